"""On hardware: what is recorded of a step is what the stand-ins record without one, so that they stand for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from reducer.test_order import fake_outline
from support.order_cases import AGREED, CASES
from support.order_trace import Recorder


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
