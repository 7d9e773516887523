"""install, uninstall: torch's DistributedDataParallel makes wrappers with our reducer in this process.

    fusedreduce.install(fusedreduce.ReduceConfig(wire="bf16"))
    model = torch.nn.parallel.DistributedDataParallel(model)     # here, or within any framework

No name is rebound, and no object changes its class. Methods of torch's class are replaced, once and for good. Each asks
the object whether its reducer is one of ours that was made here, and else calls torch's. So names that were bound
earlier work too, `type(model)` is what the script called, and subclasses inherit it, `super()` included. `uninstall`
takes nothing back but the settings: wrappers that live need their methods, to be copied as well.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any

from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ..config import ReduceConfig, checked
from ..reducer.state import ReducerState
from . import ddp, ddp_methods
from .ddp_arguments import Arguments, Settings, caps_of
from .torch_reducer import TorchReducer
from .wrapper_reducer import WrapperReducer, find_reducer, reducer_of

_logger = logging.getLogger(__name__)
Method = Callable[..., Any]
# In the `__dict__` of an object while torch makes its reducer: what ours is built from; None: torch's own is made.
_MAKING = "_fusedreduce_making"


class Installation:
    """Settings of `install`, and what is logged about wrappers.

    Args:
        config: of every wrapper.
        fallback: use torch's reducer where ours refuses the arguments.
    """

    def __init__(self, config: ReduceConfig, fallback: bool) -> None:
        self.config = config
        self.fallback = fallback
        self._left_alone: set[type] = set()

    def init(self, torch_init: Method, made: TorchDDP, args: Any, kwargs: Any) -> None:
        """Initialises `made`, the object that a call of torch's class or of a subclass has created."""
        settings = None
        if not self._leaves(made, replaced_method(type(made))):
            refused = Arguments(*args, **kwargs).refusal_on_any_rank(self.config) if self.fallback else ""
            if refused:
                self.warn(f"torch's own reducer is used, since fusedreduce's refuses: {refused}")
            else:
                settings = Arguments(*args, **kwargs).settle(self.config)
        with _making(made, settings):
            torch_init(made, *args, **kwargs)
        self.told(made, settings)

    def load(self, torch_setstate: Method, made: TorchDDP, state: dict[str, Any]) -> None:
        """Restores `made` from a pickle, which says nothing of us."""
        settings = None
        if not self._leaves(made, replaced_method(type(made))):
            settings = Settings(self.config, caps_of(state))
        try:
            _set_state(torch_setstate, made, state, settings)
        except (RuntimeError, TypeError, ValueError) as error:
            if settings is None or not self.fallback:
                raise
            self.warn(f"torch's own reducer is used, since fusedreduce's refuses: {error}")
            settings = None
            _set_state(torch_setstate, made, state, settings)
        self.told(made, settings)

    def told(self, made: TorchDDP, settings: Settings | None) -> None:
        """Called when torch has made the reducer of `made`, from `settings` unless that is None."""
        if find_reducer(made) is not None:
            self.wrapped(made)
        elif settings is not None and "reducer" in vars(made):  # else all parameters are delayed
            self._leaves(made, "_ddp_init_helper")

    def _leaves(self, made: TorchDDP, replaced: str) -> bool:
        """Whether `made` is left to torch, because its class replaces a method; the class is named once."""
        kind = type(made)
        if replaced and kind not in self._left_alone:
            self._left_alone.add(kind)
            name = f"{kind.__module__}.{kind.__qualname__}"
            wire = f"wire={self.config.wire!r}" if isinstance(self.config.wire, str) else ""
            self.warn(
                f"{name} is left to torch, because this subclass of DistributedDataParallel replaces {replaced} and "
                "does not seem to call super() there. Call it, or, where the model is wrapped, add: "
                f"model.register_comm_hook(fusedreduce.FusedHookState({wire}), fusedreduce.fused_hook)"
            )
        return bool(replaced)

    def wrapped(self, made: TorchDDP) -> None:
        """Called when a wrapper has been made, or has a new reducer."""

    def say(self, text: str) -> None:
        """Logs at level INFO."""
        _logger.info(text)

    def warn(self, text: str) -> None:
        """Logs at level WARNING."""
        _logger.warning(text)


