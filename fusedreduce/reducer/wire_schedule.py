"""WireSchedule: what the parameters of a reducer travel on, from one step to the next; the same on every rank.

    the first `wire_after` steps    bf16, where a parameter is to be encoded
    then                            the wires that ranks have compared
    with `least_sqnr_db`            bf16 again, for parameters whose encoding loses too much

Every 50th step with encoded buckets measures: each rank encodes its own contribution once more, decodes it and
compares; the smallest ratio of all ranks counts, by one all-reduce behind the last bucket's. Its result is read before
the next step. The table changes between two steps, where a plan may change too, and buckets are then built anew.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..buckets.dense import DenseReduction
from ..buckets.exchanged import EncodedBucket
from ..buckets.parameters import Parameters
from ..buckets.reduction import Reduction
from ..buckets.step_feature import StepFeature
from ..buckets.wire_table import WireTable
from ..comm.group import Group
from ..comm.protocol import Pending
from ..comm.waiting import naming_failure, wait_for
from ..config import ReduceConfig, Wire
from ..kernels import encoded
from ..kernels.table import PointerTable
from ..trace.step_profile import StepProfile
from ..wires import encoding_of

_logger = logging.getLogger(__name__)
MEASURE_EVERY = 50
# A single measurement may be of an unusual batch.
BELOW_IN_A_ROW = 3


class ParameterWire(NamedTuple):
    """How one parameter's gradient travels.

    Args:
        wire: the wire in use.
        sqnr_db: signal-to-quantization-noise ratio of its encoding as measured last, in dB, the smallest of all ranks;
            None: it was not measured.
    """

    wire: Wire
    sqnr_db: float | None


class WireSchedule(StepFeature):
    """The wires of one reducer over one group of ranks. Called under the reducer's lock.

    Args:
        agreed: the table that ranks compare.
        config: wire_after and least_sqnr_db.
        parameters: all parameters of the reducer.
        group: the ranks.

    Attributes:
        table: the wires in use.
        due: `advance` is to be called before the next step.
        measuring: the current step, or the next one, is measured.
        steps_at_16_bits: how many were taken since the reducer was built, over any ranks.
    """

    def __init__(self, agreed: WireTable, config: ReduceConfig, parameters: Parameters, group: Group) -> None:
        self._after = config.wire_after
        self._config = config
        self._parameters = parameters
        self._group = group
        unlike = [wire for wire in config.allowed if encoding_of(wire) is None]
        self._coarse_wire = "bf16" if "bf16" in unlike else next(iter(unlike), "bf16")
        self.steps_at_16_bits = 0
        self._agree(agreed)
        self.restart()
        self.table = self._table_of_now()

    def restart(self, steps: int = 0) -> None:
        """Begins anew, every parameter on its agreed wire; all ranks do so at the same place.

        Args:
            steps: how many have been taken already, from a checkpoint.
        """
        self._left = max(self._after - steps, 0)  # steps at 16 bits that are still to be taken
        self._coarse: set[int] = set()
        self._coarse_of: dict[WireTable, set[int]] = {}
        self._sqnr_db: dict[int, float] = {}
        self.due = True
        self.dropped()

    new_group = restart  # with other ranks all begins anew

    def follow(self, agreed: WireTable) -> None:
        """Has parameters travel by another table that all ranks have chosen, from the next step on.

        Which parameters have returned from an encoding is known when it is used again; what it has lost is forgotten.
        """
        self._coarse_of[self.agreed] = self._coarse
        self._agree(agreed)
        self._coarse = self._coarse_of.get(agreed, set())
        self._sqnr_db = {}
        self.due = True
        self.dropped()

    def dropped(self) -> None:
        """Forgets what some ranks may not know; the table stays."""
        self._below: dict[int, int] = {}
        self._since = 0  # encoded steps since the latest measurement
        self._ratios: torch.Tensor | None = None
        self._pending: Pending | None = None
        self._waited: torch.cuda.Event | None = None
        self._look_ahead()

    @property
    def at_16_bits(self) -> bool:
        """Whether steps of `wire_after` are still to be taken."""
        return self._left > 0

    def state(self) -> str:
        """What ranks must have in common to go on after a failed step, as text."""
        others = sorted(sorted(numbers) for numbers in self._coarse_of.values() if numbers)
        return f"{self._left}:{'.'.join(map(str, sorted(self._coarse)))}:{others}"

    def report(self) -> dict[str, ParameterWire]:
        """By name, how each parameter travels."""
        rows = enumerate(zip(self._parameters.names, self.table.wires, strict=True))
        return {name: ParameterWire(wire, self._sqnr_db.get(number)) for number, (name, wire) in rows}

    def advance(self) -> bool:
        """Decides, before a step, what its parameters travel on; returns whether that has changed."""
        self.due = False
        if self._ratios is not None:
            self._judge()
        before, self.table = self.table, self._table_of_now()
        if self._after and self.table.encoded and not before.encoded and self._group.communicator.rank == 0:
            _logger.info("after %d steps gradients travel encoded", self._after)
        self._look_ahead()
        return self.table != before

    # As a StepFeature

    @property
    def in_use(self) -> bool:
        """Whether steps are counted or measured."""
        return self._measures or self._after > 0

    @property
    def acts(self) -> bool:
        """Whether the next step is measured."""
        return self.measuring

    def sent(self, reduction: Reduction) -> None:
        """Measures what encoding loses of the bucket."""
        if isinstance(reduction, DenseReduction) and isinstance(reduction.bucket, EncodedBucket):
            found, shared = sqnr_db(reduction.bucket, reduction.packed()), self._shared()
            for slot, number in enumerate(reduction.members.numbers):
                shared[number] = -found[slot]

    def behind(self) -> int:
        """Starts the exchange of what was measured."""
        with naming_failure("comparing what encodings lose failed", self._group.communicator):
            self._pending = self._group.communicator.all_reduce(self._shared(), "max")
        return 1

    def waited(self) -> None:
        """Waits for this step's collective, if there is one; on CUDA only the current stream waits."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        wait_for(pending, "comparing what encodings lose", self._group.communicator)
        self.due = True
        if self._parameters.device.type == "cuda":
            self._waited = torch.cuda.Event()
            self._waited.record(torch.cuda.current_stream(self._parameters.device))

    def counted(self, profile: StepProfile | None) -> bool:
        """Counts a step."""
        before = self.measuring
        if self._left:
            self._left -= 1
            self.steps_at_16_bits += 1
            self.due = self._left == 0
        else:
            self._since += 1
            self._look_ahead()
        return self.measuring is not before

    # Within

    def _agree(self, agreed: WireTable) -> None:
        self.agreed = agreed
        self._measures = any(self._config.least_db(wire) is not None for wire in set(agreed.wires))

    def _table_of_now(self) -> WireTable:
        return self.agreed.with_wire(self._coarse_wire, self.agreed.encoded if self._left else self._coarse)

    def _look_ahead(self) -> None:
        """Finds out whether the next step is measured."""
        at_16_bits = self._left > 0 or self._coarse.issuperset(self.agreed.encoded)
        self.measuring = self._measures and not at_16_bits and (self._since + 1) % MEASURE_EVERY == 0

    def _shared(self) -> torch.Tensor:
        """Negative ratios by parameter, of which the ranks take the largest; at first as if nothing were lost."""
        if self._ratios is None:
            count, device = len(self._parameters.tensors), self._parameters.device
            self._ratios = torch.full((count,), -math.inf, dtype=torch.float64, device=device)
        return self._ratios

    def _judge(self) -> None:
        """Reads the ratios of all ranks, and finds the parameters that are encoded no longer."""
        if self._waited is not None:
            torch.cuda.current_stream(self._parameters.device).wait_event(self._waited)
        ratios, self._ratios, self._waited = self._shared().tolist(), None, None
        for number in self.table.encoded:
            least_db = self._config.least_db(self.table[number])
            if least_db is None or math.isinf(ratios[number]):
                continue  # no rank had a gradient, or nothing was lost
            self._sqnr_db[number] = -ratios[number]
            below = self._below.get(number, 0) + 1 if -ratios[number] < least_db else 0
            self._below[number] = below
            if below == BELOW_IN_A_ROW:
                self._coarse.add(number)
                if self._group.communicator.rank == 0:
                    _logger.warning(
                        "%s returns from %s to %s: its signal-to-quantization-noise ratio is %.1f dB, and was below "
                        "%g dB in %d measurements in a row",
                        self._parameters.names[number],
                        self.table[number],
                        self._coarse_wire,
                        -ratios[number],
                        least_db,
                        below,
                    )


