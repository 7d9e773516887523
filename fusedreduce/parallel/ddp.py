"""DistributedDataParallel: torch's own class with our reducer inside.

    ddp = fusedreduce.DistributedDataParallel(model, reduce=fusedreduce.ReduceConfig(wire="bf16"))

Signature, buffers, join, no_sync, device_mesh, state dict and isinstance are torch's, by inheritance. The C++ objects
that torch's class builds and calls, `dist.Reducer` and `dist.Logger`, are replaced by objects with the same methods.
This file alone touches torch's private interface.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo  # unlike torch.compiler.disable it imports torch._dynamo at the first call
from torch.distributed import BuiltinCommHookType  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import Optimizer

from ..buckets.grad_bucket import GradBucket
from ..buckets.gradient_table import GradientTable
from ..buckets.stats.non_finite import NonFiniteReport
from ..buckets.tensors import real_dtype
from ..comm.agreement import problems_of_ranks
from ..comm.init_process_group import warn_of_switches
from ..comm.local.process_group import LocalProcessGroup, backend_name, communicator_of
from ..config import Asynchronous, FlushReport, ReduceConfig, SyncMode
from ..errors import AgreementError, CollectiveError
from ..planning.bucketing import MIB, BucketCaps
from ..planning.plan_file import load as load_plan
from ..reducer import validation
from ..reducer.modes import asynchronous
from ..reducer.reducer import Reducer
from ..reducer.step_cycle import ReducerState
from .logging_data import Logger

# Arguments that this class honours. One that a later torch adds is refused unless it has its default value: torch might
# read it in the C++ reducer alone.
_KNOWN_ARGUMENTS = frozenset(
    {
        "module",
        "device_ids",
        "output_device",
        "dim",
        "broadcast_buffers",
        "init_sync",
        "process_group",
        "bucket_cap_mb",
        "find_unused_parameters",
        "check_reduction",
        "gradient_as_bucket_view",
        "static_graph",
        "delay_all_reduce_named_params",
        "param_to_hook_all_reduce",
        "mixed_precision",
        "device_mesh",
        "skip_all_reduce_unused_params",
        "bucket_cap_mb_list",
        "batched_grad_copy",
        "forward_sync_buffers",
    }
)
_TORCH_SIGNATURE = inspect.signature(TorchDDP.__init__)


class DistributedDataParallel(TorchDDP):
    """torch's DistributedDataParallel with gradients averaged by a `Reducer`: a subclass with one more argument.

    Methods that are not listed here are torch's, by inheritance: `no_sync`, `state_dict` and the others.

    Args:
        module: the model, as torch's class takes it.
        args: torch's further arguments, in torch's order.
        reduce: how gradients are reduced; None: ReduceConfig(), which sends them in their own dtype.
        kwargs: torch's arguments. `process_group` may be `communicator.process_group()` of a LocalGroup's rank.
            `batched_grad_copy` has no effect: copies are always fused.

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
        given = _arguments(*args, **kwargs)
        module = given["module"]
        _check_known(given)
        warn_of_switches()
        self._reduce_config = reduce or ReduceConfig()
        self._reduce_caps = BucketCaps()
        self._reduce_agreed = None
        problem = None
        try:
            self._reduce_caps = _caps(given)
            validation.check_mode(self._reduce_config.sync_mode, _excluded(module, given, self._reduce_config))
        except ValueError as error:
            problem = error
        if given["init_sync"]:
            self._reduce_agreed = self._agree(module, given, problem)
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
        validation.check_mode(mode, _excluded(self.module, given, self._reduce_config))
        self._ours().set_sync_mode(mode)
        self._reduce_config = self._ours().config

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
            Plain tensors by parameter name, and numbers; empty in the synchronous mode.

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
        return self.process_group.rank()

    def reduce_stats(self) -> dict[str, int | str]:
        """Counters of this rank's reducer since it was built.

        Returns:
            steps, buckets, buckets_reduced, collectives, wire_bytes and others, by name: `Reducer.stats` lists them.
        """
        return self._ours().stats()

    def plan_json(self) -> str:
        """The bucket plan in use, to keep in a checkpoint.

        Returns:
            JSON text, which `ReduceConfig(plan=...)` takes.
        """
        return self._ours().plan_json()

    def record_trace(self, folder: str | Path, limit: int = 100) -> AbstractContextManager[None]:
        """Records steps for `fusedreduce trace` and `fusedreduce plan` while the context is open.

        Args:
            folder: where this rank's file is written; ranks may share it.
            limit: number of synchronised steps after which recording stops.

        Returns:
            The context manager.

        Raises:
            FusedReduceError: a trace is being recorded already.
            ValueError: a mode other than Synchronous, whose steps do not end with their own backward.
        """
        return self._ours().record_trace(folder, limit)

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

    def grad_norm(self, norm_type: float = 2.0, *, include_ignored: bool = False) -> torch.Tensor:
        """Norm over all reduced gradients, as they were reduced last with ReduceConfig(grad_stats=True), else as now.

        Neither the host nor another rank is waited for. The result is the same on every rank, bit for bit, if all ranks
        have the same hardware and versions, or with ReduceConfig(grad_stats=True), which shares the largest result.

        Args:
            norm_type: 2 or inf.
            include_ignored: add gradients that this wrapper does not reduce, as they are on this rank.

        Returns:
            0-dim tensor of fp64 on the first parameter's device.

        Raises:
            ValueError: another norm_type; or a parameter that is not reduced has a gradient, unless include_ignored.
        """
        norm = self._ours().observed.grad_norm(norm_type)
        ignored = self.ignored_with_gradients(allowed=include_ignored)
        if not ignored:
            return norm
        total = GradientTable([parameter for _, parameter in ignored]).measure().total
        if norm_type == math.inf:
            return torch.maximum(norm, total[1].to(norm.device))
        return (norm.square() + total[0].to(norm.device)).sqrt()

    def grad_norms(self, norm_type: float = 2.0) -> dict[str, torch.Tensor]:
        """Norm of each reduced gradient; measured when `grad_norm` would be.

        Args:
            norm_type: 2 or inf.

        Returns:
            0-dim tensors of fp64 by parameter name.

        Raises:
            ValueError: another norm_type.
        """
        return self._ours().observed.grad_norms(norm_type)

    def grad_stats(self, *, per_parameter: bool = True) -> dict[str, float]:
        """Statistics of the latest step to log, as plain numbers: one transfer, which the host waits for.

        Args:
            per_parameter: also per parameter, under "grad_norm/<name>" and so on.

        Returns:
            grad_norm (L2) and grad_absmax. With ReduceConfig(grad_stats=True) also grad_flushed: the share of this
            rank's elements that were not zero and became zero on the wire; NaN for bf16 gradients on an fp16 wire.
        """
        return self._ours().observed.grad_stats(per_parameter=per_parameter)

    def non_finite(self) -> list[NonFiniteReport]:
        """The latest steps in which a gradient held a NaN or Inf; found with ReduceConfig(check_finite=...).

        Returns:
            A report per step, oldest first: which rank had what in which gradient before it was reduced.
        """
        return list(self._ours().observed.finite_check().reports)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients, as `Module.zero_grad` does.

        Args:
            set_to_none: set `.grad` to None; False: fill with zeros. Gradients that are views of a bucket stay views
                then, and are filled by one operator per bucket.
        """
        if hasattr(self, "reducer") and self._ours().state is ReducerState.LAUNCHED:
            self._ours().finalize()
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
            ValueError: `wire` is not "native" or `op` not "mean", which the hook would replace.
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
        self._ours().register_comm_hook(self.process_group, hooks[comm_hook_type])
        assert self.logger is not None
        self.logger._set_comm_hook_name(str(comm_hook_type))

    def ignored_with_gradients(self, *, allowed: bool) -> list[tuple[str, torch.Tensor]]:
        """Parameters that have a gradient which this wrapper does not reduce.

        Args:
            allowed: False: raise if there are any.

        Returns:
            Name and parameter of each.

        Raises:
            ValueError: there are some, and they are not `allowed`.
        """
        reduced = set(map(id, self._ours().parameters))
        found = [
            (name, parameter)
            for name, parameter in self.module.named_parameters()
            if id(parameter) not in reduced and parameter.grad is not None
        ]
        if found and not allowed:
            raise ValueError(
                f"{', '.join(name for name, _ in found[:8])} {'has' if len(found) == 1 else 'have'} a gradient that "
                "this wrapper does not reduce (ignored, delayed, or frozen since): a norm over all gradients would "
                "differ between ranks. Pass include_ignored=True to add it as it is on this rank"
            )
        return found

    def _ours(self) -> Reducer:
        reducer: Any = self.reducer
        assert isinstance(reducer, TorchReducer)
        return reducer.reducer

    def _agree(self, module: nn.Module, given: Mapping[str, Any], problem: Exception | None) -> bool:
        """Compares model and settings across ranks before torch does, whose check raises on some ranks only.

        Returns:
            Whether sums are bitwise reproducible on all ranks.
        """
        if _left_to_torch(module, given):
            return True
        named, sparse = _reduced(module, given), validation.sparse_parameters(module)
        communicator = communicator_of(_group(given))
        descriptions = []
        try:
            _check_reduced(named, given, self.reduce_config)
            descriptions = [validation.describe(one, name, id(one) in sparse) for name, one in named.items()]
        except (RuntimeError, TypeError, ValueError) as error:
            problem = problem or error
        flags: dict[str, object] = {name: bool(given[name]) for name in _COMPARED_FLAGS if name in given}
        settings = validation.settings(self.reduce_config, self._reduce_caps, flags)
        try:
            return validation.agree(communicator, descriptions, settings, _device(module), str(problem or ""))
        except AgreementError as error:
            if problem is not None and error.on_every_rank:
                raise problem from None
            raise

    def _use_native_wire(self) -> str:
        """Makes a reducer with the native wire, for a comm hook; between two steps, on every rank.

        Returns:
            The options that this replaced, for a message; "" if none.
        """
        config = self._reduce_config
        native = dataclasses.replace(config, wire="native", op="mean")
        if native == config or not hasattr(self, "reducer") or self._ours().has_comm_hook:
            return ""
        validation.check_mode(config.sync_mode, {"a comm hook": True})
        reducer = self._ours()
        reducer.check_finalized()
        if reducer.state is ReducerState.ARMED:
            raise RuntimeError(
                f"a comm hook replaces wire={config.wire!r}, but a forward waits for its backward: register "
                "the hook before that forward, or run a forward without backward under torch.no_grad()"
            )
        reducer.close()
        self._reduce_config = native
        parameters, sparse = self._build_params_for_reducer()
        names = self._build_debug_param_to_name_mapping(parameters)
        self._ddp_init_helper(parameters, sparse, names, reducer.static_graph)
        return " and ".join(
            f"{name}={getattr(config, name)!r}"
            for name in ("wire", "op")
            if getattr(config, name) != getattr(native, name)
        )

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
        facade = TorchReducer(reducer, self)
        logger = Logger(reducer, backend_name(self.process_group), caps.cap_bytes)
        facade.set_logger(logger)
        self.reducer = facade  # type: ignore[assignment]
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
        return super()._post_forward(output)


def uncompiled(module: object) -> object:
    """The module that torch.compile wrapped.

    Args:
        module: anything.

    Returns:
        The original module if `module` comes from torch.compile, else `module`.
    """
    return getattr(module, "_orig_mod", module) if isinstance(module, nn.Module) else module


_COMPARED_FLAGS = (
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
    "skip_all_reduce_unused_params",
)


class TorchReducer:
    """The methods of torch's C++ Reducer that DDP and torch.distributed call, on top of a Reducer of this package.

    Args:
        reducer: does the work.
        ddp: the wrapper; referenced weakly.
    """

    def __init__(self, reducer: Reducer, ddp: DistributedDataParallel) -> None:
        self.reducer = reducer
        self.outputs: object = None
        self._ddp = weakref.ref(ddp)
        self._joined = False
        self._logger: Logger | None = None

    def set_logger(self, logger: Logger) -> None:
        """Has errors logged there before they are raised."""
        self._logger = logger
        self.reducer.cycle.on_error = logger.set_error_and_log

    # A step

    @_disable_dynamo
    def prepare_for_forward(self) -> None:
        """Called by torch before a synchronised forward."""
        try:
            self.reducer.cycle.begin_forward()
        except Exception as error:
            self._log(error)
            raise

    @_disable_dynamo
    def _rebuild_buckets(self) -> bool:
        # Called in every forward with gradients, and on a rank that has joined: collectives keep their order here.
        ddp = self._ddp()
        if ddp is not None and not ddp.require_backward_grad_sync:
            self.reducer.expect_local_backward()
        try:
            if not self.reducer.cycle.in_forward():
                self.reducer.cycle.check_finalized()
            self.reducer.agree()
            return self.reducer.rebuild()
        except Exception as error:
            self._log(error)
            raise

    @_disable_dynamo
    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None:
        """Called by torch after a synchronised forward, with outputs for find_unused_parameters only."""
        found, self.outputs = self.outputs, None
        try:
            self.reducer.prepare_for_backward(outputs if found is None else found)
        except Exception as error:
            self._log(error)
            raise

    @_disable_dynamo
    def _delay_all_reduce(self) -> None:
        self.reducer.cycle.end_first_static_step()

    def _autograd_hook(self, index: int) -> None:
        self.reducer.cycle.on_gradient(index)

    def _check_reducer_finalized(self) -> None:
        try:
            self.reducer.check_finalized()
        except Exception as error:
            self._log(error)
            raise

    def get_backward_stats(self) -> list[int]:
        """Time in ns from the end of forward until each parameter's gradient was ready, on the host's clock."""
        return self.reducer.get_backward_stats()

    def _install_post_backward_futures(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        self.reducer.pipeline.wait_at_end(futures)

    # Join

    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        if not use_static_world_size:
            self.reducer.pipeline.divide_by_ranks_counted(work)

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        self._joined = True
        self.reducer.rebuild()
        return self.reducer.shadows.begin_step()

    def _run_comm_hook(self, bucket: GradBucket) -> JoinedWork:
        return JoinedWork(self.reducer.shadows.run(bucket))

    def _push_all_rebuilt_params(self) -> None:
        self._joined = False
        self.reducer.shadows.end_step()

    def _get_local_used_map(self) -> torch.Tensor:
        return self.reducer.shadows.used_map(joined=self._joined)

    # Settings

    def _set_static_graph(self) -> None:
        try:
            self.reducer.set_static_graph()
        except Exception as error:
            self._log(error)
            raise

    def _ddp_graph_static(self) -> bool:
        return self.reducer.cycle.unused_always_same

    def _set_optimizer_in_backward(self) -> None:
        self.reducer.leave_gradients_to_hook()

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype) -> None:
        """Allows gradients of `dtype` in fp32 buckets: mixed precision registers a comm hook that casts those."""
        self.reducer.allow_other_dtypes()

    def _run_allreduce_hook(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        ddp = self._ddp()
        assert ddp is not None
        work = dist.all_reduce(bucket.buffer(), group=ddp.process_group, async_op=True)
        assert work is not None
        future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
        return future.then(_first)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        assert self._logger is not None
        self._logger.sample_rate = sample_rate

    def _set_sparse_metadata(self, metadata: Mapping[str, torch.Tensor]) -> None:
        raise NotImplementedError(
            "fusedreduce sums sparse gradients as torch.distributed does; a fixed set of indices is not supported"
        )

    def _remove_autograd_hooks(self) -> None:
        self.reducer.remove_hooks()

    def _reset_state(self) -> None:
        # The caller sets a new process group next. The old one may have failed, so nothing is compared over it.
        self.reducer.give_up_step()

    def _update_process_group(self, group: dist.ProcessGroup) -> None:
        self.reducer.set_communicator(communicator_of(group))

    def _log(self, error: Exception) -> None:
        if self._logger is not None:
            self._logger.set_error_and_log(str(error))


class JoinedWork:
    """Work handle of one bucket's shadow collective, for torch's join.

    Args:
        complete: waits for the collective.
    """

    def __init__(self, complete: Callable[[], None]) -> None:
        self._complete = complete

    def wait(self) -> None:
        """Blocks until the collective is done.

        Raises:
            CollectiveError: it failed.
        """
        self._complete()


class LocalJoin(Join):
    """torch's Join for one wrapper over a LocalGroup, whose ranks torch.distributed does not know."""

    def _extract_dist_info(self) -> None:
        (ddp,) = self._joinables
        self._process_group, self._device = ddp.join_process_group, ddp.join_device
        self._rank = self._process_group.rank()