_installation: Installation | None = None
_decided = False
_placed: set[Method] = set()  # the functions of ours in torch's class


def install(config: ReduceConfig | None = None, *, fallback: bool = False) -> None:
    """Makes torch's DistributedDataParallel reduce by fusedreduce in this process, whoever makes one from now on.

    Its type stays torch's, and subclasses of torch's class are reduced too; one that replaces a method of torch's which
    fusedreduce needs, without calling `super()`, is left to torch, and named with what to write. `reducer_of` gives the
    reducer. A comm hook replaces the wire, which becomes "native". A second call replaces the settings.

    Args:
        config: how gradients are reduced; None: ReduceConfig(), which sends them in their own dtype.
        fallback: if fusedreduce refuses the arguments on any rank, all ranks use torch's reducer; they agree by one
            small collective more per wrapper, even with init_sync=False. False: the error is raised.

    Raises:
        TypeError: config is no ReduceConfig, or fallback no bool.
    """
    global _decided
    chosen = checked(config, "config")
    if not isinstance(fallback, bool):
        raise TypeError(f"fallback must be True or False, got {fallback!r}")
    _decided = True
    activate(Installation(chosen, fallback))


def uninstall() -> None:
    """Makes torch's DistributedDataParallel reduce by itself again. Existing wrappers, and copies of them, stay."""
    global _installation, _decided
    _decided = True
    _installation = None


def is_decided() -> bool:
    """Whether this program has called `install` or `uninstall` itself, so that `fusedreduce run` must not."""
    return _decided


def activate(installation: Installation) -> None:
    """Uses `installation` from now on."""
    global _installation
    place()
    _installation = installation


# The methods of torch's class


def method_for(name: str, torchs: Method) -> Method:
    """The function that takes the place of `torchs`, torch's method `name`.

    Args:
        name: a key of `_SPECIAL` or `_METHODS`.
        torchs: may be another library's in front of torch's.
    """
    from torch._dynamo.eval_frame import skip_code  # imports torch._dynamo, as torch's constructor does

    ours: Any = _SPECIAL[name](torchs) if name in _SPECIAL else _asking(torchs, _METHODS[name])
    # torch.compile goes by files: within a forward it leaves torch's alone, where it would compile a function of ours,
    # and under "python_reducer" traces through it, where one that is disabled would break the graph.
    skip_code(ours.__code__)
    method: Method = functools.wraps(torchs)(ours)
    return method


def place() -> None:
    """Puts our functions into torch's class, for good; again only what another library has put back since."""
    for name in (*_SPECIAL, *_METHODS):
        if not hasattr(TorchDDP, name):  # a later torch has it
            continue
        present: Any = inspect.getattr_static(TorchDDP, name)
        getter: Any = present.fget if isinstance(present, property) else present
        if inspect.unwrap(getter, stop=_placed.__contains__) in _placed:
            continue
        ours = method_for(name, getter if name in vars(TorchDDP) else _inherited(name))
        _placed.add(ours)
        if isinstance(present, property):
            setter = method_for(f"{name}.setter", present.fset) if present.fset else None
            setattr(TorchDDP, name, property(ours, setter, doc=present.__doc__))
        else:
            setattr(TorchDDP, name, ours)


def _asking(torchs: Method, ours: Method) -> Method:
    def call(self: TorchDDP, *args: Any, **kwargs: Any) -> Any:
        facade = self.__dict__.get("reducer")
        if type(facade) is not TorchReducer or facade.settings is None:
            return torchs(self, *args, **kwargs)
        return ours(self, functools.partial(torchs, self), *args, **kwargs)

    return call


