"""What a test is run against: torch's class, ours in its place or installed in it, or torch's with a hook of either.

Each of these changes torch in the process of one test, and records what the test then did.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from fusedreduce import FusedHookState, fused_hook, install

Record = Callable[[str], object]
StateAndHook = Callable[[dist.ProcessGroup], tuple[object, Callable[..., Any]]]


def put_torch(record: Record) -> None:
    """torch's class as it is."""
    _on_cpu_and_counted(DistributedDataParallel, record)


def put_class(path: str, record: Record) -> None:
    """The class at `path` (module:name) wherever torch or a test has torch's. Counts C++ Reducers that it builds."""
    module, _, name = path.partition(":")
    ours: type[Any] = getattr(importlib.import_module(module), name)
    for place, loaded in list(sys.modules.items()):
        if place.partition(".")[0] in (module.partition(".")[0], __name__):
            continue  # what ours is made from stays torch's
        for attribute, value in list(getattr(loaded, "__dict__", {}).items()):
            if value is DistributedDataParallel:
                setattr(loaded, attribute, ours)
    _on_cpu_and_counted(ours, record)
    _count_reducers_of(ours, record)


def put_installed(record: Record) -> None:
    """torch's class and its subclasses under `install`. Counts C++ Reducers that they build."""
    install()
    _on_cpu_and_counted(DistributedDataParallel, record)
    _count_reducers_of(DistributedDataParallel, record)


def put_hook(state_and_hook: StateAndHook, record: Record) -> None:
    """torch's class with a hook, registered at the first forward or join of a module that has none by then."""
    _on_cpu_and_counted(DistributedDataParallel, record)

    def register(ddp: Any) -> None:
        state, hook = state_and_hook(ddp.process_group)

        def counted(state: object, bucket: object) -> object:
            record("hook_called")
            return hook(state, bucket)

        # Past `ddp.register_comm_hook`, which leaves traces that some tests look at. A second hook is refused.
        with suppress(RuntimeError):
            dist._register_comm_hook(ddp.reducer, state, counted)  # type: ignore[attr-defined]

    lazy_init, join_hook = DistributedDataParallel._lazy_init, DistributedDataParallel.join_hook

    def init_and_register(ddp: DistributedDataParallel) -> None:
        lazy_init(ddp)
        register(ddp)

    def register_and_join(ddp: DistributedDataParallel, **options: Any) -> Any:
        register(ddp)
        return join_hook(ddp, **options)

    DistributedDataParallel._lazy_init = init_and_register  # type: ignore[method-assign]
    DistributedDataParallel.join_hook = register_and_join  # type: ignore[assignment,method-assign]


def torch_hook(wire: str, group: dist.ProcessGroup) -> tuple[object, Callable[..., Any]]:
    """torch's own hook of the same arithmetic as ours at `wire`."""
    name = "allreduce_hook" if wire == "native" else f"{wire}_compress_hook"
    return group, getattr(default_hooks, name)


def our_hook(wire: Any, group: dist.ProcessGroup) -> tuple[object, Callable[..., Any]]:
    """Ours at `wire`."""
    return FusedHookState(group, wire), fused_hook


def _on_cpu_and_counted(ddp: type[Any], record: Record) -> None:
    init = ddp.__init__

    @functools.wraps(init)
    def without_devices(
        self: Any, module: Any, device_ids: object = None, output_device: object = None, *rest: Any, **options: Any
    ) -> None:
        record("built")
        init(self, module, None, None, *rest, **options)

    ddp.__init__ = without_devices


def _count_reducers_of(ddp: type[Any], record: Record) -> None:
    reducer: type[Any] = dist.Reducer  # type: ignore[attr-defined]
    init = reducer.__init__

    def counted(self: Any, *arguments: Any, **options: Any) -> None:
        frame = sys._getframe(1)
        while frame is not None and not isinstance(frame.f_locals.get("self"), ddp):
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not None:
            record("cpp_reducer")
        init(self, *arguments, **options)

    reducer.__init__ = counted