def _first(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]


def refusal_on_any_rank(config: ReduceConfig, *args: Any, **kwargs: Any) -> str:
    """Why a wrapper with these arguments would be refused on some rank; found before it is made. A collective.

    Errors that torch's class raises as well, and different models on different ranks, are left to the constructor.

    Args:
        config: how gradients would be reduced.
        args: positional arguments of torch's class.
        kwargs: keyword arguments of torch's class.

    Returns:
        The reason of the first rank that refuses, the same on every rank; "" if none does.

    Raises:
        CollectiveError: a peer did not answer.
    """
    given = _arguments(*args, **kwargs)
    module = given["module"]
    if _left_to_torch(module, given) or not dist.is_initialized():
        return ""
    communicator, device = communicator_of(_group(given)), _device(module)
    named, sparse = _reduced(module, given), validation.sparse_parameters(module)
    problem = ""
    try:
        # First, and on every rank: with an unknown backend this issues a collective per dtype.
        dense = (one.dtype for one in named.values() if id(one) not in sparse)
        for dtype in sorted({config.wire_dtype(real_dtype(one)) for one in dense}, key=str):
            communicator.check_wire(dtype, device)
        _check_known(given)
        _caps(given)
        validation.check_mode(config.sync_mode, _excluded(module, given, config))
        _check_reduced(named, given, config)
        asynchronous.check(config, list(named), [id(one) in sparse for one in named.values()])
    except CollectiveError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        problem = str(error)
    return problems_of_ranks(communicator, problem, device)


