"""What methods of torch's DistributedDataParallel do where the reducer is ours: one function each.

`ddp.py` calls them from a subclass, `install.py` from torch's own class. `torchs` is torch's method, bound to `ddp`.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo  # unlike torch.compiler.disable it imports torch._dynamo at the first call
from torch.distributed import BuiltinCommHookType, rpc  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ..comm.local.process_group import LocalProcessGroup, backend_name, communicator_of
from ..config import Asynchronous
from ..reducer import validation
from ..reducer.unused_parameters import contains_itself
from .ddp_arguments import Settings, check_state
from .hook import check_hook_state, fused_hook
from .logging_data import Logger
from .torch_reducer import LocalJoin, TorchReducer
from .wrapper_reducer import WrapperReducer, find_reducer, reducer_of

Method = Callable[..., Any]


# The reducer: made by torch's constructor and by __setstate__


def build(
    ddp: TorchDDP,
    settings: Settings,
    parameters: Sequence[torch.Tensor],
    expect_sparse_gradient: Sequence[bool],
    param_to_name_mapping: Mapping[int, str],
    static_graph: bool,
    *,
    installed: bool,
) -> None:
    """In place of `_ddp_init_helper`: makes the wrapper's reducer and logger.

    Args:
        ddp: the wrapper.
        settings: what torch does not know.
        parameters: those to reduce.
        expect_sparse_gradient: per parameter whether its gradient is sparse.
        param_to_name_mapping: names by number.
        static_graph: as the wrapper's argument.
        installed: methods of torch's class are to ask the reducer; see `TorchReducer`.
    """
    check_state(ddp, settings.config)
    # torch writes ".weight" for a parameter of the outermost module.
    names = [param_to_name_mapping[index].removeprefix(".") for index in range(len(parameters))]
    state = vars(ddp)  # not by getattr, which a subclass may have ask the wrapped module
    reducer = WrapperReducer(
        ddp,
        parameters,
        communicator_of(ddp.process_group),
        settings.config,
        names=names,
        sparse=expect_sparse_gradient,
        caps=settings.caps,
        find_unused_parameters=ddp.find_unused_parameters,
        static_graph=static_graph,
        gradient_as_bucket_view=ddp.gradient_as_bucket_view,
        skip_unused_buckets=state.get("skip_all_reduce_unused_params", False),
        lazy_bucket_allocation=state.get("lazy_bucket_allocation", False),
        exclusive=False,
        agreed=settings.agreed,
    )
    if isinstance(ddp.process_group, LocalProcessGroup):
        # For torch.compile, torch keeps the DDP module whose forward runs in one global variable, which ranks that
        # are threads would overwrite for each other.
        ddp._inside_ddp_forward = nullcontext  # type: ignore[method-assign, assignment]
    if ddp.mixed_precision is not None:
        for index, parameter in enumerate(parameters):
            parameter._idx = index  # type: ignore[attr-defined]
    logger = Logger(reducer, backend_name(ddp.process_group), settings.caps.cap_bytes)
    reducer.require_manual_finalization(state.get("_require_manual_backward_finalization", False))
    ddp.reducer = TorchReducer(reducer, ddp, logger, settings if installed else None)  # type: ignore[assignment]
    ddp.logger = logger
    logger.set_construction_data_and_log(
        ddp.module.__class__.__name__,
        [] if ddp.device_ids is None else ddp.device_ids,
        -1 if ddp.output_device is None else ddp.output_device,
        ddp.broadcast_buffers,
        any(isinstance(layer, nn.SyncBatchNorm) for layer in ddp.module.modules()),
        static_graph,
    )
    ddp._passing_sync_batchnorm_handle(ddp.module)


def settings_of(reducer: WrapperReducer) -> Settings:
    """For a copy of the reducer's wrapper, whose ranks have compared nothing yet."""
    return Settings(reducer.config, reducer.caps)


def getstate(ddp: TorchDDP, torchs: Method) -> dict[str, Any]:
    """torch's state to copy or pickle, which has no reducer; says what is lost with that."""
    if isinstance(ddp.process_group, LocalProcessGroup):
        raise RuntimeError(
            "a DistributedDataParallel over a LocalGroup can be neither pickled nor copied (torch allows that for "
            "the default process group only): keep its state_dict(), or pickle its .module"
        )
    reducer = find_reducer(ddp)
    pending = "" if reducer is None else reducer.pending()
    if pending:
        warnings.warn(
            f"a DistributedDataParallel is copied or pickled while {pending}: the copy has none of that. Call "
            "flush() on every rank first, or keep reduce_state_dict() beside it",
            stacklevel=4,
        )
    state: dict[str, Any] = torchs()
    return state


# Forward. What runs there is hidden from torch.compile, which leaves torch's own file alone.


@_disable_dynamo
def post_forward(ddp: TorchDDP, torchs: Method, output: Any) -> Any:
    """Hands the outputs over: torch does so for find_unused_parameters only, and looks into few kinds of containers."""
    facade: Any = vars(ddp).get("reducer")
    if facade is not None and torch.is_grad_enabled():
        if ddp.require_backward_grad_sync:
            owned = rpc.is_available() and isinstance(output, rpc.RRef) and output.is_owner()
            facade.outputs = output.local_value() if owned else output
        else:
            facade.reducer.engine.watch_local_forward(output)
    torch_walks = not ddp._static_graph_delay_allreduce_enqueued if ddp.static_graph else ddp.find_unused_parameters
    if torch_walks and contains_itself(output):
        torchs(None)  # torch would walk through the output without end
        return output
    return torchs(output)


