"""The speed of a link below which a wire pays, where nothing hides communication: bytes saved against time spent.

An element that a wire sends in b bytes costs a rank 2 (W - 1) / W x b bytes on its link, in one phase or two. A wire
pays where the bytes that it saves take longer than what it spends more on arithmetic.
"""

from __future__ import annotations

from fusedreduce.kernels.encodings import ENCODINGS

# Bytes on the link and bytes of device memory, by wire, of an fp32 gradient. Memory: pack and unpack or encode and
# decode, each reading one side and writing the other (docs/design.md).
LINK_BYTES = {"native": 4.0, "bf16": 2.0} | {
    name: encoding.block_bytes / encoding.block_numel for name, encoding in ENCODINGS.items()
}
H100_BYTES_PER_NS = 3350.0  # of its memory, by its data sheet: 3.35 TB/s


def memory_bytes(wire: str, ranks: int) -> float:
    """Bytes of device memory that an element costs a rank; calculated.

    Args:
        wire: of LINK_BYTES.
        ranks: two of which decode both contributions, while three and more combine shards.
    """
    sent = LINK_BYTES[wire]
    both = 2 * (4.0 + sent)
    if wire not in ENCODINGS:
        return both
    return both + (sent if ranks == 2 else sent + sent / ranks)


def saved_bytes(wire: str, beside: str, ranks: int) -> float:
    """Bytes per element that a rank's link is spared."""
    return 2 * (ranks - 1) / ranks * (LINK_BYTES[beside] - LINK_BYTES[wire])


def break_even_gbit(saved: float, more_ns: float) -> float | None:
    """Gbit/s below which `saved` bytes take longer than `more_ns`; None: the wire pays at any speed."""
    return None if more_ns <= 0 else 8 * saved / more_ns


def on_h100_gbit(wire: str, beside: str, ranks: int) -> float | None:
    """By calculation: kernels take the time of their bytes of memory, and nothing else costs."""
    spent = memory_bytes(wire, ranks) - (0.0 if beside == "native" else memory_bytes(beside, ranks))
    return break_even_gbit(saved_bytes(wire, beside, ranks), spent / H100_BYTES_PER_NS)
