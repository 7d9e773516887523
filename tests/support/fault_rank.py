"""One rank of test_faults.py and test_ddp_faults.py, a process of its own.

sys.argv is RANK WORLD STORE WIRE AS_VIEW FAULT STEP [wrapper]: torch's DDP with our hook, or our wrapper.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from fusedreduce.buckets.phases import Exchange, Phases
from fusedreduce.comm import process_group
from fusedreduce.comm.protocol import Communicator
from support.ddp_models import batch, hooked, loss_of, mlp, wrapped
from support.inside import EXCHANGE_GOES_ON, PHASES_ARE_ISSUED
from support.timeouts import SETUP_S, patient_group, wait_briefly


def _leave(phases: Phases) -> None:
    """In place of second phases, when the first phases have ended."""
    for one in phases.due:
        one.issued[0].wait()
    time.sleep(0.5)  # peers issue theirs meanwhile
    os._exit(0)


def _leave_after(phases: int) -> None:
    """Has this rank end once so many phases of every bucket have been issued."""
    begin = EXCHANGE_GOES_ON.present

    def begin_next(exchange: Exchange, communicator: Communicator) -> None:
        if len(exchange.issued) == phases:
            time.sleep(0.5)  # peers issue theirs meanwhile
            os._exit(0)
        begin(exchange, communicator)

    EXCHANGE_GOES_ON.set(begin_next)


def main() -> None:
    """Trains; the last rank dies, stops or leaves in the middle of a step."""
    rank, world, store, wire, as_view, fault, fault_step, *wrapper = sys.argv[1:]
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=SETUP_S)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world), timeout=timeout
    )
    options: dict[str, Any] = {"gradient_as_bucket_view": as_view == "view", "process_group": patient_group()}
    if fault.startswith("phase"):  # on two nodes
        options["ranks_per_node"] = 2
    model = mlp()
    ddp = wrapped(model, wire, **options) if wrapper else hooked(model, wire, **options)[0]
    victim = int(rank) == int(world) - 1
    for step in range(int(fault_step) + 3):
        ddp.zero_grad()
        loss = loss_of(ddp(batch(int(rank), step)))
        if fault == "stop" and step == int(fault_step):  # of one that ends, its peers are told at once
            wait_briefly()
        if victim and step == int(fault_step):
            if fault == "between":
                process_group.Work.ready = lambda work: False  # type: ignore[method-assign, assignment]
                PHASES_ARE_ISSUED.set(_leave)
            elif fault.startswith("phase"):
                _leave_after(int(fault.removeprefix("phase ")))
            elif fault == "leave":
                if wrapper:
                    os._exit(0)
                return
            else:
                os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault])
        began = time.monotonic()
        try:
            loss.backward()
        except BaseException:
            print(f"raised after {time.monotonic() - began:.1f} s at step {step}")
            raise
    print("finished")


if __name__ == "__main__":
    main()
