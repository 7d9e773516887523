"""WireTable: the wire of each parameter of a reducer, resolved from ReduceConfig.wire; the same on every rank."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from ..config import Accumulation, AnyWire, ReduceConfig, Wire, WirePatterns
from ..errors import shortened
from ..planning.bucketing import DEFAULT_CAP_BYTES, MIB, BucketCaps
from ..wires import NATIVE, any_accumulated, any_encoded, block_of, check_wire, encoding_of, possible_wire, wire_for

_logger = logging.getLogger(__name__)
_NAMES_SHOWN = 8
LEAST_SHARD_BYTES = 64 * 1024
_EXCHANGED_CAP_BYTES = 2 * MIB


@dataclass(frozen=True)
class WireTable:
    """The wire of each parameter.

    Args:
        wires: by the parameter's number.
        accumulation: of 16-bit wires, see ReduceConfig.
    """

    wires: tuple[Wire, ...]
    accumulation: Accumulation

    @classmethod
    def of(
        cls,
        config: ReduceConfig,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        sparse: Sequence[bool],
        *,
        wire: Wire | None = None,
    ) -> WireTable:
        """Resolves `config.wire`, of several the first. What cannot be encoded is "native", and sparse gradients are.

        Args:
            config: of the reducer.
            names: of its parameters.
            parameters: the parameters.
            sparse: per parameter whether its gradient is.
            wire: in place of `config.wire`, one of several.

        Raises:
            ValueError: a pattern matches no parameter; a function raised or returned no wire; or the wires exclude
                another option.
        """
        asked = _asked(wire or next(iter(config.allowed), config.wire), names, parameters)
        wires: list[Wire] = [
            "native" if alone else possible_wire(parameter, wire)
            for wire, parameter, alone in zip(asked, parameters, sparse, strict=True)
        ]
        if callable(config.wire):  # what it would return was not known when the settings were made
            config.check_beside(not any_accumulated(asked) and "wire= without 'bf16' and 'fp16'", wires=asked)
        return cls(tuple(wires), config.accumulation)

    @classmethod
    def of_each(
        cls, config: ReduceConfig, names: Sequence[str], parameters: Sequence[torch.Tensor], sparse: Sequence[bool]
    ) -> dict[Wire, WireTable]:
        """As `of`, by the wires of `config` between which steps choose; one by "" where they do not."""
        given = config.allowed or (None,)
        return {wire or "": cls.of(config, names, parameters, sparse, wire=wire) for wire in given}

    def __getitem__(self, number: int) -> Wire:
        """The wire of a parameter."""
        return self.wires[number]

    @property
    def is_native(self) -> bool:
        """Whether every gradient travels in its own dtype."""
        return set(self.wires) <= {NATIVE}

    @property
    def encoded(self) -> tuple[int, ...]:
        """The numbers of the parameters that travel encoded."""
        encoded = set(filter(encoding_of, set(self.wires)))
        return tuple(number for number, wire in enumerate(self.wires) if wire in encoded)

    def has_two_phases(self, ranks: int) -> bool:
        """Returns whether so many ranks exchange shards of their contributions, and then the sums of these."""
        exchanges = self.accumulation == "fp32" and any_accumulated(self.wires)
        return ranks > 2 and (exchanges or any_encoded(self.wires))

    def default_caps(self, ranks: int, device: torch.device) -> BucketCaps:
        """Limits of buckets where the user gives none: torch's, or smaller ones where shards are exchanged on CPU.

        Phases of one bucket then overlap with those of others and with backward, and Gloo's all-to-all is quicker in
        parts: 8 MB among 3 ranks at 300 Mbit/s take 230 ms, in eight parts 165. Full buckets of fp32 keep shards of
        LEAST_SHARD_BYTES, where torch's limit allows that.

        Args:
            ranks: how many.
            device: of the gradients.
        """
        if device.type != "cpu" or not self.has_two_phases(ranks):
            return BucketCaps()
        full_shards = ranks * max(_fp32_bytes(wire, LEAST_SHARD_BYTES) for wire in self.wires if wire != "native")
        return BucketCaps(cap_bytes=min(max(_EXCHANGED_CAP_BYTES, full_shards), DEFAULT_CAP_BYTES))

    def with_wire(self, other: Wire, numbers: Collection[int]) -> WireTable:
        """The table in which the parameters `numbers` travel on another wire."""
        chosen = frozenset(numbers)
        wires = tuple(other if number in chosen else wire for number, wire in enumerate(self.wires))
        return dataclasses.replace(self, wires=wires)

    def log(
        self, config: ReduceConfig, names: Sequence[str], parameters: Sequence[torch.Tensor], sparse: Sequence[bool]
    ) -> None:
        """Logs for which parameters `config.wire` may surprise; arguments as of `of`."""
        left = [name for name, alone in zip(names, sparse, strict=True) if alone]
        if left and self.encoded:
            _logger.info("sparse gradients are not encoded: %s stay native", shortened(left, _NAMES_SHOWN))
        rounded = [names[number] for number in self.encoded if parameters[number].dtype is torch.float64]
        if rounded:
            wires = " and ".join(sorted({self[number] for number in self.encoded if names[number] in rounded}))
            _logger.warning("fp64 gradients of %s are rounded to %s", shortened(rounded, _NAMES_SHOWN), wires)


@functools.cache
def warn_of_small_shards(encoded: frozenset[Wire], ranks: int, cap_bytes: int) -> None:
    """Logs, once for the same arguments, if a full bucket that all ranks exchange has small shards.

    Args:
        encoded: the wires.
        ranks: how many exchange it.
        cap_bytes: of a full bucket, in bytes of fp32 gradients.
    """
    for wire in sorted(encoded):
        block_numel, block_bytes = block_of(wire)
        shard_bytes = cap_bytes // 4 // block_numel * block_bytes // ranks
        if shard_bytes < LEAST_SHARD_BYTES:
            cap_mb = -(-_fp32_bytes(wire, ranks * LEAST_SHARD_BYTES) // MIB)
            _logger.warning(
                "wire=%r among %d ranks: full buckets have shards of %d bytes, fewer than %d, so that the number of "
                "messages decides how long they take. Raise bucket_cap_mb to %d, or, on nodes of several ranks, have "
                "them exchanged in two levels: ReduceConfig(ranks_per_node=...)",
                wire,
                ranks,
                shard_bytes,
                LEAST_SHARD_BYTES,
                cap_mb,
            )


def _fp32_bytes(wire: Wire, sent_bytes: int) -> int:
    """Bytes of fp32 gradients that take `sent_bytes` on a wire that is not "native"."""
    block_numel, block_bytes = block_of(wire)
    return -(-sent_bytes * block_numel * 4 // block_bytes)


def _asked(wire: AnyWire, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> list[Wire]:
    """The wire that is asked for, per parameter, whether or not it can be encoded."""
    if isinstance(wire, str):
        return [wire_for(parameter, wire) for parameter in parameters]
    if callable(wire):
        found: list[Wire] = []
        for name, parameter in zip(names, parameters, strict=True):
            try:
                found.append(wire(name, parameter))
                check_wire(found[-1])
            except Exception as error:  # so that other ranks can be told, whatever it is
                raise ValueError(f"ReduceConfig(wire=...) failed for {name}: {error!r}") from error
        return found
    pairs = tuple(dict(cast("WirePatterns", wire)).items())
    unused = [pattern for pattern, _ in pairs if not any(fnmatch.fnmatchcase(name, pattern) for name in names)]
    if unused:
        raise ValueError(
            f"ReduceConfig(wire=...): no parameter's name matches {', '.join(map(repr, unused))}; there are "
            f"{shortened(names, _NAMES_SHOWN)}"
        )
    return [next((one for pattern, one in pairs if fnmatch.fnmatchcase(name, pattern)), "native") for name in names]
