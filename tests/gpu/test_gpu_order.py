"""On hardware: what is recorded of a step is what the stand-ins record without one, so that they stand for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from reducer.test_order import fake_outline
from support.cuda.order_cases import AGREED, CASES
from support.cuda.order_trace import Recorder

from fusedreduce.comm.process_group import ProcessGroupCommunicator
from fusedreduce.comm.protocol import Pieces


@pytest.mark.gpu
def test_a_future_of_several_collectives_is_behind_each_of_them(tmp_path: Path) -> None:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        communicator = ProcessGroupCommunicator()
        sent = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
        received = [torch.zeros_like(sent) for _ in range(2)]
        communicator.all_gather(sent)[0].wait()  # connects
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(10**9)
            sent.fill_(7)
            pieces = Pieces([communicator.all_gather(sent, into)[0] for into in received], sent.device)
        read = pieces.future().then(lambda done: [bool((one == 7).all()) for one in done.value()])
        assert read.wait() == [True, True]
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("name", AGREED)
def test_the_trace_is_that_of_the_stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    with monkeypatch.context() as patch:
        expected = fake_outline(patch, name)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        recorder = Recorder(monkeypatch)
        with recorder.recording():
            CASES[name]().run(recorder, torch.device("cuda", torch.cuda.current_device()))
        torch.cuda.synchronize()
    finally:
        dist.destroy_process_group()
    assert recorder.outline() == expected
