"""Runs cases of one framework on every rank; rank 0 prints what each found, a JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import torch.distributed as dist


def run(cases: Sequence[Callable[[], str]], names: Sequence[str]) -> None:
    """Runs those of `cases` whose names are given, or all, in a Gloo group of torchrun's ranks."""
    dist.init_process_group("gloo")
    for case in cases:
        if names and case.__name__ not in names:
            continue
        found = case()
        if dist.get_rank() == 0:
            print(json.dumps({"case": case.__name__, "found": found}), flush=True)
    dist.destroy_process_group()
