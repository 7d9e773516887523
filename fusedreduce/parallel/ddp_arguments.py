"""The arguments of torch's constructor: what of them our wrapper refuses, reads, and compares across ranks.

All of it happens before torch's constructor sees them, whose own checks raise on some ranks only.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Collection, Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ..buckets.tensors import real_dtype
from ..buckets.wire_table import WireTable
from ..comm.agreement import problems_of_ranks
from ..comm.init_process_group import warn_of_switches
from ..comm.local.process_group import communicator_of
from ..comm.protocol import Communicator
from ..config import Feature, ReduceConfig, checked, unexpected_options
from ..errors import AgreementError, CollectiveError
from ..planning.bucketing import DEFAULT_CAP_BYTES, MIB, BucketCaps
from ..planning.plan_file import load as load_plan
from ..reducer import validation
from ..wires import wire_dtype

# Arguments that our class honours. One that a later torch adds is refused unless it has its default value: torch might
# read it in the C++ reducer alone.
KNOWN_ARGUMENTS = frozenset(
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
        "lazy_bucket_allocation",
    }
)
_LISTED = "bucket_cap_mb_list=[1, 25]"
_CLASS = "DistributedDataParallel"
TORCH_SIGNATURE = inspect.signature(TorchDDP.__init__)
_COMPARED_FLAGS = (
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
    "skip_all_reduce_unused_params",
)


_PYTHON_REDUCER = (
    'torch._dynamo.config.optimize_ddp="python_reducer" replaces the reducer by traced code; use "ddp_optimizer" (the '
    'default) or "no_optimization" with fusedreduce'
)


def signature_with_reduce() -> inspect.Signature:
    """The signature of torch's constructor, with one argument more."""
    added = inspect.Parameter("reduce", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ReduceConfig | None)
    every = sorted([*TORCH_SIGNATURE.parameters.values(), added], key=lambda parameter: parameter.kind)
    return TORCH_SIGNATURE.replace(parameters=every, return_annotation=None)


@dataclass(frozen=True)
class Settings:
    """What a wrapper's reducer is built from, beside torch's own arguments.

    Args:
        config: how gradients are reduced.
        caps: limits of the buckets.
        agreed: None: the ranks have not compared model and settings yet. Else whether sums are bitwise reproducible on
            all of them.
    """

    config: ReduceConfig
    caps: BucketCaps
    agreed: bool | None = None


