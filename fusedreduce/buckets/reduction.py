"""Members of a bucket, and what the reducer asks of a reduction."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..comm.group import Group
from ..comm.protocol import Pending
from ..errors import FusedReduceError
from ..kernels.table import Partials, SourcePartials
from ..planning.plan import bucket_label
from .gradient_views import GradientViews
from .loss_scale import LossScale


@dataclass(frozen=True, eq=False)
class Members:
    """The parameters of one bucket.

    Args:
        index: the bucket's place in the launch order.
        numbers: the parameters' numbers within the reducer.
        parameters: the parameters.
        names: their names.
        is_last: whether it is the last bucket of the plan.
    """

    index: int
    numbers: tuple[int, ...]
    parameters: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    is_last: bool

    @functools.cached_property
    def label(self) -> str:
        """The bucket's index and its parameters' names, for messages."""
        return bucket_label(self.index, self.names)

    def all_reduce_text(self) -> str:
        """Names the bucket's all-reduce, for errors."""
        return f"the all-reduce of {self.label}"

    @functools.cached_property
    def device(self) -> torch.device:
        """The device of all of them."""
        return self.parameters[0].device


class StartedCollective(NamedTuple):
    """A collective that `launch` has started.

    Args:
        watched: its handle; None: none was started yet.
        issued_ns: time.perf_counter_ns() when it was issued.
    """

    watched: Pending | torch.futures.Future[Any] | None
    issued_ns: int


class Reduction:
    """One bucket's reduction, as the reducer drives it: launch, check_unchanged, finish.

    Args:
        members: the bucket's parameters.
        group: the ranks to average over.

    Attributes:
        source: where statistics of the packed gradients go; None: nowhere.
        result: where those of the unpacked gradients go; None: nowhere.
    """

    source: SourcePartials | None = None
    result: Partials | None = None
    _views: GradientViews | None = None  # of the bucket's buffer, as far as gradients may be such

    def __init__(self, members: Members, group: Group) -> None:
        self.members = members
        self._group = group
        # The gradients that `launch` has taken, and their versions then; None: a hook may write to them.
        self._packed: list[torch.Tensor | None] = []
        self._versions: list[int] | None = None

    def launch(self, divisor: float) -> StartedCollective:
        """Takes the gradients as they are now and starts their reduction.

        Args:
            divisor: what gradients are divided by.

        Returns:
            The collective.

        Raises:
            TypeError: a gradient is of another layout or dtype than its bucket.
            CollectiveError: the collective could not be issued.
        """
        raise NotImplementedError

    def check_unchanged(self) -> None:
        """Raises FusedReduceError, which names it, if a gradient was replaced or written to after it had been packed.

        (A second gradient of a backward is accumulated in place: written.)
        """
        for slot, (parameter, before) in enumerate(zip(self.members.parameters, self._packed, strict=True)):
            if parameter.grad is not before:
                raise self._changed_error(slot, replaced=True)
            if before is not None and self._versions is not None and before._version != self._versions[slot]:
                raise self._changed_error(slot, replaced=False)

    def finish(self, unused: Collection[int], scale: LossScale | None) -> None:
        """Waits for the reduction and writes the gradients.

        Args:
            unused: numbers of parameters that no rank has used: their gradients are left as they are.
            scale: the loss scale, which is removed on the way; None: there is none.

        Raises:
            CollectiveError: a peer died, left, or did not answer.
        """
        raise NotImplementedError

    def release(self) -> None:
        """Drops memory that lasts as long as a step. On CUDA the current stream is behind what `finish` enqueued."""

    def spans(self) -> list[tuple[int, int]]:
        """Per parameter its rows of statistics, [begin, end), one behind the other."""
        raise NotImplementedError

    def collect(self, source: SourcePartials | None, result: Partials) -> None:
        """Sets where statistics go, from the next step on.

        Args:
            source: of the gradients that are packed; None: none are wanted.
            result: of the gradients that are unpacked.
        """
        self.source, self.result = source, result

    def _first_non_finite(self) -> Partials:
        """Where what is packed is measured; but for its first non-finite values, what is unpacked takes its place."""
        assert self.source is not None and self.result is not None
        return Partials(self.result.sums, self.result.peaks, self.source.first_non_finite)

    def skip(self) -> None:
        """Writes the statistics of a step in which this bucket is not reduced: zeros, nothing non-finite."""
        if self.source is not None:
            self.source.first_non_finite.fill_(-1)
            self.source.flushed.zero_()
        if self.result is not None:
            self.result.sums.zero_()
            self.result.peaks.zero_()
            self.result.first_non_finite.fill_(-1)

    def zero_views(self) -> bool:
        """Zeroes all gradients at once if each is a view of one buffer; returns whether it did."""
        gradients = [parameter.grad for parameter in self.members.parameters]
        if self._views is None or not self._views.hold_all(gradients):
            return False
        self._views.buffer.zero_()
        return True

    def drop_views(self) -> None:
        """Sets gradients that are views of a buffer to None: a collective may still write there."""
        views = [] if self._views is None else self._views.tensors
        for parameter, view in zip(self.members.parameters, views, strict=False):
            if parameter.grad is view:
                parameter.grad = None

    def _changed_error(self, slot: int, *, replaced: bool) -> FusedReduceError:
        name, number = self.members.names[slot], self.members.numbers[slot]
        twice = f"Expected to mark a variable ready only once. Parameter at index {number} with name {name}: "
        return FusedReduceError(
            f"{'' if replaced else twice}rank {self._group.communicator.rank}: the gradient of {name} (parameter "
            f"{number}) was {'replaced' if replaced else 'written to'} after it had been packed into bucket "
            f"{self.members.index}, so the reduced gradient lacks that change. Usual causes: a hook of yours that ran "
            "after the reducer's (register it on the parameter itself), or a second backward through the same "
            "parameter, as by reentrant checkpoints that share it or by its use outside of forward (use "
            "static_graph=True)"
        )
