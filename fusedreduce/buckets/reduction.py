"""Members of a bucket, and what the reducer asks of a reduction."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from ..comm.protocol import Communicator, Pending
from ..comm.waiting import wait_for
from ..errors import FusedReduceError
from ..kernels.table import ChunkTable, Partials, SourcePartials
from ..planning.plan import bucket_label
from .grad_bucket import GradBucket
from .loss_scale import Unscaling
from .tensors import none_missing


@dataclass(frozen=True, eq=False)
class Members:
    """The parameters of one bucket.

    Args:
        index: the bucket's place in the launch order.
        numbers: the parameters' numbers within the reducer.
        parameters: themselves.
        names: theirs.
        is_last: whether no bucket follows.
    """

    index: int
    numbers: tuple[int, ...]
    parameters: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    is_last: bool

    @property
    def label(self) -> str:
        """The bucket and its parameters' names."""
        return bucket_label(self.index, self.names)

    @property
    def device(self) -> torch.device:
        """Where all of them live."""
        return self.parameters[0].device


class StartedCollective(NamedTuple):
    """A collective that `launch` has started.

    Args:
        watched: tells when it ends.
        issued_ns: time.perf_counter_ns() when it was issued; None: not seen.
    """

    watched: Pending | torch.futures.Future[Any]
    issued_ns: int | None


class Reduction(Protocol):
    """What the reducer asks of a bucket."""

    members: Members

    groups: Sequence[range]  # slots that can be taken together ahead of `launch`; all slots or none
    early: Collection[int]  # which of the groups are worth it

    def pack_early(self, group: int, divisor: float) -> None:
        """Takes a group's gradients, if all are there, as they are now and ahead of `launch`."""
        ...

    def is_complete(self) -> bool:
        """Whether every gradient is there."""
        ...

    def launch(self, divisor: float) -> None:
        """Takes the gradients as they are now and starts their reduction."""
        ...

    def in_flight(self) -> StartedCollective | None:
        """What `launch` started and `finish` will wait for."""
        ...

    def check_unchanged(self) -> None:
        """Raises if a gradient is not what it was when it was taken."""
        ...

    def finish(self, unused: Collection[int], unscaling: Unscaling) -> None:
        """Waits for the reduction, and writes every gradient whose parameter's number is not in `unused`.

        The loss scale comes off on the way.
        """
        ...

    @property
    def rows(self) -> int:
        """Rows of by-products."""
        ...

    def spans(self) -> list[tuple[int, int]]:
        """Per member its rows, [begin, end)."""
        ...

    def collect(self, source: SourcePartials | None, result: Partials | None) -> None:
        """From the next step on: where the by-products go of what is packed, and of what is unpacked."""
        ...

    def skip(self) -> None:
        """Writes by-products for a step in which this bucket is not reduced."""
        ...

    def zero_views(self) -> bool:
        """Zeroes all gradients at once if each is a view of one buffer; says whether it did."""
        ...

    def drop_views(self) -> None:
        """Sets gradients that are views of a buffer to None: a collective may still write there."""
        ...

    def shadow(self) -> GradBucket:
        """Zeros that a joined rank contributes in place of gradients."""
        ...

    def run_shadow(self, bucket: GradBucket) -> Pending | torch.futures.Future[torch.Tensor] | None:
        """Issues the collective of `launch` for what `shadow` returned; None where `launch` issues none."""
        ...


class WritesPartials:
    """Where a reduction's by-products go.

    `source` and `result`: of what goes into the reduction and what comes out; None: not wanted.
    """

    source: SourcePartials | None = None
    result: Partials | None = None

    def collect(self, source: SourcePartials | None, result: Partials | None) -> None:
        """From the next step on: where the by-products go of what is packed, and of what is unpacked."""
        self.source, self.result = source, result

    def skip(self) -> None:
        """Writes by-products for a step in which this bucket is not reduced."""
        if self.source is not None:
            self.source.first_non_finite.fill_(-1)
            self.source.flushed.zero_()
        if self.result is not None:
            self.result.sums.zero_()
            self.result.peaks.zero_()
            self.result.first_non_finite.fill_(-1)


class PackedAtLaunch(WritesPartials):
    """A reduction that takes nothing ahead of `launch`."""

    members: Members
    groups: Sequence[range] = ()
    early: Collection[int] = ()

    def pack_early(self, group: int, divisor: float) -> None:
        """Never called: there are no groups."""

    def is_complete(self) -> bool:
        """Whether every gradient is there."""
        return none_missing([parameter.grad for parameter in self.members.parameters])


def row_spans(chunks: ChunkTable) -> list[tuple[int, int]]:
    """Per slot its rows of by-products."""
    return list(itertools.pairwise(chunks.first_rows.tolist()))


def check_unchanged(
    members: Members,
    now: Sequence[torch.Tensor | None],
    packed: Sequence[torch.Tensor | None],
    versions: Sequence[int] | None,
    rank: int,
) -> None:
    """Checks that gradients still are the tensors that were packed, and that nothing has written to them since.

    Args:
        members: the bucket's parameters.
        now: their gradients.
        packed: what they were when the bucket was packed.
        versions: of `packed`, then; None: writing is allowed.
        rank: for the message.

    Raises:
        FusedReduceError: one is not; names it. (A second gradient of a backward is accumulated in place: written.)
    """
    for slot, (gradient, before) in enumerate(zip(now, packed, strict=True)):
        if gradient is not before:
            raise _changed_error(members, slot, True, rank)
        if gradient is not None and versions is not None and gradient._version != versions[slot]:
            raise _changed_error(members, slot, False, rank)


def _changed_error(members: Members, slot: int, replaced: bool, rank: int) -> FusedReduceError:
    twice = "" if replaced else "Expected to mark a variable ready only once. "
    return FusedReduceError(
        f"{twice}rank {rank}: the gradient of {members.names[slot]} (parameter {members.numbers[slot]}) was "
        f"{'replaced' if replaced else 'written to'} after it had been packed into bucket {members.index}, so its "
        "reduction lacks what was added. A hook of yours, or a second backward through the same parameter (reentrant "
        "checkpoints that share it, use outside of forward), came after the reducer: use static_graph=True, or "
        "register the hook on the parameter itself"
    )


def wait_for_bucket(pending: Pending, members: Members, communicator: Communicator) -> None:
    """Waits for a bucket's all-reduce. Raises CollectiveError: its gradients are still this rank's own."""
    wait_for(pending, lambda: f"the all-reduce of {members.label}", communicator)