class Arguments:
    """Arguments of torch's constructor by name, with defaults filled in.

    Args:
        args: positional ones.
        kwargs: keyword ones.

    Raises:
        TypeError: arguments that the constructor does not take, or takes for something else.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            bound = TORCH_SIGNATURE.bind(None, *args, **kwargs)
        except TypeError as error:
            unknown = {name: value for name, value in kwargs.items() if name not in TORCH_SIGNATURE.parameters}
            raise TypeError(f"{_CLASS}.__init__() {error}{unexpected_options(unknown)}") from None
        bound.apply_defaults()
        self._given: Mapping[str, Any] = {name: one for name, one in bound.arguments.items() if name != "self"}
        self.module: nn.Module = self._given["module"]
        for name, value in self._given.items():
            if isinstance(value, ReduceConfig):
                raise TypeError(
                    f"{name} is an argument of torch's {_CLASS}, got {value!r}, which has a name of its own: write "
                    f"fusedreduce.{_CLASS}(module, reduce={value!r})"
                )
        if not isinstance(self.module, nn.Module):
            raise TypeError(f"{_CLASS} takes an nn.Module, got {type(self.module).__name__}: give the model itself")
        devices = self._given["device_ids"]
        if devices is not None and not isinstance(devices, Sized):
            raise TypeError(f"device_ids must be a list of one device or None, got {devices!r}: write [{devices!r}]")

    def settle(self, reduce: ReduceConfig | None) -> Settings:
        """Checks the arguments, and compares them across ranks, before torch's constructor sees them. A collective.

        Args:
            reduce: how gradients are reduced; None: ReduceConfig().

        Returns:
            What the reducer is built from.

        Raises:
            AgreementError, RuntimeError, TypeError, ValueError: see `DistributedDataParallel`.
        """
        config = checked(reduce, "reduce")
        self.check_known()
        warn_of_switches()
        if not self._is_left_to_torch():
            self._communicator()  # with no process group it raises, and says more than torch's constructor would
        caps, agreed, problem = BucketCaps(), None, None
        try:
            caps = self.caps()
            config.check_beside(*features_in_use(self.module, self._given, config))
        except (TypeError, ValueError) as error:
            problem = error
        if self._given["init_sync"]:
            agreed = self.agree(config, caps, problem)
        if problem is not None:
            raise problem
        return Settings(config, caps, agreed)

    def check_known(self) -> None:
        """Refuses arguments and settings that cannot be honoured.

        Raises:
            TypeError: an argument that this version does not know.
            RuntimeError: the "python_reducer" mode of torch.compile.
        """
        if torch._dynamo.utils.get_optimize_ddp_mode() == "python_reducer":
            raise RuntimeError(_PYTHON_REDUCER)
        for name, value in self._given.items():
            default = TORCH_SIGNATURE.parameters[name].default
            if name not in KNOWN_ARGUMENTS and value != default:
                raise TypeError(
                    f"{name}={value!r} is an argument of torch {torch.__version__} that this version of fusedreduce "
                    "does not know: leave it at its default, or update fusedreduce"
                )

    def caps(self) -> BucketCaps:
        """Reads bucket_cap_mb and bucket_cap_mb_list as torch does: a cap given applies to the first bucket too.

        Raises:
            TypeError: a cap that is no number.
            ValueError: a negative cap, or one that is not finite.
        """
        several = self._given.get("bucket_cap_mb_list") or ()
        if isinstance(several, str) or not isinstance(several, Iterable):
            raise TypeError(f"bucket_cap_mb_list must be a list or None, got {several!r}: write {_LISTED}")
        listed = tuple(_cap_bytes("each of bucket_cap_mb_list", cap, _LISTED) for cap in several)
        own = self._given["bucket_cap_mb"]
        if own is not None:
            cap_bytes = _cap_bytes("bucket_cap_mb", own, "bucket_cap_mb=25")
            return BucketCaps(first_bytes=cap_bytes, cap_bytes=cap_bytes, listed_bytes=listed)
        if listed:
            return BucketCaps(first_bytes=max(listed), cap_bytes=max(listed), listed_bytes=listed)
        return BucketCaps()

    def agree(self, config: ReduceConfig, caps: BucketCaps, problem: Exception | None) -> bool:
        """Compares model and settings across ranks. A collective.

        Args:
            config: how gradients are reduced.
            caps: what `caps` returned.
            problem: what this rank has to raise; the others are told.

        Returns:
            Whether sums are bitwise reproducible on all ranks.

        Raises:
            AgreementError: ranks differ, or another one has a problem; on every rank.
            Exception: `problem`, or what the reducer would raise about its parameters.
        """
        if self._is_left_to_torch():
            return True
        named, sparse = self._reduced(), validation.sparse_parameters(self.module)
        communicator = self._communicator()
        descriptions, wires = [], dict[str, str]()
        try:
            self._check_reduced(named, config)
            descriptions = [validation.describe(one, name, id(one) in sparse) for name, one in named.items()]
            tables = _tables(config, named, sparse)
            wires = dict(zip(named, tables[0].wires, strict=True))
            for table in tables:
                validation.check_encoding(named.values(), table.wires)
        except (RuntimeError, TypeError, ValueError) as error:
            problem = problem or error
        flags: dict[str, object] = {name: bool(self._given[name]) for name in _COMPARED_FLAGS if name in self._given}
        settings = validation.settings(config, caps, flags)
        try:
            told = str(problem or "")
            return validation.agree(communicator, descriptions, settings, self._device(), told, wires)
        except AgreementError as error:
            if problem is not None and error.on_every_rank:
                raise problem from None
            raise

    def refusal_on_any_rank(self, config: ReduceConfig) -> str:
        """Why a wrapper with these arguments would be refused on some rank; found before it is made. A collective.

        Errors that torch's class raises as well, and different models on different ranks, are left to the constructor.

        Args:
            config: how gradients would be reduced.

        Returns:
            The reason of the first rank that refuses, the same on every rank; "" if none does.

        Raises:
            CollectiveError: a peer did not answer.
        """
        if self._is_left_to_torch() or not dist.is_initialized():
            return ""
        communicator, device = self._communicator(), self._device()
        named, sparse = self._reduced(), validation.sparse_parameters(self.module)
        problem = ""
        try:
            tables = _tables(config, named, sparse)
            # First, and on every rank: with an unknown backend this issues a collective per dtype.
            dense = [
                (one, wire)
                for table in tables
                for one, wire in zip(named.values(), table.wires, strict=True)
                if id(one) not in sparse
            ]
            for dtype in sorted({wire_dtype(wire) or real_dtype(one.dtype) for one, wire in dense}, key=str):
                communicator.check_wire(dtype, device)
            self.check_known()
            self.caps()
            self._check_reduced(named, config)
            for table in tables:
                validation.check_encoding(named.values(), table.wires)
            config.check_beside(
                *features_in_use(self.module, self._given, config),
                wires=tables[0].wires,
                sparse=[name for name, one in named.items() if id(one) in sparse],
            )
        except CollectiveError:
            raise
        except (RuntimeError, TypeError, ValueError) as error:
            problem = str(error)
        with validation.comparing(communicator):
            return problems_of_ranks(communicator, problem, device)

    def _is_left_to_torch(self) -> bool:
        """Whether there is nothing to compare: torch refuses the mesh on every rank, or reduces all parameters."""
        mesh = self._given["device_mesh"]
        refused = mesh is not None and (self._given["process_group"] is not None or mesh.ndim != 1)
        return refused or bool(self._given.get("delay_all_reduce_named_params") and not self._reduced())

    def _communicator(self) -> Communicator:
        mesh = self._given["device_mesh"]
        return communicator_of(self._given["process_group"] if mesh is None else mesh.get_group(mesh_dim=0))

    def _device(self) -> torch.device:
        return next((one.device for one in self.module.parameters()), torch.device("cpu"))

    def _reduced(self) -> dict[str, nn.Parameter]:
        """The parameters that the reducer is to reduce, by name."""
        ignored = set(getattr(self.module, "_ddp_params_and_buffers_to_ignore", ()))
        ignored |= {name for name, _ in self._given["delay_all_reduce_named_params"] or ()}
        found: dict[int, tuple[str, nn.Parameter]] = {}
        # As torch's class does, whose name for a shared parameter is the last of its names.
        for prefix, module in self.module.named_modules():
            for name, parameter in module.named_parameters(prefix, recurse=False):
                if parameter.requires_grad and name not in ignored:
                    found[id(parameter)] = name, parameter
        return dict(found.values())

    def _check_reduced(self, named: Mapping[str, torch.Tensor], config: ReduceConfig) -> None:
        """Raises what torch and the reducer would raise about the parameters, and about a plan given for them."""
        mesh = self._given["device_mesh"]
        if mesh is None or mesh._get_root_mesh() == mesh:  # torch turns a sliced mesh's DTensors into plain tensors
            if not named:
                raise RuntimeError(
                    "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a "
                    "gradient."
                )
            for name, parameter in named.items():
                validation.check_one(parameter, name)
        if config.plan_text is not None:
            load_plan(config.plan_text, names=list(named), numels=[one.numel() for one in named.values()])


def _cap_bytes(name: str, cap_mb: object, example: str) -> int:
    """A limit as torch reads it: less than a byte means one bucket per parameter."""
    if not isinstance(cap_mb, numbers.Real):
        raise TypeError(f"{name} must be a number of MiB, got {cap_mb!r}, a {type(cap_mb).__name__}: write {example}")
    cap_bytes = float(cap_mb) * MIB
    if not (math.isfinite(cap_bytes) and cap_bytes >= 0):
        raise ValueError(f"{name} must be a number of MiB, 0 or more, got {cap_mb!r}: write {example}")
    return int(cap_bytes) or 1


def _tables(config: ReduceConfig, named: Mapping[str, torch.Tensor], sparse: Collection[int]) -> list[WireTable]:
    """Resolves the wires of parameters by name; `sparse` has the ids of those with sparse gradients."""
    alone = [id(one) in sparse for one in named.values()]
    return list(WireTable.of_each(config, list(named), list(named.values()), alone).values())


def check_state(ddp: TorchDDP, config: ReduceConfig) -> None:
    """Refuses what is refused when a wrapper is made, of one that has its attributes: an unpickled one too.

    Raises:
        RuntimeError: see `Arguments.check_known`.
        ValueError: see `ReduceConfig.check_beside`.
    """
    if ddp._use_python_reducer:
        raise RuntimeError(_PYTHON_REDUCER)
    config.check_beside(*features_of(ddp, config))


def features_of(ddp: TorchDDP, config: ReduceConfig) -> list[Feature]:
    """Those of `features_in_use` of a wrapper that has its attributes."""
    delayed = {"delay_all_reduce_named_params": vars(ddp).get("_delay_all_reduce_params")}
    return features_in_use(ddp.module, {**vars(ddp), **delayed}, config)


def caps_of(state: Mapping[str, Any]) -> BucketCaps:
    """The limits of the buckets, as a wrapper's attributes say them; see `Arguments.caps`."""
    cap_bytes = state["bucket_bytes_cap"] or 1
    if state["bucket_bytes_cap_default"] and cap_bytes == DEFAULT_CAP_BYTES:
        return BucketCaps()
    listed = tuple(one or 1 for one in state.get("bucket_bytes_cap_list") or ())
    return BucketCaps(first_bytes=cap_bytes, cap_bytes=cap_bytes, listed_bytes=listed)


def features_in_use(module: nn.Module, given: Mapping[str, Any], config: ReduceConfig) -> list[Feature]:
    """The features of a wrapper that may be excluded by others.

    Args:
        module: the model.
        given: arguments of torch's constructor, or some of them.
        config: how gradients are reduced.
    """
    used: dict[Feature, object] = {
        "gradient_as_bucket_view": config.has_views(bool(given.get("gradient_as_bucket_view"))),
        "skip_unused_buckets or skip_all_reduce_unused_params": given.get("skip_all_reduce_unused_params"),
        "mixed_precision": given.get("mixed_precision"),
        "delay_all_reduce_named_params": given.get("delay_all_reduce_named_params"),
        "an optimizer in backward": any(hasattr(one, "_in_backward_optimizers") for one in module.parameters()),
    }
    return [name for name, value in used.items() if value]