def _inherited(name: str) -> Method:
    """A method that torch's class has from a base, found anew in each call."""

    def call(self: TorchDDP, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(TorchDDP, self), name)(*args, **kwargs)

    return functools.wraps(getattr(TorchDDP, name))(call)


def _is_settled(made: TorchDDP) -> bool:
    """Whether what reduces `made` is decided: within torch's constructor and __setstate__, and where the script did."""
    return _MAKING in vars(made) or isinstance(made, ddp.DistributedDataParallel)


@contextmanager
def _making(made: TorchDDP, settings: Settings | None) -> Iterator[None]:
    before = {_MAKING: vars(made)[_MAKING]} if _MAKING in vars(made) else {}
    vars(made)[_MAKING] = settings
    try:
        yield
    finally:
        del vars(made)[_MAKING]
        vars(made).update(before)


def _init(torchs: Method) -> Method:
    def call(self: TorchDDP, *args: Any, **kwargs: Any) -> None:
        if _installation is None or _is_settled(self):
            torchs(self, *args, **kwargs)
        else:
            _installation.init(torchs, self, args, kwargs)

    return call


def _init_helper(torchs: Method) -> Method:
    def call(self: TorchDDP, *args: Any, **kwargs: Any) -> None:
        facade: Any = vars(self).get("reducer")
        settings = vars(self).get(_MAKING) or (facade.settings if isinstance(facade, TorchReducer) else None)
        if settings is None:
            torchs(self, *args, **kwargs)
        else:
            ddp_methods.build(self, settings, *args, **kwargs, installed=True)

    return call


class CopiedState(dict[str, Any]):
    """torch's state of an object, with what reduces it for copies in this process; a pickle gets a plain dict of it.

    Args:
        state: torch's.
        settings: of the object's reducer; None: it is torch's.
    """

    def __init__(self, state: Mapping[str, Any], settings: Settings | None) -> None:
        super().__init__(state)
        self.settings = settings

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiedState:
        return CopiedState(copy.deepcopy(dict(self), memo), self.settings)

    def __reduce_ex__(self, protocol: object) -> tuple[type, tuple[dict[str, Any]]]:
        return dict, (dict(self),)


def _getstate(torchs: Method) -> Method:
    def call(self: TorchDDP) -> dict[str, Any]:
        if isinstance(self, ddp.DistributedDataParallel):
            state: dict[str, Any] = torchs(self)
            return state
        reducer = find_reducer(self)
        if reducer is None:
            return CopiedState(torchs(self), None)
        return CopiedState(
            ddp_methods.getstate(self, functools.partial(torchs, self)), ddp_methods.settings_of(reducer)
        )

    return call


def _setstate(torchs: Method) -> Method:
    def call(self: TorchDDP, state: dict[str, Any]) -> None:
        if _is_settled(self):
            torchs(self, state)
        elif isinstance(state, CopiedState):
            _set_state(torchs, self, state, state.settings)
            if _installation is not None:
                _installation.told(self, state.settings)
        elif _installation is not None:
            _installation.load(torchs, self, state)
        else:
            torchs(self, state)

    return call


def _set_state(torchs: Method, made: TorchDDP, state: dict[str, Any], settings: Settings | None) -> None:
    if settings is not None:
        # torch queues the end of a static graph's first step once per module object.
        state["_static_graph_delay_allreduce_enqueued"] = False
    with _making(made, settings):
        torchs(made, state)


def _register_comm_hook(made: TorchDDP, torchs: Method, state: object, hook: Method) -> None:
    """As torch's class does: a script's hook replaces the installed wire, where our own class refuses it."""
    ddp_methods.check_comm_hook(made, state, hook)
    _drop_wire(made, getattr(hook, "__qualname__", repr(hook)))
    ddp_methods.register_comm_hook(made, torchs, state, hook)


def _register_builtin_comm_hook(made: TorchDDP, torchs: Method, comm_hook_type: Any) -> None:
    _drop_wire(made, str(comm_hook_type))
    ddp_methods.register_builtin_comm_hook(made, torchs, comm_hook_type)


