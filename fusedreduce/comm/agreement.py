"""Compares settings and models across ranks before they are used; where they differ, all ranks raise the same error."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch

from ..errors import AgreementError, shortened
from .protocol import Communicator

CAPACITY_BYTES = 2048
_PROBLEM_SHOWN = 300
_WIRES_SHOWN = 8
# Where a rank reduces with torch's own class, whose first collective is another one.
ON_EVERY_MACHINE = "start `python -m fusedreduce.run` on every machine, or have the script make fusedreduce's wrapper"


def agree(communicator: Communicator, what: str, settings: Mapping[str, object], device: torch.device) -> None:
    """Compares `settings`, plain JSON values by name, across all ranks; one small blocking collective.

    Args:
        communicator: the ranks that must agree; each calls this at the same place.
        what: the subject, for the message.
        settings: name -> value; must serialise to at most CAPACITY_BYTES.
        device: where the backend takes tensors.

    Raises:
        AgreementError: on every rank, with each differing name and which ranks have which value.
    """
    payload = json.dumps(dict(settings), sort_keys=True).encode()
    by_rank = _parsed(communicator.all_gather_bytes(payload, CAPACITY_BYTES, device))
    problems = []
    for name in sorted(set().union(*by_rank)):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, values in enumerate(by_rank):
            value = json.dumps(values[name]) if name in values else "nothing"
            ranks_by_value.setdefault(value, []).append(rank)
        if len(ranks_by_value) > 1:
            parts = [f"{value} on {ranks_text(ranks)}" for value, ranks in ranks_by_value.items()]
            problems.append(f"{name}: {'; '.join(parts)}")
    if problems:
        raise AgreementError(
            f"ranks disagree on the {what}, so nothing has been reduced. Give every rank the same. "
            + " | ".join(problems)
        )


def agree_on_parameters(
    communicator: Communicator,
    descriptions: Sequence[str],
    settings: Mapping[str, object],
    device: torch.device,
    problem: str = "",
    arithmetic: str = "",
    wires: Mapping[str, str] | None = None,
    what: str = "settings of the reduction (under fusedreduce run: flags and FUSEDREDUCE_* variables)",
) -> bool:
    """Compares a model and its settings across all ranks by two small blocking collectives (more where models differ).

    Args:
        communicator: the ranks that must agree; each calls this at the same place.
        descriptions: one text per parameter, with everything that must be equal.
        settings: as for `agree`.
        device: where the backend takes tensors.
        problem: why this rank cannot take part, which is reported to the others instead of leaving them waiting.
        arithmetic: what decides the last bits of sums on this rank; it may differ between ranks.
        wires: what each parameter travels on, by name.
        what: names the settings in errors.

    Returns:
        Whether `arithmetic` is the same on every rank.

    Raises:
        AgreementError: with the same text on every rank: the ranks' problems, the first parameter that differs, the
            parameters whose wires differ, or each differing setting.
    """
    hashes = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in descriptions]
    digest = hashlib.blake2b(b"".join(hashes), digest_size=16).hexdigest()
    about = {"parameters": len(descriptions), "digest": digest, "problem": problem[:_PROBLEM_SHOWN]}
    coded = "\n".join((wires or {}).values()).encode()
    about["wires"] = hashlib.blake2b(coded, digest_size=8).hexdigest()
    about["wires_bytes"] = len(coded)
    by_rank = _gather_summaries(communicator, {**about, "arithmetic": arithmetic}, device)
    refusals = _problems(by_rank)
    if refusals:
        error = AgreementError(f"not every rank can reduce its model. {' | '.join(refusals)}")
        error.on_every_rank = len(refusals) == len(by_rank)
        raise error
    counts = [summary.get("parameters") for summary in by_rank]
    if len({(summary.get("parameters"), summary.get("digest")) for summary in by_rank}) > 1:
        if len(set(counts)) > 1:
            other = next(rank for rank, count in enumerate(counts) if count != counts[0])
            raise AgreementError(
                f"DDP expects same model across all ranks, but Rank 0 has {counts[0]} params, while rank {other} has "
                f"inconsistent {counts[other]} params. Parameters that require a gradient, by rank: {counts}"
            )
        listed = communicator.all_gather_bytes(b"".join(hashes), 8 * len(hashes), device)
        first = next(
            index for index in range(len(hashes)) if len({raw[8 * index : 8 * index + 8] for raw in listed}) > 1
        )
        texts = communicator.all_gather_bytes(descriptions[first].encode()[:CAPACITY_BYTES], CAPACITY_BYTES, device)
        by_text: dict[str, list[int]] = {}
        for rank, raw in enumerate(texts):
            by_text.setdefault(raw.decode(errors="replace"), []).append(rank)
        shown = "; ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in by_text.items())
        raise AgreementError(
            f"parameter {first} appears not to match across ranks: {shown}. Build the same model on all"
        )
    if wires and len({summary.get("wires") for summary in by_rank}) > 1:
        most = max(int(str(summary.get("wires_bytes"))) for summary in by_rank)
        listed = communicator.all_gather_bytes(coded, most, device)
        raise AgreementError(_wires_text(list(wires), [raw.decode(errors="replace").split("\n") for raw in listed]))
    agree(communicator, what, settings, device)
    return len({str(summary.get("arithmetic")) for summary in by_rank}) == 1


def _wires_text(names: Sequence[str], by_rank: Sequence[Sequence[str]]) -> str:
    """Says which parameters travel on different wires; `by_rank` has those of every parameter."""
    names_by_wires: dict[tuple[str, ...], list[str]] = {}
    for name, wires in zip(names, zip(*by_rank, strict=True), strict=True):
        if len(set(wires)) > 1:
            names_by_wires.setdefault(wires, []).append(name)
    differing = []
    for of_ranks, alike in names_by_wires.items():
        whose = f"all {len(names)} parameters" if len(alike) == len(names) > 1 else shortened(alike, _WIRES_SHOWN)
        ranks = {wire: [rank for rank, one in enumerate(of_ranks) if one == wire] for wire in of_ranks}
        differing.append(f"{whose}: " + "; ".join(f"{wire!r} on {ranks_text(of)}" for wire, of in ranks.items()))
    return (
        "ranks disagree on the wires of parameters, so nothing has been reduced. Give every rank the same "
        "ReduceConfig(wire=...) (under fusedreduce run: the same --wire or FUSEDREDUCE_WIRE). "
        f"{shortened(differing, _WIRES_SHOWN, ' | ')}"
    )


def problems_of_ranks(communicator: Communicator, problem: str, device: torch.device) -> str:
    """Gathers why ranks cannot take part; one small blocking collective.

    Args:
        communicator: the ranks; each calls this at the same place.
        problem: this rank's; "" where it has none.
        device: where the backend takes tensors.

    Returns:
        All ranks' problems in one text, the same on all ranks; "" if there are none.

    Raises:
        AgreementError: only some ranks were given `fallback`; the others compare their models already.
    """
    return " | ".join(
        _problems(_gather_summaries(communicator, {"problem": problem[:_PROBLEM_SHOWN], "fallback": True}, device))
    )


def _gather_summaries(
    communicator: Communicator, mine: dict[str, object], device: torch.device
) -> list[dict[str, object]]:
    """Gathers what each rank says of its wrapper, in rank order; `mine` is this rank's."""
    by_rank = _parsed(communicator.all_gather_bytes(json.dumps(mine).encode(), CAPACITY_BYTES, device))
    asking = [rank for rank, summary in enumerate(by_rank) if summary.get("fallback")]
    if 0 < len(asking) < len(by_rank):
        raise AgreementError(f"fallback is asked for on {ranks_text(asking)} only. Give every rank the same")
    return by_rank


def _problems(by_rank: Sequence[Mapping[str, object]]) -> list[str]:
    return [f"rank {rank}: {one['problem']}" for rank, one in enumerate(by_rank) if one.get("problem")]


def _parsed(raws: Sequence[bytes]) -> list[dict[str, object]]:
    """Parses what every rank sent, each of which must be a JSON object."""
    by_rank = list(map(_parse, raws))
    others = [rank for rank, values in enumerate(by_rank) if values is None]
    if others:
        raise AgreementError(
            f"{ranks_text(others)} sent something else than settings, as torch's own class or another program does: "
            f"{ON_EVERY_MACHINE}"
        )
    return [values for values in by_rank if values is not None]


def _parse(raw: bytes) -> dict[str, object] | None:
    try:
        value = json.loads(raw)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def ranks_text(ranks: Sequence[int]) -> str:
    """Writes ranks for a message: "rank 3" or "ranks 0, 2"; at most the first eight are shown."""
    return f"rank{'s' if len(ranks) > 1 else ''} {shortened(ranks, 8)}"
