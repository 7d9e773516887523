"""Descriptions of peers' calls, and the one verdict on them: pure functions, with the same answer on every peer.

Example: in an all_reduce, peer 1 has shape (4,) and the others (2, 3). `judge` of the three descriptions is a Verdict:
    AllReduceShapeMismatch: operation 7 (all_reduce): shapes differ: (2, 3) on peers 0, 2; (4,) on peer 1. Nothing ...
A verdict is JSON and is found once per operation, so every peer raises that, late ones too.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import shortened
from .errors import BY_NAME, CollectiveSessionError

Kind = Literal["all_reduce", "reduce", "broadcast", "finish", "register"]
Op = Literal["sum", "mean", "min", "max", "product"]
OPS: tuple[Op, ...] = ("sum", "mean", "min", "max", "product")
_PEERS_SHOWN = 16


@dataclass(frozen=True)
class Description:
    """One peer's call, in plain values.

    Attributes:
        peer: its number.
        kind: the operation that it called.
        op, root: its arguments; None where it has none.
        shape, stride, dtype: of its tensor; None without one.
        settings: of a registration: (name, value) of what must be equal on all peers.
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
    """The verdict on an operation.

    Attributes:
        error: (name of the error's class, text); None if the operation is carried out.
        source: of a broadcast: the call of the peer whose tensor is sent.
        closes: the session is over for all peers.
    """

    error: tuple[str, str] | None = None
    source: Description | None = None
    closes: bool = False

    def raised(self) -> CollectiveSessionError:
        """Makes the error: a new one for each peer, because threads must not share a traceback."""
        assert self.error is not None
        name, text = self.error
        return BY_NAME.get(name, CollectiveSessionError)(text)


def failed(error: type[CollectiveSessionError] | str, text: str) -> Verdict:
    """Makes a verdict that an operation fails."""
    return Verdict((error if isinstance(error, str) else error.__name__, text))


def judge(descriptions: Sequence[Description], operation: str) -> Verdict:
    """Decides whether an operation is carried out.

    Args:
        descriptions: of all peers' calls, or of some where that suffices: one that finishes and one that does not.
        operation: which operation it is, for the message.
    """
    calls = sorted(descriptions, key=lambda call: call.peer)
    if calls[0].kind == "register":
        return _judge_registration(calls, operation)
    problems = [call for call in calls if call.problem is not None]
    if problems:
        assert problems[0].problem is not None
        return failed(problems[0].problem[0], f"{_named(calls, operation)}: {_problems(problems)}. Nothing was done")
    finishing = [call.peer for call in calls if call.kind == "finish"]
    if finishing and len(finishing) < len(calls):
        others = _by_value([call for call in calls if call.kind != "finish"], lambda call: call.kind)
        return failed(
            "PeerLost",
            f"{operation}: {peers_text(finishing)} called finish, while others called other operations: "
            f"{others}. Nothing was done",
        )
    if len({call.kind for call in calls}) > 1:
        kinds = _by_value(calls, lambda call: call.kind)
        return failed("KindMismatch", f"{operation}: peers called different operations: {kinds}. Nothing was done")
    if calls[0].kind == "broadcast":
        return _judge_broadcast(calls, operation)
    return _judge_reduction(calls, operation)


def lost(present: Sequence[Description], expected: Iterable[int], operation: str, timeout_s: float) -> Verdict:
    """The verdict where not all `expected` peers have called an operation within `timeout_s`.

    Args:
        present: descriptions of the calls that were made.
        expected: numbers of all peers.
        operation: which operation it is, for the message.
        timeout_s: seconds.
    """
    arrived = {call.peer for call in present}
    missing = [peer for peer in expected if peer not in arrived]
    called = _by_value(sorted(present, key=lambda call: call.peer), lambda call: call.kind) or "nothing"
    who = f"{peers_text(missing)} did not arrive" if missing else "all peers arrived, but reached no verdict"
    return failed("PeerLost", f"{operation}: {who} within {timeout_s:g} s (called: {called})")


def encode(value: Verdict | Sequence[Description]) -> str:
    """Encodes a verdict or descriptions as JSON, for `decode_verdict` or `decode_descriptions`."""
    if isinstance(value, Verdict):
        return json.dumps(dataclasses.asdict(value))
    return json.dumps([dataclasses.asdict(one) for one in value])


def decode_descriptions(text: str) -> list[Description]:
    """Decodes descriptions that `encode` wrote.

    Raises:
        ValueError: the text is something else.
    """
    try:
        values = json.loads(text)
        if not isinstance(values, list) or not values:
            raise TypeError("no list")
        return [_description(one) for one in values]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"expected descriptions of operations, got {text[:80]!r}") from error


def descriptions_of(texts: Mapping[int, str]) -> list[Description]:
    """Decodes all nodes' descriptions, in the order of nodes and peers.

    Args:
        texts: by node, what `encode` wrote.
    """
    return [one for node in sorted(texts) for one in decode_descriptions(texts[node])]


