"""What each peer says that it wants, and the one verdict on it: pure functions, the same answer whoever asks.

Example: of all_reduce, peer 1 has shape (4,) and the others (2, 3). `judge` of the three descriptions is a Verdict with
    AllReduceShapeMismatch: operation 7 (all_reduce): shapes differ: (2, 3) on peers 0, 2; (4,) on peer 1. Nothing ...
and since a verdict is JSON and found once per operation, every peer raises that, those that come late too.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .errors import BY_NAME, CollectiveSessionError

Kind = Literal["all_reduce", "reduce", "broadcast", "finish", "register"]
Op = Literal["sum", "mean", "min", "max", "product"]
OPS: tuple[Op, ...] = ("sum", "mean", "min", "max", "product")
_PEERS_SHOWN = 16


@dataclass(frozen=True)
class Description:
    """One peer's call, in plain values.

    Attributes:
        peer: who.
        kind: what it called.
        op, root: its arguments; None where it has none.
        shape, stride, dtype: of its tensor; None without one.
        settings: of a registration: what must be equal.
        problem: (name of an error class, why) if the call cannot be carried out whatever the others want.
    """

    peer: int
    kind: Kind
    op: str | None = None
    root: int | None = None
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None
    dtype: str | None = None
    settings: tuple[tuple[str, Any], ...] = ()
    problem: tuple[str, str] | None = None


@dataclass(frozen=True)
class Verdict:
    """On an operation.

    Attributes:
        error: (name of the class, text); None if the operation is carried out.
        source: of a broadcast: whose tensor it is.
        closes: the session is over for all who read this.
    """

    error: tuple[str, str] | None = None
    source: Description | None = None
    closes: bool = False

    def raised(self) -> CollectiveSessionError:
        """The error, a new one for each peer: threads do not share a traceback."""
        assert self.error is not None
        name, text = self.error
        return BY_NAME.get(name, CollectiveSessionError)(text)


def failed(error: type[CollectiveSessionError] | str, text: str) -> Verdict:
    """A verdict against."""
    return Verdict((error if isinstance(error, str) else error.__name__, text))


def judge(descriptions: Sequence[Description], place: str) -> Verdict:
    """What becomes of an operation.

    Args:
        descriptions: of all peers, or of some where that suffices: one that finishes and one that does not.
        place: which operation it is, for the message.
    """
    held = sorted(descriptions, key=lambda one: one.peer)
    if held[0].kind == "register":
        return _judge_registration(held, place)
    problems = [one for one in held if one.problem is not None]
    if problems:
        assert problems[0].problem is not None
        return failed(problems[0].problem[0], f"{_named(held, place)}: {_problems(problems)}. Nothing was done")
    finishing = [one.peer for one in held if one.kind == "finish"]
    if finishing and len(finishing) < len(held):
        others = _by_value([one for one in held if one.kind != "finish"], lambda one: one.kind)
        return failed(
            "PeerLost",
            f"{place}: {peers_text(finishing)} called finish, while others go on: {others}. Nothing was done",
        )
    if len({one.kind for one in held}) > 1:
        kinds = _by_value(held, lambda one: one.kind)
        return failed("KindMismatch", f"{place}: peers called different operations: {kinds}. Nothing was done")
    if held[0].kind == "broadcast":
        return _judge_broadcast(held, place)
    return _judge_reduction(held, place)


def lost(present: Sequence[Description], expected: Iterable[int], place: str, timeout_s: float) -> Verdict:
    """The verdict where `timeout_s` is over and not all of the `expected` peers came."""
    came = {one.peer for one in present}
    missing = [peer for peer in expected if peer not in came]
    there = _by_value(sorted(present, key=lambda one: one.peer), lambda one: one.kind) or "nobody"
    who = f"{peers_text(missing)} did not come" if missing else "the peers came, but not to a verdict"
    return failed("PeerLost", f"{place}: {who} within {timeout_s:g} s (there: {there})")


def encode(value: Verdict | Sequence[Description]) -> str:
    """As text, for `decode_verdict` or `decode_descriptions`."""
    if isinstance(value, Verdict):
        return json.dumps(dataclasses.asdict(value))
    return json.dumps([dataclasses.asdict(one) for one in value])


def decode_descriptions(text: str) -> list[Description]:
    """What `encode` made of some.

    Raises:
        ValueError: it is something else.
    """
    try:
        held = json.loads(text)
        if not isinstance(held, list) or not held:
            raise TypeError("no list")
        return [_description(one) for one in held]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"no descriptions of operations but {text[:80]!r}") from error


def descriptions_of(held: Mapping[int, str]) -> list[Description]:
    """All descriptions that nodes have given as text, in the order of nodes and peers."""
    return [one for node in sorted(held) for one in decode_descriptions(held[node])]


def decode_verdict(text: str) -> Verdict:
    """What `encode` made of one.

    Raises:
        ValueError: it is something else.
    """
    try:
        held = json.loads(text)
        error, source = held["error"], held["source"]
        named = None if error is None else (str(error[0]), str(error[1]))
        return Verdict(named, None if source is None else _description(source), bool(held["closes"]))
    except (TypeError, KeyError, AttributeError, IndexError) as error:
        raise ValueError(f"no verdict but {text[:80]!r}") from error


def peers_text(peers: Sequence[int]) -> str:
    """ "peer 3" or "peers 0, 2"."""
    shown = ", ".join(map(str, peers[:_PEERS_SHOWN]))
    more = f" and {len(peers) - _PEERS_SHOWN} more" if len(peers) > _PEERS_SHOWN else ""
    return f"peer{'s' if len(peers) > 1 else ''} {shown}{more}"


def _judge_registration(held: Sequence[Description], place: str) -> Verdict:
    problems = [one for one in held if one.problem is not None]
    if problems:
        assert problems[0].problem is not None
        return failed(problems[0].problem[0], f"{place}: {_problems(problems)}")
    peers = [one.peer for one in held]
    doubled = sorted({peer for peer in peers if peers.count(peer) > 1})
    if doubled:
        return failed("MultipleRegister", f"{place}: {len(peers)} callers, of which several are {peers_text(doubled)}")
    differing = []
    for name, _ in held[0].settings:
        values = {one.peer: json.dumps(dict(one.settings).get(name)) for one in held}
        if len(set(values.values())) > 1:
            differing.append(f"{name}: {_by_value(held, lambda one, values=values: values[one.peer])}")  # type: ignore[misc]
    if differing:
        text = " | ".join(differing)
        return failed("RegisterParamsMismatch", f"{place}: peers disagree. {text}. Give every peer the same")
    return Verdict()


def _judge_reduction(held: Sequence[Description], place: str) -> Verdict:
    kind = held[0].kind
    prefix = {"all_reduce": "AllReduce", "reduce": "Reduce"}.get(kind)
    if prefix is None:
        return Verdict()
    checks: tuple[tuple[str, str, Callable[[Description], Hashable]], ...] = (
        (f"{prefix}ShapeMismatch", "shapes", lambda one: one.shape),
        ("DTypeMismatch", "dtypes", lambda one: one.dtype),
        (f"{prefix}OperationMismatch", "ops", lambda one: one.op),
        ("ReduceRootMismatch", "roots", lambda one: one.root),
    )
    for name, what, value in checks:
        if len({value(one) for one in held}) > 1:
            return failed(name, f"{place} ({kind}): {what} differ: {_by_value(held, value)}. Nothing was reduced")
    return Verdict()


def _judge_broadcast(held: Sequence[Description], place: str) -> Verdict:
    senders = [one for one in held if one.shape is not None]
    roots = [one for one in held if one.root is not None]
    named = f"{place} (broadcast)"
    if len({one.root for one in roots}) > 1:
        return failed("BroadcastRootMismatch", f"{named}: roots differ: {_by_value(roots, lambda one: one.root)}")
    if not senders:
        return failed("BroadcastNoTensor", f"{named}: none of {peers_text([one.peer for one in held])} has a tensor")
    if len(senders) > 1:
        tensors = _by_value(senders, lambda one: f"{one.dtype} {one.shape}")
        return failed("BroadcastMultipleTensors", f"{named}: more than one peer has a tensor: {tensors}")
    if roots and roots[0].root != senders[0].peer:
        said = _by_value(roots, lambda one: f"root {one.root}")
        return failed("BroadcastRootMismatch", f"{named}: {said}, but the tensor is peer {senders[0].peer}'s")
    return Verdict(source=senders[0])


def _named(held: Sequence[Description], place: str) -> str:
    kinds = {one.kind for one in held}
    return f"{place} ({held[0].kind})" if len(kinds) == 1 else place


def _problems(problems: Sequence[Description]) -> str:
    return "; ".join(f"peer {one.peer}: {one.problem[1]}" for one in problems if one.problem is not None)


def _by_value(held: Iterable[Description], value: Callable[[Description], Hashable]) -> str:
    """ "(2, 3) on peers 0, 2; (4,) on peer 1"."""
    peers: dict[str, list[int]] = {}
    for one in held:
        peers.setdefault(str(value(one)), []).append(one.peer)
    return "; ".join(f"{text} on {peers_text(who)}" for text, who in peers.items())


def _description(held: dict[str, Any]) -> Description:
    for name in ("shape", "stride", "problem"):
        if held[name] is not None:
            held[name] = tuple(held[name])
    held["settings"] = tuple((name, value) for name, value in held["settings"])
    return Description(**held)