def _arguments(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Arguments of torch's constructor by name, with defaults filled in."""
    bound = _TORCH_SIGNATURE.bind(None, *args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    given.pop("self")
    return given


def _check_known(given: Mapping[str, Any]) -> None:
    """Refuses arguments and settings that cannot be honoured."""
    if torch._dynamo.utils.get_optimize_ddp_mode() == "python_reducer":
        raise RuntimeError(
            'torch._dynamo.config.optimize_ddp="python_reducer" replaces the reducer by traced code; use '
            '"ddp_optimizer" (the default) or "no_optimization" with fusedreduce'
        )
    for name, value in given.items():
        default = _TORCH_SIGNATURE.parameters[name].default
        if name not in _KNOWN_ARGUMENTS and value != default:
            raise TypeError(
                f"{name}={value!r} is an argument of torch {torch.__version__} that this version of fusedreduce does "
                "not know: leave it at its default, or update fusedreduce"
            )


def _left_to_torch(module: nn.Module, given: Mapping[str, Any]) -> bool:
    """Whether there is nothing to compare: torch refuses the mesh on every rank, or reduces all parameters itself."""
    mesh = given["device_mesh"]
    refused = mesh is not None and (given["process_group"] is not None or mesh.ndim != 1)
    return refused or bool(given.get("delay_all_reduce_named_params") and not _reduced(module, given))


def _group(given: Mapping[str, Any]) -> Any:
    mesh = given["device_mesh"]
    return given["process_group"] if mesh is None else mesh.get_group(mesh_dim=0)


def _device(module: nn.Module) -> torch.device:
    return next((one.device for one in module.parameters()), torch.device("cpu"))


def _reduced(module: nn.Module, given: Mapping[str, Any]) -> dict[str, nn.Parameter]:
    """The parameters that the reducer is to reduce, by name."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    ignored |= {name for name, _ in given["delay_all_reduce_named_params"] or ()}
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }


def _check_reduced(named: Mapping[str, torch.Tensor], given: Mapping[str, Any], config: ReduceConfig) -> None:
    """Raises what the reducer would raise about its parameters, and about a plan given for them."""
    if not _is_sliced(given["device_mesh"]):  # torch turns a sliced mesh's DTensors into plain tensors
        _check_trainable(named)
    if config.plan is not None:
        load_plan(config.plan, names=list(named), numels=[one.numel() for one in named.values()])


def _caps(given: Mapping[str, Any]) -> BucketCaps:
    """Reads bucket_cap_mb and bucket_cap_mb_list as torch does: a cap that is given applies to the first bucket too."""
    # A cap of less than a byte means one bucket per parameter.
    listed = tuple(int(cap * MIB) or 1 for cap in given.get("bucket_cap_mb_list") or ())
    own = given["bucket_cap_mb"]
    if own is not None:
        cap_bytes = int(own * MIB) or 1
        return BucketCaps(first_bytes=cap_bytes, cap_bytes=cap_bytes, listed_bytes=listed)
    if listed:
        return BucketCaps(first_bytes=max(listed), cap_bytes=max(listed), listed_bytes=listed)
    return BucketCaps()


def _excluded(module: nn.Module, given: Mapping[str, Any], config: ReduceConfig) -> dict[str, bool]:
    """Features that modes with delayed averages exclude: name -> whether this wrapper uses it."""
    names = ("skip_all_reduce_unused_params", "mixed_precision", "delay_all_reduce_named_params")
    return {
        "gradient_as_bucket_view": config.has_views(bool(given.get("gradient_as_bucket_view"))),
        **{name: bool(given.get(name)) for name in names},
        "an optimizer in backward": any(hasattr(one, "_in_backward_optimizers") for one in module.parameters()),
    }


def _is_sliced(mesh: Any) -> bool:
    return mesh is not None and mesh._get_root_mesh() != mesh


def _check_trainable(named: Mapping[str, torch.Tensor]) -> None:
    """Raises what torch's constructor and the reducer would raise, with their messages."""
    if not named:
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    for name, parameter in named.items():
        validation.check_one(parameter, name)
