"""Feedback: residuals, what encoding has lost of gradients, which are added to those of the next step.

    contribution     encode(gradient / divisor + residual), on every rank
    sum of a shard   encode(sum of the contributions + residual), on its owner; three ranks and more

A residual is in units of the result, without loss scale: `weights` bring it to the units of a step and back. There are
two copies of each. A step reads the live one and writes the other, which becomes live at its end if all its gradients
are finite: else an optimizer skips it, and nothing of it was lost. All that is decided on the device.

Residuals of parameters outlive plans. A shard is of one plan: its residual is added to those of the parameters in it
when the plan ends, and for a checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..comm.protocol import Communicator
from ..comm.waiting import naming_failure, wait_for
from ..kernels import encoded
from ..kernels.encoded_table import EncodedTable, Residuals
from ..kernels.table import PointerTable
from ..trace.step_profile import StepProfile
from .data_path import scalar
from .parameters import Parameters
from .reduction import Reduction
from .stats.grad_stats import GradStats
from .step_feature import Ended, StepFeature
from .tensors import dense_shape

# A residual with a larger norm than this many times that of what it is added to is dropped: it is no longer the error
# of a value that is still there. A steady one has 0.2 times the norm at int4, and 0.01 at int8; that of a spike comes
# back as a multiple of an ordinary gradient.
MOST = 1.0

Tensors = list[torch.Tensor]


@dataclass(eq=False)
class _State:
    """What the residuals on one device have in common.

    Args:
        live: int64 [1], which copy is read.
        weights: fp32 [2], see `Residuals`.
        dropped: int64 [2], how many residuals were: of parameters, and of sums, which another stream counts.
        begun: recorded when `weights` are those of a step: gradients come from several streams; None on CPU.
    """

    live: torch.Tensor
    weights: torch.Tensor
    dropped: torch.Tensor
    begun: torch.cuda.Event | None


class Feedback(StepFeature):
    """The residuals of one reducer's parameters on this rank: 8 bytes per element of those that are encoded.

    Args:
        parameters: all parameters of the reducer.
        observed: the loss scale of a step's gradients, and whether they are finite.
    """

    in_use = True

    def __init__(self, parameters: Parameters, observed: GradStats) -> None:
        self._parameters = parameters
        self._observed = observed
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._on: dict[torch.device, _State] = {}
        self._buckets: list[BucketFeedback] = []
        self._idle = False
        device = parameters.device
        # Of the step that has made the live copies its clip, and whether gradients were not finite.
        self._coefficient = torch.ones(1, dtype=torch.float32, device=device)
        self._skipped = torch.zeros(1, dtype=torch.bool, device=device)

    def of_bucket(self, numbers: Sequence[int], chunks: EncodedTable, rank: int) -> BucketFeedback:
        """The residuals of one bucket.

        Args:
            numbers: of its parameters.
            chunks: its table.
            rank: of this process, the owner of that shard.
        """
        state = self._state(self._parameters.tensors[numbers[0]].device)
        bucket = BucketFeedback([self._copies_of(number) for number in numbers], chunks, rank, state, self._coefficient)
        self._buckets.append(bucket)
        return bucket

    def leave_buckets(self) -> None:
        """Called before buckets are built anew: keeps what shards have lost.

        The new ones may travel on other wires for some steps, which end without writing a copy.
        """
        self._settle()
        self._buckets = []

    # As a StepFeature

    def opened(self, profile: StepProfile | None) -> int:
        """Brings residuals to the units of the step's gradients."""
        scale = self._observed.units.scale_of_step()
        for device, state in self._on.items():
            state.weights[:1].copy_(self._coefficient)
            state.weights[1:].fill_(1.0)
            if scale is not None:
                state.weights[:1].mul_(scale.scale.reshape(1).to(device))
                state.weights[1:].copy_(scale.inverse.reshape(1))
            if state.begun is not None:
                state.begun.record(torch.cuda.current_stream(device))
        return 0

    def landed(self, ended: Ended) -> int:
        """Keeps what the step has lost, if all its gradients are finite."""
        if self._idle or ended.number is None or ended.elsewhere:
            return 0
        self._skipped = self._observed.found_non_finite().reshape(1) > 0
        self._coefficient.masked_fill_(~self._skipped, 1.0)
        for device, state in self._on.items():
            state.live.bitwise_xor_((~self._skipped).to(device, torch.int64))
        return 0

    @contextlib.contextmanager
    def own_set_aside(self, reductions: Sequence[Reduction]) -> Iterator[None]:
        """Context of a step on a rank without inputs (join), which sends zeros and keeps its residuals as they are."""
        self._idle = True
        for bucket in self._buckets:
            bucket.idle = True
        try:
            yield
        finally:
            self._idle = False
            for bucket in self._buckets:
                bucket.idle = False

    def clip(self, coefficient: torch.Tensor) -> None:
        """Called when the latest step's gradients are multiplied by `coefficient`, one element.

        Its residuals will be too. (A norm is NaN also where parameters count that are not reduced.)
        """
        coefficient = coefficient.detach().reshape(1).to(self._coefficient)
        self._coefficient.mul_(torch.where(self._skipped | coefficient.isnan(), 1.0, coefficient))

    def residuals_dropped(self) -> int:
        """How many residuals were dropped so far; the host waits for it."""
        return sum(int(state.dropped.sum()) for state in self._on.values())

    # Checkpoints

    def own(self) -> dict[str, torch.Tensor]:
        """This rank's residuals by name, fp32 of the parameters' shapes, on CPU; those of shards are added to them."""
        self._settle()
        found = {}
        for number in sorted(self._copies):
            size, strides = dense_shape(self._parameters.tensors[number])
            live = self._copies[number][0].as_strided(size, strides)
            found[self._parameters.names[number]] = live.clone(memory_format=torch.contiguous_format).cpu()
        return found

    def gathered(self, own: Mapping[str, torch.Tensor], communicator: Communicator) -> dict[str, torch.Tensor]:
        """Every rank's residuals, by name [ranks, *shape]. A collective per parameter.

        Args:
            own: what `own` returned.
            communicator: the ranks.

        Raises:
            CollectiveError: a peer died, left, or did not answer.
        """
        found = {}
        for number in sorted(self._copies):
            name = self._parameters.names[number]
            what, mine = f"gathering the residuals of {name}", own[name].to(self._parameters.tensors[number].device)
            with naming_failure(what, communicator):
                pending, rows = communicator.all_gather(mine.reshape(-1))
            wait_for(pending, what, communicator)
            found[name] = rows.reshape(communicator.size, *mine.shape).cpu()
        return found

    def check(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Raises ValueError if `residuals`, as `gathered` returned them, are of another model."""
        named = zip(self._parameters.names, self._parameters.tensors, strict=True)
        shapes = {name: tuple(one.shape) for name, one in named}
        ranks = {len(rows) for rows in residuals.values()}
        for name, rows in residuals.items():
            if shapes.get(name) != tuple(rows.shape[1:]) or rows.dtype is not torch.float32 or len(ranks) > 1:
                raise ValueError(
                    f"these residuals are of another model: {name} is {rows.dtype}, {tuple(rows.shape)} there, and "
                    f"{shapes.get(name, 'missing')} here, where float32 of each of its ranks is expected"
                )

    def load(self, residuals: Mapping[str, torch.Tensor], communicator: Communicator) -> None:
        """Takes over this rank's part of `residuals`: those of rank r go to rank r mod the ranks of now."""
        self._fold()
        self._coefficient.fill_(1.0)
        for copies in self._copies.values():
            torch._foreach_zero_(copies)
        for name, rows in residuals.items():
            number = self._parameters.names.index(name)
            mine = list(rows[communicator.rank :: communicator.size])
            if not mine:
                continue
            size, strides = dense_shape(self._parameters.tensors[number])
            total = functools.reduce(operator.add, mine)
            for copy in self._copies_of(number):
                copy.as_strided(size, strides).copy_(total)

    # Within

    def _copies_of(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        if number not in self._copies:
            numel, device = self._parameters.tensors[number].numel(), self._parameters.tensors[number].device
            first, second = (torch.zeros(numel, dtype=torch.float32, device=device) for _ in range(2))
            self._copies[number] = first, second
            self._state(device)
        return self._copies[number]

    def _state(self, device: torch.device) -> _State:
        if device not in self._on:
            others = list(self._on.values())
            live = others[0].live.to(device, copy=True) if others else torch.zeros(1, dtype=torch.int64, device=device)
            begun = torch.cuda.Event() if device.type == "cuda" else None
            weights = torch.ones(2, dtype=torch.float32, device=device)
            dropped = torch.zeros(2, dtype=torch.int64, device=device)
            self._on[device] = _State(live, weights, dropped, begun)
        return self._on[device]

    def _fold(self) -> None:
        for bucket in self._buckets:
            bucket.fold()

    def _settle(self) -> None:
        """Makes both copies what the next step would read: with what shards hold, and the latest clip."""
        self._fold()
        for first, second in self._copies.values():
            live = torch.where(self._on[first.device].live > 0, second, first)
            live.mul_(self._coefficient.to(live.device))
            first.copy_(live)
            second.copy_(live)
        self._coefficient.fill_(1.0)


class _Part(NamedTuple):
    """What a shard holds of one parameter.

    Args:
        slot: of the bucket.
        begin: first element in the shard.
        end: behind the last one.
        of_parameter: first element in the parameter.
    """

    slot: int
    begin: int
    end: int
    of_parameter: int


class BucketFeedback:
    """The residuals of one bucket's parameters, and of its shard.

    Args:
        copies: of each parameter both.
        chunks: the bucket's table.
        rank: of this process.
        state: of the bucket's device.
        coefficient: see `Feedback`.

    Attributes:
        of_parameters: for `encode`.
        of_sum: for `combine_encoded`; None: there is one phase.
        idle: nothing is added in this step, and nothing kept.
    """

    idle = False

    def __init__(
        self,
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
        chunks: EncodedTable,
        rank: int,
        state: _State,
        coefficient: torch.Tensor,
    ) -> None:
        self._state = state
        self._coefficient = coefficient
        first, second = [one for one, _ in copies], [other for _, other in copies]
        self.of_parameters = Residuals((first, second), state.live, state.weights)
        self.of_sum: Residuals | None = None
        self._parts: list[_Part] = []
        self._here: Collection[int] = ()  # slots that have a gradient
        layout = chunks.layout
        if layout.shards > 1:
            numel, device = layout.shard_numel, state.live.device
            one, other = (torch.zeros(numel, dtype=torch.float32, device=device) for _ in range(2))
            self.of_sum = Residuals(([one], [other]), state.live, state.weights)
            self._parts = list(_parts_of(chunks, rank * numel, (rank + 1) * numel))
            # The shard alone, as one gradient: to add the contributions to it up before they are encoded.
            self._sum = EncodedTable([numel], [0], [torch.float32], numel, layout.encoding, 1)
            self._sum.on(device)
            self._sum.places_on(device)
            self._sum.geometry(layout.shards, device)
            scalar(1.0, torch.float32, device)
            self._pointers = PointerTable()

    def before_encode(self, gradients: Sequence[torch.Tensor | None], divisor: float) -> None:
        """Called before `gradients` are encoded; arguments as of `encoded.encode`."""
        if self._state.begun is not None:
            torch.cuda.current_stream(self._state.live.device).wait_event(self._state.begun)
        self._here = {slot for slot, one in enumerate(gradients) if one is not None}
        slots = sorted(self._here)
        copies = [[copy[slot] for slot in slots] for copy in self.of_parameters.copies]
        self._drop(copies, [one for one in gradients if one is not None], divisor, self._state.dropped[:1])

    def before_combine(self, received: torch.Tensor, total: torch.Tensor) -> None:
        """Called before the contributions `received` are added up; `total`: fp32 [shard_numel], overwritten."""
        assert self.of_sum is not None
        one = scalar(1.0, torch.float32, total.device)
        encoded.unchecked(total.device, self._sum.dtype_set).decode([total], self._sum, self._pointers, received, one)
        # Where this rank has no gradient there may be none at all, and the sum is of residuals.
        parts = [part for part in self._parts if part.slot in self._here]
        copies = [[copy[0][part.begin : part.end] for part in parts] for copy in self.of_sum.copies]
        self._drop(copies, [total[part.begin : part.end] for part in parts], 1.0, self._state.dropped[1:])

    def keep(self, slots: Collection[int]) -> None:
        """Called in a step that does not write the gradients of `slots`, because no rank has used them."""
        kept = [[copy[slot] for slot in slots] for copy in self.of_parameters.copies]
        if self.of_sum is not None:
            for some, (copy,) in zip(kept, self.of_sum.copies, strict=True):
                some += [copy[part.begin : part.end] for part in self._parts if part.slot in slots]
        live, coefficient = self._state.live > 0, self._coefficient.to(self._state.live.device)
        for one, other in zip(*kept, strict=True):  # into the one that this step makes live, if it does
            clipped = torch.where(live, other, one) * coefficient
            one.copy_(torch.where(live, clipped, one))
            other.copy_(torch.where(live, other, clipped))

    def fold(self) -> None:
        """Adds the residual of the shard to those of the parameters that are in it."""
        if self.of_sum is None:
            return
        for copy, (of_sum,) in zip(self.of_parameters.copies, self.of_sum.copies, strict=True):
            for slot, begin, end, of_parameter in self._parts:
                copy[slot][of_parameter : of_parameter + end - begin].add_(of_sum[begin:end])
            of_sum.zero_()

    def _drop(self, copies: Sequence[Tensors], values: Tensors, divisor: float, dropped: torch.Tensor) -> None:
        """Zeroes, and counts, those residuals that are larger than `MOST` times what they are added to.

        That is `values` / `divisor`. Not where it is zero, which says nothing about ordinary gradients, nor where it
        is NaN.
        """
        if not values:
            return
        live, on_cuda = self._state.live, self._state.begun is not None
        if not on_cuda:
            copies, live = [copies[int(live)]], torch.zeros_like(live)
        norms = torch.stack([_norms(one) for one in copies]).index_select(0, live)[0] * self._state.weights[0]
        limit = _norms(values) / divisor * MOST
        large = (norms > limit) & (limit > 0)
        if not on_cuda and not bool(large.any()):
            return
        dropped.add_(large.sum())
        factors = list((~large).to(torch.float32).unbind())
        for one in copies:  # the other copy, if given, is overwritten in this step
            torch._foreach_mul_(one, factors)


def _norms(tensors: Tensors) -> torch.Tensor:
    dtype = torch.float64 if tensors[0].dtype is torch.float64 else torch.float32
    return torch.stack(torch._foreach_norm(tensors, 2, dtype))


def _parts_of(chunks: EncodedTable, begin: int, end: int) -> Sequence[_Part]:
    """What elements [begin, end) of a bucket hold of each of its parameters."""
    found = []
    for slot, (numel, offset) in enumerate(zip(chunks.numels, chunks.offsets, strict=True)):
        low, high = max(begin, offset), min(end, offset + numel)
        if low < high:
            found.append(_Part(slot, low - begin, high - begin, low - offset))
    return found
