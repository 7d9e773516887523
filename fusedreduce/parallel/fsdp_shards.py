"""The two reductions of a module that `fully_shard` was called on, on our wires.

    backward of a module ends   torch copies its gradients into one flat tensor, [ranks x shard]
    `ReduceScatter`             this rank's shard of their sum, within a node: pack, all-to-all, add up
    `ReplicaGroup`              reduces that shard across replicas, in place: pack, exchange, unpack
    then                        torch divides where it has to, and views the shard as the parameters' `.grad`

torch calls both on streams of its own. A call is a whole reduction, which that stream is behind when it returns; on
CUDA the host waits for nothing.

The flat shard holds, one after the other, the padded shards of the parameters that have got a gradient in this
backward; which ones these are is not told. If it is as long as those of all that require a gradient, each of them has
blocks of its own on an encoded wire, and those of fewer than two dimensions travel in their own dtype: across replicas
from where they lie, in one all-reduce behind the encoded ones. A shard of another length travels as bf16 with sums of
fp32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..buckets import data_path
from ..buckets.bucket import Bucket
from ..buckets.phases import Phases
from ..buckets.streams import refuse_capture
from ..buckets.wire_table import WireTable
from ..comm.group import Group
from ..comm.process_group import ProcessGroupCommunicator
from ..comm.waiting import naming_failure, wait_for
from ..config import Accumulation, Op, ReduceConfig, Wire
from ..errors import FusedReduceError
from ..kernels.table import Gradients
from ..wires import NATIVE, encoding_of, is_accumulated, wire_dtype
from .fsdp_buckets import reduce_scatter_bucket
from .hook_buckets import make_bucket

_logger = logging.getLogger(__name__)
_MOST_BUCKETS = 8  # of a module: lengths without a layout may be many
COUNTS = ("calls", "calls_without_layout", "collectives", "wire_bytes")


class _Layout(NamedTuple):
    """What a flat shard travels as: the elements of its slots, and which of them are encoded.

    accumulation: of 16-bit wires where that is not the user's to say.
    """

    wire: Wire
    numels: list[int]
    is_encoded: list[bool]
    accumulation: Accumulation | None = None


class FlatShard:
    """The shard of one module, as one of its two reductions sees it.

    Args:
        group: torch's FSDPParamGroup.
        wire: of the reduction.
        label: names the shard in errors.
        told: of a group of modules, whether a call without a layout has been told: once for all of them.

    Attributes:
        buckets: those in use, by what they depend on.
        counts: see `FSDPComms.stats`.
    """

    def __init__(self, group: Any, wire: Wire, label: str, told: set[str]) -> None:
        self._group = group
        self.wire = wire
        self.label = label
        self._told = told
        self.buckets: dict[tuple[object, ...], Bucket] = {}
        self.counts = dict.fromkeys(COUNTS, 0)

    def begin(self, communicator: ProcessGroupCommunicator, device: torch.device) -> None:
        """Counts a call.

        Raises:
            FusedReduceError: an earlier one has failed; or a CUDA graph is being captured.
        """
        if communicator.lost:
            raise FusedReduceError(
                f"rank {communicator.rank}: an earlier reduction of a shard failed, and this rank may be out of step "
                f"with its peers. Start all ranks anew from a checkpoint. The failure: {communicator.lost}"
            )
        if device.type == "cuda":
            refuse_capture(communicator.rank)
        self.counts["calls"] += 1

    def layout(self, flat: torch.Tensor) -> _Layout:
        """The slots of a shard, of which complex elements are pairs."""
        encoding, numel = encoding_of(self.wire), flat.numel()
        if encoding is None:
            return _Layout(self.wire, [numel], [False])
        trained = [one for one in self._group.fsdp_params if one.sharded_param.requires_grad]
        if any(one.sharded_param.is_complex() for one in trained):  # which torch does not mix with others
            return _Layout(NATIVE, [numel], [False])
        numels, dims = [shard_numel(one) for one in trained], [one.sharded_param.ndim for one in trained]
        if sum(numels) != numel:
            self._note_without_layout(numel, sum(numels))
            return _Layout("bf16" if flat.itemsize > 2 else NATIVE, [numel], [False], accumulation="fp32")
        is_encoded = [n >= encoding.block_numel and ndim > 1 for n, ndim in zip(numels, dims, strict=True)]
        return _Layout(self.wire, numels if any(is_encoded) else [numel], is_encoded if any(is_encoded) else [False])

    def reduce(
        self,
        key: tuple[object, ...],
        make: Callable[[], Bucket],
        packed: Gradients,
        written: Gradients | None,
        communicator: ProcessGroupCommunicator,
        divisor: float,
        phases: Phases | None = None,
    ) -> None:
        """One reduction, from gradients to gradients.

        Args:
            key: says which kind of shard it is.
            make: makes the bucket for those, at the first of them.
            packed, written, communicator, divisor: see `data_path.start` and `finish`.
            phases: issues what follows the first collective; None: nothing does.

        Raises:
            CollectiveError: a rank died, left, or did not answer in time.
        """
        bucket = self.buckets.pop(key, None) or make()
        in_flight = data_path.start(bucket, packed, communicator, divisor=divisor / bucket.sent_split)
        if phases is not None:
            phases.issue_all()
        wait_for(in_flight.pending, bucket.collective_text(), communicator)
        data_path.finish(in_flight, written)
        bucket.release()
        self.buckets[key] = bucket  # the latest comes last; one whose use was broken off is not used again
        if len(self.buckets) > _MOST_BUCKETS:
            del self.buckets[next(iter(self.buckets))]
        self.counts["collectives"] += bucket.collectives
        self.counts["wire_bytes"] += bucket.wire_bytes

    def _note_without_layout(self, numel: int, expected: int) -> None:
        if not self._told:
            self._told.add(self.label)
            _logger.warning(
                "%s has %d elements where those of all its parameters that require a gradient are %d: some have got "
                "none in this backward. Such shards travel as bf16, and FSDPComms.stats() counts them. Freeze what is "
                "not used, or call set_reduce_scatter_unused_params(True) on the module (torch 2.13)",
                self.label,
                numel,
                expected,
            )
        self.counts["calls_without_layout"] += 1


class Replicas:
    """What the modules share that have the same replicas.

    Args:
        communicator: the replicas.
        wire: what contributions travel as.
        accumulation: of 16-bit wires.
        device: of the shards.
    """

    def __init__(
        self, communicator: ProcessGroupCommunicator, wire: Wire, accumulation: Accumulation, device: torch.device
    ) -> None:
        self.communicator = communicator
        self.wire = wire
        self.accumulation = accumulation
        self.told: set[str] = set()
        self.phases = Phases(Group(communicator), device)
        wires = WireTable((wire, "bf16"), "fp32" if encoding_of(wire) is not None else accumulation)
        if wires.has_two_phases(communicator.size):
            self.phases.open(wires, None)


class ReplicaGroup(dist.ProcessGroup):
    """The replicas of one module's shard, as torch finds them: their all-reduce is ours.

    It equals their process group, as which torch.distributed looks it up where an all-reduce raises.

    Args:
        group: torch's FSDPParamGroup.
        replicas: the ranks, and the wire.
        label: names the shard in errors.
    """

    def __init__(self, group: Any, replicas: Replicas, label: str) -> None:
        super().__init__(replicas.communicator.rank, replicas.communicator.size)  # type: ignore[call-arg]
        self.replicas = replicas
        self.shard = FlatShard(group, replicas.wire, label, replicas.told)

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
            FusedReduceError: see `FlatShard.begin`.
        """
        flat = tensors[0].view(-1)  # torch gives complex ones as pairs
        replicas, shard = self.replicas, self.shard
        communicator = replicas.communicator
        if communicator.size == 1:
            return
        shard.begin(communicator, flat.device)
        op: Op = "mean" if opts.reduceOp == dist.ReduceOp.AVG else "sum"
        wire, numels, is_encoded, accumulation = shard.layout(flat)
        accumulation = "wire" if not is_accumulated(wire) else accumulation or replicas.accumulation
        accumulates = accumulation == "fp32" and communicator.size > 2
        slots = flat.split(numels)
        packed, in_place = [flat], list[torch.Tensor]()
        if any(is_encoded):
            packed = list(compress(slots, is_encoded))
            in_place = [slot for slot, encoded in zip(slots, is_encoded, strict=True) if not encoded and slot.numel()]
        elif not accumulates and (wire_dtype(wire) or flat.dtype) is flat.dtype:
            packed, in_place = [], [flat]

        def make() -> Bucket:
            config = ReduceConfig(wire=wire, accumulation=accumulation, op=op)
            mine, encoded = [slot.numel() for slot in packed], [any(is_encoded)] * len(packed)
            ranks, phases = communicator.size, replicas.phases
            return make_bucket(flat, mine, encoded, config, ranks, shard.label, phases, lazy=True)

        if packed:
            key = wire, op, flat.dtype, *numels, *is_encoded
            divisor = communicator.size if op == "mean" else 1
            shard.reduce(key, make, packed, None, communicator, divisor, replicas.phases)
        if in_place:
            what = f"the all-reduce of {shard.label}"
            with naming_failure(what, communicator):
                pending = communicator.all_reduce_coalesced(in_place, "avg" if op == "mean" else "sum")
            wait_for(pending, what, communicator)
            shard.counts["collectives"] += 1
            shard.counts["wire_bytes"] += sum(slot.nbytes for slot in in_place)


