"""HSDP on our wires: gradient shards of FSDP2's modules (`fully_shard`), averaged across replicas.

    backward of a module ends   torch copies its gradients into one flat tensor, and reduce-scatters that within a node
    `ReplicaGroup`              reduces this rank's flat shard across the replicas, in place: pack, exchange, unpack
    then                        torch divides where it has to, and views the shard as the parameters' `.grad`

torch takes a `ReplicaGroup` for the process group of the replicas, and its all-reduce is ours. torch calls it on the
stream that it has for all-reduces. A call is a whole reduction, which that stream is behind when it returns; on CUDA
the host waits for nothing.

The flat shard holds, one after the other, the padded shards of the parameters that have got a gradient in this
backward; which ones these are is not told. If it is as long as those of all that require a gradient, each of them has
blocks of its own on an encoded wire, and those of fewer than two dimensions travel in their own dtype. A shard of
another length travels as bf16 with sums of fp32.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..buckets import data_path
from ..buckets.bucket import Bucket
from ..buckets.phases import Phases
from ..buckets.streams import refuse_capture
from ..buckets.wire_table import WireTable
from ..comm.agreement import agree, agree_on_parameters, problems_of_ranks
from ..comm.group import Group
from ..comm.process_group import ProcessGroupCommunicator
from ..comm.waiting import wait_for
from ..config import Accumulation, Op, ReduceConfig, Wire
from ..errors import AgreementError, FusedReduceError, shortened
from ..kernels import encoded
from ..wires import described, encoding_of
from .hook_buckets import make_bucket

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_logger = logging.getLogger(__name__)
# Of torch's FSDPParamGroup, of which torch documents nothing.
_USED = ("fsdp_params", "mesh_info", "post_forward_mesh_info", "mp_policy", "device")
_MOST_BUCKETS = 8  # of a module: lengths without a layout may be many
_COUNTS = ("calls", "calls_without_layout", "collectives", "wire_bytes")


class FSDPComms:
    """What `set_fsdp_comms` has set.

    Args:
        groups: one per module that `fully_shard` was called on.
    """

    def __init__(self, groups: list[ReplicaGroup]) -> None:
        self._groups = groups

    def stats(self) -> dict[str, int]:
        """Counters on this rank, of all modules since `set_fsdp_comms`.

        Returns:
            calls (reductions across replicas), calls_without_layout (those of shards in which not every parameter that
            requires a gradient has one: on an encoded wire they travel as bf16), collectives, and wire_bytes (payload
            of this rank).
        """
        return {name: sum(group.counts[name] for group in self._groups) for name in _COUNTS}


def set_fsdp_comms(
    model: nn.Module,
    *,
    all_reduce: Wire,
    accumulation: Accumulation = "wire",
    replicate_mesh: DeviceMesh | None = None,
) -> FSDPComms:
    """Has FSDP2 reduce gradients across replicas (HSDP) on a wire of ours. Every rank calls it, after `fully_shard`.

    The modules of `model` on which `fully_shard` was called are sharded over a mesh of two dimensions (replicate,
    shard), or over the shard dimension alone with `replicate_mesh` given. Gradients are divided as torch's HSDP divides
    them: by all ranks, or by what `set_gradient_divide_factor` was given. `set_requires_all_reduce(False)` accumulates
    shards on each replica, as with it.

    Args:
        model: sharded, the whole of it. Called again, for the model or a part of it, also between steps, the last call
            counts.
        all_reduce: what contributions of replicas travel as, "native" or a wire; see `ReduceConfig`. It is one for all
            parameters; those of fewer than two dimensions are not encoded.
        accumulation: "fp32": 16-bit wires are added up in fp32, on three or more replicas.
        replicate_mesh: of one dimension, the ranks that hold the same shards. None: it is the replicate dimension of
            the mesh that the modules were sharded over.

    Returns:
        What counts calls and bytes.

    Raises:
        ValueError: nothing in `model` is sharded by `fully_shard`; it has no replicas, or both its own and
            `replicate_mesh`; parameters of one module are sharded over different meshes; or an option is not accepted.
        FusedReduceError: this version of torch has other internals, or the devices cannot encode.
        AgreementError: replicas have other settings or another model, on every rank.
    """
    config = ReduceConfig(wire=all_reduce, accumulation=accumulation)
    config.check_beside("set_fsdp_comms")
    if replicate_mesh is not None and getattr(replicate_mesh, "ndim", None) != 1:
        raise ValueError(
            "replicate_mesh must be a DeviceMesh of one dimension, the ranks that hold the same shards, got "
            f'{replicate_mesh}. Write replicate_mesh=mesh["replicate"]'
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    sharded = list(_sharded_modules(model))
    if not sharded:
        raise ValueError(
            f"no module of this {type(model).__name__} was sharded by torch.distributed.fsdp.fully_shard. Call "
            "fully_shard on it first (FSDP1 is not served); for a model that every rank holds whole, use "
            "fusedreduce.DistributedDataParallel"
        )
    held = [one for of in sharded for one in of.group.fsdp_params]
    known = {id(getattr(one, name, None)) for one in held for name in ("sharded_param", "_unsharded_param")}
    if others := [name for name, one in model.named_parameters() if one.requires_grad and id(one) not in known]:
        _logger.warning(
            "no fully_shard has sharded %s, which no wire reaches. If it is still to be called on a module that holds "
            "them, as the whole model, call set_fsdp_comms after that",
            shortened(others, 8),
        )
    by_group: dict[dist.ProcessGroup, list[_Sharded]] = {}
    for one in sharded:
        if (group := _replicas_of(one, replicate_mesh)) is not None:
            by_group.setdefault(group, []).append(one)
    if not by_group:
        raise ValueError(
            "the model was sharded over a mesh of one dimension, so that no rank holds the same shard as another. "
            'Shard it over a mesh ("replicate", "shard"), or give replicate_mesh=mesh["replicate"]'
        )
    agreed = [(_Replicas(group, config, members, names), members) for group, members in by_group.items()]
    made = []
    for replicas, members in agreed:
        for one in members:
            label = f"the shard of {one.name or 'the root module'} (rank {dist.get_rank()} of the job)"
            made.append(ReplicaGroup(one.group, replicas, label))
            _set_replicas(one.group, made[-1])
    return FSDPComms(made)


class _Sharded(NamedTuple):
    """A module that `fully_shard` was called on, or the first of several that share a group of parameters."""

    name: str
    group: Any  # torch's FSDPParamGroup


def _sharded_modules(model: nn.Module) -> Iterator[_Sharded]:
    """The modules of `model` with parameters to shard, in its order.

    Raises:
        ValueError: one has several groups of parameters.
        FusedReduceError: torch's internals are other ones.
    """
    seen = set()
    for name, module in model.named_modules():
        state_of = getattr(module, "_get_fsdp_state", None)
        if state_of is None or id(state := state_of()) in seen:
            continue
        seen.add(id(state))
        single = getattr(state, "_fsdp_param_group", None)  # before torch 2.12
        groups = getattr(state, "_fsdp_param_groups", [single] if single is not None else [])
        if len(groups) > 1:
            raise ValueError(
                f"{name or 'the root module'}: its parameters are sharded over {len(groups)} meshes, which is "
                "not served. Call fully_shard on a module of its own for the parameters of each mesh"
            )
        for group in groups:
            if missing := [field for field in _USED if not hasattr(group, field)]:
                raise FusedReduceError(
                    f"torch {torch.__version__} has other internals of fully_shard (no {', '.join(missing)}): "
                    "set_fsdp_comms was tried with torch 2.11 and 2.13"
                )
            yield _Sharded(name, group)


def _replicas_of(sharded: _Sharded, replicate_mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """The ranks that hold the same shard of a module; None: there are none, as of experts that all ranks share.

    Raises:
        ValueError: the module is not sharded, or has replicas or a hook of its own beside `replicate_mesh`.
    """
    info, name = sharded.group.mesh_info, sharded.name or "the root module"
    if info.shard_mesh_dim is None:
        raise ValueError(f"{name} is replicated and not sharded: use fusedreduce.DistributedDataParallel for it")
    if replicate_mesh is not None and sharded.group._all_reduce_hook is not None:
        raise ValueError(
            f"{name} has an all-reduce hook, and replicas would be reduced twice: leave set_all_reduce_hook out"
        )
    if replicate_mesh is None:
        return None if info.replicate_mesh_dim is None else info.mesh.get_group(info.replicate_mesh_dim)
    if info.replicate_mesh_dim is not None:
        raise ValueError(
            f"{name} was sharded over a mesh that has replicas, {tuple(info.mesh.shape)}: leave out replicate_mesh"
        )
    return replicate_mesh.get_group()


def _set_replicas(group: Any, replicas: ReplicaGroup) -> None:
    """Has torch find its replicas there; the parameters, and the mesh, keep what they know."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo  # who has no FSDP need not import it

    info = copy.copy(group.mesh_info)
    info.__class__ = HSDPMeshInfo  # of a mesh of one dimension it is another one
    info.replicate_process_group = replicas
    if group.post_forward_mesh_info == group.mesh_info:  # else torch would gather from another mesh after a forward
        group.post_forward_mesh_info = info
    group.mesh_info = info


