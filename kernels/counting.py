"""Counting of launches and of torch's operators, for tests and `fusedreduce doctor`.

While somebody counts, functions that count take the place of those that `dispatch` and `encoded` find. Nobody else's
calls take a step more.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from . import cpu, cpu_encoded, cpu_stats, dispatch, few_ops, reference_encoded

_ON_TORCH = cpu, cpu_encoded, cpu_stats, few_ops, reference_encoded
_FUNCTIONS = {
    "pack",
    "unpack",
    "measure",
    "scale",
    "combine",
    "reduce_partials",
    "reduce_source_partials",
    "encode",
    "combine_encoded",
    "decode",
}
_ALLOCATIONS = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))


@dataclass(frozen=True)
class Launch:
    """One call that `count_launches` counted.

    Args:
        function: name of the function.
        path: the path it took.
        launches: number of kernels, or of torch operators on the torch path.
    """

    function: str
    path: dispatch.Path
    launches: int


_lock = threading.Lock()
_counting: list[list[Launch]] = []
_replaced: list[tuple[Any, str, Any]] = []  # owner, name and function, while somebody counts
_thread = threading.local()  # kernels: how many the call under way has launched


@contextmanager
def count_launches() -> Iterator[list[Launch]]:
    """Counts the calls of all functions of `dispatch` and `encoded` in the process, and those that `unchecked` finds.

    On any thread, while the context is open. A kernel counts as one launch; on the torch path every operator that does
    work does. Dispatch modes that are active on the calling thread do not see the operators counted here.

    Yields:
        The calls so far; the list grows.
    """
    counted: list[Launch] = []
    with _lock:
        if not _counting:
            _replace()
        _counting.append(counted)
    try:
        yield counted
    finally:
        with _lock:
            _counting[:] = [one for one in _counting if one is not counted]
            if not _counting:
                while _replaced:
                    setattr(*_replaced.pop())


def _replace() -> None:
    paths: dict[Any, dispatch.Path] = dict.fromkeys(_ON_TORCH, "torch")
    kernels = dispatch._triton()
    if kernels is not None:
        paths[kernels] = "interpreter" if kernels.variants.interpreted() else "triton"
        _put(kernels.variants.Variant, "launch", _noted)
    for owner, path in paths.items():
        for name in _FUNCTIONS & vars(owner).keys():
            _put(owner, name, functools.partial(_counted, name, path))


def _put(owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    function = getattr(owner, name)
    _replaced.append((owner, name, function))
    setattr(owner, name, functools.wraps(function)(around(function)))


def _noted(launch: Callable[..., None]) -> Callable[..., None]:
    def noted(*arguments: Any) -> None:
        _thread.kernels = getattr(_thread, "kernels", 0) + 1
        launch(*arguments)

    return noted


def _counted(name: str, path: dispatch.Path, function: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*arguments: Any, **options: Any) -> Any:
        _thread.kernels = 0
        # The caller's modes would count these operators again, and those by which the interpreter runs a kernel.
        with _disable_current_modes(), OperatorCounter() as operators:
            result = function(*arguments, **options)
        launch = Launch(name, path, operators.calls if path == "torch" else _thread.kernels)
        with _lock:
            for one in _counting:
                one.append(launch)
        return result

    return counted


def does_work(operator: Any) -> bool:
    """Whether a torch operator launches work: it is no view, no bare allocation, no mark for the profiler.

    Args:
        operator: as `__torch_dispatch__` gets it.
    """
    return not (operator.is_view or operator.namespace == "profiler" or operator._opname in _ALLOCATIONS)


class OperatorCounter(TorchDispatchMode):
    """Counts the torch operators that do work, as dispatched on this thread and on the autograd threads it starts.

    A foreach operator counts as one call, however many kernels it launches. Calls that `count_launches` counts are left
    out.

    Attributes:
        calls: how many so far.
    """

    calls = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.calls += does_work(func)
        return func(*args, **(kwargs or {}))
