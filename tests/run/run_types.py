"""Training scripts that look at the wrapper's type, or have a class of their own, and know torch alone.

run_types.py save FILE     trains each, and pickles a wrapper
run_types.py load FILE     makes none: loads it, and trains it
"""

from __future__ import annotations

import copy
import hashlib
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.ddp_subclasses import Forwarding, OldTrainer, Plain, Trainer, replacing
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

WRAPPERS = (nn.DataParallel, DDP)
CLASSES = (DDP, Plain, Forwarding, Trainer, OldTrainer, replacing("register_comm_hook", seen=True))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def trained(wrapper: Any) -> str:
    """Five steps with an average of the weights beside them, as trainers keep it; says what is left."""
    bare: Any = wrapper.module
    average = copy.deepcopy(bare)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    for step in range(5):
        inputs = torch.arange(8.0).view(2, 4).sin() * (step + 1 + dist.get_rank())
        if isinstance(wrapper, Trainer | OldTrainer):
            wrapper.train_step(inputs, optimizer)
        else:
            optimizer.zero_grad()
            wrapper(inputs).square().mean().backward()
            optimizer.step()
        inner = wrapper.module if type(wrapper) in WRAPPERS or isinstance(wrapper, DDP) else wrapper
        current = inner.state_dict()
        with torch.no_grad():
            for name, value in average.state_dict().items():
                value.copy_(value.lerp(current[name].to(value.dtype), 0.1) if value.is_floating_point() else value)
    saved = wrapper.module.state_dict() if type(wrapper) in (*WRAPPERS, *CLASSES) else wrapper.state_dict()
    assert not any(name.startswith("module.") for name in saved), sorted(saved)
    values = [*saved.values(), *average.state_dict().values()]
    digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in values)).hexdigest()
    kind, reducer = type(wrapper), type(wrapper.reducer).__module__
    return f"{kind.__module__}.{kind.__qualname__} {reducer} {digest}"


def lines(what: str, path: Path) -> list[str]:
    """What is said of each wrapper."""
    if what == "load":
        return [trained(pickle.loads(path.read_bytes()))]
    found = [trained(kind(model())) for kind in CLASSES]
    if dist.get_rank() == 0:
        path.write_bytes(pickle.dumps(DDP(model(), init_sync=False)))
    return found


def main() -> None:
    dist.init_process_group("gloo")
    for line in lines(sys.argv[1], Path(sys.argv[2])):
        os.write(1, f"rank {dist.get_rank()} {line}\n".encode())  # in one write: ranks share stdout
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a process that ends with Gloo's threads in it may abort


if __name__ == "__main__":
    main()