def _drop_wire(made: TorchDDP, hook: str) -> None:
    """Makes a reducer with the native wire, for a comm hook; between two steps, on every rank."""
    reducer = reducer_of(made)
    config = reducer.config
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
    if native == config or reducer.has_comm_hook:
        return
    native.check_beside("a comm hook")
    reducer.check_finalized()
    if reducer.state is ReducerState.ARMED:
        raise RuntimeError(
            f"a comm hook replaces wire={config.wire_text!r}, but a forward waits for its backward: register "
            "the hook before that forward, or run a forward without backward under torch.no_grad()"
        )
    _replace_reducer(made, reducer, native)
    if _installation is not None:
        dropped = " and ".join(
            f"{name}={getattr(config, name)!r}"
            for name in ("wire", "op")
            if getattr(config, name) != getattr(native, name)
        )
        _installation.say(f"the script's comm hook {hook} replaces {dropped}")
        _installation.wrapped(made)


def _replace_reducer(made: TorchDDP, reducer: WrapperReducer, config: ReduceConfig) -> None:
    """Makes a new reducer with other options; between two steps, on every rank."""
    facade: Any = made.reducer
    settings = dataclasses.replace(facade.settings, config=config, caps=reducer.caps)
    reducer.close()
    parameters, sparse = made._build_params_for_reducer()
    names = made._build_debug_param_to_name_mapping(parameters)
    with _making(made, settings):
        made._ddp_init_helper(parameters, sparse, names, reducer.static_graph)


_SPECIAL: Mapping[str, Callable[[Method], Method]] = {
    "__init__": _init,
    "__getstate__": _getstate,
    "__setstate__": _setstate,
    "_ddp_init_helper": _init_helper,
}
_METHODS: Mapping[str, Method] = {
    "_post_forward": ddp_methods.post_forward,
    "will_sync_module_buffers": ddp_methods.will_sync_module_buffers,
    "_distributed_rank": lambda made, torchs: made.process_group.rank(),  # which may be that of a LocalGroup
    "join": ddp_methods.join,
    "join_hook": ddp_methods.join_hook,
    "_match_all_reduce_for_bwd_pass": lambda made, torchs: reducer_of(made).step_without_inputs(),
    "_match_unused_params_allreduce": lambda made, torchs: None,
    "register_comm_hook": _register_comm_hook,
    "_register_builtin_comm_hook": _register_builtin_comm_hook,
    "_register_fused_optim": ddp_methods.register_fused_optim,
    "zero_grad": ddp_methods.zero_grad,
    "require_manual_backward_finalization": lambda made, torchs: ddp_methods.manual_required(made),
    "require_manual_backward_finalization.setter": lambda made, torchs, on: ddp_methods.require_manual(made, on),
    "should_finalize_after_backward": lambda made, torchs: reducer_of(made).should_finalize_after_backward,
    "finalize_backward": lambda made, torchs: ddp_methods.finalize_backward(made),
}


# Subclasses


def replaced_method(kind: type) -> str:
    """The method of torch's that we need and that `kind` replaces without calling torch's; "" if there is none.

    It goes by the names in the method's code. Where that is wrong the reducer is torch's, or ours does without the
    method: both reduce. (Whose `_ddp_init_helper` ran is seen when it has run.)
    """
    above = kind.__mro__[: kind.__mro__.index(TorchDDP)]
    for name in (*_SPECIAL, *_METHODS):
        for one in above:
            if name != "__init__" and name in vars(one) and name not in _names_in(vars(one)[name]):
                return f"{one.__qualname__}.{name}"
    return ""


def _names_in(value: object) -> set[str]:
    """The names that a method's code uses, of functions within it too."""
    value = value.fget if isinstance(value, property) else value
    code = getattr(inspect.unwrap(value), "__code__", None) if callable(value) else None
    found, codes = set[str](), [] if code is None else [code]
    while codes:
        code = codes.pop()
        found.update(code.co_names)
        codes += [one for one in code.co_consts if isinstance(one, CodeType)]
    return found