@_disable_dynamo
def will_sync_module_buffers(ddp: TorchDDP, torchs: Method) -> bool:
    """False in the asynchronous mode, where `flush` broadcasts the buffers."""
    facade: Any = vars(ddp).get("reducer")
    late = facade is not None and isinstance(facade.reducer.config.sync_mode, Asynchronous)
    return not late and bool(torchs())


# join


def join(
    ddp: TorchDDP,
    torchs: Method,
    divide_by_initial_world_size: bool = True,
    enable: bool = True,
    throw_on_early_termination: bool = False,
) -> Join:
    """torch's context manager; over a LocalGroup ours."""
    if not isinstance(ddp.process_group, LocalProcessGroup):
        joined: Join = torchs(divide_by_initial_world_size, enable, throw_on_early_termination)
        return joined
    return LocalJoin(
        [ddp], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
    )


def join_hook(ddp: TorchDDP, torchs: Method, **kwargs: Any) -> Any:
    """torch's hook, unless the mode excludes it."""
    reducer = find_reducer(ddp)
    if reducer is not None:
        reducer.config.check_beside("join")
    return torchs(**kwargs)


# Comm hooks, which torch hands to its C++ reducer


def check_comm_hook(ddp: TorchDDP, state: object, hook: Method) -> None:
    """Raises what torch's class does, and for a wrong state of our own hook, which torch would call with it."""
    ddp._check_comm_hook(hook)
    if hook is fused_hook:
        check_hook_state(state)
    validation.check_comm_hook(state)


def register_comm_hook(ddp: TorchDDP, torchs: Method, state: object, hook: Method) -> None:
    """Hands the hook to our reducer."""
    check_comm_hook(ddp, state, hook)
    reducer_of(ddp).register_comm_hook(state, hook)
    assert ddp.logger is not None
    ddp.logger._set_comm_hook_name(hook.__qualname__)
    ddp._comm_hooks.append((hook, state))


def register_builtin_comm_hook(ddp: TorchDDP, torchs: Method, comm_hook_type: Any) -> None:
    """Hands the Python hook of the same arithmetic to our reducer."""
    hooks = {
        BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
        BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
    }
    reducer = reducer_of(ddp)
    if reducer.has_comm_hook:
        raise RuntimeError("register_builtin_comm_hook or register_comm_hook can only be called once.")
    reducer.register_comm_hook(weakref.ref(ddp), functools.partial(_over_its_group, hooks[comm_hook_type]))
    assert ddp.logger is not None
    ddp.logger._set_comm_hook_name(str(comm_hook_type))


def _over_its_group(hook: Method, alive: weakref.ref[TorchDDP], bucket: object) -> Any:
    """A built-in comm hook, over the process group that its wrapper has now."""
    ddp = alive()
    assert ddp is not None, "the wrapper's reducer calls this"
    return hook(ddp.process_group, bucket)


def register_fused_optim(ddp: TorchDDP, torchs: Method, optim: type, *args: Any, **kwargs: Any) -> None:
    """torch's optimizer in backward, unless the mode excludes it."""
    reducer = reducer_of(ddp)
    reducer.config.check_beside("an optimizer in backward")
    torchs(optim, *args, **kwargs)
    reducer_of(ddp).steps_in_backward = True  # of the reducer that now has torch's hook


# Gradients


def zero_grad(ddp: TorchDDP, torchs: Method, set_to_none: bool = True) -> None:
    """Completes the step; zeroes gradients that are views of a bucket by one operator per bucket."""
    reducer = find_reducer(ddp)
    if reducer is not None:
        reducer.engine.complete_outside()
    if set_to_none or reducer is None or not reducer.has_views:
        torchs(set_to_none)
        return
    reducer.zero_grad()
    done = set(map(id, reducer.parameters))
    for parameter in ddp.parameters():  # ignored, delayed, or frozen later
        if id(parameter) not in done and parameter.grad is not None:
            parameter.grad.detach_().zero_()


# Manual finalization: of torch 2.15, and of our class on every version


def manual_required(ddp: TorchDDP) -> bool:
    """Whether `finalize_backward` ends each step."""
    return bool(vars(ddp).get("_require_manual_backward_finalization", False))


def require_manual(ddp: TorchDDP, required: bool) -> None:
    """Sets whether `finalize_backward` ends each step."""
    if required:
        check_manual_supported(ddp)
    reducer = find_reducer(ddp)
    if reducer is not None:
        reducer.require_manual_finalization(required)
    ddp._require_manual_backward_finalization = required  # type: ignore[assignment]  # an attribute: copies have it


def finalize_backward(ddp: TorchDDP) -> None:
    """Ends the step."""
    check_manual_supported(ddp)
    reducer_of(ddp).finalize_backward()


def check_manual_supported(ddp: TorchDDP) -> None:
    """Raises torch's error where there is no reducer."""
    if find_reducer(ddp) is None:
        raise RuntimeError(
            "Manual backward finalization is not supported when all DDP parameters use delay_all_reduce_named_params."
        )