def sqnr_db(bucket: EncodedBucket, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """The signal-to-quantization-noise ratio of gradients that are encoded once, rounded to nearest.

    Args:
        bucket: encodes them; its wire is left alone.
        gradients: one per slot, dense in memory; None: missing.

    Returns:
        fp64 [slots] on the bucket's device, in dB; inf where nothing is lost, or a gradient is missing or not finite.
    """
    # In two levels the bucket's own wire is of elements.
    wire = torch.empty(bucket.chunks.layout.nbytes, dtype=torch.uint8, device=bucket.device)
    encoded.unchecked(bucket.device, (wire.dtype,)).encode(gradients, bucket.chunks, PointerTable(), wire, 1.0)
    decoded = torch.empty(bucket.layout.numel, dtype=torch.float32, device=bucket.device)
    bucket.decode_flat(wire, decoded)
    found = torch.full((len(gradients),), math.inf, dtype=torch.float64, device=bucket.device)
    for index, (slot, gradient) in enumerate(zip(bucket.layout.slots, gradients, strict=True)):
        if gradient is not None:
            exact = gradient.as_strided((slot.numel,), (1,)).to(bucket.compute_dtype)
            noise = torch.linalg.vector_norm(decoded[slot.offset : slot.offset + slot.numel] - exact)
            ratio = (20.0 * torch.log10(torch.linalg.vector_norm(exact) / noise)).double()
            found[index] = torch.where(ratio.isfinite(), ratio, math.inf)
    return found
