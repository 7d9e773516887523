"""DistributedDataParallel: torch's own class with our reducer inside.

    ddp = fusedreduce.DistributedDataParallel(model, reduce=fusedreduce.ReduceConfig(wire="bf16"))

Signature, buffers, join, no_sync, device_mesh, state dict and isinstance are torch's, by inheritance. What torch's
class builds and calls in C++, `dist.Reducer` and `dist.Logger`, is replaced by objects with the same methods. All of
torch's private surface is touched in this file alone.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
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
from ..reducer import validation as admission
from ..reducer.modes import asynchronous as own_pace
from ..reducer.reducer import Reducer, ReducerState
from ..reducer.unused_parameters import tensors_in
from .logging_data import Logger

# What this class hands to torch's constructor or honours itself. An argument that a later torch adds is refused unless
# it has its default value: it might be read by the C++ reducer alone.
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
    """torch's DistributedDataParallel, whose gradients a `Reducer` averages: a subclass with one more argument.

    What is not listed here is torch's, by inheritance: `no_sync`, buffers, the state dict, and the rest.

    Args:
        module: the model, as torch's class takes it.
        args: torch's further arguments, in torch's order.
        reduce: how gradients travel; default: in their own dtype.
        kwargs: torch's arguments; `process_group` may be `communicator.process_group()` of a LocalGroup's rank.
            `batched_grad_copy` has no effect: copies are always fused.

    Raises:
        AgreementError: ranks were given different models or settings; on every rank. (With init_sync=False by the
            first synchronised forward.)
        TypeError: an argument of torch's that this version does not know; a parameter of DTensor or FSDP.
        ValueError: a negative bucket cap, something that excludes the sync_mode, or what torch refuses.
        RuntimeError: torch's own, and the experimental "python_reducer" mode of torch.compile.
    """

    _reduce_config: ReduceConfig
    _reduce_caps: BucketCaps
    _reduce_agreed: bool | None  # None: not compared; else whether all ranks compute alike

    def __init__(self, module: nn.Module, *args: Any, reduce: ReduceConfig | None = None, **kwargs: Any) -> None:
        self._prepare(reduce, module, *args, **kwargs)
        super().__init__(module, *args, **kwargs)

    def _prepare(self, reduce: ReduceConfig | None, *args: Any, **kwargs: Any) -> None:
        """What comes before torch's constructor, with its arguments: ranks compare model and settings."""
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
            admission.check_mode(self._reduce_config.sync_mode, _excluded(module, given, self._reduce_config))
        except ValueError as error:
            problem = error
        if given["init_sync"]:
            self._reduce_agreed = self._agree(module, given, problem)
        if problem is not None:
            raise problem

    @property
    def reduce_config(self) -> ReduceConfig:
        """How gradients travel."""
        return self._reduce_config

    @property
    def sync_mode(self) -> SyncMode:
        """Of which step the averages are that gradients hold after a backward."""
        return self._reduce_config.sync_mode

    def set_sync_mode(self, mode: SyncMode) -> None:
        """Goes on in another mode, every rank at the same place, after `flush`; see `Reducer.set_sync_mode`."""
        given = {
            "mixed_precision": self.mixed_precision,
            "delay_all_reduce_named_params": getattr(self, "_delay_all_reduce_params", None),
        }
        admission.check_mode(mode, _excluded(self.module, given, self._reduce_config))
        self._ours().set_sync_mode(mode)
        self._reduce_config = self._ours().config

    def flush(self, *optimizers: Optimizer, step: Callable[[], None] | None = None) -> FlushReport:
        """Lands every step that is under way; see `Reducer.flush`. Every rank calls it at the same place.

        Asynchronously buffers become rank 0's too, unless broadcast_buffers=False.
        """
        buffers = self.modules_buffers if self.broadcast_buffers else ()
        return self._ours().flush(*optimizers, step=step, buffers=list(buffers))

    def will_sync_module_buffers(self) -> bool:
        """Whether forward broadcasts buffers, as torch asks; not where ranks are in different steps: `flush` does."""
        late = isinstance(self._reduce_config.sync_mode, Asynchronous)
        return not late and bool(super().will_sync_module_buffers())

    def reduce_state_dict(self) -> dict[str, Any]:
        """What is under way, to keep in a checkpoint beside the model's state; see `Reducer.state_dict`."""
        return self._ours().state_dict()

    def load_reduce_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with what `reduce_state_dict` has given; see `Reducer.load_state_dict`."""
        self._ours().load_state_dict(state)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """As torch's."""
        if not isinstance(self.process_group, LocalProcessGroup):
            joined: Join = super().join(divide_by_initial_world_size, enable, throw_on_early_termination)
            return joined
        return LocalJoin(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> Any:
        """As torch's, which `join` calls too; in the synchronous mode, even where it is not enabled."""
        admission.check_mode(self.sync_mode, {"join": True})
        return super().join_hook(**kwargs)

    @property
    def _distributed_rank(self) -> int:
        return self.process_group.rank()

    def reduce_stats(self) -> dict[str, int | str]:
        """Counters of the reducer; see `Reducer.stats`."""
        return self._ours().stats()

    def plan_json(self) -> str:
        """The plan in use, to keep in a checkpoint; `ReduceConfig(plan=...)` takes it. See `Reducer.plan_json`."""
        return self._ours().plan_json()

    def record_trace(self, folder: str | Path, limit: int = 100) -> AbstractContextManager[None]:
        """Within: steps are recorded for `fusedreduce trace` and `fusedreduce plan`. See `Reducer.record_trace`."""
        return self._ours().record_trace(folder, limit)

    def reset(self) -> None:
        """Makes the wrapper usable again after a backward that failed; see `Reducer.reset`. Call it on every rank."""
        self._static_graph_delay_allreduce_enqueued = False
        self._ours().reset()

    def check_finalized(self) -> None:
        """Raises if the last backward did not reduce every gradient, with the names of those that are missing."""
        self._ours().check_finalized()

    def grad_norm(self, norm_type: float = 2.0, *, include_ignored: bool = False) -> torch.Tensor:
        """Norm over all reduced gradients: of the latest reduction with ReduceConfig(grad_stats=True), else of now.

        Nothing waits for it, and no rank for another. The same on every rank, bit for bit, where all ranks compute
        alike, or ReduceConfig(grad_stats=True) has them share the largest of their sums.

        Args:
            norm_type: 2 or inf.
            include_ignored: add those that this wrapper does not reduce, as they are on this rank.

        Returns:
            fp64, 0-dim, on the first parameter's device.

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
        """As `grad_norm`, of each reduced gradient, by the parameter's name."""
        return self._ours().observed.grad_norms(norm_type)

    def grad_stats(self, *, per_parameter: bool = True) -> dict[str, float]:
        """What to log of the latest step, as plain numbers; see `Observed.grad_stats`. The host waits for it."""
        return self._ours().observed.grad_stats(per_parameter=per_parameter)

    def non_finite(self) -> list[NonFiniteReport]:
        """The latest steps in which a gradient held a NaN or Inf, with ReduceConfig(check_finite=...)."""
        return list(self._ours().observed.finite_check().reports)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `Module.zero_grad`; with `set_to_none=False` gradients that are views stay views, zeroed per bucket."""
        if hasattr(self, "reducer") and self._ours().state is ReducerState.LAUNCHED:
            self._ours().finalize()
        if set_to_none or not hasattr(self, "reducer") or not self._ours().has_views:
            super().zero_grad(set_to_none)
            return
        reducer = self._ours()
        reducer.zero_grad()
        done = set(map(id, reducer.parameters))
        for parameter in self.parameters():  # ignored and delayed ones, those that were frozen later
            if id(parameter) not in done and parameter.grad is not None:
                parameter.grad.detach_().zero_()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """As torch's. The hook takes the place of our wire, which must be "native"."""
        self._check_comm_hook(hook)
        self._ours().register_comm_hook(state, hook)
        assert self.logger is not None
        self.logger._set_comm_hook_name(hook.__qualname__)
        self._comm_hooks.append((hook, state))

    def _register_fused_optim(self, optim: type, *args: Any, **kwargs: Any) -> None:
        admission.check_mode(self.sync_mode, {"an optimizer in backward": True})
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
        """Parameters that have a gradient, but not a reduced one, with their names.

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
                f"{', '.join(name for name, _ in found[:8])} {'has' if len(found) == 1 else 'have'} a gradient, but "
                "this wrapper does not reduce it (ignored, delayed, or frozen since): a norm over all gradients would "
                "differ between ranks. include_ignored=True adds it as it is here"
            )
        return found

    def _ours(self) -> Reducer:
        reducer: Any = self.reducer
        assert isinstance(reducer, TorchReducer)
        return reducer.reducer

    def _agree(self, module: nn.Module, given: Mapping[str, Any], problem: Exception | None) -> bool:
        """Compares model and settings across ranks before torch does: its check raises on some ranks only."""
        if _left_to_torch(module, given):
            return True
        named, sparse = _reduced(module, given), admission.sparse_parameters(module)
        communicator = communicator_of(_group(given))
        descriptions = []
        try:
            _check_reduced(named, given, self.reduce_config)
            descriptions = [admission.describe(one, name, id(one) in sparse) for name, one in named.items()]
        except (RuntimeError, TypeError, ValueError) as error:
            problem = problem or error
        flags: dict[str, object] = {name: bool(given[name]) for name in _COMPARED_FLAGS if name in given}
        settings = admission.settings(self.reduce_config, self._reduce_caps, flags)
        try:
            return admission.agree(communicator, descriptions, settings, _device(module), str(problem or ""))
        except AgreementError as error:
            if problem is not None and error.on_every_rank:
                raise problem from None
            raise

    def _use_native_wire(self) -> str:
        """Makes way for a comm hook, between two steps, on every rank; says what that drops, "" if nothing."""
        config = self._reduce_config
        native = dataclasses.replace(config, wire="native", op="mean")
        if native == config or not hasattr(self, "reducer") or self._ours().has_comm_hook:
            return ""
        admission.check_mode(config.sync_mode, {"a comm hook": True})
        reducer = self._ours()
        reducer.check_finalized()
        if reducer.state is ReducerState.ARMED:
            raise RuntimeError(
                f"a comm hook takes the place of wire={config.wire!r}, but a forward waits for its backward: register "
                "the hook first, or have a forward without backward run under torch.no_grad()"
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
            # torch notes in one place of the process, for torch.compile, whose forward runs. Threads would leave one
            # there, and have each other's split.
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
                "a DistributedDataParallel over a LocalGroup can be neither pickled nor copied, as torch's over any "
                "group but the default one; keep its state_dict(), or its module"
            )
        pending = self._ours().late.pending() if hasattr(self, "reducer") else ""
        if pending:
            warnings.warn(
                f"a wrapper is copied or pickled while {pending}: the copy has nothing of that. flush() on every rank "
                "first, or keep reduce_state_dict() beside it",
                stacklevel=3,
            )
        state: dict[str, Any] = super().__getstate__()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The ranks of the group that it is loaded into have compared nothing yet.
        state["_reduce_agreed"] = None
        # torch queues the end of a static graph's first step once in a module's life; a copy's life begins now.
        state["_static_graph_delay_allreduce_enqueued"] = False
        self.__dict__.update({name: state[name] for name in ("_reduce_config", "_reduce_caps", "_reduce_agreed")})
        super().__setstate__(state)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _post_forward(self, output: Any) -> Any:
        if hasattr(self, "reducer") and torch.is_grad_enabled():
            reducer: Any = self.reducer
            if self.require_backward_grad_sync:
                # torch hands them on for find_unused_parameters only, and looks into few kinds of containers.
                reducer.outputs = tensors_in(output)
            else:
                reducer.reducer.watch_local_forward(output)
        return super()._post_forward(output)


def uncompiled(module: object) -> object:
    """What torch.compile was given, where `module` is what it has made."""
    return getattr(module, "_orig_mod", module) if isinstance(module, nn.Module) else module


_COMPARED_FLAGS = (
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
    "skip_all_reduce_unused_params",
)


class TorchReducer:
    """torch's C++ Reducer as DDP and its companions call it, on top of a Reducer.

    Args:
        reducer: ours.
        ddp: the wrapper, held weakly.
    """

    def __init__(self, reducer: Reducer, ddp: DistributedDataParallel) -> None:
        self.reducer = reducer
        self.outputs: list[torch.Tensor] = []
        self._ddp = weakref.ref(ddp)
        self._joined = False
        self._logger: Logger | None = None

    def set_logger(self, logger: Logger) -> None:
        """Where errors are noted before they are raised."""
        self._logger = logger
        self.reducer.on_error = logger.set_error_and_log

    # A step

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def prepare_for_forward(self) -> None:
        """Before a synchronised forward."""
        with self._logged():
            self.reducer.begin_forward()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _rebuild_buckets(self) -> bool:
        # Every forward with gradients comes here, and so does a rank that has joined: the place for collectives.
        ddp = self._ddp()
        if ddp is not None and not ddp.require_backward_grad_sync:
            self.reducer.expect_local_backward()
        with self._logged():
            self.reducer.check_finalized()
            self.reducer.agree()
            return self.reducer.rebuild()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None:
        """After a synchronised forward; `outputs` is empty where nothing is to be searched."""
        found, self.outputs = self.outputs, []
        with self._logged():
            self.reducer.prepare_for_backward(found or outputs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _delay_all_reduce(self) -> None:
        self.reducer.end_first_static_step()

    def _autograd_hook(self, index: int) -> None:
        self.reducer.on_gradient(index)

    def _check_reducer_finalized(self) -> None:
        with self._logged():
            self.reducer.check_finalized()

    def get_backward_stats(self) -> list[int]:
        """See `Reducer.get_backward_stats`."""
        return self.reducer.get_backward_stats()

    def _install_post_backward_futures(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        self.reducer.wait_at_end(futures)

    # Join

    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        if not use_static_world_size:
            self.reducer.divide_by_ranks_counted(work)

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        self._joined = True
        self.reducer.rebuild()
        return self.reducer.shadows.begin()

    def _run_comm_hook(self, bucket: GradBucket) -> JoinedWork:
        return JoinedWork(self.reducer.shadows.run(bucket))

    def _push_all_rebuilt_params(self) -> None:
        self._joined = False
        self.reducer.shadows.share_used_map()
        self.reducer.shadows.end()

    def _get_local_used_map(self) -> torch.Tensor:
        return self.reducer.shadows.used_map(joined=self._joined)

    # Settings

    def _set_static_graph(self) -> None:
        with self._logged():
            self.reducer.set_static_graph()

    def _ddp_graph_static(self) -> bool:
        return self.reducer.unused_always_same

    def _set_optimizer_in_backward(self) -> None:
        self.reducer.leave_gradients_to_hook()

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype) -> None:
        """Gradients of `dtype` go into fp32 buckets; mixed precision has registered a hook that casts those."""
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
        # Its caller gives a new group next: the old one may be beyond comparing anything.
        self.reducer.give_up_step()

    def _update_process_group(self, group: dist.ProcessGroup) -> None:
        self.reducer.set_communicator(communicator_of(group))

    @contextmanager
    def _logged(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self._logger is not None:
                self._logger.set_error_and_log(str(error))
            raise


class JoinedWork:
    """What torch's join waits for, once per bucket, on a rank without inputs.

    Args:
        complete: waits for the bucket's collective.
    """

    def __init__(self, complete: Callable[[], None]) -> None:
        self._complete = complete

    def wait(self) -> None:
        """Blocks until the collective is done. Raises CollectiveError if it fails."""
        self._complete()


class LocalJoin(Join):
    """torch's, of one wrapper over a LocalGroup, whose ranks torch.distributed does not know."""

    def _extract_dist_info(self) -> None:
        (ddp,) = self._joinables
        self._process_group, self._device = ddp.join_process_group, ddp.join_device
        self._rank = self._process_group.rank()


def _first(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]


def refusal_on_any_rank(config: ReduceConfig, *args: Any, **kwargs: Any) -> str:
    """Why a wrapper would be refused here or on another rank, before it is made. A collective.

    What torch's class refuses as well, and ranks that were given different models, is for the constructor to raise.

    Args:
        config: how gradients would travel.
        args: torch's arguments.
        kwargs: torch's.

    Returns:
        The same on every rank: the reason of the first one that has one; "" where none has.

    Raises:
        CollectiveError: a peer did not answer.
    """
    given = _arguments(*args, **kwargs)
    module = given["module"]
    if _left_to_torch(module, given) or not dist.is_initialized():
        return ""
    communicator, device = communicator_of(_group(given)), _device(module)
    named, sparse = _reduced(module, given), admission.sparse_parameters(module)
    problem = ""
    try:
        # First, and on every rank: of a backend that is not known this takes a collective for each dtype.
        dense = (one.dtype for one in named.values() if id(one) not in sparse)
        for dtype in sorted({config.wire_dtype(real_dtype(one)) for one in dense}, key=str):
            communicator.check_wire(dtype, device)
        _check_known(given)
        _caps(given)
        admission.check_mode(config.sync_mode, _excluded(module, given, config))
        _check_reduced(named, given, config)
        own_pace.check(config, list(named), [id(one) in sparse for one in named.values()])
    except CollectiveError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        problem = str(error)
    return problems_of_ranks(communicator, problem, device)


def _arguments(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """torch's arguments by name, defaults filled in."""
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
                "not know; leave it at its default, or update fusedreduce"
            )


def _left_to_torch(module: nn.Module, given: Mapping[str, Any]) -> bool:
    """Whether there is nothing to compare: torch refuses the mesh, on every rank, or reduces all parameters itself."""
    mesh = given["device_mesh"]
    refused = mesh is not None and (given["process_group"] is not None or mesh.ndim != 1)
    return refused or bool(given.get("delay_all_reduce_named_params") and not _reduced(module, given))


def _group(given: Mapping[str, Any]) -> Any:
    mesh = given["device_mesh"]
    return given["process_group"] if mesh is None else mesh.get_group(mesh_dim=0)


def _device(module: nn.Module) -> torch.device:
    return next((one.device for one in module.parameters()), torch.device("cpu"))


def _reduced(module: nn.Module, given: Mapping[str, Any]) -> dict[str, nn.Parameter]:
    """The parameters that our reducer would get, by name."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    ignored |= {name for name, _ in given["delay_all_reduce_named_params"] or ()}
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }


def _check_reduced(named: Mapping[str, torch.Tensor], given: Mapping[str, Any], config: ReduceConfig) -> None:
    """What the reducer would refuse of its parameters, and of the plan that was given for them."""
    if not _is_sliced(given["device_mesh"]):  # torch makes plain tensors of a sliced mesh's DTensors
        _check_trainable(named)
    if config.plan is not None:
        load_plan(config.plan, names=list(named), numels=[one.numel() for one in named.values()])


def _caps(given: Mapping[str, Any]) -> BucketCaps:
    """As torch reads bucket_cap_mb and bucket_cap_mb_list: a cap of one's own leaves no small first bucket."""
    # A cap of less than a byte is a bucket for each parameter.
    listed = tuple(int(cap * MIB) or 1 for cap in given.get("bucket_cap_mb_list") or ())
    own = given["bucket_cap_mb"]
    if own is not None:
        cap_bytes = int(own * MIB) or 1
        return BucketCaps(first_bytes=cap_bytes, cap_bytes=cap_bytes, listed_bytes=listed)
    if listed:
        return BucketCaps(first_bytes=max(listed), cap_bytes=max(listed), listed_bytes=listed)
    return BucketCaps()


def _excluded(module: nn.Module, given: Mapping[str, Any], config: ReduceConfig) -> dict[str, bool]:
    """What a mode whose averages come later excludes, and whether this wrapper has it."""
    names = ("skip_all_reduce_unused_params", "mixed_precision", "delay_all_reduce_named_params")
    return {
        "gradient_as_bucket_view": config.has_views(bool(given.get("gradient_as_bucket_view"))),
        **{name: bool(given.get(name)) for name in names},
        "an optimizer in backward": any(hasattr(one, "_in_backward_optimizers") for one in module.parameters()),
    }


def _is_sliced(mesh: Any) -> bool:
    return mesh is not None and mesh._get_root_mesh() != mesh


def _check_trainable(named: Mapping[str, torch.Tensor]) -> None:
    """What torch's constructor and the reducer would refuse, in their words."""
    if not named:
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    for name, parameter in named.items():
        admission.check_one(parameter, name)
