"""measure_collectives: counts and bytes of every operation, over threads and Gloo; times on a clock of the test's."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from support.cuda.device_time import DEVICE, FakeGpu
from support.ranks import RankPool
from support.timeouts import PATIENT_S, settles
from torch import nn

import fusedreduce
from fusedreduce.comm.local.group import LocalCommunicator
from fusedreduce.comm.process_group import ProcessGroupCommunicator
from fusedreduce.trace import collective_metrics
from fusedreduce.trace.collective_metrics import CollectiveMetrics, OperationMetrics

CPU = torch.device("cpu")
# What `everything` does with two ranks: (count, bytes of tensors, bytes on the link by a ring).
WANTED = {
    "all_reduce": (3, 3 * 400, 3 * 400.0),
    "reduce": (1, 400, 400.0),
    "reduce_scatter": (1, 400, 200.0),
    "all_gather": (1, 800, 400.0),
    "all_to_all": (1, 400, 200.0),
    "all_reduce_sparse": (1, 3 * (8 + 4), 36.0),
    "broadcast": (1, 400, 400.0),
    "all_gather_bytes": (1, 6, 3.0),
    "send": (1, 400, 400.0),
    "recv": (1, 400, 400.0),
}


def everything(communicator: Any) -> CollectiveMetrics:
    methods = dict(vars(communicator))
    other = 1 - communicator.rank
    communicator.all_reduce(torch.ones(7)).wait()
    with fusedreduce.measure_collectives(communicator) as metrics:
        with (
            pytest.raises(fusedreduce.FusedReduceError, match="measured already"),
            fusedreduce.measure_collectives(communicator),
        ):
            raise AssertionError("two at once")
        assert metrics.total == OperationMetrics() and metrics.total.bytes_per_s == metrics.total.mean_s == 0
        pendings = [communicator.all_reduce(torch.ones(100)) for _ in range(2)]
        pendings.append(communicator.all_reduce(torch.ones(100), op="max"))
        pendings.append(communicator.reduce(torch.ones(100), root=1))
        pendings.append(communicator.reduce_scatter(torch.ones(100))[0])
        pendings.append(communicator.all_gather(torch.ones(100))[0])
        pendings.append(communicator.all_to_all(torch.empty(100), torch.ones(100)))
        index = torch.tensor([[0, 4, 7]])
        sparse = torch.sparse_coo_tensor(index, torch.ones(3), (9,), check_invariants=True)
        pendings.append(communicator.all_reduce_sparse(sparse))
        communicator.broadcast(torch.ones(100), 0)
        assert communicator.all_gather_bytes(b"abc", 5, CPU) == [b"abc"] * 2
        pendings += [communicator.send(torch.ones(100), other), communicator.recv(torch.empty(100), other)]
        for pending in pendings:
            pending.wait()
        counts = {kind: wanted[0] for kind, wanted in WANTED.items()}  # Gloo's threads call back a little later
        assert settles(lambda: {kind: found.count for kind, found in metrics.operations.items()} == counts)
    communicator.all_reduce(torch.ones(7)).wait()
    assert dict(vars(communicator)).keys() - {"_issued"} == methods.keys() - {"_issued"}, "nothing stays"
    found = metrics.operations
    assert {kind: (one.count, one.tensor_bytes, one.link_bytes) for kind, one in found.items()} == WANTED
    assert all(0 < one.time_s < 10 and one.mean_s == one.time_s / one.count for one in found.values())
    assert metrics.total.count == sum(count for count, *_ in WANTED.values())
    assert metrics.total.time_s == pytest.approx(sum(one.time_s for one in found.values()))
    one = found["all_reduce"]
    assert one.bytes_per_s == one.tensor_bytes / one.time_s
    return metrics


def over_torch(rank: int, world: int) -> None:
    everything(ProcessGroupCommunicator())


def test_threads() -> None:
    fusedreduce.LocalGroup(2, timeout_s=PATIENT_S).run(everything)


def test_processes(two: RankPool) -> None:
    two.run(over_torch)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shares_of_the_link(ranks: int) -> None:
    shares = {kind: share(ranks) for kind, share in collective_metrics.LINK_SHARES.items()}
    if ranks == 1:
        assert {kind: share for kind, share in shares.items() if share} == {"send": 1.0, "recv": 1.0}
    part = (ranks - 1) / ranks
    assert shares["all_reduce"] == shares["reduce_scatter"] + shares["all_gather"] == 2 * part


def test_a_time_ends_when_the_last_rank_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])
    first, second = fusedreduce.LocalGroup(2, one_thread=True).communicators()
    with fusedreduce.measure_collectives(first) as metrics:
        first.all_reduce(torch.ones(250))
        now[0] = 2_000_000_000
        assert metrics.operations == {}, "only what has ended counts"
        second.all_reduce(torch.ones(250))
        now[0] = 5_000_000_000
    assert metrics.total == OperationMetrics(1, 1000, 1000.0, 2.0) and metrics.total.bytes_per_s == 500


def test_an_operation_that_is_not_issued_does_not_count() -> None:
    (alone,) = fusedreduce.LocalGroup(1).communicators()
    with pytest.raises(ValueError, match="destination"), fusedreduce.measure_collectives(alone):
        alone.send(torch.ones(1, device="cpu"), 0)
    with fusedreduce.measure_collectives(alone) as metrics:
        with pytest.raises(ValueError, match="destination"):
            alone.send(torch.ones(1), 0)
        alone.all_reduce(torch.ones(1)).wait()
    assert {kind: one.count for kind, one in metrics.operations.items()} == {"all_reduce": 1}


def test_a_wrappers_reducer() -> None:
    """As many all-reduces as the wrapper counts itself, and their bytes."""

    def case(communicator: LocalCommunicator) -> None:
        ddp = fusedreduce.DistributedDataParallel(
            nn.Linear(32, 16), reduce=fusedreduce.ReduceConfig(wire="bf16"), process_group=communicator.process_group()
        )
        for _ in range(3):
            ddp(torch.ones(2, 32)).sum().backward()
        before = ddp.reduce_stats()
        with ddp.measure_collectives() as metrics:
            for _ in range(5):
                ddp(torch.ones(2, 32)).sum().backward()
        after, found = ddp.reduce_stats(), metrics.operations["all_reduce"]
        assert found.count == int(after["collectives"]) - int(before["collectives"]) > 0
        assert found.tensor_bytes == 5 * int(after["wire_bytes"])

    fusedreduce.LocalGroup(2, timeout_s=PATIENT_S).run(case)


class OnAStream:
    """Ends on a device that is stood in for, at a time of its own."""

    def __init__(self, gpu: FakeGpu, end_ns: int) -> None:
        self._gpu = gpu
        self._end_ns = end_ns

    def wait(self) -> None:
        self._gpu.current.wait_until(self._end_ns)


class StoodIn:
    """A rank of two whose collectives take 3 ms each on the device, behind what was queued before."""

    size, rank, lost = 2, 0, ""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def waits_in_backward(self, device: torch.device) -> bool:
        return True

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> OnAStream:
        return OnAStream(self._gpu, self._gpu.current.now_ns + 3_000_000)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self._gpu.work(2_000_000)

    reduce = reduce_scatter = all_gather = all_gather_bytes = all_to_all = all_reduce_sparse = send = recv = all_reduce


def test_on_cuda_the_devices_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """From what was queued before; the issuing stream goes on meanwhile, and is not made to wait."""
    gpu = FakeGpu(monkeypatch)
    monkeypatch.setattr(collective_metrics, "_device_of", lambda tensors: DEVICE)
    communicator: Any = StoodIn(gpu)
    with fusedreduce.measure_collectives(communicator) as metrics:
        for _ in range(2 * collective_metrics.MOST_UNREAD):
            gpu.work(1_000_000)
            communicator.all_reduce(torch.ones(250))
        communicator.broadcast(torch.ones(250), 0)
        assert len(metrics._unread) == collective_metrics.MOST_UNREAD, "no more events are kept"
    count = 2 * collective_metrics.MOST_UNREAD
    assert gpu.current.now_ns == count * 1_000_000 + 2_000_000
    found = metrics.operations
    assert not any(clock._events for clock in metrics._clocks.values())
    assert found["broadcast"] == OperationMetrics(1, 1000, 1000.0, 0.002)
    assert found["all_reduce"].time_s == pytest.approx(0.003 * count) and found["all_reduce"].count == count


@pytest.mark.gpu
def test_on_a_gpu_the_devices_time() -> None:
    from support.ranks import group_of_one

    with group_of_one("cuda"):
        communicator = ProcessGroupCommunicator()
        tensor = torch.ones(1_000_000, device="cuda")
        communicator.all_reduce(tensor).wait()
        torch.cuda.synchronize()
        with fusedreduce.measure_collectives(communicator) as metrics:
            for _ in range(2 * collective_metrics.MOST_UNREAD):
                communicator.all_reduce(tensor).wait()
            communicator.broadcast(tensor, 0)
        found = metrics.operations
    assert found["all_reduce"].count == 2 * collective_metrics.MOST_UNREAD and found["broadcast"].count == 1
    assert all(0 < one.mean_s < 0.1 for one in found.values())