class ReduceScatter:
    """The reduce-scatter of one module, as torch calls it: a custom one, see torch's `set_custom_reduce_scatter`.

    Contributions are rounded once, exchanged, and added up in fp32 in the order of ranks by the rank whose shard it is.

    Args:
        group: torch's FSDPParamGroup.
        wire: what contributions travel as.
        label: names the shard in errors.
        told: see FlatShard.
        torchs: torch's own, whose place it takes.
    """

    def __init__(self, group: Any, wire: Wire, label: str, told: set[str], torchs: Any) -> None:
        self.shard = FlatShard(group, wire, label, told)
        self.torchs = torchs

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the input and for the output of a call."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduces, by an average, a sum, or a sum of products with a factor, as torch asks for it.

        Args:
            output_tensor: this rank's shard, [elements of a shard].
            input_tensor: this rank's gradients, [ranks x elements of a shard]; it is read before this returns (on CUDA:
                by the current stream).
            group: the ranks.
            op: of torch.
            async_op: torch asks for none.

        Raises:
            CollectiveError: a rank died, left, or did not answer in time.
            FusedReduceError: see `FlatShard.begin`.
        """
        assert not async_op
        communicator = ProcessGroupCommunicator(group)
        shard, ranks, device = self.shard, communicator.size, output_tensor.device
        shard.begin(communicator, device)
        into, given = (_real(one) for one in (output_tensor, input_tensor))
        divisor = float(ranks) if op == dist.ReduceOp.AVG else 1.0
        if op == dist.ReduceOp.PREMUL_SUM:
            divisor = 1.0 / op.__getstate__()[1]  # torch 2.11 has no `factor`
        layout = shard.layout(into)
        numels = layout.numels

        def make() -> Bucket:
            return reduce_scatter_bucket(into, layout.wire, numels, layout.is_encoded, shard.label, ranks)

        key = layout.wire, into.dtype, *numels, *layout.is_encoded
        shard.reduce(key, make, given.split(numels * ranks), into.split(numels), communicator, divisor)


def shard_numel(parameter: Any) -> int:
    """The elements of a parameter in the flat shard, padding included; of torch's FSDPParam."""
    numel: int = parameter.padded_sharded_param_size.numel()
    return numel


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements, complex ones as pairs."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor.view(-1)
