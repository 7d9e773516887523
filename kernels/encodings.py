"""Encodings: blocks of elements as small signed integers with a scale each, and how a bucket's blocks lie in bytes.

    scale = largest absolute value of the block / levels        int4: rounded up to bf16
    code  = rint(value * (1 / scale))                           |code| <= levels, by construction
    value = code * scale

All in fp32, each operation correctly rounded, none fused with the next. A block whose scale would be below the smallest
normal number, 2^-126, has scale 0 and codes 0. A block with a NaN or infinity has scale NaN and codes 0, so that all of
it decodes to NaN. A slot's last block is filled up with zeros.

A bucket is `shards` equal parts. A shard is one range of bytes: the scales of all of its blocks, then their codes.
Scales beside each block would leave codes at addresses that are no multiple of 16 (260 bytes a block at int8), and a
collective of their own would double the number of messages. A shard has as many blocks as make its scales a multiple of
16 bytes: so there is no padding, and scales and codes of every block begin where accesses of 16 bytes can.

Two codes of int4 lie in one byte: byte j of a block is the signed number 16 * high + low of the codes of elements
j + block / 2 and j. Consecutive bytes so are consecutive elements of either half, whatever the width of an access; and
the number is made by one multiplication and addition: low is its last four bits, signed, and high what then remains.

Example, int8, 2 shards, 2048 elements: 4 blocks a shard, 16 bytes of scales and 1024 of codes, 2080 bytes in all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_ACCESS_BYTES = 16
# Half a block lies within a warp, and no two threads of it share 16 bytes of a gradient (`blocks`): without exchanges.
_BLOCK_NUMELS = (64, 128, 256)


@dataclass(frozen=True)
class Encoding:
    """A way to encode blocks, and as a wire what a gradient travels in.

    Args:
        block_numel: elements of a block: 64, 128 or 256.
        bits: of a code: 8, with scales in fp32, or 4, with scales rounded up to bf16.

    Raises:
        ValueError: another number.
    """

    block_numel: int
    bits: int

    def __post_init__(self) -> None:
        for name, accepted in (("block_numel", _BLOCK_NUMELS), ("bits", (8, 4))):
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} must be one of {accepted}, got {getattr(self, name)!r}")

    @property
    def name(self) -> str:
        """What it is called: "int8", or of other blocks "int8 of 64"."""
        return f"int{self.bits}" if self in ENCODINGS.values() else f"int{self.bits} of {self.block_numel}"

    @property
    def scale_bytes(self) -> int:
        """Bytes of a scale: 4 of fp32, or 2 of bf16."""
        return 4 if self.bits == 8 else 2

    @property
    def levels(self) -> int:
        """The largest code."""
        return int(2 ** (self.bits - 1) - 1)

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of one block."""
        return self.block_numel * self.bits // 8

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, scale and codes."""
        return self.scale_bytes + self.code_bytes

    @property
    def shard_align(self) -> int:
        """Elements of which a shard is a multiple."""
        return self.block_numel * _ACCESS_BYTES // self.scale_bytes


INT8 = Encoding(block_numel=256, bits=8)
INT4 = Encoding(block_numel=64, bits=4)
ENCODINGS: Mapping[str, Encoding] = {"int8": INT8, "int4": INT4}  # those that are built in


@dataclass(frozen=True)
class EncodedLayout:
    """How a bucket lies in encoded bytes.

    Args:
        encoding: of its blocks.
        shards: equal parts.
        shard_blocks: blocks of each.
        tail_bytes: behind the blocks of each, for what the caller sends beside them: neither written nor read here.
    """

    encoding: Encoding
    shards: int
    shard_blocks: int
    tail_bytes: int = 0

    @classmethod
    def of(cls, encoding: Encoding, numel: int, shards: int, tail_bytes: int = 0) -> EncodedLayout:
        """The layout of `numel` elements.

        Raises:
            ValueError: they are no multiple of shards x `encoding.shard_align`, or the tail is none of 16 bytes.
        """
        if shards < 1 or numel % (shards * encoding.shard_align):
            raise ValueError(
                f"{numel} elements are no {shards} shards of {encoding.name}: pad them to a multiple of "
                f"{shards} x {encoding.shard_align}"
            )
        if tail_bytes < 0 or tail_bytes % 16:
            raise ValueError(f"shards begin at multiples of 16 bytes, and {tail_bytes} bytes behind each are none")
        return cls(encoding, shards, numel // shards // encoding.block_numel, tail_bytes)

    @property
    def shard_numel(self) -> int:
        """Elements of a shard."""
        return self.shard_blocks * self.encoding.block_numel

    @property
    def scales_bytes(self) -> int:
        """Bytes of a shard's scales, after which its codes begin."""
        return self.shard_blocks * self.encoding.scale_bytes

    @property
    def shard_bytes(self) -> int:
        """Bytes of a shard, its tail included."""
        return self.shard_blocks * self.encoding.block_bytes + self.tail_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the bucket."""
        return self.shards * self.shard_bytes
