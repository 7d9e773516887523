"""AsynchronousMode: gradients are contributed and corrected, at this rank's own pace.

    end of a synchronised backward   the loss scale is removed, then Contributions.end_of_step: gradients are corrected
    flush, state_dict                the averages of all contributions are applied, on every rank

Its collectives have a communicator of their own, because ranks are in different steps. So nothing else is exchanged
within a step either: unused parameters, a norm to clip by, and non-finite gradients are this rank's own.

A rank with a loss scaler whose gradients are not finite is about to skip its step. Nothing of that step is contributed,
and no average is applied in it, because it would be lost: it is applied in the next step. So no other rank notices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ...buckets.bucket_set import BucketMaker, BucketSet
from ...buckets.reduction import Members, Reduction
from ...buckets.step_feature import Ended
from ...buckets.tensors import any_gradient, real_dtype
from ...comm.protocol import Communicator
from ...comm.waiting import naming_failure
from ...config import FlushReport
from ...errors import AgreementError, CollectiveError
from ...wires import cast_of
from . import checkpoint
from .asynchronous_bucket import AsynchronousBucket
from .average_parameters import equalize
from .bounded_staleness import NO_SYNC_WAITS, DelayedMode
from .contributions import Contributions
from .gradient_stash import GradientStash
from .mode import DelayedAverages
from .steps import Steps


class AsynchronousMode(DelayedMode):
    """Ranks step at their own pace: each contributes its gradients, and averages correct later ones.

    Args:
        maker: what the reducer's buckets have in common.
        max_in_flight: number of contributions that may be in flight at once.
        stash, late: see `DelayedMode`.
    """

    together = False

    def __init__(self, maker: BucketMaker, max_in_flight: int, stash: GradientStash, late: DelayedAverages) -> None:
        super().__init__(stash, late)
        self._maker = maker
        self._max_in_flight = max_in_flight
        self._members: list[Members] = []
        self._communicator: Communicator | None = None
        self._contributions: Contributions | None = None

    # Between steps

    def set_buckets(self, buckets: BucketSet) -> None:
        """Switches to other buckets, from the next contribution on; does nothing if they are the same."""
        members = [one.members for one in buckets.reductions]
        same = [one.numbers for one in members] == [one.numbers for one in self._members]
        if self._contributions is not None and same:
            return
        assert self._contributions is None or self._contributions.empty, "a plan has changed under contributions"
        self._members = members
        self._make()

    def open(self) -> None:
        """Connects the ranks, so that no contribution has to wait for that within a backward."""
        if self._communicator is None:
            whole = self._maker.group.communicator
            with naming_failure("the asynchronous mode's own group could not be made", whole):
                self._communicator = whole.apart(dict.fromkeys(one.device for one in self._maker.parameters.tensors))
                self._make()

    def release(self) -> None:
        """Drops the contributions and closes the mode's own communicator."""
        self._contributions = None
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None

    def stats(self) -> dict[str, int | str]:
        """Numbers of contributions and of steps merged into them, and what their wires hold."""
        one = self._contributions
        return {
            "contributions": 0 if one is None else one.issued,
            "contributions_under_way": 0 if one is None else one.under_way,
            "merged_steps": 0 if one is None else one.merged,
            "wire_bytes": 0 if one is None else sum(ledger.wire_bytes for ledger in one.ledgers),
            "padding_bytes": 0 if one is None else sum(ledger.padding_bytes for ledger in one.ledgers),
            "wire_allocations": 0 if one is None else sum(ledger.wires_made for ledger in one.ledgers),
        }

    # A step

    def end_step(self, steps: Steps, launched: Sequence[Reduction]) -> Ended:
        """Contributes and corrects the gradients. Waits for no peer.

        Raises:
            TypeError, CollectiveError: as `Contributions.end_of_step`.
        """
        observed, contributions = steps.observed, self._opened()
        if steps.buckets.streams is not None:
            for members in self._members:
                steps.buckets.streams.wait_for_gradients(members.index, members.device)
        scale = observed.units.scale_of_step()
        if scale is not None:
            observed.table.multiply(scale.inverse)
        if not (observed.units.attached and bool(observed.table.measure().total[2] > 0)):
            contributions.end_of_step()
        return Ended(steps.rounds + 1, measured=False)

    # What is outstanding

    def pending(self) -> str:
        """Says whether averages are outstanding."""
        settled = self._contributions is None or self._contributions.settled
        return "" if settled else "averages of steps since the last flush() are outstanding"

    def flush(
        self,
        steps: Steps,
        step: Callable[[], None] | None,
        optimizers: Sequence[Optimizer],
        buffers: Sequence[torch.Tensor],
    ) -> FlushReport:
        """Applies all averages at once; then parameters, optimizers' states and buffers become the same everywhere."""
        maker, contributions = steps.maker, self._opened()
        stopped: Exception | None = None
        try:
            if self.stash.local():
                contributions.drain(f"flush() while {NO_SYNC_WAITS}")  # raises, on every rank
            self.stash.stash_unused()
            try:
                landed = contributions.drain()
            finally:
                self.stash.put_back()
            try:
                if step is not None and any_gradient(maker.parameters.tensors):
                    step()
            except Exception as error:
                stopped = error
            problem = "" if stopped is None else f"its step raised {type(stopped).__name__}: {stopped}"
            drift = equalize(
                maker.parameters.tensors,
                maker.parameters.names,
                optimizers,
                buffers,
                maker.group.communicator,
                problem,
            )
        except CollectiveError as error:
            steps.fail(error)
            raise
        except AgreementError:
            if stopped is not None:
                raise stopped from None
            raise
        self._late.flushed += 1
        return FlushReport(landed, drift.largest, drift.relative)

    def state_dict(self, steps: Steps) -> dict[str, Any]:
        """This rank's outstanding correction; see `Contributions.owed`."""
        owed = self._opened().owed()
        return {
            **self._header(),
            "owed": {name: owed.get(number) for number, name in enumerate(self._maker.parameters.names)},
        }

    def load_state_dict(self, steps: Steps, state: Mapping[str, Any]) -> None:
        """Restores this rank's outstanding correction."""
        checkpoint.check(state, self._header())
        owed = checkpoint.in_order(state["owed"], self._maker, own_dtype=False)
        self._opened().owe({number: one for number, one in enumerate(owed) if one is not None})

    # Within

    def _header(self) -> dict[str, Any]:
        return checkpoint.header(self._maker, "asynchronous", rank=self._maker.group.communicator.rank)

    def _opened(self) -> Contributions:
        assert self._contributions is not None, "open() has not been called"
        return self._contributions

    def _make(self) -> None:
        if self._communicator is None or not self._members:
            return
        ledgers, divisor = [], self._maker.config.divisor(self._communicator.size)
        for members in self._members:
            cast = cast_of(self._maker.wires[members.numbers[0]])
            wire = real_dtype(members.parameters[0].dtype) if cast is None else cast.torch_dtype
            wire = torch.float32 if wire is torch.float16 else wire  # in which sums of several steps overflow
            self._communicator.check_wire(wire, members.device)
            ledgers.append(AsynchronousBucket(members, self._communicator, wire, divisor=divisor, cast=cast))
        before = 0 if self._contributions is None else self._contributions.comparisons
        self._contributions = Contributions(ledgers, self._communicator, self._max_in_flight, before)
