"""Networks: what an all-reduce costs on a few kinds of cluster, by alpha-beta models of NCCL's algorithms.

    ring          2 (W - 1) hops, 2 (W - 1) / W of the bytes over every link
    tree          2 log2(hosts) hops between hosts and a chain inside each, twice the bytes over every link
    hierarchical  reduce-scatter in the host, ring or tree between hosts on 1 / p of the bytes, all-gather in the host

Encoded buckets, which no collective can add up, are exchanged: shards go to their owners, and their sums to all,

    exchange      2 (W - 1) messages in two phases, 2 (W - 1) / W of the bytes over every link; of two ranks one phase
    two levels    reduce-scatter in the host in fp32, exchange between hosts on 1 / p of the bytes, all-gather inside

The library takes the fastest for a size, so a bucket's cost is the least of several lines (concave in its size); the
planner knows one line only, fitted to the buckets that it has measured, here as in training.

Sources. Ring: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009. The
alpha-beta form: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.
Double binary tree: Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
2009. Hierarchical: Jia et al., "Highly scalable deep learning training system with mixed-precision", 2018. Hops,
shares and speeds: NCCL (2025), src/graph/tuning.cc and search.cc, src/include/topo.h.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ..planning.cost_model import FREE, FS_PER_NS, Costs, Linear, fit

_FS_PER_BYTE_AT_1_GB_S = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """A GPU.

    Args:
        name: for the command line.
        memory_gb_per_s: nominal bandwidth of its memory. A copy reaches less, equally for every policy.
        peak_tflops: dense 16-bit matrix products, nominal.
    """

    name: str
    memory_gb_per_s: float
    peak_tflops: float


# NVIDIA's data sheets: A100 80GB SXM, H100 SXM.
ACCELERATORS: Mapping[str, Accelerator] = MappingProxyType(
    {
        "a100": Accelerator(name="a100", memory_gb_per_s=2039, peak_tflops=312),
        "h100": Accelerator(name="h100", memory_gb_per_s=3350, peak_tflops=989),
    }
)


@dataclass(frozen=True, kw_only=True)
class Network:
    """A kind of cluster.

    Args:
        name: for the command line.
        title: for tables.
        accelerator: the name of its accelerator, unless the user gives another.
        ranks_per_host: number of ranks that NVLink joins; 1: every rank is alone in its host.
        port_gb_per_s: what a collective reaches through one rank's port.
        nvlink_gb_per_s: the same through one rank's NVLink, in one direction; unused where ranks are alone.
        hop_us: latency of a hop between hosts; None: that of NCCL over RDMA.
    """

    name: str
    title: str
    accelerator: str
    ranks_per_host: int
    port_gb_per_s: float
    nvlink_gb_per_s: float = math.inf
    hop_us: float | None = None

    def hosts(self, ranks: int) -> int:
        """How many hosts so many ranks fill."""
        return -(-ranks // self.ranks_per_host)


# TCP carries 1,448 bytes of 1,538 on the line: 94 %. Through the kernels of both hosts and a switch a message takes 20
# to 30 us (ping-pong tools show twice that), whatever the rate.
_TCP_SHARE, _TCP_HOP_US = 0.94, 25.0
_GB_PER_S_OF_GBIT = 1 / 8


def _ethernet(name: str, gbit_per_s: float) -> Network:
    """One rank a host, and plain TCP between them."""
    return Network(
        name=name,
        title=f"{gbit_per_s:g} GbE, TCP",
        accelerator="a100",
        ranks_per_host=1,
        port_gb_per_s=gbit_per_s * _GB_PER_S_OF_GBIT * _TCP_SHARE,
        hop_us=_TCP_HOP_US,
    )


# Speeds are those that NCCL itself plans with. search.cc tries 48, 12 and 3 GB/s for ports of 50, 12.5 and 3.125 GB/s:
# 96 % of the line, which leaves room for headers (RoCE v2 with 4,096-byte packets: 82 bytes each, 2 %). topo.h counts
# 20.6 GB/s for each of the H100's 18 NVLinks of 25 GB/s: 371 GB/s, 82 %.
# From 25 GbE on Ethernet means RDMA (RoCE v2): NCCL has one latency for all such networks.
NETWORKS: Mapping[str, Network] = MappingProxyType(
    {
        network.name: network
        for network in (
            _ethernet("1gbe", 1.0),
            _ethernet("10gbe", 10.0),
            Network(name="25gbe", title="25 GbE", accelerator="a100", ranks_per_host=1, port_gb_per_s=3.0),
            Network(name="100gbe", title="100 GbE", accelerator="a100", ranks_per_host=1, port_gb_per_s=12.0),
            Network(name="ndr", title="400 Gb InfiniBand", accelerator="h100", ranks_per_host=1, port_gb_per_s=48.0),
            Network(
                name="nvlink",
                title="NVLink, 8 a host",  # beyond a host: one 400 Gb port per rank
                accelerator="h100",
                ranks_per_host=8,
                port_gb_per_s=48.0,
                nvlink_gb_per_s=20.6 * 18,
            ),
        )
    }
)


@dataclass(frozen=True)
class _Protocol:
    """How NCCL moves bytes: Simple for bandwidth, LL (half of what travels are flags) for latency.

    Args:
        base_us: latency of a collective of any size.
        net_us: latency of a hop between hosts. (NCCL uses the tree's also for a ring of single ranks.)
        nvlink_us: latency of a hop by NVLink.
        ring_share: share of the bandwidth that a ring reaches.
        tree_share: share of the bandwidth that a tree reaches.
    """

    base_us: float
    net_us: float
    nvlink_us: float
    ring_share: float
    tree_share: float


# tuning.cc: baseLat, hwLat, and the factors on busBw.
_PROTOCOLS = {
    "": _Protocol(8.4, 14.0, 3.4, 1.0, 0.92),
    " LL": _Protocol(6.8, 5.0, 0.6, 1 / 2, 0.92 / 3.8),
}

_BUCKET_BYTES = (2**18, 2**21, 2**24)
# From one short kernel to the next: 3.8 us (Gray, "Getting started with CUDA graphs", 2019, on a V100).
_LAUNCH_NS = 4_000


def lines(network: Network, ranks: int) -> dict[str, Linear]:
    """Returns the cost of an all-reduce over `ranks`, by algorithm.

    Args:
        network: which reduces.
        ranks: at least 1; hosts are filled one after the other.

    Raises:
        ValueError: there are no ranks.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    if ranks == 1:
        return {"none": Linear(fixed_ns=0, fs_per_byte=0)}
    local = min(ranks, network.ranks_per_host)
    hosts = -(-ranks // network.ranks_per_host)
    port = network.port_gb_per_s
    # A ring or tree through many hosts uses all ports of each: a channel enters and leaves by each of them.
    speed = min([network.nvlink_gb_per_s] * (local > 1) + [port * local] * (hosts > 1))
    ring, levels = 2 * (ranks - 1), math.ceil(math.log2(hosts))
    lines_by_name = {}
    for name, kind in _PROTOCOLS.items():
        net, nvlink = network.hop_us or kind.net_us, kind.nvlink_us
        across = 2 * (hosts - 1) * (hosts > 1)
        hops_us = across * net + (ring - across) * nvlink
        lines_by_name[f"ring{name}"] = _line(kind.base_us + hops_us, ring / ranks / (speed * kind.ring_share))
        hops_us = 2 * (levels * net + (local - 1) * nvlink)
        lines_by_name[f"tree{name}"] = _line(kind.base_us + hops_us, 2 / (speed * kind.tree_share))
        if local > 1 and hosts > 1:
            inside = 2 * (local - 1) / local / (network.nvlink_gb_per_s * kind.ring_share)
            base_us = kind.base_us + 2 * (local - 1) * nvlink
            tree, flat = 2 / (port * kind.tree_share), across / hosts / (port * kind.ring_share)
            lines_by_name[f"hierarchical tree{name}"] = _line(base_us + 2 * levels * net, inside + tree / local)
            lines_by_name[f"hierarchical ring{name}"] = _line(base_us + across * net, inside + flat / local)
    return lines_by_name


def exchange_lines(network: Network, ranks: int, wide: float) -> dict[str, Linear]:
    """Returns the cost of exchanging a bucket that is encoded over `ranks`, by algorithm.

    Args:
        network: which carries it.
        ranks: at least 1; hosts are filled one after the other.
        wide: bytes of fp32 that a byte on the wire stands for, which a host of several ranks adds up first.

    Raises:
        ValueError: there are no ranks.
    """
    if ranks <= 1:
        return lines(network, ranks)
    local = min(ranks, network.ranks_per_host)
    hosts = -(-ranks // network.ranks_per_host)
    among = hosts if hosts > 1 else local
    phases = 1 if among == 2 else 2
    found = {}
    for name, kind in _PROTOCOLS.items():
        share = kind.ring_share
        hop_us = (network.hop_us or kind.net_us) if hosts > 1 else kind.nvlink_us
        speed = network.port_gb_per_s * local if hosts > 1 else network.nvlink_gb_per_s
        fixed_us = phases * (kind.base_us + (among - 1) * hop_us)
        seconds = 2 * (among - 1) / among / (speed * share)
        if local > 1 and hosts > 1:
            fixed_us += 2 * (kind.base_us + (local - 1) * kind.nvlink_us)
            seconds += (local - 1) / local * (wide + 1) / (network.nvlink_gb_per_s * share)
        found[f"exchange{name}"] = _line(fixed_us, seconds)
    return found


def link(network: Network, ranks: int, *, wide: float | None = None) -> Linear:
    """The line that is nearest to what a bucket costs, of a quarter of a MiB to 16 MiB.

    Args:
        network: which carries it.
        ranks: number of ranks.
        wide: as for `exchange_lines`; None: it is all-reduced.
    """
    choices = bucket_lines(network, ranks, wide)
    return fit([(size, fastest_fs(choices, size) // FS_PER_NS) for size in _BUCKET_BYTES]) or FREE


def bucket_lines(network: Network, ranks: int, wide: float | None) -> list[Linear]:
    """`lines`, or, of buckets that are exchanged, `exchange_lines`."""
    return list((lines(network, ranks) if wide is None else exchange_lines(network, ranks, wide)).values())


def fastest_fs(choices: Sequence[Linear], size_bytes: int) -> int:
    """The cost of the fastest of several algorithms for a size, in femtoseconds."""
    return min(line.fs(size_bytes) for line in choices)


def copies(accelerator: Accelerator, *, wire_itemsize_bytes: int, gradient_itemsize_bytes: int = 4) -> Linear:
    """The cost of packing or unpacking a bucket, by its bytes on the wire: it is read once and written once.

    Args:
        accelerator: which copies.
        wire_itemsize_bytes: bytes of an element on the wire.
        gradient_itemsize_bytes: bytes of an element of a gradient.
    """
    return kernel(accelerator, (wire_itemsize_bytes + gradient_itemsize_bytes) / wire_itemsize_bytes)


def kernel(accelerator: Accelerator, moved: float) -> Linear:
    """The cost of a kernel that is bound by memory, by a bucket's bytes on the wire.

    Args:
        accelerator: which runs it.
        moved: bytes of memory that it reads and writes, for each of those.
    """
    return Linear(fixed_ns=_LAUNCH_NS, fs_per_byte=round(moved / accelerator.memory_gb_per_s * _FS_PER_BYTE_AT_1_GB_S))


def costs(
    network: Network, ranks: int, sizes_bytes: Sequence[int], copy: Linear, *, wide: float | None = None
) -> Costs | None:
    """The costs that a planner would learn: one line through the collectives of the buckets that it has measured.

    Args:
        network: which reduces.
        ranks: number of ranks.
        sizes_bytes: of the buckets, on the wire.
        copy: cost of packing, and of unpacking.
        wide: for buckets that are exchanged, see `exchange_lines`; None: they are all-reduced.

    Returns:
        The costs; None where buckets have fewer than two sizes.
    """
    choices = bucket_lines(network, ranks, wide)
    wire = fit([(size, fastest_fs(choices, size) // FS_PER_NS) for size in sizes_bytes])
    return None if wire is None else Costs(wire=wire, pack=copy, unpack=copy)


def _line(fixed_us: float, seconds_per_gb: float) -> Linear:
    return Linear(fixed_ns=round(fixed_us * 1000), fs_per_byte=round(seconds_per_gb * _FS_PER_BYTE_AT_1_GB_S))
