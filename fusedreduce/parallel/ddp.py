"""DistributedDataParallel: torch's own class with our reducer inside.

    ddp = fusedreduce.DistributedDataParallel(model, reduce=fusedreduce.ReduceConfig(wire="bf16"))

Signature, buffers, join, no_sync, device_mesh, state dict and isinstance are torch's, by inheritance. The C++ objects
that torch's class builds and calls, `dist.Reducer` and `dist.Logger`, are replaced by objects with the same methods:
`TorchReducer` and `Logger`. What overridden methods of torch's class do stands in ddp_methods.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._compile import _disable_dynamo  # unlike torch.compiler.disable it imports torch._dynamo at the first call
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import Optimizer

from ..buckets.stats.non_finite import NonFiniteReport
from ..comm.init_process_group import local_rank
from ..comm.local.process_group import LocalProcessGroup
from ..config import FlushReport, ReduceConfig, SyncMode
from ..planning.bucketing import BucketCaps
from ..reducer.wire_choice import WireTimes
from ..reducer.wire_schedule import ParameterWire
from ..trace.collective_metrics import CollectiveMetrics
from . import ddp_methods as methods
from .ddp_arguments import Arguments, Settings, signature_with_reduce
from .wrapper_reducer import find_reducer, reducer_of

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh


class DistributedDataParallel(TorchDDP):
    """torch's DistributedDataParallel with gradients averaged by a `Reducer`: a subclass with one more argument.

    Methods that are not listed here are torch's, by inheritance: `no_sync`, `state_dict` and the others.

    Args:
        module: the model, as torch's class takes it.
        args: torch's further arguments, in torch's order.
        reduce: how gradients are reduced, by name only; None: ReduceConfig(), which sends them in their own dtype.
        kwargs: torch's arguments. `process_group` may be `communicator.process_group()` of a LocalGroup's rank.
            `batched_grad_copy` has no effect: copies in both directions are always fused. `lazy_bucket_allocation`
            (torch 2.15) has none with gradients that are views of a bucket, and in the asynchronous mode.

    Raises:
        AgreementError: ranks were given different models or settings; raised on every rank. (With init_sync=False
            the first synchronised forward raises it.)
        TypeError: an argument of torch's class that this version does not know, or of another kind than it takes;
            `reduce` is no ReduceConfig, or its options are given as arguments; a parameter of DTensor or FSDP.
        ValueError: there is no process group; a negative bucket cap, or one that is not finite; an option that the
            sync_mode excludes; whatever torch's class refuses.
        RuntimeError: whatever torch's class refuses; the experimental "python_reducer" mode of torch.compile.
    """

    _reduce_settings: Settings

    if TYPE_CHECKING:
        # What editors show and type checkers check: torch's arguments, with torch's defaults. By position those that
        # every version of torch has there.
        def __init__(
            self,
            module: nn.Module,
            device_ids: Sequence[int | torch.device] | None = None,
            output_device: int | torch.device | None = None,
            dim: int = 0,
            broadcast_buffers: bool | None = None,
            init_sync: bool = True,
            process_group: dist.ProcessGroup | None = None,
            bucket_cap_mb: float | None = None,
            find_unused_parameters: bool = False,
            check_reduction: bool = False,
            gradient_as_bucket_view: bool = False,
            static_graph: bool = False,
            delay_all_reduce_named_params: Iterable[tuple[str, torch.Tensor]] | None = None,
            param_to_hook_all_reduce: torch.Tensor | None = None,
            mixed_precision: Any = None,
            device_mesh: DeviceMesh | None = None,
            skip_all_reduce_unused_params: bool = False,
            *,
            bucket_cap_mb_list: Sequence[float] | None = None,
            batched_grad_copy: bool = False,
            forward_sync_buffers: bool | None = None,
            lazy_bucket_allocation: bool = False,
            reduce: ReduceConfig | None = None,
        ) -> None: ...

    else:

        def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
            reduce = kwargs.pop("reduce", None)
            # Before torch's constructor, whose own checks raise on some ranks only. What is not given is left to torch,
            # whose defaults differ between versions.
            self._reduce_settings = Arguments(module, *args, **kwargs).settle(reduce)
            super().__init__(module, *args, **kwargs)

        # What help(), notebooks and the reference show: the arguments of this version of torch.
        __init__.__signature__ = signature_with_reduce()

    @property
    def reduce_config(self) -> ReduceConfig:
        """The options of the reduction."""
        reducer = find_reducer(self)
        return self._reduce_settings.config if reducer is None else reducer.config

    @property
    def sync_mode(self) -> SyncMode:
        """The mode in use: which step's averages `.grad` holds after a backward."""
        return self.reduce_config.sync_mode

    def set_sync_mode(self, mode: SyncMode) -> None:
        """Changes the mode from the next step on. Call it on every rank at the same place, after `flush`.

        Args:
            mode: Synchronous(), BoundedStaleness(k) or Asynchronous(); see `ReduceConfig.sync_mode`.

        Raises:
            ValueError: an option of this wrapper excludes the mode, or it is not a mode.
            FusedReduceError: steps are in flight, or one is not finished.
        """
        reducer_of(self).set_sync_mode(mode)

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
        reducer_of(self).set_bucket_size(size)

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
        return reducer_of(self).flush(*optimizers, step=step)

    @_disable_dynamo
    def will_sync_module_buffers(self) -> bool:
        """Whether forward broadcasts buffers. False in the asynchronous mode, where `flush` broadcasts them instead.

        Returns:
            True if the next forward is to broadcast rank 0's buffers.
        """
        return methods.will_sync_module_buffers(self, super().will_sync_module_buffers)

    def reduce_state_dict(self) -> dict[str, Any]:
        """The averages in flight, to keep in a checkpoint beside the model's state. Waits for their collectives.

        In the asynchronous mode every rank calls it at the same place, and each rank's state is its own.

        Returns:
            Plain tensors by parameter name, and numbers; see `Reducer.state_dict`.

        Raises:
            FusedReduceError: a step is not finished.
        """
        return reducer_of(self).state_dict()

    def load_reduce_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a checkpoint of averages in flight, whatever the bucket plan was then.

        Args:
            state: what `reduce_state_dict` returned.

        Raises:
            ValueError: it is damaged, or belongs to another model, number of ranks or mode.
            FusedReduceError: steps are in flight here, or one is not finished.
        """
        reducer_of(self).load_state_dict(state)

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
        return methods.join(self, super().join, divide_by_initial_world_size, enable, throw_on_early_termination)

    def join_hook(self, **kwargs: Any) -> Any:
        """torch's hook, called by `join` and by `Join` with several modules.

        Args:
            kwargs: as torch's: divide_by_initial_world_size.

        Returns:
            The hook that takes part in the other ranks' steps.

        Raises:
            ValueError: a mode other than Synchronous, which join does not support, whether enabled or not.
        """
        return methods.join_hook(self, super().join_hook, **kwargs)

    def _match_all_reduce_for_bwd_pass(self) -> None:
        reducer_of(self).step_without_inputs()

    def _match_unused_params_allreduce(self) -> None: ...  # that step has taken part in it

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
        reducer_of(self).reset()

    def check_finalized(self) -> None:
        """Raises if the last backward did not reduce every gradient. A step in flight is completed first.

        Raises:
            FusedReduceError: with the names of the parameters that are missing; or a CUDA graph is being captured.
        """
        reducer_of(self).check_finalized()

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
        return methods.manual_required(self)

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        methods.require_manual(self, required)

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether the coming `finalize_backward` is possible only after backward has returned; ask after each forward.

        Else a backward hook may call it, once all gradients are ready: of all that this package does, the only call
        that waits for other ranks on an autograd thread. False where manual finalization is not required.
        """
        reducer = find_reducer(self)
        return reducer is not None and reducer.should_finalize_after_backward

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
        methods.finalize_backward(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients, as `Module.zero_grad` does.

        Args:
            set_to_none: set `.grad` to None; False: fill with zeros. Gradients that are views of a bucket stay views
                then, and are filled by one operator per bucket.
        """
        methods.zero_grad(self, super().zero_grad, set_to_none)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduces buckets with `hook(state, bucket)` in place of this package's wire, as torch's class does.

        Args:
            state: the hook's first argument.
            hook: takes `state` and a GradBucket (flat, dense, one dtype, no padding, not divided); returns a future of
                one tensor with as many elements.

        Raises:
            RuntimeError: a hook is registered already.
            TypeError, ValueError: the hook's annotations are not those that torch expects; or the state of `fused_hook`
                is no FusedHookState.
            ValueError: `wire` is not "native" or `op` not "mean", which the hook would replace; or `state` is a
                FusedHookState whose wire is exchanged ("int8", "int4", accumulation="fp32"), which `reduce` has too.
        """
        methods.register_comm_hook(self, super().register_comm_hook, state, hook)

    def _register_fused_optim(self, optim: type, *args: Any, **kwargs: Any) -> None:
        methods.register_fused_optim(self, super()._register_fused_optim, optim, *args, **kwargs)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        methods.register_builtin_comm_hook(self, super()._register_builtin_comm_hook, comm_hook_type)

    # Reports

    @property
    def world_size(self) -> int:
        """Number of ranks of the process group."""
        return int(self.process_group.size())

    @property
    def rank(self) -> int:
        """This rank's number in the process group."""
        return int(self.process_group.rank())

    @property
    def local_rank(self) -> int | None:
        """This process's number on its machine: LOCAL_RANK, None if that is not set; of a LocalGroup's rank its rank.

        Raises:
            ValueError: LOCAL_RANK is not a number, or out of range.
        """
        return self.rank if isinstance(self.process_group, LocalProcessGroup) else local_rank()

    def reduce_stats(self) -> dict[str, int | str]:
        """Counters of this rank's reducer since it was built.

        Returns:
            steps, buckets, buckets_reduced, collectives, wire_bytes and others, by name: `Reducer.stats` lists them.
        """
        return reducer_of(self).stats()

    def plan_json(self) -> str:
        """The bucket plan in use, to keep in a checkpoint.

        Returns:
            JSON text, which `ReduceConfig(plan=...)` takes.
        """
        return reducer_of(self).plan_json()

    def wire_report(self) -> dict[str, ParameterWire]:
        """By parameter's name what its gradient travels on, and what its encoding has lost: `Reducer.wire_report`."""
        return reducer_of(self).wire_report()

    def wire_times(self) -> WireTimes | None:
        """Which of several wires is used, and what steps took on those that were tried: `Reducer.wire_times`."""
        return reducer_of(self).wire_times()

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
        return reducer_of(self).record_trace(folder, limit)

    def measure_collectives(self) -> AbstractContextManager[CollectiveMetrics]:
        """Counts and times the reducer's collectives while the context is open, see `measure_collectives`.

        What travels by a communicator of its own is not seen: averages in the mode Asynchronous, and on CPU the second
        phases of the wires "int8", "int4" and accumulation="fp32" on three and more ranks.

        Returns:
            The context manager, which gives the metrics.

        Raises:
            FusedReduceError: they are being measured already.
        """
        return reducer_of(self).measure_collectives()

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
        return reducer_of(self).grad_norm(norm_type, include_ignored=include_ignored)

    def grad_norms(self, norm_type: float = 2.0) -> dict[str, torch.Tensor]:
        """Norm of each reduced gradient; measured when `grad_norm` would be.

        Args:
            norm_type: 2 or inf.

        Returns:
            0-dim tensors of fp64 by parameter name.

        Raises:
            ValueError: another norm_type.
        """
        return reducer_of(self).grad_norms(norm_type)

    def grad_stats(self, *, per_parameter: bool = True) -> dict[str, float]:
        """Statistics of the latest step to log, as plain numbers: one transfer, which the host waits for.

        Args:
            per_parameter: also per parameter, under "grad_norm/<name>" and so on.

        Returns:
            grad_norm (L2) and grad_absmax. With ReduceConfig(grad_stats=True) also grad_flushed: the share of this
            rank's elements that were not zero and became zero on the wire; NaN for bf16 gradients on an fp16 wire.
        """
        return reducer_of(self).grad_stats(per_parameter=per_parameter)

    def non_finite(self) -> list[NonFiniteReport]:
        """The latest steps in which a gradient held a NaN or Inf; found with ReduceConfig(check_finite=...).

        Returns:
            A report per step, oldest first: which rank had what in which gradient before it was reduced.
        """
        return reducer_of(self).non_finite()

    # Called by torch's constructor, and by __setstate__

    def _ddp_init_helper(
        self,
        parameters: Sequence[torch.Tensor],
        expect_sparse_gradient: Sequence[bool],
        param_to_name_mapping: Mapping[int, str],
        static_graph: bool,
    ) -> None:
        methods.build(
            self,
            self._reduce_settings,
            parameters,
            expect_sparse_gradient,
            param_to_name_mapping,
            static_graph,
            installed=False,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {
            **methods.getstate(self, super().__getstate__),
            "_reduce_settings": methods.settings_of(reducer_of(self)),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch queues the end of a static graph's first step once per module object.
        state["_static_graph_delay_allreduce_enqueued"] = False
        self._reduce_settings = state["_reduce_settings"]
        super().__setstate__(state)

    @_disable_dynamo
    def _post_forward(self, output: Any) -> Any:
        return methods.post_forward(self, super()._post_forward, output)
