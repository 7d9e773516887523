"""Streams: the CUDA streams of a reduction: pack waits for all that made gradients, unpack runs on a side stream.

A bucket's gradients may come from several streams, if parts of the forward ran on others than the default. They are
recorded with each parameter's first gradient under a plan: an AccumulateGrad node keeps its stream for life, and one
that replaces it gets the same. On CPU there are none.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from ..errors import FusedReduceError
from ..kernels.current_stream import current_stream


def refuse_capture(rank: int) -> None:
    """Refuses a step on CUDA within the capture of a graph. The check changes nothing, so the capture stays usable.

    A step waits for events of earlier steps, reads measurements on the host, and agrees with other ranks on the next
    plan: a capture allows none of that, and no replay would do it.

    Args:
        rank: for the message.

    Raises:
        FusedReduceError: a CUDA graph is being captured on the current stream.
    """
    if torch.cuda.is_current_stream_capturing():
        raise FusedReduceError(
            f"rank {rank}: a CUDA graph is being captured, and steps of fusedreduce cannot be part of one. Capture the "
            "module's forward and backward alone, with torch.cuda.make_graphed_callables before it is wrapped; the "
            "reduction runs behind each replay. (The kernels alone, fusedreduce.kernels.dispatch, can be captured.)"
        )


def streams_of(bucket_of: Sequence[int], device: torch.device) -> Streams | None:
    """The streams of the buckets of one plan; None: the gradients are not on CUDA.

    Args:
        bucket_of: by parameter its bucket.
        device: a device of the gradients' type.
    """
    return Streams(bucket_of) if device.type == "cuda" else None


class Streams:
    """The streams of the buckets of one plan.

    Args:
        bucket_of: by parameter its bucket.

    Attributes:
        unrecorded: parameters whose gradient's stream is not known yet.
    """

    def __init__(self, bucket_of: Sequence[int]) -> None:
        self.unrecorded = set(range(len(bucket_of)))
        self._bucket_of = bucket_of
        self._made: list[dict[int, torch.cuda.Stream]] = [{} for _ in range(max(bucket_of) + 1)]
        self._side: dict[torch.device, torch.cuda.Stream] = {}
        self._packed: dict[tuple[torch.device, int], torch.cuda.Stream] = {}
        # To record an event again is safe, because a stream waits for what was recorded when it was told to.
        self._turns: defaultdict[torch.device, torch.cuda.Event] = defaultdict(torch.cuda.Event)
        # Two for each bucket, by turns: that of its last step may be queried until the next one's takes its place. By
        # device too: a step in flight is written in the buckets of its own plan, and an event stays on one device.
        self._written: defaultdict[tuple[int, torch.device], Iterator[torch.cuda.Event]] = defaultdict(
            lambda: itertools.cycle((torch.cuda.Event(), torch.cuda.Event()))
        )

    def record(self, parameter: int, device: torch.device) -> None:
        """Records that a parameter's gradient was accumulated on the current stream."""
        stream = current_stream(device)
        self._made[self._bucket_of[parameter]].setdefault(stream.cuda_stream, stream)
        self.unrecorded.discard(parameter)

    def wait_for_gradients(self, bucket: int, device: torch.device) -> None:
        """Makes the current stream, where a bucket is packed next, wait for all enqueued on its gradients' streams."""
        current = current_stream(device)
        self._packed.setdefault((device, current.cuda_stream), current)
        for stream in self._made[bucket].values():
            if stream.device == current.device and stream != current:
                current.wait_stream(stream)

    def wait_for_packs(self) -> None:
        """Makes each device's current stream wait for this step's packs on other streams."""
        packed, self._packed = self._packed, {}
        for (device, _), stream in packed.items():
            current = current_stream(device)
            if stream != current:
                current.wait_stream(stream)

    @contextmanager
    def beside(self, device: torch.device) -> Iterator[Callable[[int], torch.cuda.Event]]:
        """Context in which a side stream is current.

        The outer stream waits for it, also after an exception.

        Args:
            device: of the gradients that are written there.

        Yields:
            Records on the side stream that a bucket is written, and returns that event.
        """
        if device not in self._side:
            self._side[device] = torch.cuda.Stream(device)
        side, current, turn = self._side[device], current_stream(device), self._turns[device]

        def written(bucket: int) -> torch.cuda.Event:
            event = next(self._written[bucket, device])
            event.record(side)
            return event

        try:
            turn.record(current)  # a user's hook may have enqueued a kernel that still reads a gradient
            side.wait_event(turn)
            with torch.cuda.stream(side):
                yield written
        finally:
            turn.record(side)
            current.wait_event(turn)


class AsideStreams:
    """A side stream per device, for what follows a collective in the middle of backward, which does not wait for it.

    What is enqueued there is behind that collective, and so behind all that the collective is behind. Nothing waits for
    the stream itself: a later collective is issued from it, and who waits for that is behind it. Where nobody will,
    because a step is given up, `join` comes before memory that is used there may be given out again.
    """

    def __init__(self) -> None:
        self._made: dict[torch.device, torch.cuda.Stream] = {}

    def on(self, device: torch.device) -> AbstractContextManager[object]:
        """Context in which the side stream of `device`, and that device, are current."""
        if device not in self._made:
            # Else a kernel of some us, for which a collective waits, would queue behind the blocks of backward's.
            self._made[device] = torch.cuda.Stream(device, priority=-1)
        return torch.cuda.stream(self._made[device])

    def join(self) -> None:
        """Makes each device's current stream wait for the side stream; not in a capture, whose memory is its own."""
        if self._made and not torch.cuda.is_current_stream_capturing():
            for device, side in self._made.items():
                current_stream(device).wait_stream(side)
