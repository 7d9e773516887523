"""Two ranks whose link becomes slow in the middle of a training, as a script: its process 1, or a rank.

python choice_link.py          process 1 of namespaces of its own (link_network.room_command); prints what ranks do
python choice_link.py rank     a rank, which begins when it is told so, on stdin
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "perf"), str(ROOT)]
SLOW_MBIT = 100.0  # where 2 MB take 0.17 s: several times of what a loaded machine adds to a step
MOST_STEPS = 600


def room() -> int:
    """Starts the ranks, and slows their link when they have chosen; exit status 1 if one has failed."""
    import link_network

    ranks = [
        subprocess.Popen(
            [*link_network.rank_command(Path(__file__)), "rank"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **link_network.rank_environment(rank, 2)},
        )
        for rank in range(2)
    ]
    outputs = [rank.stdout for rank in ranks if rank.stdout is not None]
    for output in outputs:
        output.readline()  # it is in a namespace of its own
    network = link_network.Network([rank.pid for rank in ranks])
    for rank in ranks:
        assert rank.stdin is not None
        print("begin", file=rank.stdin, flush=True)
    print(outputs[0].readline(), end="", flush=True)
    network.shape(SLOW_MBIT)
    for output in outputs:
        for line in output:
            print(line, end="", flush=True)
    return int(any(rank.wait() for rank in ranks))


def rank() -> int:
    """Trains until a wire was chosen twice."""
    print("here", flush=True)
    sys.stdin.readline()
    os.environ.pop("TRITON_INTERPRET", None)  # steps as they are in training, whatever the tests have
    import torch
    import torch.distributed as dist

    import fusedreduce

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(2)])
    reduce = fusedreduce.ReduceConfig(wire=("native", "int8"))
    ddp = fusedreduce.DistributedDataParallel(model, reduce=reduce)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    stages, found = [""], []
    for step in range(1, MOST_STEPS + 1):
        optimizer.zero_grad()
        ddp(torch.randn(4, 512, device="cpu")).square().mean().backward()
        optimizer.step()
        times = ddp.wire_times()
        assert times is not None
        if times.stage != stages[-1]:
            stages.append(times.stage)
            if times.stage == "chosen":
                found.append((step, times.wire, times.measured_ms))
                if len(found) == 1 and dist.get_rank() == 0:
                    print(json.dumps({"first": found[0][:2]}), flush=True)
                if len(found) == 2:
                    break
    weights = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    print(json.dumps({"chosen": found, "weights": hashlib.sha256(weights).hexdigest()}), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(rank() if sys.argv[1:] == ["rank"] else room())
