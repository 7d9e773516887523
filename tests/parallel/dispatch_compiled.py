"""What torch.compile makes of torch's DistributedDataParallel before install, under it, and behind it: as JSON."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel as DDP

import fusedreduce


class Model(nn.Module):
    """Of the user's, whose forward torch.compile takes; torch's own modules it leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(4, 600), nn.BatchNorm1d(600), nn.Linear(600, 600)
        self.last = nn.Linear(600, 500)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Two linear layers around a normalisation."""
        result: torch.Tensor = self.last(self.second(self.norm(self.first(inputs).relu())).relu())
        return result


def compiled(wrapper: nn.Module) -> dict[str, Any]:
    """Graphs and breaks of the wrapper compiled, and of a step around it."""
    found: dict[str, Any] = {}
    graphs: list[str] = []

    def backend(module: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(" ".join(str(node.target) for node in module.graph.nodes if node.op.startswith("call")))
        return module.forward

    def step(inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = wrapper(2 * inputs).sum() * 3
        return result

    called: tuple[Callable[..., Any], ...] = (wrapper, step)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    for one in called:
        torch._dynamo.reset()
        counters.clear()
        run = torch.compile(one, backend=backend)
        for number in range(3):
            optimizer.zero_grad()
            run(torch.arange(20.0).view(5, 4) / (3 + number)).sum().backward()
            optimizer.step()
        found["breaks"] = found.get("breaks", 0) + sum(counters["graph_break"].values())
        found["frames"] = found.get("frames", 0) + counters["frames"]["total"]
    weights = b"".join(one.detach().numpy().tobytes() for one in wrapper.parameters())
    return {**found, "graphs": graphs, "weights": hashlib.sha256(weights).hexdigest()}


def main() -> None:
    logging.disable(logging.ERROR)
    # "python_reducer" stays in force for a whole process.
    torch._dynamo.config.optimize_ddp = sys.argv[1]  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        compiled(DDP(Model(), bucket_cap_mb=1))  # the first time frames of torch's imports count
        kept = DDP(Model(), bucket_cap_mb=1)
        found = {"before": compiled(DDP(Model(), bucket_cap_mb=1))}
        fusedreduce.install()
        found["made before"] = compiled(kept)
        if sys.argv[1] != "python_reducer":  # which we refuse
            made = DDP(Model(), bucket_cap_mb=1)
            found["installed"] = {**compiled(made), "steps": fusedreduce.reducer_of(made).steps}
        fusedreduce.uninstall()
        found["uninstalled"] = compiled(DDP(Model(), bucket_cap_mb=1))
    print(json.dumps(found), flush=True)
    os._exit(0)  # a process that ends with Gloo's threads in it may abort
