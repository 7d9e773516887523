"""The data path of one bucket, stateless: start (pack, all-reduce) and finish (unpack).

    start(bucket, gradients)   gradient / divisor -> wire, one rounding;  all-reduce(wire), asynchronous
    finish(in_flight)          wire * scale -> the same gradients; a loss scale comes off here

On request the two kernels also write statistics: non-finite values, norms, and what the wire flushes to zero.

Two launches and one collective per bucket. Where the wire has the gradients' own dtype and they already lie in one
buffer (a comm hook at wire "native"), `start` divides in place and there is nothing to finish: one launch.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.autograd import profiler
from torch.profiler import record_function

from ..comm.protocol import Communicator, Pending
from ..comm.waiting import collective_failed
from ..config import Op
from ..errors import CollectiveError
from ..kernels.table import Gradients, Partials, SourcePartials
from .bucket import Bucket, BucketState


@dataclass(frozen=True)
class InFlight:
    """A bucket in flight. It owns the gradients, because a kernel may still read the pointer table that refers to them.

    Args:
        bucket: which one.
        gradients: per slot the real memory that was packed; None where missing.
        wire: what `Bucket.unpack` takes when the collective is done.
        pending: the collective.
        rank: of this process.
        in_place: the gradient itself is the wire.
        issued_ns: time.perf_counter_ns() right before the collective was issued: it may end before this thread goes on.
    """

    bucket: Bucket
    gradients: tuple[torch.Tensor | None, ...]
    wire: torch.Tensor
    pending: Pending
    rank: int
    in_place: bool
    issued_ns: int


def prepare(bucket: Bucket, *, stats: bool = False) -> None:
    """On CUDA: compiles the bucket's kernels and uploads what never changes, so that no backward has to.

    Args:
        bucket: the bucket.
        stats: also the variants that write statistics.
    """
    if bucket.device.type == "cuda":
        with torch.cuda.device(bucket.device):
            bucket.warm_up(stats=stats)
            bucket.chunks.on(bucket.device)
            scalar(1.0 / bucket.split, bucket.compute_dtype, bucket.device)


def start(
    bucket: Bucket,
    gradients: Gradients,
    communicator: Communicator,
    *,
    divisor: float,
    in_place: bool = False,
    partials: SourcePartials | None = None,
) -> InFlight:
    """Packs `gradients` and starts their all-reduce.

    Args:
        bucket: idle or checked out; its layout says what each gradient is.
        gradients: one per slot, None where missing; their sizes, dtypes and memory layout are those of the slots. Read
            before this returns (on CUDA: by the current stream).
        communicator: the ranks to average over.
        divisor: what to divide by.
        in_place: the one gradient is flat and has the wire's dtype: it is the wire.
        partials: where statistics of the packed gradients go; None: nowhere.

    Returns:
        The bucket in flight, for `finish`.

    Raises:
        CollectiveError: the collective could not be issued.
    """
    assert bucket.state in (BucketState.IDLE, BucketState.TAKEN), f"{bucket.label} is {bucket.state.value}"
    with _range("pack", bucket) if profiler._is_profiler_enabled else _NO_RANGE:
        wire = gradients[0] if in_place else bucket.wire()
        assert wire is not None
        bucket.pack(gradients, wire, divisor, partials)
    bucket.state = BucketState.LAUNCHED
    issued_ns = time.perf_counter_ns()
    try:
        with _range("all_reduce", bucket) if profiler._is_profiler_enabled else _NO_RANGE:
            pending, reduced = bucket.reduce(wire, communicator)
    except CollectiveError:  # of a bucket before this one
        bucket.state = BucketState.FAILED
        raise
    except RuntimeError as error:
        bucket.state = BucketState.FAILED
        state = "divided by the number of ranks, but not summed" if in_place else "still this rank's own"
        what = f"{bucket.collective_text()} could not be started (its gradients are {state})"
        raise collective_failed(what, communicator, error) from error
    return InFlight(bucket, tuple(gradients), reduced, pending, communicator.rank, in_place, issued_ns)


def finish(
    in_flight: InFlight,
    gradients: Gradients | None = None,
    *,
    scale: torch.Tensor | None = None,
    partials: Partials | None = None,
) -> torch.cuda.Event | None:
    """Unpacks the reduced wire into the gradients it was packed from; the collective must be done.

    Args:
        in_flight: what `start` returned.
        gradients: other tensors to unpack into, None where a slot is to be skipped; None: those that were packed.
        scale: what to multiply by, one element of the compute dtype on the device; None: what takes the split off.
        partials: where statistics of the unpacked gradients go; None: nowhere.

    Returns:
        On CUDA the event after which the gradients may be read by any stream; None on CPU.
    """
    bucket = in_flight.bucket
    try:
        if not in_flight.in_place:
            with _range("unpack", bucket) if profiler._is_profiler_enabled else _NO_RANGE:
                by = scalar(1.0 / bucket.split, bucket.compute_dtype, bucket.device) if scale is None else scale
                into = in_flight.gradients if gradients is None else gradients
                bucket.unpack(into, in_flight.wire, by, partials)
        event = bucket.unpacked()
    except BaseException:
        bucket.state = BucketState.FAILED
        raise
    bucket.state = BucketState.IDLE
    return event


def fp16_split(ranks: int, op: Op = "mean") -> float:
    """What an fp16 wire holds, divided by the result: a power of two; of a mean about the root of the ranks' number.

    To divide by the full number of ranks before the sum flushes small values to zero; not to divide before it lets
    large ones overflow; and a power of two costs no rounding. Example, 8 ranks: 4, so gradients are divided by 2 before
    and by 4 after the sum, which keeps gradients from 6e-8 on and means up to 16,376. For two and three ranks it is 1.

    For op="sum" it is below one: the inverse of the least power of two that is no less than the number of ranks. The
    wire can then hold the sum of whatever each rank can hold.

    Args:
        ranks: number of ranks, at least 1.
        op: "mean" or "sum".

    Returns:
        A power of two.
    """
    if op == "sum":
        return 0.5 ** (ranks - 1).bit_length()
    power = ranks.bit_length() - 1
    return 2.0 ** ((power + 1) // 2) if power > 1 else 1.0


def divisor_split(wire: torch.dtype, gradients: Collection[torch.dtype], ranks: int, op: Op = "mean") -> float:
    """What a bucket's wire holds, divided by the result: a power of two, which unpack takes off.

    Args:
        wire: dtype of the wire.
        gradients: real dtypes of the gradients.
        ranks: number of ranks.
        op: the reduction.

    Returns:
        `fp16_split` for an fp16 wire, else 1. It is 1 where a gradient is fp16 itself, because unpack would then round
        a second time.
    """
    return fp16_split(ranks, op) if wire is torch.float16 and torch.float16 not in gradients else 1.0


def accumulated_split(wire: torch.dtype, ranks: int, op: Op = "mean") -> float:
    """What a contribution is multiplied by beside its division, where sums are in fp32 and no rounding is left to undo.

    Contributions to a mean in fp16 are divided by a power of two, which costs no digit, and the rest comes off their
    sum. It is at least 2, so that gradients of 80000 and 0 fit, and about the root of the ranks' number.

    Args:
        wire: dtype of the wire.
        ranks: number of ranks, at least 2.
        op: the reduction.

    Returns:
        The factor; for op="sum" that of `fp16_split`, which unpacking takes off: the wire may not hold the sum itself.
    """
    if wire is not torch.float16:
        return 1.0
    power = ranks.bit_length() - 1
    return fp16_split(ranks, op) if op == "sum" else ranks / 2.0 ** max(1, power // 2)


@functools.cache
def scalar(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What unpack multiplies by where there is no loss scale: on the device, uploaded once, when a bucket is prepared.

    The host waits for the upload, because several streams will read it.
    """
    return torch.tensor([value], dtype=dtype, device="cpu").to(device)


def _range(stage: str, bucket: Bucket) -> AbstractContextManager[object]:
    """A range in torch's profiler, which costs 5 us, so only while the profiler is on."""
    return record_function(f"fusedreduce::{stage} {bucket.label}")


_NO_RANGE = nullcontext()