def decode_verdict(text: str) -> Verdict:
    """Decodes a verdict that `encode` wrote.

    Raises:
        ValueError: the text is something else.
    """
    try:
        values = json.loads(text)
        error, source = values["error"], values["source"]
        named = None if error is None else (str(error[0]), str(error[1]))
        return Verdict(named, None if source is None else _description(source), bool(values["closes"]))
    except (TypeError, KeyError, AttributeError, IndexError) as error:
        raise ValueError(f"expected a verdict, got {text[:80]!r}") from error


def peers_text(peers: Sequence[int]) -> str:
    """Writes peers for a message: "peer 3" or "peers 0, 2"."""
    return f"peer{'s' if len(peers) > 1 else ''} {shortened(peers, _PEERS_SHOWN)}"


def _judge_registration(calls: Sequence[Description], operation: str) -> Verdict:
    problems = [call for call in calls if call.problem is not None]
    if problems:
        assert problems[0].problem is not None
        return failed(problems[0].problem[0], f"{operation}: {_problems(problems)}")
    peers = [call.peer for call in calls]
    doubled = sorted({peer for peer in peers if peers.count(peer) > 1})
    if doubled:
        return failed(
            "MultipleRegister",
            f"{operation}: {len(peers)} callers, of which several registered as {peers_text(doubled)}",
        )
    differing = []
    for name, _ in calls[0].settings:
        values = {call.peer: json.dumps(dict(call.settings).get(name)) for call in calls}
        if len(set(values.values())) > 1:
            differing.append(f"{name}: {_by_value(calls, lambda call, values=values: values[call.peer])}")  # type: ignore[misc]
    if differing:
        text = " | ".join(differing)
        return failed("RegisterParamsMismatch", f"{operation}: peers disagree. {text}. Give every peer the same")
    return Verdict()


def _judge_reduction(calls: Sequence[Description], operation: str) -> Verdict:
    kind = calls[0].kind
    prefix = {"all_reduce": "AllReduce", "reduce": "Reduce"}.get(kind)
    if prefix is None:
        return Verdict()
    checks: tuple[tuple[str, str, Callable[[Description], Hashable]], ...] = (
        (f"{prefix}ShapeMismatch", "shapes", lambda call: call.shape),
        ("DTypeMismatch", "dtypes", lambda call: call.dtype),
        (f"{prefix}OperationMismatch", "ops", lambda call: call.op),
        ("ReduceRootMismatch", "roots", lambda call: call.root),
    )
    for name, what, value in checks:
        if len({value(call) for call in calls}) > 1:
            return failed(name, f"{operation} ({kind}): {what} differ: {_by_value(calls, value)}. Nothing was reduced")
    return Verdict()


def _judge_broadcast(calls: Sequence[Description], operation: str) -> Verdict:
    senders = [call for call in calls if call.shape is not None]
    roots = [call for call in calls if call.root is not None]
    named = f"{operation} (broadcast)"
    if len({call.root for call in roots}) > 1:
        return failed("BroadcastRootMismatch", f"{named}: roots differ: {_by_value(roots, lambda call: call.root)}")
    if not senders:
        return failed("BroadcastNoTensor", f"{named}: none of {peers_text([call.peer for call in calls])} has a tensor")
    if len(senders) > 1:
        tensors = _by_value(senders, lambda call: f"{call.dtype} {call.shape}")
        return failed("BroadcastMultipleTensors", f"{named}: more than one peer has a tensor: {tensors}")
    if roots and roots[0].root != senders[0].peer:
        said = _by_value(roots, lambda call: f"root {call.root}")
        return failed("BroadcastRootMismatch", f"{named}: {said}, but the tensor is peer {senders[0].peer}'s")
    return Verdict(source=senders[0])


def _named(calls: Sequence[Description], operation: str) -> str:
    kinds = {call.kind for call in calls}
    return f"{operation} ({calls[0].kind})" if len(kinds) == 1 else operation


def _problems(problems: Sequence[Description]) -> str:
    return "; ".join(f"peer {call.peer}: {call.problem[1]}" for call in problems if call.problem is not None)


def _by_value(calls: Iterable[Description], value: Callable[[Description], Hashable]) -> str:
    """Writes which peers have which value: "(2, 3) on peers 0, 2; (4,) on peer 1"."""
    peers: dict[str, list[int]] = {}
    for call in calls:
        peers.setdefault(str(value(call)), []).append(call.peer)
    return "; ".join(f"{text} on {peers_text(who)}" for text, who in peers.items())


def _description(values: dict[str, Any]) -> Description:
    for name in ("shape", "stride", "problem"):
        if values[name] is not None:
            values[name] = tuple(values[name])
    values["settings"] = tuple((name, value) for name, value in values["settings"])
    return Description(**values)
