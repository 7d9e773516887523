"""Ranks compare what they were told before they act on it; where they differ, all of them raise the same error."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from ..errors import AgreementError
from .protocol import Communicator

CAPACITY_BYTES = 2048


def agree(communicator: Communicator, what: str, settings: Mapping[str, object], device: torch.device) -> None:
    """Compares `settings`, plain JSON values by name, across all ranks; one small blocking collective.

    Args:
        communicator: the ranks that must agree; each calls this at the same place.
        what: the subject, for the message.
        settings: name -> value; must serialise to at most CAPACITY_BYTES.
        device: where the backend takes tensors.

    Raises:
        AgreementError: on every rank, with each differing name and which ranks hold which value.
    """
    payload = json.dumps(dict(settings), sort_keys=True).encode()
    held = [_parse(raw) for raw in communicator.all_gather_bytes(payload, CAPACITY_BYTES, device)]
    problems = []
    for name in sorted(set().union(*held)):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, one in enumerate(held):
            value = json.dumps(one[name]) if name in one else "nothing"
            ranks_by_value.setdefault(value, []).append(rank)
        if len(ranks_by_value) > 1:
            parts = [f"{value} on {_ranks(ranks)}" for value, ranks in ranks_by_value.items()]
            problems.append(f"{name}: {'; '.join(parts)}")
    if problems:
        raise AgreementError(
            f"ranks disagree on the {what}, so nothing has been reduced. Give every rank the same. "
            + " | ".join(problems)
        )


def _parse(raw: bytes) -> dict[str, object]:
    """What a peer sent: JSON of an object, nothing else is accepted."""
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise AgreementError(f"a peer sent no settings but {raw[:40]!r}: is another program in this group?") from error
    if not isinstance(value, dict):
        raise AgreementError(f"a peer sent no settings but {raw[:40]!r}: is another program in this group?")
    return value


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
