"""The collectives of a LocalGroup, as functions of all ranks' arrivals; the last rank to arrive calls them.

On CUDA the work goes to a stream of the group's own on each device that takes part, behind the events that the ranks
recorded on arrival; the host never waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ...kernels import dispatch
from ...kernels.parts import Part, parts_within
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


class Resources:
    """What a group keeps for its collectives: per CUDA device a stream and the sums' tables, made on first use.

    Args:
        strategy: the order of additions.
        size: number of ranks.
    """

    def __init__(self, strategy: Strategy, size: int) -> None:
        self.strategy = strategy
        self._size = size
        self._prepared: set[tuple[torch.dtype, torch.device]] = set()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._tables: dict[torch.device, CombineTables | None] = {}

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream of a CUDA device. If two threads are the first at once, one of the streams made is dropped."""
        if device not in self._streams:
            self._streams.setdefault(device, torch.cuda.Stream(device))
        return self._streams[device]

    def tables(self, device: torch.device) -> CombineTables | None:
        """The tables of a CUDA device, which are only used on its stream; None on CPU."""
        if device.type == "cuda" and device not in self._tables:
            self._tables.setdefault(device, dispatch.new_combine_tables())
        return self._tables.get(device)

    def prepare(self, dtype: torch.dtype, device: torch.device) -> None:
        """Has the sum's kernel compiled before a step needs it, by summing one element."""
        if device.type == "cuda" and (dtype, device) not in self._prepared:
            self._prepared.add((dtype, device))
            with torch.no_grad(), torch.cuda.stream(self.stream(device)):
                ones = [torch.ones(1, dtype=dtype, device=device) for _ in range(self._size)]
                dispatch.combine(ones, ones, self.strategy.parts(self._size, 1))


def perform(arrivals: Sequence[Arrival], resources: Resources) -> Outcome:
    """Performs a collective.

    Args:
        arrivals: in rank order, with equal signatures.
        resources: the group's.
    """
    kind = arrivals[0].kind
    if not arrivals[0].tensors:
        return Outcome(gathered=tuple(arrival.payload for arrival in arrivals))
    devices = list(dict.fromkeys(tensor.device for arrival in arrivals for tensor in arrival.tensors if tensor.is_cuda))
    ours = tuple(resources.stream(device) for device in devices)
    inference = any(tensor.is_inference() for arrival in arrivals for tensor in arrival.tensors)
    with contextlib.ExitStack() as contexts:
        contexts.enter_context(torch.inference_mode() if inference else torch.no_grad())
        for stream in ours:
            for arrival in arrivals:
                for event in arrival.events:
                    stream.wait_event(event)
            contexts.enter_context(torch.cuda.stream(stream))
        results = OPERATIONS[kind](arrivals, resources)
    return Outcome(events=tuple(stream.record_event() for stream in ours), streams=ours, results=results)


def _all_reduce(arrivals: Sequence[Arrival], resources: Resources) -> None:
    tensors = [arrival.tensors[0] for arrival in arrivals]
    _reduce_into(tensors, tensors, arrivals[0].op, resources)


def _reduce(arrivals: Sequence[Arrival], resources: Resources) -> None:
    root = arrivals[0].root
    assert root is not None
    tensors = [arrival.tensors[0] for arrival in arrivals]
    _reduce_into(tensors, [tensors[root]], arrivals[0].op, resources)


def _reduce_scatter(arrivals: Sequence[Arrival], resources: Resources) -> None:
    size, numel = len(arrivals), arrivals[0].tensors[0].numel()
    shards = [arrival.tensors[0].view(size, numel // size) for arrival in arrivals]
    order = resources.strategy.parts(size, numel)  # of the whole, so that a shard has the bits of an all-reduce
    for rank in range(size):
        tensors = [shard[rank] for shard in shards]
        parts = parts_within(order, rank * (numel // size), (rank + 1) * (numel // size))
        _reduce_into(tensors, [tensors[rank]], arrivals[0].op, resources, parts)


def _reduce_into(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    op: ReduceOp | None,
    resources: Resources,
    parts: tuple[Part, ...] | None = None,
) -> None:
    first = tensors[0]
    assert op is not None
    if op == "sum" and first.dtype in COMPUTED_WIDE:
        parts = resources.strategy.parts(len(tensors), first.numel()) if parts is None else parts
        dispatch.combine(tensors, outputs, parts, tables=resources.tables(first.device))
        return
    # Of these only products round; they are computed in rank order.
    total = first.to(torch.float32) if first.dtype in (torch.float16, torch.bfloat16) else first.clone()
    for tensor in tensors[1:]:
        _PAIRWISE[op](total, tensor.to(total.device, non_blocking=True), out=total)
    for output in outputs:
        output.copy_(total, non_blocking=True)


def _all_reduce_sparse(arrivals: Sequence[Arrival], resources: Resources) -> list[torch.Tensor]:
    """Sums in rank order. Two entries of an index are added at a time, so their order within a tensor is irrelevant."""
    tensors = [arrival.tensors[0] for arrival in arrivals]
    dtype, device = tensors[0].dtype, tensors[0].device
    compute = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = tensors[0].coalesce().to(compute)
    for tensor in tensors[1:]:
        total = (total + tensor.to(device).coalesce().to(compute)).coalesce()
    total = total.to(dtype)
    return [total.to(tensor.device, copy=True) for tensor in tensors]


def _all_gather(arrivals: Sequence[Arrival], resources: Resources) -> None:
    for arrival in arrivals:
        for row, other in zip(arrival.tensors[1].unbind(), arrivals, strict=True):
            row.copy_(other.tensors[0].view(-1), non_blocking=True)


def _all_to_all(arrivals: Sequence[Arrival], resources: Resources) -> None:
    size = len(arrivals)
    parts = [arrival.tensors[0].view(size, -1) for arrival in arrivals]
    for rank, arrival in enumerate(arrivals):
        for row, sent in zip(arrival.tensors[1].view(size, -1).unbind(), parts, strict=True):
            row.copy_(sent[rank], non_blocking=True)


def _transfer(arrivals: Sequence[Arrival], resources: Resources) -> None:
    (source,), (destination,) = (arrival.tensors for arrival in arrivals)
    destination.copy_(source.view_as(destination), non_blocking=True)


def _broadcast(arrivals: Sequence[Arrival], resources: Resources) -> None:
    root = arrivals[0].root
    assert root is not None
    source = arrivals[root].tensors[0]
    for arrival in arrivals:
        if arrival.tensors[0] is not source and arrival.tensors[0].data_ptr() != source.data_ptr():
            arrival.tensors[0].copy_(source.view_as(arrival.tensors[0]), non_blocking=True)


OPERATIONS: Mapping[str, Callable[[Sequence[Arrival], Resources], list[torch.Tensor] | None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "all_reduce_sparse": _all_reduce_sparse,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "reduce_scatter": _reduce_scatter,
    "transfer": _transfer,
    "broadcast": _broadcast,
}


def dense_problem(tensor: torch.Tensor) -> str:
    """Why a tensor cannot be used as it lies in memory; "" if it can."""
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout} is not dense"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"a tensor on {tensor.device.type} cannot be used, only on cpu and cuda"
    return "" if tensor.is_contiguous() else f"a tensor of strides {tensor.stride()} is not contiguous"


def parts_problem(tensor: torch.Tensor, size: int) -> str:
    """Why a tensor cannot be divided among `size` ranks as it lies in memory; "" if it can."""
    uneven = f"{tensor.numel()} elements cannot be divided among {size} ranks" if tensor.numel() % size else ""
    return dense_problem(tensor) or uneven
