"""What many ranks make of their gradients in two levels, by what each of them does with its bucket, in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from fusedreduce.buckets.data_path import scalar
from fusedreduce.buckets.phases import Phases
from fusedreduce.buckets.two_levels import TwoLevelBucket
from fusedreduce.buckets.wire_table import WireTable
from fusedreduce.comm.group import Group
from fusedreduce.config import Wire
from fusedreduce.kernels import encoded
from fusedreduce.kernels.encodings import ENCODINGS
from support.loopback import Loopback

CPU = torch.device("cpu")


def mean_in_two_levels(
    gradient_of: Callable[[int], torch.Tensor], nodes: int, per_node: int, wire: Wire
) -> torch.Tensor:
    """The mean of as many flat gradients as there are ranks.

    Args:
        gradient_of: by rank, [numel].
        nodes: two or more.
        per_node: ranks of each, two or more.
        wire: "int8" or "int4".
    """
    ranks = nodes * per_node
    phases = Phases(Group(Loopback([torch.clone] * (ranks - 1))), CPU)
    phases.open(WireTable((wire,), "wire"), per_node)
    first = gradient_of(0)
    shapes = [(tuple(first.shape), tuple(first.stride()))]
    bucket = TwoLevelBucket(
        [first.numel()], [first.dtype], ENCODINGS[wire], CPU, "bucket", shapes, ranks=ranks, phases=phases, lazy=False
    )
    of_node = [
        _sums_of_node(bucket, map(gradient_of, range(node, node + per_node)), ranks)
        for node in range(0, ranks, per_node)
    ]
    if nodes == 2:
        result = torch.cat(of_node)
    else:
        shards = torch.stack(of_node).view(nodes, ranks, -1)
        result = torch.empty_like(of_node[0])
        for shard, total in enumerate(result.view(ranks, -1)):
            encoded.combine_encoded(shards[:, shard].reshape(-1), bucket.chunks, total)
    mean = torch.full_like(first, math.nan)
    bucket.unpack([mean], result, scalar(1.0, bucket.compute_dtype, CPU), None)
    return mean


def _sums_of_node(bucket: TwoLevelBucket, gradients: Iterable[torch.Tensor], ranks: int) -> torch.Tensor:
    """The encoded sums of all shards of one node, in their order; its contributions are added up in fp32."""
    wires = [torch.empty(bucket.wire_numel, dtype=bucket.wire_dtype) for _ in range(2)]
    for place, gradient in enumerate(gradients):
        bucket.pack([gradient], wires[min(place, 1)], ranks, None)
        if place:
            wires[0] += wires[1]
    sums = torch.empty(bucket.chunks.layout.nbytes, dtype=torch.uint8)
    shards = sums.view(-1, bucket._of_sum.layout.nbytes)
    for total, mine in zip(wires[0].view(len(shards), -1), shards, strict=True):
        bucket._encode_sum(total, mine)
    return sums
