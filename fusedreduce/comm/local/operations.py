"""What the last peer to arrive does for all: the collectives of a LocalGroup, as functions of what the peers brought.

On CUDA the work goes to a stream of the group's own on each device that takes part, behind the events that the peers
left there; nothing waits on the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ...kernels import dispatch
from ..protocol import ReduceOp
from .rendezvous import Arrival, Outcome
from .strategies import Strategy

if TYPE_CHECKING:
    from ...kernels.combine import CombineTables

_PAIRWISE: Mapping[ReduceOp, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}
COMPUTED_WIDE = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})


class Workshop:
    """What a group keeps for its work: a stream and the sums' tables per CUDA device, made on first need.

    Args:
        strategy: of sums.
        size: ranks.
    """

    def __init__(self, strategy: Strategy, size: int) -> None:
        self.strategy = strategy
        self._size = size
        self._prepared: set[tuple[torch.dtype, torch.device]] = set()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._tables: dict[torch.device, CombineTables | None] = {}

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The one of a device. (Of two threads that need it first at once, one makes it in vain.)"""
        if device not in self._streams:
            self._streams.setdefault(device, torch.cuda.Stream(device))
        return self._streams[device]

    def tables(self, device: torch.device) -> CombineTables | None:
        """Those of a CUDA device, all of whose launches are on its stream."""
        if device.type == "cuda" and device not in self._tables:
            self._tables.setdefault(device, dispatch.new_combine_tables())
        return self._tables.get(device)

    def prepare(self, dtype: torch.dtype, device: torch.device) -> None:
        """Has the sum's kernel compiled before a step needs it, by adding one element up."""
        if device.type == "cuda" and (dtype, device) not in self._prepared:
            self._prepared.add((dtype, device))
            with torch.no_grad(), torch.cuda.stream(self.stream(device)):
                ones = [torch.ones(1, dtype=dtype, device=device) for _ in range(self._size)]
                dispatch.combine(ones, ones, self.strategy.parts(self._size, 1))


def perform(arrivals: Sequence[Arrival], workshop: Workshop) -> Outcome:
    """Carries out what all peers agree on.

    Args:
        arrivals: in rank order, with equal signatures.
        workshop: the group's.
    """
    kind = arrivals[0].kind
    if not arrivals[0].tensors:
        return Outcome(gathered=tuple(one.payload for one in arrivals))
    devices = list(dict.fromkeys(tensor.device for one in arrivals for tensor in one.tensors if tensor.is_cuda))
    ours = tuple(workshop.stream(device) for device in devices)
    inference = any(tensor.is_inference() for one in arrivals for tensor in one.tensors)
    with contextlib.ExitStack() as contexts:
        contexts.enter_context(torch.inference_mode() if inference else torch.no_grad())
        for stream in ours:
            for one in arrivals:
                for event in one.events:
                    stream.wait_event(event)
            contexts.enter_context(torch.cuda.stream(stream))
        results = _OPERATIONS[kind](arrivals, workshop)
    return Outcome(events=tuple(stream.record_event() for stream in ours), streams=ours, results=results)


def _all_reduce(arrivals: Sequence[Arrival], workshop: Workshop) -> None:
    tensors = [one.tensors[0] for one in arrivals]
    _reduce_into(tensors, tensors, arrivals[0].op, workshop)


def _reduce(arrivals: Sequence[Arrival], workshop: Workshop) -> None:
    root = arrivals[0].root
    assert root is not None
    tensors = [one.tensors[0] for one in arrivals]
    _reduce_into(tensors, [tensors[root]], arrivals[0].op, workshop)


def _reduce_into(
    tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], op: ReduceOp | None, workshop: Workshop
) -> None:
    first = tensors[0]
    assert op is not None
    if op == "sum" and first.dtype in COMPUTED_WIDE:
        parts = workshop.strategy.parts(len(tensors), first.numel())
        dispatch.combine(tensors, outputs, parts, tables=workshop.tables(first.device))
        return
    # Nothing here rounds but products, whose order is that of the ranks.
    total = first.to(torch.float32) if first.dtype in (torch.float16, torch.bfloat16) else first.clone()
    for one in tensors[1:]:
        _PAIRWISE[op](total, one.to(total.device, non_blocking=True), out=total)
    for output in outputs:
        output.copy_(total, non_blocking=True)


def _all_reduce_sparse(arrivals: Sequence[Arrival], workshop: Workshop) -> list[torch.Tensor]:
    """Sums in rank order; two entries of an index meet at a time, so it does not matter how they were sorted."""
    tensors = [one.tensors[0] for one in arrivals]
    dtype, device = tensors[0].dtype, tensors[0].device
    compute = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = tensors[0].coalesce().to(compute)
    for one in tensors[1:]:
        total = (total + one.to(device).coalesce().to(compute)).coalesce()
    total = total.to(dtype)
    return [total.to(one.device, copy=True) for one in tensors]


def _all_gather(arrivals: Sequence[Arrival], workshop: Workshop) -> None:
    for one in arrivals:
        for row, other in zip(one.tensors[1].unbind(), arrivals, strict=True):
            row.copy_(other.tensors[0].view(-1), non_blocking=True)


def _all_to_all(arrivals: Sequence[Arrival], workshop: Workshop) -> None:
    size = len(arrivals)
    parts = [one.tensors[0].view(size, -1) for one in arrivals]
    for rank, one in enumerate(arrivals):
        for row, sent in zip(one.tensors[1].view(size, -1).unbind(), parts, strict=True):
            row.copy_(sent[rank], non_blocking=True)


def _broadcast(arrivals: Sequence[Arrival], workshop: Workshop) -> None:
    root = arrivals[0].root
    assert root is not None
    source = arrivals[root].tensors[0]
    for one in arrivals:
        if one.tensors[0] is not source and one.tensors[0].data_ptr() != source.data_ptr():
            one.tensors[0].copy_(source.view_as(one.tensors[0]), non_blocking=True)


_OPERATIONS: Mapping[str, Callable[[Sequence[Arrival], Workshop], list[torch.Tensor] | None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "all_reduce_sparse": _all_reduce_sparse,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
}
