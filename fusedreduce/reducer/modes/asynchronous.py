"""AsynchronousMode: the asynchronous mode of one reducer: what takes the place of its pipeline's launch and finish.

    end of a synchronised backward   a loss scale comes off, then Contributions.end_of_step: gradients are corrected
    flush, state_dict                everything lands, everywhere

Its collectives are on a channel of their own, apart from the reducer's: ranks are in different steps. So nothing else
is exchanged within a step either: what is unused, a norm to clip by, whether a gradient is finite, is this rank's own.

A rank whose gradients are not finite under a loss scaler is about to skip its step. Nothing of that step is
contributed, and nothing lands in it, since it would be lost: it lands in the next one. So no other rank notices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...buckets.bucket_set import BucketMaker
from ...buckets.reduction import Members
from ...buckets.stats.grad_stats import Observed
from ...buckets.streams import Streams
from ...buckets.tensors import real_dtype
from ...comm.protocol import Communicator
from ...config import Asynchronous, ReduceConfig
from .asynchronous_bucket import Ledger
from .contributions import Contributions, Drained


class AsynchronousMode:
    """The asynchronous mode of one reducer. Called under its lock.

    Args:
        maker: what its buckets have in common.
        max_in_flight: contributions under way at once.
    """

    def __init__(self, maker: BucketMaker, max_in_flight: int) -> None:
        self._maker = maker
        self._max_in_flight = max_in_flight
        self._members: list[Members] = []
        self._channel: Communicator | None = None
        self._contributions: Contributions | None = None
        self.skipped = 0

    # Between steps

    def set_buckets(self, members: Sequence[Members]) -> None:
        """The buckets in use, from the next contribution on; what is under way stays if they are the same."""
        same = [one.numbers for one in members] == [one.numbers for one in self._members]
        if self._contributions is not None and same:
            return
        assert self._contributions is None or self._contributions.empty, "a plan has changed under contributions"
        self._members = list(members)
        self._make()

    def open(self) -> None:
        """Makes the channel, once. Every rank calls it at the same place; it may wait for the others.

        The ranks are connected then, so that no contribution, within a backward, has to wait for that.
        """
        if self._channel is None:
            devices = dict.fromkeys(parameter.device for parameter in self._maker.parameters)
            self._channel = self._maker.communicator.apart(devices)
            self._make()

    def set_communicator(self, communicator: Communicator) -> None:
        """Goes on with other ranks, and nothing under way. To be followed by `open`."""
        self.release()
        self._maker = dataclasses.replace(self._maker, communicator=communicator)

    def release(self) -> None:
        """Gives everything up, the channel too. May be called twice."""
        self._contributions = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    @property
    def failed(self) -> bool:
        """Whether a collective of the channel has: it cannot be used any more."""
        return self._contributions is not None and bool(self._contributions.failure)

    @property
    def settled(self) -> bool:
        """See `Contributions.settled`."""
        return self._contributions is None or self._contributions.settled

    def stats(self) -> dict[str, int | str]:
        """contributions issued on this channel, contributions_under_way, steps merged into later contributions."""
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

    def end_step(self, observed: Observed, streams: Streams) -> None:
        """The gradients are all there: they are contributed and corrected. Waits for no peer."""
        contributions = self._opened()
        for members in self._members:
            streams.wait_for_gradients(members.index, members.device)
        with torch.no_grad():
            scale = observed.units.unscaling().scale
            if scale is not None:
                observed.table.multiply(scale.inverse)
            if observed.units.attached and bool(observed.table.measure().total[2] > 0):
                self.skipped += 1
                return
        contributions.end_of_step()

    # All that is left

    def drain(self, problem: str = "") -> Drained:
        """See `Contributions.drain`."""
        return self._opened().drain(problem)

    def state(self) -> dict[str, Any]:
        """See `Contributions.state`."""
        return self._opened().state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `Contributions.load_state`."""
        self._opened().load_state(state)

    # Within

    def _opened(self) -> Contributions:
        assert self._contributions is not None, "the channel has not been opened"
        return self._contributions

    def _make(self) -> None:
        if self._channel is None or not self._members:
            return
        ledgers = []
        for members in self._members:
            wire = wire_dtype(self._maker, members)
            self._channel.check_wire(wire, members.device)
            divisor = self._maker.config.divisor(self._channel.size)
            ledgers.append(Ledger(members, self._channel, wire, divisor=divisor))
        self._contributions = Contributions(ledgers, self._channel, self._max_in_flight)


def check(config: ReduceConfig, names: Sequence[str], sparse: Sequence[bool]) -> None:
    """Refuses what the asynchronous mode cannot do; nothing, in another mode.

    Raises:
        ValueError: an fp16 wire, check_finite, or sparse gradients.
    """
    if not isinstance(config.sync_mode, Asynchronous):
        return
    if config.wire == "fp16":
        raise ValueError(
            "wire='fp16' and Asynchronous exclude each other: a rank that is ahead sends the sum of many steps, which "
            "overflows there; use 'bf16'"
        )
    if config.check_finite != "off":
        raise ValueError(
            f"check_finite={config.check_finite!r} and Asynchronous exclude each other: ranks compare what they found "
            "in every step, and are in different ones"
        )
    found = [name for name, one in zip(names, sparse, strict=True) if one]
    if found:
        raise ValueError(f"the gradients of {', '.join(found[:8])} are sparse; Asynchronous takes dense ones only")


def wire_dtype(maker: BucketMaker, members: Members) -> torch.dtype:
    """What a bucket travels in. fp16 gradients in fp32, since sums of several steps overflow in fp16."""
    wire = maker.config.wire_dtype(real_dtype(members.parameters[0].dtype))
    return torch.float32 if wire is torch.float16 else wire
