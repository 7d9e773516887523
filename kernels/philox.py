"""Philox-4x32-10 on CPU: random bits that depend on what they are for, not on how often numbers were drawn before.

The key is (seed, stream), the counter (number of the draw, 64 bits; parameter; step). A draw gives four words of 32
bits. J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11.

For a block of B elements words are drawn for its first half, and each serves two elements: the low 16 bits element j,
the high 16 bits element j + B / 2. Word j of block b of a parameter is word j % 4 of draw b * B / 8 + j // 4.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox(key: tuple[int, int], draws: npt.NDArray[np.int64], parameter: int, step: int) -> npt.NDArray[np.uint64]:
    """The words of some draws.

    Args:
        key: seed and stream, each in [0, 2**32).
        draws: their numbers, [n].
        parameter: in [0, 2**32).
        step: of which the low 32 bits count.

    Returns:
        [n, 4], each below 2**32.
    """
    number = draws.astype(np.uint64)
    c0, c1 = number & _LOW, number >> _HALF
    c2, c3 = np.full_like(c0, parameter), np.full_like(c0, step % 2**32)
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (second >> _HALF) ^ c1 ^ np.uint64(k0),
            second & _LOW,
            (first >> _HALF) ^ c3 ^ np.uint64(k1),
            first & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) % 2**32, (k1 + _WEYL[1]) % 2**32
    return np.stack([c0, c1, c2, c3], axis=1)


def fractions(
    key: tuple[int, int], first_block: int, blocks: int, block_numel: int, parameter: int, step: int
) -> npt.NDArray[np.float32]:
    """What stochastic rounding adds before it rounds down, for consecutive blocks of a parameter.

    Args:
        key: seed and stream.
        first_block: its number within the parameter.
        blocks: how many.
        block_numel: elements of a block.
        parameter: its number.
        step: of which the low 32 bits count.

    Returns:
        [blocks, block_numel], odd multiples of 2**-17 in (0, 1).
    """
    each = block_numel // 8
    draws = np.arange(first_block * each, (first_block + blocks) * each)
    words = philox(key, draws, parameter, step).reshape(blocks, block_numel // 2)
    halves = np.concatenate([words & np.uint64(0xFFFF), words >> np.uint64(16)], axis=1)
    return halves.astype(np.float32) * np.float32(2.0**-16) + np.float32(2.0**-17)
