"""install, uninstall: torch's DistributedDataParallel makes fusedreduce's wrappers in this process.

    fusedreduce.install(fusedreduce.ReduceConfig(wire="bf16"))
    model = torch.nn.parallel.DistributedDataParallel(model)     # here, or within any framework

No name is rebound: `__init__` of torch's class is replaced, and changes the class of an object that exactly torch's
class was called for. So names bound earlier work too, `isinstance` holds, and `uninstall` leaves nothing behind. (A
`__new__` would do the same, but CPython cannot remove one again: every call of the class would raise TypeError. It
would also hide the constructor's signature.)
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ..config import ReduceConfig
from ..reducer import validation
from ..reducer.state import ReducerState
from . import ddp
from .ddp_arguments import Arguments

_logger = logging.getLogger(__name__)


class DistributedDataParallel(ddp.DistributedDataParallel):
    """What torch's class makes after `install`: a wrapper whose wire a comm hook replaces instead of being refused."""

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduces buckets with `hook(state, bucket)` in place of the installed wire, as torch's class does.

        Args:
            state: the hook's first argument.
            hook: takes `state` and a GradBucket; returns a future of one tensor with as many elements.

        Raises:
            RuntimeError: a hook is registered already, or a forward waits for its backward.
            TypeError, ValueError: the hook's annotations are not those that torch expects.
            ValueError: the sync_mode excludes comm hooks, or `state` is a FusedHookState whose wire is exchanged.
        """
        self._check_comm_hook(hook)
        validation.check_comm_hook(state)
        self._drop_wire(getattr(hook, "__qualname__", repr(hook)))
        super().register_comm_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self._drop_wire(str(comm_hook_type))
        super()._register_builtin_comm_hook(comm_hook_type)

    def _drop_wire(self, hook: str) -> None:
        """Makes a reducer with the native wire, for a comm hook; between two steps, on every rank."""
        config = self.reduce_config
        native = dataclasses.replace(
            config,
            wire="native",
            accumulation="wire",
            wire_after=0,
            least_sqnr_db=None,
            stochastic_rounding=False,
            error_feedback=False,
            op="mean",
        )
        if native == config or not hasattr(self, "reducer") or self._ours().has_comm_hook:
            return
        validation.check_mode(config.sync_mode, {"a comm hook": True})
        reducer = self._ours()
        reducer.check_finalized()
        if reducer.state is ReducerState.ARMED:
            raise RuntimeError(
                f"a comm hook replaces wire={config.wire_text!r}, but a forward waits for its backward: register "
                "the hook before that forward, or run a forward without backward under torch.no_grad()"
            )
        self._replace_reducer(native)
        if _installation is not None:
            dropped = " and ".join(
                f"{name}={getattr(config, name)!r}"
                for name in ("wire", "op")
                if getattr(config, name) != getattr(native, name)
            )
            _installation.say(f"the script's comm hook {hook} replaces {dropped}")
            _installation.wrapped(self)


class Installation:
    """Settings of `install`, and what is logged about wrappers.

    Args:
        config: of every wrapper.
        fallback: use torch's class where fusedreduce's refuses the arguments.
    """

    def __init__(self, config: ReduceConfig, fallback: bool) -> None:
        self.config = config
        self.fallback = fallback
        self._left_alone: set[type] = set()

    def init(self, torch_init: Callable[..., None], made: TorchDDP, args: Any, kwargs: Any) -> None:
        """Initialises `made`, the object that a call of torch's class or of a subclass has created."""
        if type(made) is not TorchDDP:
            self._leave_alone(type(made))
            torch_init(made, *args, **kwargs)
            return
        refused = Arguments(*args, **kwargs).refusal_on_any_rank(self.config) if self.fallback else ""
        if refused:
            self.warn(f"torch's own DistributedDataParallel is used, since fusedreduce's refuses: {refused}")
            torch_init(made, *args, **kwargs)
            return
        made.__class__ = DistributedDataParallel
        assert isinstance(made, DistributedDataParallel)
        # Not the constructor, which calls TorchDDP.__init__: a library that has wrapped that would run twice.
        made._prepare(self.config, *args, **kwargs)
        torch_init(made, *args, **kwargs)
        if hasattr(made, "reducer"):  # else all parameters are delayed (delay_all_reduce_named_params)
            self.wrapped(made)

    def wrapped(self, made: DistributedDataParallel) -> None:
        """Called when a wrapper has been made, or has a new reducer."""

    def say(self, text: str) -> None:
        """Logs at level INFO."""
        _logger.info(text)

    def warn(self, text: str) -> None:
        """Logs at level WARNING."""
        _logger.warning(text)

    def _leave_alone(self, kind: type) -> None:
        if not issubclass(kind, ddp.DistributedDataParallel) and kind not in self._left_alone:
            self._left_alone.add(kind)
            name = f"{kind.__module__}.{kind.__qualname__}"
            self.warn(f"{name}, the script's own subclass of torch's DistributedDataParallel, is left as it is")


_installation: Installation | None = None
# Our replacement of torch's `__init__`, and torch's.
_placed: tuple[Callable[..., None], Callable[..., None]] | None = None
_decided = False


def install(config: ReduceConfig | None = None, *, fallback: bool = False) -> None:
    """Makes torch's DistributedDataParallel create fusedreduce's wrappers in this process, whoever calls it.

    Subclasses of torch's class are left alone. `type(model) is torch.nn.parallel.DistributedDataParallel` is False for
    what is created. A comm hook replaces the wire, which becomes "native". A second call replaces the settings.

    Args:
        config: how gradients are reduced; None: ReduceConfig(), which sends them in their own dtype.
        fallback: if fusedreduce's class refuses the arguments on any rank, all ranks use torch's; they agree by one
            small collective more per wrapper, even with init_sync=False. False: the error is raised.

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
    activate(init, torch_init, Installation(config or ReduceConfig(), fallback))


def uninstall() -> None:
    """Makes torch's DistributedDataParallel create its own wrappers again. Existing wrappers stay as they are."""
    global _installation, _placed, _decided
    _decided = True
    if _placed is not None and TorchDDP.__init__ is _placed[0]:  # else another library has wrapped what we placed
        TorchDDP.__init__ = _placed[1]  # type: ignore[method-assign]
    _installation = _placed = None


def is_decided() -> bool:
    """Whether this program has called `install` or `uninstall` itself, so that `fusedreduce run` must not."""
    return _decided


def activate(placed: Callable[..., None], torch_init: Callable[..., None], installation: Installation) -> None:
    """Uses `installation` from now on; `placed` has replaced `torch_init` already."""
    global _installation, _placed
    _installation, _placed = installation, (placed, torch_init)


def initialise(torch_init: Callable[..., None], made: TorchDDP, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Body of the replacement of torch's `__init__`."""
    if _installation is None:  # uninstalled, but another library has wrapped the replacement and still calls it
        torch_init(made, *args, **kwargs)
    else:
        _installation.init(torch_init, made, args, kwargs)
