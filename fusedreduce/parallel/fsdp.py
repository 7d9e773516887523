"""FSDP2 on our wires: the gradients of modules that `fully_shard` was called on, within a node and across replicas.

`set_fsdp_comms` finds these modules, compares them and their settings across ranks, and gives torch what reduces them:
`ReduceScatter` and `ReplicaGroup` (see fsdp_shards.py). All around these two stays torch's.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..comm.agreement import CAPACITY_BYTES, agree_on_parameters
from ..comm.nodes import launched_per_node
from ..comm.process_group import ProcessGroupCommunicator
from ..comm.waiting import naming_failure
from ..config import Accumulation, ReduceConfig, Wire
from ..errors import AgreementError, FusedReduceError, shortened
from ..kernels import encoded
from ..wires import NATIVE, any_encoded, described
from .fsdp_shards import COUNTS, FlatShard, ReduceScatter, ReplicaGroup, Replicas, shard_numel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_logger = logging.getLogger(__name__)
_COMPARING = "comparing models and settings in set_fsdp_comms, which some rank has not called or with other meshes,"
# Of torch's FSDPParamGroup, of which torch documents nothing.
_USED = ("fsdp_params", "mesh_info", "post_forward_mesh_info", "device", "_reduce_scatter_comm")


class FSDPComms:
    """What `set_fsdp_comms` has set.

    Args:
        shards: by reduction, those of every module.
    """

    def __init__(self, shards: dict[str, list[FlatShard]]) -> None:
        self._shards = shards

    def stats(self) -> dict[str, dict[str, Any]]:
        """Counters on this rank, of all modules since `set_fsdp_comms`.

        Returns:
            By what was set, "all_reduce" and "reduce_scatter": wire; calls; calls_without_layout (those of shards in
            which not every parameter that requires a gradient has one: on an encoded wire they travel as bf16);
            collectives; and wire_bytes (this rank's input of the collectives. Of W ranks' reduce-scatter a W-th of it
            stays here). A "native" reduce-scatter is torch's own, and not counted.
        """
        return {
            name: {
                "wire": shards[0].wire,
                **{count: sum(one.counts[count] for one in shards) for count in COUNTS},
            }
            for name, shards in self._shards.items()
        }


def set_fsdp_comms(
    model: nn.Module,
    *,
    all_reduce: Wire | None = None,
    reduce_scatter: Wire | None = None,
    accumulation: Accumulation = "wire",
    replicate_mesh: DeviceMesh | None = None,
) -> FSDPComms:
    """Has FSDP2 reduce gradients on wires of ours. Every rank calls it, after `fully_shard`.

    Gradients are divided as torch divides them: by all ranks, or by what `set_gradient_divide_factor` was given.
    Called again, for the model or a part of it, also between steps, the last call counts.

    Args:
        model: sharded, the whole of it.
        all_reduce: what contributions of replicas travel as (HSDP), "native" or a wire; see `ReduceConfig`. The modules
            are sharded over a mesh of two dimensions (replicate, shard), or over the shard dimension alone with
            `replicate_mesh` given. None: it stays as it is.
        reduce_scatter: what contributions to the ranks' shards travel as; they are added up in fp32. Each rank has a
            node to itself, or all have one. "native": torch's own reduce-scatter. None: it stays as it is.
        accumulation: of `all_reduce`; "fp32": 16-bit wires are added up in fp32, on three or more replicas.
        replicate_mesh: of one dimension, the ranks that hold the same shards. None: it is the replicate dimension of
            the mesh that the modules were sharded over.

    A wire is one for all parameters; those of fewer than two dimensions are not encoded.

    Returns:
        What counts calls and bytes.

    Raises:
        ValueError: nothing in `model` is sharded by `fully_shard`; it has no replicas, or both its own and
            `replicate_mesh`; it has a custom reduce-scatter; or an option is not accepted.
        FusedReduceError: this version of torch has other internals.
        AgreementError: ranks have other settings or another model; the devices of some cannot encode; or ranks of a
            reduce-scatter share nodes, of which there are several. On every rank.
    """
    if all_reduce is None and reduce_scatter is None:
        raise ValueError('set_fsdp_comms sets nothing: give it all_reduce="bf16", reduce_scatter="bf16", or both')
    if all_reduce is None and (accumulation != "wire" or replicate_mesh is not None):
        raise ValueError("accumulation and replicate_mesh are those of all_reduce, which is missing: leave them out")
    for wire, sums in ((all_reduce, accumulation), (reduce_scatter, "wire")):
        if wire is not None:
            ReduceConfig(wire=wire, accumulation=sums).check_beside("set_fsdp_comms")
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
    by_mesh: dict[tuple[dist.ProcessGroup | None, dist.ProcessGroup], list[_Sharded]] = {}
    for one in sharded:
        if reduce_scatter is not None:
            _check_reduce_scatter(one)
        groups = _replicas_of(one, replicate_mesh), one.group.mesh_info.shard_process_group
        by_mesh.setdefault(groups, []).append(one)
    if all_reduce is not None and all(replicas is None for replicas, _ in by_mesh):
        raise ValueError(
            "the model was sharded over a mesh of one dimension, so that no rank holds the same shard as another. "
            'Shard it over a mesh ("replicate", "shard"), or give replicate_mesh=mesh["replicate"]'
        )
    settings = {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "accumulation": accumulation}
    meshes = [_Mesh(*groups, members) for groups, members in by_mesh.items()]
    _agree(meshes, settings, names)
    reductions = [mesh.open(all_reduce, reduce_scatter, accumulation) for mesh in meshes]
    shards: dict[str, list[FlatShard]] = {}
    for mesh, replicas in zip(meshes, reductions, strict=True):
        told: set[str] = set()
        for one in mesh.members:
            label = f"the shard of {one.name or 'the root module'} (rank {dist.get_rank()} of the job)"
            if replicas is not None:
                made = ReplicaGroup(one.group, replicas, label)
                _set_replicas(one.group, made)
                shards.setdefault("all_reduce", []).append(made.shard)
            if reduce_scatter is not None:
                before = one.group._reduce_scatter_comm
                torchs = before.torchs if isinstance(before, ReduceScatter) else before
                scatter = ReduceScatter(one.group, reduce_scatter, label, told, torchs)
                one.group._reduce_scatter_comm = torchs if reduce_scatter == NATIVE else scatter
                shards.setdefault("reduce_scatter", []).append(scatter.shard)
    return FSDPComms(shards)


class _Sharded(NamedTuple):
    """A module that `fully_shard` was called on, or the first of several that share a group of parameters."""

    name: str
    group: Any  # torch's FSDPParamGroup


def _sharded_modules(model: nn.Module) -> Iterator[_Sharded]:
    """The modules of `model` with parameters to shard, in its order; of several meshes, one by one.

    Raises:
        FusedReduceError: torch's internals are other ones.
    """
    seen = set()
    for name, module in model.named_modules():
        state_of = getattr(module, "_get_fsdp_state", None)
        if state_of is None or id(state := state_of()) in seen:
            continue
        seen.add(id(state))
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # before torch 2.12
            groups = [one for one in (getattr(state, "_fsdp_param_group", None),) if one is not None]
        for group in groups:
            if missing := [field for field in _USED if not hasattr(group, field)]:
                raise FusedReduceError(
                    f"torch {torch.__version__} has other internals of fully_shard (no {', '.join(missing)}): "
                    "set_fsdp_comms was tried with torch 2.11, 2.13 and 2.15"
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


def _check_reduce_scatter(sharded: _Sharded) -> None:
    """Raises ValueError where a module has a custom reduce-scatter of the user's."""
    has = type(sharded.group._reduce_scatter_comm)
    if has is not ReduceScatter and not has.__module__.startswith("torch."):
        raise ValueError(
            f"{sharded.name or 'the root module'} has a custom reduce-scatter, a {has.__name__}, which reduce_scatter= "
            "would replace: leave set_custom_reduce_scatter out, or reduce_scatter="
        )


