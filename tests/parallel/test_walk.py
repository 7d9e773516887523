"""The walk of one gradient in docs/design.md, against a traced step.

As a program, without TRITON_INTERPRET, this file trains a wrapper on one rank and prints the files of the package that
a steady step enters, in the order in which it enters them first.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from support.ranks import Program
from torch import nn

import fusedreduce

WALK = "## The walk of one gradient through the wrapper"
STEPS = 40  # among the first ones are steps that learn a plan


def entered() -> list[str]:
    """The files that one steady step of a wrapper enters, in order."""
    package, found = str(Path(fusedreduce.__file__).parent), list[str]()
    kernels = os.path.realpath(f"{package}/kernels")

    def note(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        for folder, name in ((kernels, "kernels/"), (f"{package}/kernels", "kernels/"), (package, "")):
            if event == "call" and path.startswith(f"{folder}/"):
                file = name + path[len(folder) + 1 :]
                if file not in found:
                    found.append(file)
                return

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    ddp = fusedreduce.DistributedDataParallel(model, reduce=fusedreduce.ReduceConfig(wire="bf16"))
    for step in range(STEPS):
        ddp.zero_grad()
        if step == STEPS - 1:
            sys.setprofile(note)
        ddp(torch.ones(4, 8)).sum().backward()
    sys.setprofile(None)
    return found


def test_the_walk_of_a_gradient_is_the_one_that_the_design_page_describes() -> None:
    page = Path(__file__).resolve().parents[2].joinpath("docs", "design.md").read_text()
    block = page[page.index(WALK) :].split("```")[1]
    listed = [line.split()[0] for line in block.splitlines() if line.startswith("  ")]
    assert json.loads(Program(Path(__file__).read_text()).printed()) == listed


if __name__ == "__main__":
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    print(json.dumps(entered()))
    dist.destroy_process_group()
