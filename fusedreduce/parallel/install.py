"""install, uninstall: in this process torch's DistributedDataParallel makes wrappers of ours.

    fusedreduce.install(fusedreduce.ReduceConfig(wire="bf16"))
    model = torch.nn.parallel.DistributedDataParallel(model)     # here, or within any framework

No name is rebound: the `__init__` of torch's class has an object become ours where exactly that class was called. Names
that were bound earlier count as well, `isinstance` holds, and `uninstall` leaves nothing behind. (A `__new__` would do
the same, but CPython cannot take one back: every call of the class would raise TypeError. It would also hide the
constructor's signature.)
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ..config import ReduceConfig
from . import ddp

_logger = logging.getLogger(__name__)


class DistributedDataParallel(ddp.DistributedDataParallel):
    """What torch's class makes while `install` holds: its wire gives way to a comm hook."""

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """As torch's. The hook takes the place of the wire that was installed."""
        self._check_comm_hook(hook)
        self._give_way(getattr(hook, "__qualname__", repr(hook)))
        super().register_comm_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self._give_way(str(comm_hook_type))
        super()._register_builtin_comm_hook(comm_hook_type)

    def _give_way(self, hook: str) -> None:
        dropped = self._use_native_wire()
        if dropped and _installation is not None:
            _installation.say(f"the script's comm hook {hook} takes the place of {dropped}")
            _installation.wrapped(self)


class Installation:
    """What is installed.

    Args:
        config: of every wrapper.
        fallback: what ours refuses is left to torch's class.
    """

    def __init__(self, config: ReduceConfig, fallback: bool) -> None:
        self.config = config
        self.fallback = fallback
        self._left_alone: set[type] = set()

    def init(self, torch_init: Callable[..., None], made: TorchDDP, args: Any, kwargs: Any) -> None:
        """What a call of torch's class does with the object that it has made."""
        if type(made) is not TorchDDP:
            self._leave_alone(type(made))
            torch_init(made, *args, **kwargs)
            return
        refused = ddp.refusal_on_any_rank(self.config, *args, **kwargs) if self.fallback else ""
        if refused:
            self.warn(f"torch's own DistributedDataParallel is used, as ours would be refused: {refused}")
            torch_init(made, *args, **kwargs)
            return
        made.__class__ = DistributedDataParallel
        assert isinstance(made, DistributedDataParallel)
        # Not its constructor: that calls torch's, where another library that has wrapped ours would come in again.
        made._prepare(self.config, *args, **kwargs)
        torch_init(made, *args, **kwargs)
        if hasattr(made, "reducer"):  # else torch's class reduces every parameter itself, late
            self.wrapped(made)

    def wrapped(self, made: DistributedDataParallel) -> None:
        """A wrapper has been made, or has got a new reducer."""

    def say(self, text: str) -> None:
        """Something that is as it should be."""
        _logger.info(text)

    def warn(self, text: str) -> None:
        """Something that may not be what was meant."""
        _logger.warning(text)

    def _leave_alone(self, kind: type) -> None:
        if not issubclass(kind, ddp.DistributedDataParallel) and kind not in self._left_alone:
            self._left_alone.add(kind)
            name = f"{kind.__module__}.{kind.__qualname__}"
            self.warn(f"{name}, the script's own subclass of torch's DistributedDataParallel, is left as it is")


_installation: Installation | None = None
# What `install` has put in the place of torch's `__init__`, and that.
_placed: tuple[Callable[..., None], Callable[..., None]] | None = None
_decided = False


def install(config: ReduceConfig | None = None, *, fallback: bool = False) -> None:
    """From now on torch's DistributedDataParallel makes wrappers of ours, in this process, whoever calls it.

    A subclass of torch's is left alone; `type(model) is torch.nn.parallel.DistributedDataParallel` is False. A comm
    hook takes the place of the wire, which becomes "native". Called again, it replaces what was installed.

    Args:
        config: how gradients travel; None: in their own dtype.
        fallback: where our class would refuse its arguments on some rank, all ranks use torch's; which they agree on by
            one small collective more when a wrapper is made, init_sync=False included. Else what it raises is raised.

    Raises:
        TypeError: config is no ReduceConfig, or fallback no bool.
    """
    if config is not None and not isinstance(config, ReduceConfig):
        raise TypeError(f"config must be a fusedreduce.ReduceConfig or None, got {config!r}")
    if not isinstance(fallback, bool):
        raise TypeError(f"fallback must be True or False, got {fallback!r}")
    uninstall()
    torch_init = TorchDDP.__init__

    @functools.wraps(torch_init)
    def init(self: TorchDDP, *args: Any, **kwargs: Any) -> None:
        initialise(torch_init, self, args, kwargs)

    TorchDDP.__init__ = init  # type: ignore[method-assign]
    hold(init, torch_init, Installation(config or ReduceConfig(), fallback))


def uninstall() -> None:
    """torch's DistributedDataParallel makes its own wrappers again; those that were made stay as they are."""
    global _installation, _placed, _decided
    _decided = True
    if _placed is not None and TorchDDP.__init__ is _placed[0]:  # else another library has wrapped what we placed
        TorchDDP.__init__ = _placed[1]  # type: ignore[method-assign]
    _installation = _placed = None


def is_decided() -> bool:
    """Whether this program has called `install` or `uninstall` itself."""
    return _decided


def hold(placed: Callable[..., None], torch_init: Callable[..., None], installation: Installation) -> None:
    """Notes what is installed; `placed` stands in the place of `torch_init` already."""
    global _installation, _placed
    _installation, _placed = installation, (placed, torch_init)


def initialise(torch_init: Callable[..., None], made: TorchDDP, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What stands in the place of torch's `__init__`."""
    if _installation is None:  # another library has wrapped what stood there, and keeps it
        torch_init(made, *args, **kwargs)
    else:
        _installation.init(torch_init, made, args, kwargs)