def _set_replicas(group: Any, replicas: ReplicaGroup) -> None:
    """Has torch find its replicas there; the parameters, and the mesh, keep what they know."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo  # who has no FSDP need not import it

    info = copy.copy(group.mesh_info)
    info.__class__ = HSDPMeshInfo  # of a mesh of one dimension it is another one
    info.replicate_process_group = replicas
    if group.post_forward_mesh_info == group.mesh_info:  # else torch would gather from another mesh after a forward
        group.post_forward_mesh_info = info
    group.mesh_info = info


def _agree(meshes: list[_Mesh], settings: Mapping[str, str | None], names: Mapping[int, str]) -> None:
    """Compares settings and modules over all groups of ranks of all meshes.

    Groups come in an order that depends on their ranks alone: where each rank goes through its own in one order of all,
    none waits for one that waits for it, whatever their models are.

    Args:
        meshes: of this rank's modules.
        settings: of `set_fsdp_comms`.
        names: of parameters, by id.

    Raises:
        AgreementError: with the same text on every rank.
        CollectiveError: a rank did not come within the timeout.
    """
    each = [(of.group, mesh, among) for mesh in meshes for among, of in mesh.groups.items()]
    groups = sorted(((dist.get_process_group_ranks(of), mesh, among) for of, mesh, among in each), key=itemgetter(0))
    problem = ""
    for _, mesh, among in groups:
        problem = mesh.compare(among, settings, names) or problem
    # Ranks that no other differs from would wait for those in the next forward: as many rounds as may lie between them.
    for _, mesh, among in groups * len(groups):
        problem = mesh.told(among, problem)
    if problem:
        raise AgreementError(problem)


def _reduce_dtype(parameter: Any) -> torch.dtype:
    """The dtype in which torch reduces a parameter's gradient; of torch's FSDPParam."""
    policy = parameter.mp_policy
    dtype: torch.dtype = policy.reduce_dtype or policy.param_dtype or parameter.sharded_param.dtype
    return dtype


class _Mesh:
    """Modules with the same replicas and the same shards.

    Args:
        replicas: the ranks that hold the same shard; None: there are none.
        shards: the ranks that hold a shard each.
        members: the modules.
    """

    def __init__(self, replicas: dist.ProcessGroup | None, shards: dist.ProcessGroup, members: list[_Sharded]) -> None:
        self.members = members
        self._replicas = None if replicas is None else ProcessGroupCommunicator(replicas)
        self._shards = ProcessGroupCommunicator(shards)
        replicated = {} if self._replicas is None else {"replicas": self._replicas}
        self.groups = {**replicated, "shards": self._shards}
        self._device: torch.device = members[0].group.device

    def compare(self, among: str, settings: Mapping[str, str | None], names: Mapping[int, str]) -> str:
        """Compares settings and modules with the ranks of one of its groups.

        Args:
            among: the name of the group.
            settings: of `set_fsdp_comms`.
            names: of parameters, by id.

        Returns:
            Why this rank cannot reduce so with the others; "": it can.
        """
        infos = [one.group.mesh_info for one in self.members]
        descriptions = [
            f"{names.get(id(one.sharded_param), f'a parameter of {of.name}')}: {shard_numel(one)} elements a rank of "
            f"{one.sharded_param.dtype}, reduced in {_reduce_dtype(one)}, "
            f"{'trained' if one.sharded_param.requires_grad else 'frozen'}"
            for of in self.members
            for one in of.group.fsdp_params
        ]
        compared = {name: value and described(value) for name, value in settings.items()}
        if among == "replicas":  # others may be as long
            compared["shard"] = ", ".join(sorted({f"{one.shard_mesh_rank} of {one.shard_mesh_size}" for one in infos}))
        communicator, what = self.groups[among], "wires of set_fsdp_comms"
        try:
            with naming_failure(_COMPARING, communicator, but=AgreementError):
                agree_on_parameters(communicator, descriptions, compared, self._device, what=what)
        except AgreementError as error:
            ranks = ", ".join(map(str, dist.get_process_group_ranks(communicator.group)))
            return f"among the {among} {ranks}, here numbered from 0: {error}"
        return self._problem(settings)

    def told(self, among: str, problem: str) -> str:
        """Tells the ranks of one of its groups why some cannot reduce.

        Args:
            among: the name of the group.
            problem: of this rank; "": none.

        Returns:
            The first of theirs in the order of texts, so that all ranks end with one; "": none has any.
        """
        communicator = self.groups[among]
        with naming_failure(_COMPARING, communicator):
            texts = communicator.all_gather_bytes(problem.encode()[:CAPACITY_BYTES], CAPACITY_BYTES, self._device)
        return min((text.decode(errors="replace") for text in texts if text), default="")

    def open(self, all_reduce: Wire | None, reduce_scatter: Wire | None, accumulation: Accumulation) -> Replicas | None:
        """Makes what the reductions of all of these modules need; changes nothing yet.

        Returns:
            The replicas; None: these modules have none, or keep those that they have.

        Raises:
            UnsupportedWireError: the backend has no all-to-all; on every rank.
        """
        if reduce_scatter not in (None, NATIVE):
            self._shards.check_exchange(self._device)
        if all_reduce is None or self._replicas is None:
            return None
        return Replicas(self._replicas, all_reduce, accumulation, self._device)

    def _problem(self, settings: Mapping[str, str | None]) -> str:
        """Why this rank cannot reduce so; "": it can."""
        asked = [wire for name, wire in settings.items() if name != "accumulation" and wire is not None]
        if any_encoded(asked) and (why := encoded.refusal(self._device)):
            return f"rank {dist.get_rank()}: {self._device} cannot encode gradients: {why}"
        ranks = dist.get_process_group_ranks(self._shards.group)
        per_node = launched_per_node(ranks, dist.get_rank(), os.environ)
        if settings["reduce_scatter"] not in (None, NATIVE) and 1 < per_node < len(ranks):
            return (
                f"reduce_scatter= would send {per_node} times as much between nodes as torch's own, since {per_node} "
                'ranks of each node take part. Shard within a node, over a mesh ("replicate", "shard") of '
                f"({len(ranks) // per_node}, {per_node}) ranks, and give all_reduce="
            )
        return ""
