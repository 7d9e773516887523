"""Plans as JSON, to log them and to keep them in checkpoints, and their hash, which ranks compare."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from ..config import PlanOfFile
from .plan import Plan

FORMAT = "fusedreduce-plan"
VERSION = 1
_HASH_BITS = 62  # so that the hash and its negative fit into an int64


def plan_hash(plan: Plan) -> int:
    """Returns a hash below 2**62, the same in every process."""
    digest = hashlib.blake2b(json.dumps(plan).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _HASH_BITS)


def model_digest(names: Sequence[str], numels: Sequence[int]) -> str:
    """Returns a digest of a model's parameter names and sizes."""
    text = json.dumps([list(names), list(numels)])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def dump(plan: Plan, *, names: Sequence[str], numels: Sequence[int], world_size: int, wire: str) -> str:
    """Writes a plan as JSON.

    Args:
        plan: parameter numbers by bucket, in launch order.
        names: of all parameters.
        numels: their numbers of elements.
        world_size: the number of ranks that it is for.
        wire: the wire that it is for.
    """
    return json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "world_size": world_size,
            "wire": wire,
            "model": model_digest(names, numels),
            "hash": f"{plan_hash(plan):016x}",
            "buckets": [list(bucket) for bucket in plan],
        }
    )


def load(text: str, *, names: Sequence[str], numels: Sequence[int]) -> tuple[Plan, int]:
    """Reads a plan that `dump` wrote.

    Args:
        text: JSON; a PlanOfFile has its file named in errors.
        names: of the parameters that it will be used for.
        numels: their numbers of elements.

    Returns:
        The plan, and the number of ranks that it was made for.

    Raises:
        ValueError: it is not a plan, is damaged, of another version, or for another model.
    """
    try:
        return _load(text, names, numels)
    except ValueError as error:
        if not isinstance(text, PlanOfFile):
            raise
        raise ValueError(f"plan={text.file!r}: {error}") from None


def _load(text: str, names: Sequence[str], numels: Sequence[int]) -> tuple[Plan, int]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError, TypeError) as error:
        raise ValueError(f"this is not a plan: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f'this is not a plan of fusedreduce: no "format": "{FORMAT}" in it')
    if type(data.get("version")) is not int or data["version"] != VERSION:
        raise ValueError(f"this plan has version {data.get('version')!r}; this fusedreduce reads version {VERSION}")
    world_size, wire, buckets = data.get("world_size"), data.get("wire"), data.get("buckets")
    if type(world_size) is not int or world_size < 1 or not isinstance(wire, str):
        raise ValueError(f"this plan is damaged: world_size {world_size!r}, wire {wire!r}")
    if data.get("model") != model_digest(names, numels):
        raise ValueError("this plan was made for a model with other parameters (names, sizes or their order)")
    plan = _checked(buckets, len(names))
    if data.get("hash") != f"{plan_hash(plan):016x}":
        raise ValueError("this plan is damaged: its buckets do not have the hash that it names")
    return plan, world_size


def _checked(buckets: object, count: int) -> Plan:
    """Returns the buckets, if they are lists of numbers that name every parameter once."""
    if not isinstance(buckets, list) or not all(isinstance(bucket, list) and bucket for bucket in buckets):
        raise ValueError("this plan is damaged: its buckets are not lists of parameter numbers")
    numbers = [number for bucket in buckets for number in bucket]
    if any(type(number) is not int for number in numbers) or sorted(numbers) != list(range(count)):
        raise ValueError(f"this plan is damaged: it does not name each of {count} parameters once")
    return tuple(tuple(bucket) for bucket in buckets)