class _Replicas:
    """What the groups share that have the same replicas.

    Args:
        process_group: the replicas.
        config: the wire, for a mean.
        sharded: the modules.
        names: of parameters, by id.

    Raises:
        AgreementError: see `set_fsdp_comms`.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, config: ReduceConfig, sharded: list[_Sharded], names: dict[int, str]
    ) -> None:
        self.communicator = ProcessGroupCommunicator(process_group)
        self.configs: dict[Op, ReduceConfig] = {"mean": config, "sum": replace(config, op="sum")}
        bf16 = replace(config, wire="bf16", accumulation="fp32")
        self.without_layout: dict[Op, ReduceConfig] = {"mean": bf16, "sum": replace(bf16, op="sum")}
        device, infos = sharded[0].group.device, [one.group.mesh_info for one in sharded]
        encodes = encoding_of(config.one_wire) is not None
        why = encoded.refusal(device) if encodes else ""
        descriptions = [
            f"{names.get(id(one.sharded_param), f'a parameter of {of.name}')}: {_shard_numel(one)} elements a rank of "
            f"{one.sharded_param.dtype}, {'trained' if one.sharded_param.requires_grad else 'frozen'}"
            for of in sharded
            for one in of.group.fsdp_params
        ]
        shards_held = sorted({f"{one.shard_mesh_rank} of {one.shard_mesh_size}" for one in infos})
        settings = {
            "all_reduce": described(config.one_wire),
            "accumulation": config.accumulation,
            "shard": ", ".join(shards_held),  # others may be as long
            "reduce_dtype": ", ".join(sorted({str(one.group.mp_policy.reduce_dtype) for one in sharded})),
        }
        problem = why and f"{device} cannot encode gradients: {why}"
        try:
            agree_on_parameters(self.communicator, descriptions, settings, device, problem)
        except AgreementError as error:
            ranks = ", ".join(map(str, dist.get_process_group_ranks(process_group)))
            problem = f"among the replicas {ranks}, here numbered from 0: {error}"
        # Ranks with other shards, whose replicas may agree, would wait for these in the next forward.
        shards = ProcessGroupCommunicator(infos[0].shard_process_group)
        if problem := problems_of_ranks(shards, problem, device):
            raise AgreementError(problem)
        agree(shards, "settings of set_fsdp_comms", {**settings, "shard": ""}, device)
        self.told_of_layout = False
        self.phases = Phases(Group(self.communicator), device)
        wires = WireTable((config.one_wire, "bf16"), "fp32" if encodes else config.accumulation)
        if wires.has_two_phases(self.communicator.size):
            self.phases.open(wires, None)


class ReplicaGroup(dist.ProcessGroup):
    """The replicas of one module's shard, as torch finds them: their all-reduce is ours.

    It equals their process group, as which torch.distributed looks it up where an all-reduce raises.

    Args:
        group: torch's FSDPParamGroup.
        replicas: the ranks, and the wire.
        label: names the shard in errors.

    Attributes:
        counts: see `FSDPComms.stats`.
    """

    def __init__(self, group: Any, replicas: _Replicas, label: str) -> None:
        super().__init__(replicas.communicator.rank, replicas.communicator.size)  # type: ignore[call-arg]
        self._group = group
        self.replicas = replicas
        self._label = label
        self._buckets: dict[tuple[object, ...], Bucket] = {}
        self.counts = dict.fromkeys(_COUNTS, 0)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.replicas.communicator.group

    def __hash__(self) -> int:
        return hash(self.replicas.communicator.group)

    def allreduce(self, tensors: Any, opts: Any = None) -> None:  # type: ignore[override]
        """Reduces a shard over the replicas, by an average or a sum, as torch asks for it.

        Args:
            tensors: what the reduce-scatter has left on this rank, [elements of a shard].
            opts: the op.

        Raises:
            CollectiveError: a replica died, left, or did not answer in time.
            FusedReduceError: that has happened before; or a CUDA graph is being captured.
        """
        flat = tensors[0].view(-1)  # torch gives complex ones as pairs
        communicator = self.replicas.communicator
        if communicator.lost:
            raise FusedReduceError(
                f"rank {communicator.rank}: an earlier reduction across replicas failed, and this rank may be out of "
                f"step with its peers. Start all ranks anew from a checkpoint. The failure: {communicator.lost}"
            )
        if communicator.size == 1:
            return
        if flat.is_cuda:
            refuse_capture(communicator.rank)
        op: Op = "mean" if opts.reduceOp == dist.ReduceOp.AVG else "sum"
        self.counts["calls"] += 1
        bucket, numels = self._bucket(flat, op)
        if bucket is None:
            pending = communicator.all_reduce(flat, "avg" if op == "mean" else "sum")
            wait_for(pending, f"the all-reduce of {self._label}", communicator)
            self.counts["collectives"] += 1
            self.counts["wire_bytes"] += flat.nbytes
            return
        divisor = (communicator.size if op == "mean" else 1) / bucket.sent_split
        in_flight = data_path.start(bucket, flat.split(numels), communicator, divisor=divisor)
        self.replicas.phases.issue_all()
        wait_for(in_flight.pending, bucket.collective_text(), communicator)
        data_path.finish(in_flight)
        bucket.release()
        self.counts["collectives"] += bucket.collectives
        self.counts["wire_bytes"] += bucket.wire_bytes

    def _bucket(self, flat: torch.Tensor, op: Op) -> tuple[Bucket | None, list[int]]:
        """What packs a shard, and the elements of its slots; None: it travels as it is."""
        replicas, config = self.replicas, self.replicas.configs[op]
        encoding = encoding_of(config.one_wire)
        numels, is_encoded = [flat.numel()], [False]
        if encoding is not None:
            trained = [one for one in self._group.fsdp_params if one.sharded_param.requires_grad]
            shards = [_shard_numel(one) for one in trained]
            if sum(shards) == flat.numel():
                dims = [one.sharded_param.ndim for one in trained]
                numels = shards
                is_encoded = [n >= encoding.block_numel and ndim > 1 for n, ndim in zip(numels, dims, strict=True)]
            else:
                self._note_without_layout(flat.numel(), sum(shards))
                config = replicas.without_layout[op]
        accumulates = config.accumulation == "fp32" and replicas.communicator.size > 2
        if not any(is_encoded) and not accumulates and config.wire_dtype(flat.dtype) is flat.dtype:
            return None, numels
        key = (config.one_wire, op, flat.dtype, *numels, *is_encoded)
        bucket = self._buckets.pop(key, None)
        if bucket is None:
            ranks, phases = replicas.communicator.size, replicas.phases
            bucket = make_bucket(flat, numels, is_encoded, config, ranks, self._label, phases, lazy=True)
        self._buckets[key] = bucket  # the latest comes last
        if len(self._buckets) > _MOST_BUCKETS:
            del self._buckets[next(iter(self._buckets))]
        return bucket, numels

    def _note_without_layout(self, numel: int, expected: int) -> None:
        if not self.replicas.told_of_layout:
            self.replicas.told_of_layout = True
            _logger.warning(
                "%s has %d elements where those of all its parameters that require a gradient are %d: some have got "
                "none in this backward. Such shards travel as bf16, and FSDPComms.stats() counts them. Freeze what is "
                "not used, or call set_reduce_scatter_unused_params(True) on the module (torch 2.13)",
                self._label,
                numel,
                expected,
            )
        self.counts["calls_without_layout"] += 1


def _shard_numel(parameter: Any) -> int:
    """The elements of a parameter in the flat shard, padding included; of torch's FSDPParam."""
    numel: int = parameter.padded_sharded_param_size.numel()
    return numel
