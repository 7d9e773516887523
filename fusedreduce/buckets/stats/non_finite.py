"""FiniteCheck: tells every rank which rank had a NaN or Inf in which gradient before it was reduced.

In each step every rank sends the others, in 16 bytes, the first of its parameters whose gradient holds one, and where:
one small collective after the last bucket's. Only the end of backward waits for it, and the host only to raise.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ...comm.group import Group
from ...comm.protocol import Pending
from ...comm.waiting import naming_failure, wait_for
from ...errors import NonFiniteGradientError, shortened
from ...kernels.table import Totals

_logger = logging.getLogger(__name__)
_REPORTS_KEPT = 100
_SHOWN = 8
_EXCHANGE = "the exchange of non-finite gradients between the ranks"


@dataclass(frozen=True)
class Culprit:
    """The first gradient of a rank that held a NaN or Inf before it was reduced.

    Args:
        rank: within the group.
        parameter: name of the parameter.
        index: the first such element, in the gradient's memory order (of a sparse gradient: within its values).
    """

    rank: int
    parameter: str
    index: int

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.parameter}, element {self.index}"


@dataclass(frozen=True)
class NonFiniteReport:
    """A step in which a gradient held a NaN or an Inf; equal on every rank.

    Args:
        step: number of the synchronised step, from 1.
        culprits: one for each rank that had one, in rank order. Empty if finite gradients overflowed on the wire.
        reduced: names of the parameters whose reduced gradient held one.
    """

    step: int
    culprits: tuple[Culprit, ...]
    reduced: tuple[str, ...]

    def __str__(self) -> str:
        where = shortened(self.culprits, _SHOWN, "; ")
        if self.culprits:
            text = f"step {self.step}: a NaN or Inf was in a gradient before it was reduced: {where}"
        else:
            text = (
                f"step {self.step}: every rank's gradients were finite, but their sum, or the wire's dtype, could not "
                "hold them"
            )
        return f"{text}. Not finite after the reduction: {shortened(self.reduced, _SHOWN) or 'none'}"


# Name and element of (number of a parameter, index within its memory), for a report.
Locate: TypeAlias = Callable[[int, int], tuple[str, int]]
# A collective that `FiniteCheck.start_exchange` has started, and the tensor that it will fill.
Started = tuple[Pending, torch.Tensor]


@dataclass(frozen=True)
class _Outcome:
    """The result of a step's check, on its way to the host."""

    step: int
    rank: int  # of this process
    ranks: torch.Tensor  # int64 [W, 2]: parameter or -1, index
    count: torch.Tensor  # fp64 [1]: parameters that are not finite after the reduction
    first: torch.Tensor  # int64 [P], on the device: where
    known: torch.cuda.Event | None
    excused: bool
    locate: Locate


class FiniteCheck:
    """The reports of one reducer.

    Args:
        locate: describes a parameter; None: `end_step` is given that of each step.
        group: the ranks.
        raises: raise at the end of the step.

    Attributes:
        reports: the latest ones.
    """

    def __init__(self, locate: Locate | None, group: Group, *, raises: bool) -> None:
        self._locate = locate
        self.group = group
        self._raises = raises
        self._gathered: torch.Tensor | None = None
        self._outcomes: deque[_Outcome] = deque()
        self._latest: NonFiniteReport | None = None
        self.reports: deque[NonFiniteReport] = deque(maxlen=_REPORTS_KEPT)

    def start_exchange(self, first: torch.Tensor) -> Started:
        """Starts the exchange of non-finite gradients, after the last bucket's collective, on every rank.

        Args:
            first: int64 [2] on the device: number of the first parameter whose gradient is not finite, or -1; and the
                index in memory.

        Returns:
            The exchange, for `complete`.

        Raises:
            CollectiveError: it could not be started.
        """
        with naming_failure(f"{_EXCHANGE} could not be started", self.group.communicator):
            return self.group.communicator.all_gather(first)

    def complete(self, started: Started) -> None:
        """Waits for an exchange; on CUDA only the current stream waits.

        Raises:
            CollectiveError: a peer died, left, or did not answer.
        """
        pending, self._gathered = started
        wait_for(pending, _EXCHANGE, self.group.communicator)

    def end_step(self, step: int, totals: Totals, *, excused: bool = False, locate: Locate | None = None) -> None:
        """Ends a step: reports what was not finite in it.

        Args:
            step: its number, from 1.
            totals: of the reduced gradients.
            excused: a loss scaler is attached, which finds its scale by overflows: nothing is raised or warned of.
            locate: describes the step's parameters, where they differ from step to step.
        """
        gathered, self._gathered = self._gathered, None
        locate = locate or self._locate
        assert gathered is not None and locate is not None
        ranks, count, known = gathered, totals.total[2:3], None
        if gathered.is_cuda and not self._raises:
            ranks, count = (torch.empty_like(one, device="cpu", pin_memory=True) for one in (ranks, count))
            ranks.copy_(gathered, non_blocking=True)
            count.copy_(totals.total[2:3], non_blocking=True)
            known = torch.cuda.Event()
            # The copies are on the stream of what they read, whichever device is current here.
            known.record(torch.cuda.current_stream(gathered.device))
        mine = self.group.communicator.rank
        self._outcomes.append(_Outcome(step, mine, ranks, count, totals.first_non_finite, known, excused, locate))
        if known is None:
            latest = self.make_reports()
            self._latest = None if excused else latest

    def check(self) -> None:
        """Raises for the step that `end_step` has ended.

        Raises:
            NonFiniteGradientError: with `raises`, on every rank alike, if a gradient held a NaN or Inf in this step.
        """
        report, self._latest = self._latest, None
        if report is not None and self._raises:
            raise NonFiniteGradientError(
                f"rank {self.group.communicator.rank}: {report}. All ranks have finished the step, but its gradients "
                "are worthless: call zero_grad() and go on with the next batch, or stop here"
            )

    def make_reports(self, *, all_of_them: bool = False) -> NonFiniteReport | None:
        """Makes the reports of the results that have reached the host.

        Args:
            all_of_them: wait for those that have not.

        Returns:
            The latest report made; None: there was none.
        """
        latest = None
        while self._outcomes:
            outcome = self._outcomes[0]
            if outcome.known is not None and not outcome.known.query():
                if not all_of_them:
                    break
                outcome.known.synchronize()
            self._outcomes.popleft()
            latest = self._report(outcome) or latest
        return latest

    def drop_step(self) -> None:
        """Drops what is known of a step that was given up, and the report that is to be raised."""
        self._gathered = self._latest = None

    def _report(self, outcome: _Outcome) -> NonFiniteReport | None:
        ranks = enumerate(outcome.ranks.tolist())
        culprits = [Culprit(rank, *outcome.locate(number, index)) for rank, (number, index) in ranks if number >= 0]
        reduced: tuple[str, ...] = ()
        if outcome.count.item() > 0:
            first = enumerate(outcome.first.tolist())
            reduced = tuple(outcome.locate(number, index)[0] for number, index in first if index >= 0)
        if not culprits and not reduced:
            return None
        report = NonFiniteReport(outcome.step, tuple(culprits), reduced)
        self.reports.append(report)
        concerned = outcome.rank == 0 or any(one.rank == outcome.rank for one in culprits)
        warned = concerned and not outcome.excused
        _logger.log(logging.WARNING if warned else logging.INFO, "rank %d: %s", outcome.rank, report)
        return report
