"""DistributedDataParallel: torch's own class with our reducer inside.

    ddp = fusedreduce.DistributedDataParallel(model, reduce=fusedreduce.ReduceConfig(wire="bf16"))

Signature, buffers, join, no_sync, device_mesh, state dict and isinstance are torch's, by inheritance. The C++ objects
that torch's class builds and calls, `dist.Reducer` and `dist.Logger`, are replaced by objects with the same methods:
`TorchReducer` and `Logger`. Private methods of torch's class are overridden here; for comm hooks in install.py too.
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
from torch.distributed import BuiltinCommHookType  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import Optimizer

from ..buckets.deferred_errors import in_backward
from ..comm.init_process_group import warn_of_switches
from ..comm.local.process_group import LocalProcessGroup, backend_name, communicator_of
from ..config import Asynchronous, FlushReport, ReduceConfig, SyncMode
from ..errors import FusedReduceError
from ..planning.bucketing import BucketCaps
from ..reducer import validation
from ..reducer.reducer import Reducer
from ..reducer.unused_parameters import contains_itself
from .ddp_arguments import Arguments, features_in_use
from .ddp_reports import ReducerReports
from .logging_data import Logger
from .torch_reducer import LocalJoin, TorchReducer


class DistributedDataParallel(ReducerReports, TorchDDP):
    """torch's DistributedDataParallel with gradients averaged by a `Reducer`: a subclass with one more argument.

    Methods that are not listed here are torch's, by inheritance: `no_sync`, `state_dict` and the others.

    Args:
        module: the model, as torch's class takes it.
        args: torch's further arguments, in torch's order.
        reduce: how gradients are reduced; None: ReduceConfig(), which sends them in their own dtype.
        kwargs: torch's arguments. `process_group` may be `communicator.process_group()` of a LocalGroup's rank.
            `batched_grad_copy` has no effect: copies in both directions are always fused. `lazy_bucket_allocation`
            (torch 2.15) has none with gradients that are views of a bucket, and in the asynchronous mode.

    Raises:
        AgreementError: ranks were given different models or settings; raised on every rank. (With init_sync=False
            the first synchronised forward raises it.)
        TypeError: an argument of torch's class that this version does not know; `reduce` is no ReduceConfig; a
            parameter of DTensor or FSDP.
        ValueError: a negative bucket cap; an option that the sync_mode excludes; whatever torch's class refuses.
        RuntimeError: whatever torch's class refuses; the experimental "python_reducer" mode of torch.compile.
    """

    _reduce_config: ReduceConfig
    _reduce_caps: BucketCaps
    _reduce_agreed: bool | None  # None: not compared yet; else whether sums are bitwise reproducible on all ranks

    def __init__(self, module: nn.Module, *args: Any, reduce: ReduceConfig | None = None, **kwargs: Any) -> None:
        self._prepare(reduce, module, *args, **kwargs)
        super().__init__(module, *args, **kwargs)

    def _prepare(self, reduce: ReduceConfig | None, *args: Any, **kwargs: Any) -> None:
        """Runs before torch's constructor, with its arguments: checks them and compares them across ranks."""
        if reduce is not None and not isinstance(reduce, ReduceConfig):
            raise TypeError(f"reduce must be a fusedreduce.ReduceConfig, got {reduce!r}")
        given = Arguments(*args, **kwargs)
        given.check_known()
        warn_of_switches()
        self._reduce_config = reduce or ReduceConfig()
        self._reduce_caps = BucketCaps()
        self._reduce_agreed = None
        self._require_manual_backward_finalization = False
        problem = None
        try:
            self._reduce_caps = given.caps()
            given.check_mode(self._reduce_config)
        except ValueError as error:
            problem = error
        if given.init_sync:
            self._reduce_agreed = given.agree(self._reduce_config, self._reduce_caps, problem)
        if problem is not None:
            raise problem

    @property
    def reduce_config(self) -> ReduceConfig:
        """The options of the reduction."""
        return self._reduce_config

    @property
    def sync_mode(self) -> SyncMode:
        """The mode in use: which step's averages `.grad` holds after a backward."""
        return self._reduce_config.sync_mode

    def set_sync_mode(self, mode: SyncMode) -> None:
        """Changes the mode from the next step on. Call it on every rank at the same place, after `flush`.

        Args:
            mode: Synchronous(), BoundedStaleness(k) or Asynchronous(); see `ReduceConfig.sync_mode`.

        Raises:
            ValueError: an option of this wrapper excludes the mode, or it is not a mode.
            FusedReduceError: steps are in flight, or one is not finished.
        """
        given = {
            "mixed_precision": self.mixed_precision,
            "delay_all_reduce_named_params": getattr(self, "_delay_all_reduce_params", None),
        }
        validation.check_mode(mode, features_in_use(self.module, given, self._reduce_config))
        self._ours().set_sync_mode(mode)
        self._reduce_config = self._ours().config

    def set_bucket_size(self, size: int | BucketCaps) -> None:
        """Changes bucket_cap_mb, in bytes. Call it on every rank at the same place, between two steps.

        The next forward compares the limits across ranks and builds the buckets anew. A compiled model keeps the cuts
        of its graph. Not within `join` once a rank has run out of inputs.

        Args:
            size: limit of every bucket in bytes of gradients; or BucketCaps. See `Reducer.set_bucket_size`.

        Raises:
            TypeError, ValueError: not a number of bytes from 1; a given plan is in use; a comm hook is registered.
            FusedReduceError: a step is armed or not finished, or a trace is being recorded; or, with Asynchronous,
                averages are outstanding.
        """
        reducer = self._ours()
        reducer.set_bucket_size(size)
        self._reduce_caps = caps = reducer.caps
        self.bucket_bytes_cap = caps.cap_bytes  # torch.compile cuts its graphs by it
        assert self.logger is not None
        self.logger.set_bucket_cap_bytes(caps.cap_bytes)

    def flush(self, *optimizers: Optimizer, step: Callable[[], None] | None = None) -> FlushReport:
        """Applies the averages of every step in flight, in order. Call it on every rank at the same place.

        Averages are added to `.grad`, unless a torch.optim optimizer has stepped with what is there. In the
        asynchronous mode parameters, and the optimizers' state of them, become the same on all ranks, and buffers
        become rank 0's unless broadcast_buffers=False.

        Args:
            optimizers: each is stepped after each step's averages have been applied; gradients are None afterwards.
            step: called in place of stepping, to clip, step, update a loss scaler and zero gradients. With neither,
                `.grad` holds the sum of the averages that were in flight.

        Returns:
            How many steps were applied, and how far parameters were apart.

        Raises:
            FusedReduceError: gradients of backwards under no_sync() wait to be reduced, or a step is not finished.
            ValueError: optimizers together with `step` (except in the asynchronous mode), or with a loss scaler, which
                has to decide on each of their steps.
            TypeError: an optimizer that is not a torch optimizer.
            CollectiveError: a peer died, left, or did not answer within the process group's timeout.
        """
        buffers = self.modules_buffers if self.broadcast_buffers else ()
        return self._ours().flush(*optimizers, step=step, buffers=list(buffers))

    def will_sync_module_buffers(self) -> bool:
        """Whether forward broadcasts buffers. False in the asynchronous mode, where `flush` broadcasts them instead.

        Returns:
            True if the next forward is to broadcast rank 0's buffers.
        """
        late = isinstance(self._reduce_config.sync_mode, Asynchronous)
        return not late and bool(super().will_sync_module_buffers())

    def reduce_state_dict(self) -> dict[str, Any]:
        """The averages in flight, to keep in a checkpoint beside the model's state. Waits for their collectives.

        In the asynchronous mode every rank calls it at the same place, and each rank's state is its own.

        Returns:
            Plain tensors by parameter name, and numbers; see `Reducer.state_dict`.

        Raises:
            FusedReduceError: a step is not finished.
        """
        return self._ours().state_dict()

    def load_reduce_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a checkpoint of averages in flight, whatever the bucket plan was then.

        Args:
            state: what `reduce_state_dict` returned.

        Raises:
            ValueError: it is damaged, or belongs to another model, number of ranks or mode.
            FusedReduceError: steps are in flight here, or one is not finished.
        """
        self._ours().load_state_dict(state)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """torch's context manager for ranks with different numbers of inputs; over a LocalGroup too.

        Args:
            divide_by_initial_world_size: divide by the number of all ranks; False: by that of ranks with inputs left.
            enable: False: no rank runs out of inputs, and nothing is exchanged for it.
            throw_on_early_termination: raise on every rank once one rank has run out of inputs.

        Returns:
            The context manager to train in.
        """
        if not isinstance(self.process_group, LocalProcessGroup):
            joined: Join = super().join(divide_by_initial_world_size, enable, throw_on_early_termination)
            return joined
        return LocalJoin(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> Any:
        """torch's hook, called by `join` and by `Join` with several modules.

        Args:
            kwargs: as torch's: divide_by_initial_world_size.

        Returns:
            The hook that shadows this wrapper's collectives.

        Raises:
            ValueError: a mode other than Synchronous, which join does not support, whether enabled or not.
        """
        validation.check_mode(self.sync_mode, {"join": True})
        return super().join_hook(**kwargs)

    @property
    def _distributed_rank(self) -> int:
        return self.rank

    def reset(self) -> None:
        """Makes the wrapper usable again after a backward that failed. Call it on every rank, within the timeout.

        Gradients stay as they are (gradients that are views of a buffer become None): zero them.

        Raises:
            FusedReduceError: on every rank that called it: a collective failed, ranks have issued different numbers of
                collectives, or a rank did not come. The process group cannot be used any more.
        """
        self._static_graph_delay_allreduce_enqueued = False
        self._ours().reset()

    def check_finalized(self) -> None:
        """Raises if the last backward did not reduce every gradient. A step in flight is completed first.

        Raises:
            FusedReduceError: with the names of the parameters that are missing; or a CUDA graph is being captured.
        """
        self._ours().check_finalized()

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether `finalize_backward` ends each synchronised step, as in torch 2.15; set it between two steps.

        A backward then ends with its collectives in flight and this rank's own gradients (with gradients that are views
        of a bucket: undefined ones), so that other work can run beside the collectives. Until `finalize_backward` the
        next forward raises, and so do optimizers and this package's norms, clipping and loss scalers. torch's own are
        noticed by `finalize_backward` if they write to a gradient, else not at all. No optimizer takes a closure.

        Raises:
            FusedReduceError: set after a forward whose backward is not finalized.
            RuntimeError: torch delays the reduction of all parameters (delay_all_reduce_named_params).
            ValueError: a mode other than Synchronous.
        """
        return self._require_manual_backward_finalization

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            self._check_manual_backward_finalization_supported()
        if hasattr(self, "reducer"):
            self._ours().require_manual_finalization(required)
        self._require_manual_backward_finalization = required

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether the coming `finalize_backward` is possible only after backward has returned; ask after each forward.

        Else a backward hook may call it, once all gradients are ready: of all that this package does, the only call
        that waits for other ranks on an autograd thread. False where manual finalization is not required.
        """
        mixed = self._require_manual_backward_finalization and self.mixed_precision is not None
        return mixed or (hasattr(self, "reducer") and self._ours().should_finalize_after_backward)

    def finalize_backward(self) -> None:
        """Ends the step, exactly once, where `require_manual_backward_finalization` is set.

        Waits for the collectives (on CUDA the current stream does) and writes the averages to `.grad`.

        Raises:
            FusedReduceError: it is not required, not every gradient is ready, nothing is to be finalized (under
                no_sync(), or a second time), or a backward hook has called it where `should_finalize_after_backward`.
            RuntimeError: torch delays the reduction of all parameters (delay_all_reduce_named_params).
            CollectiveError: a peer died, left, or did not answer within the process group's timeout.
            NonFiniteGradientError: see `ReduceConfig.check_finite`.
        """
        self._check_manual_backward_finalization_supported()
        if self.mixed_precision is not None and in_backward():
            raise FusedReduceError(
                f"rank {self._distributed_rank}: with mixed_precision a step cannot be finalized within its backward: "
                "call finalize_backward() after backward()"
            )
        self._ours().finalize_backward()

    def _check_manual_backward_finalization_supported(self) -> None:
        if not hasattr(self, "reducer"):
            raise RuntimeError(
                "Manual backward finalization is not supported when all DDP parameters use "
                "delay_all_reduce_named_params."
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients, as `Module.zero_grad` does.

        Args:
            set_to_none: set `.grad` to None; False: fill with zeros. Gradients that are views of a bucket stay views
                then, and are filled by one operator per bucket.
        """
        if hasattr(self, "reducer"):
            self._ours().cycle.complete_outside()
        if set_to_none or not hasattr(self, "reducer") or not self._ours().has_views:
            super().zero_grad(set_to_none)
            return
        reducer = self._ours()
        reducer.zero_grad()
        done = set(map(id, reducer.parameters))
        for parameter in self.parameters():  # ignored, delayed, or frozen later
            if id(parameter) not in done and parameter.grad is not None:
                parameter.grad.detach_().zero_()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduces buckets with `hook(state, bucket)` in place of this package's wire, as torch's class does.

        Args:
            state: the hook's first argument.
            hook: takes `state` and a GradBucket (flat, dense, one dtype, no padding, not divided); returns a future of
                one tensor with as many elements.

        Raises:
            RuntimeError: a hook is registered already.
            TypeError, ValueError: the hook's annotations are not those that torch expects.
            ValueError: `wire` is not "native" or `op` not "mean", which the hook would replace; or `state` is a
                FusedHookState whose wire is exchanged ("int8", "int4", accumulation="fp32"), which `reduce` has too.
        """
        self._check_comm_hook(hook)
        self._ours().register_comm_hook(state, hook)
        assert self.logger is not None
        self.logger._set_comm_hook_name(hook.__qualname__)
        self._comm_hooks.append((hook, state))

    def _register_fused_optim(self, optim: type, *args: Any, **kwargs: Any) -> None:
        validation.check_mode(self.sync_mode, {"an optimizer in backward": True})
        super()._register_fused_optim(optim, *args, **kwargs)
        self._ours().steps_in_backward = True

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        hooks = {
            BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
            BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        if self._ours().has_comm_hook:
            raise RuntimeError("register_builtin_comm_hook or register_comm_hook can only be called once.")
        self._ours().register_comm_hook(weakref.ref(self), functools.partial(_over_its_group, hooks[comm_hook_type]))
        assert self.logger is not None
        self.logger._set_comm_hook_name(str(comm_hook_type))

    def _ours(self) -> Reducer:
        reducer: Any = self.reducer
        assert isinstance(reducer, TorchReducer)
        return reducer.reducer

    def _replace_reducer(self, config: ReduceConfig) -> None:
        """Makes a new reducer with other options; between two steps, on every rank."""
        reducer = self._ours()
        reducer.close()
        self._reduce_config = config
        parameters, sparse = self._build_params_for_reducer()
        names = self._build_debug_param_to_name_mapping(parameters)
        self._ddp_init_helper(parameters, sparse, names, reducer.static_graph)

    # Called by torch's constructor, and by __setstate__

    def _ddp_init_helper(
        self,
        parameters: Sequence[torch.Tensor],
        expect_sparse_gradient: Sequence[bool],
        param_to_name_mapping: Mapping[int, str],
        static_graph: bool,
    ) -> None:
        config, caps = self.reduce_config, self._reduce_caps
        # torch writes ".weight" for a parameter of the outermost module.
        names = [param_to_name_mapping[index].removeprefix(".") for index in range(len(parameters))]
        reducer = Reducer(
            parameters,
            communicator_of(self.process_group),
            config,
            names=names,
            sparse=expect_sparse_gradient,
            caps=caps,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            skip_unused_buckets=getattr(self, "skip_all_reduce_unused_params", False),
            lazy_bucket_allocation=getattr(self, "lazy_bucket_allocation", False),
            exclusive=False,
            agreed=self._reduce_agreed,
        )
        if isinstance(self.process_group, LocalProcessGroup):
            # For torch.compile, torch keeps the DDP module whose forward runs in one global variable, which ranks that
            # are threads would overwrite for each other.
            self._inside_ddp_forward = nullcontext  # type: ignore[method-assign, assignment]
        if self.mixed_precision is not None:
            for index, parameter in enumerate(parameters):
                parameter._idx = index  # type: ignore[attr-defined]
        logger = Logger(reducer, backend_name(self.process_group), caps.cap_bytes)
        reducer.require_manual_finalization(self._require_manual_backward_finalization)
        self.reducer = TorchReducer(reducer, self, logger)  # type: ignore[assignment]
        self.logger = logger
        logger.set_construction_data_and_log(
            self.module.__class__.__name__,
            [] if self.device_ids is None else self.device_ids,
            -1 if self.output_device is None else self.output_device,
            self.broadcast_buffers,
            any(isinstance(layer, nn.SyncBatchNorm) for layer in self.module.modules()),
            static_graph,
        )
        self._passing_sync_batchnorm_handle(self.module)

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self.process_group, LocalProcessGroup):
            raise RuntimeError(
                "a DistributedDataParallel over a LocalGroup can be neither pickled nor copied (torch allows that for "
                "the default process group only): keep its state_dict(), or pickle its .module"
            )
        pending = self._ours().pending() if hasattr(self, "reducer") else ""
        if pending:
            warnings.warn(
                f"a DistributedDataParallel is copied or pickled while {pending}: the copy has none of that. Call "
                "flush() on every rank first, or keep reduce_state_dict() beside it",
                stacklevel=3,
            )
        state: dict[str, Any] = super().__getstate__()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The ranks of the new process group have compared nothing yet.
        state["_reduce_agreed"] = None
        # torch queues the end of a static graph's first step once per module object.
        state["_static_graph_delay_allreduce_enqueued"] = False
        self.__dict__.update({name: state[name] for name in ("_reduce_config", "_reduce_caps", "_reduce_agreed")})
        super().__setstate__(state)

    @_disable_dynamo
    def _post_forward(self, output: Any) -> Any:
        if hasattr(self, "reducer") and torch.is_grad_enabled():
            reducer: Any = self.reducer
            if self.require_backward_grad_sync:
                # torch passes outputs on for find_unused_parameters only, and looks into few kinds of containers.
                reducer.outputs = output
            else:
                reducer.reducer.cycle.watch_local_forward(output)
        if (self.find_unused_parameters or self.static_graph) and contains_itself(output):
            super()._post_forward(None)  # torch would walk through the output without end
            return output
        return super()._post_forward(output)


def _over_its_group(hook: Callable[..., Any], alive: weakref.ref[DistributedDataParallel], bucket: object) -> Any:
    """A built-in comm hook, over the process group that its wrapper has now."""
    ddp = alive()
    assert ddp is not None, "the wrapper's reducer calls this"
    return hook(ddp.process_group, bucket)


def uncompiled(module: object) -> object:
    """The module that torch.compile wrapped.

    Args:
        module: anything.

    Returns:
        The original module if `module` comes from torch.compile, else `module`.
    """
    return getattr(module, "_orig_mod", module) if isinstance(module, nn.Module) else module
