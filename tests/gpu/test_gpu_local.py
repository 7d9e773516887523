"""LocalGroup with eight peers on one device, GPU or CPU: the kernel's bits; on a GPU also streams, events, memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from support.on_device import pick

from fusedreduce.comm.local.group import LocalCommunicator, LocalGroup
from fusedreduce.comm.local.strategies import Centralized, Ring, Strategy, Tree
from fusedreduce.kernels import combine, counting, dispatch, reference
from fusedreduce.kernels.parts import Part

CUDA = torch.device("cuda", 0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
STRATEGIES: tuple[Strategy, ...] = (Centralized(), Tree(2), Ring())
PEERS = 8


def drawn(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().view(torch.uint8)


@contextmanager
def kernels(device: torch.device) -> Iterator[None]:
    """Within: sums take the kernel on CPU too, where dispatch spares peers in one process the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            patch.setattr(dispatch, "path_for", lambda *_: "triton")
        yield


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_the_kernel_has_the_references_bits(device: torch.device, strategy: Strategy) -> None:
    # The interpreter does not round to bf16: it cuts bits off.
    dtypes = [one for one in DTYPES if device.type == "cuda" or one is not torch.bfloat16]
    numels = pick(device, cpu=(1, 203), cuda=(1, 7, 4096, 100_003))
    for numel, dtype, shift in itertools.product(numels, dtypes, (0, 1)):
        has_the_references_bits(device, numel, dtype, strategy.parts(PEERS, numel), shift)


def has_the_references_bits(
    device: torch.device, numel: int, dtype: torch.dtype, parts: tuple[Part, ...], shift: int
) -> None:
    rooms = [torch.zeros(numel + 9, dtype=dtype, device=device) for _ in range(PEERS)]
    tensors = [room[rank * shift :][:numel] for rank, room in enumerate(rooms)]
    on_cpu = [drawn(rank, numel, dtype) for rank in range(PEERS)]
    for one, other in zip(tensors, on_cpu, strict=True):
        one.copy_(other)
    with kernels(device), counting.count_launches() as counted:
        dispatch.combine(tensors, tensors, parts, 0.5)
    assert [(one.path, one.launches) for one in counted] == [(pick(device, cpu="interpreter", cuda="triton"), 1)]
    reference.combine(on_cpu, on_cpu, parts, 0.5)
    for rank, (room, one) in enumerate(zip(rooms, tensors, strict=True)):
        assert torch.equal(bits(one), bits(on_cpu[rank]))
        assert not room[: rank * shift].any() and not room[rank * shift + numel :].any(), "written beside it"


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_eight_peers_on_one_device_end_with_the_same_bytes(device: torch.device, strategy: Strategy) -> None:
    numels = pick(device, cpu=(1, 1000, 30_001), cuda=(1, 1000, 300_001))

    def case(communicator: LocalCommunicator) -> list[torch.Tensor]:
        results = []
        for dtype in DTYPES:
            for numel in numels:
                one = drawn(communicator.rank, numel, dtype).to(device)
                communicator.all_reduce(one).wait()
                results.append(bits(one))
        assert communicator.waits_in_backward(device) == pick(device, cpu=True, cuda=False)
        return results

    results = LocalGroup(PEERS, strategy=strategy, timeout_s=60).run(case)
    place = 0
    for dtype in DTYPES:
        for numel in numels:
            held = [drawn(rank, numel, dtype) for rank in range(PEERS)]
            reference.combine(held, held, strategy.parts(PEERS, numel))
            for one in results:
                assert torch.equal(one[place], bits(held[0]))
            place += 1


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_eight_peers_get_their_parts_and_hand_them_on(device: torch.device, strategy: Strategy) -> None:
    """A reduce-scatter has the bits of an all-reduce; then each part goes to the next peer, on streams of their own."""
    numel = pick(device, cpu=1001, cuda=100_003)

    def case(communicator: LocalCommunicator) -> list[torch.Tensor]:
        rank, results = communicator.rank, []
        for dtype in DTYPES:
            given = drawn(rank, PEERS * numel, dtype).to(device)
            whole = given.clone()
            pending, part = communicator.reduce_scatter(given)
            pending.wait()
            communicator.all_reduce(whole).wait()
            assert torch.equal(bits(part), bits(whole[rank * numel : (rank + 1) * numel]))
            received = torch.empty_like(part)
            sent = communicator.send(part * 2, (rank + 1) % PEERS)
            communicator.recv(received, (rank - 1) % PEERS).wait()
            sent.wait()
            before = (rank - 1) % PEERS
            assert torch.equal(bits(received), bits(whole[before * numel : (before + 1) * numel] * 2))
            results.append(bits(whole))
        return results

    first, *others = LocalGroup(PEERS, strategy=strategy, timeout_s=60).run(case)
    for one in others:
        assert all(torch.equal(mine, other) for mine, other in zip(one, first, strict=True))


@pytest.mark.gpu
def test_a_collective_is_behind_what_a_peer_has_queued_and_the_peer_behind_the_collective() -> None:
    """Each peer works on a stream of its own, which is busy for some milliseconds before and after."""

    def case(communicator: LocalCommunicator) -> None:
        with torch.cuda.stream(torch.cuda.Stream(CUDA)):
            for step in range(50):
                one = torch.zeros(100_000, device=CUDA)
                torch.cuda._sleep(2_000_000 * (1 + communicator.rank % 2))
                one.fill_(float(communicator.rank + step))
                pending = communicator.all_reduce(one)
                pending.wait()
                doubled = one * 2
                one.fill_(-1.0)
                wanted = 2.0 * (sum(range(4)) + 4 * step)
                assert doubled.eq(wanted).all().item(), step

    LocalGroup(4, timeout_s=60).run(case)


@pytest.mark.gpu
def test_nothing_is_waited_for_on_the_host() -> None:
    group = LocalGroup(2, timeout_s=60, one_thread=True)
    ranks = [group.communicator(rank) for rank in range(2)]
    tensors = [torch.ones(1000, device=CUDA) for _ in range(2)]
    for one in [ranks[rank].all_reduce(tensors[rank]) for rank in range(2)]:
        one.wait()  # kernels are compiled, tables uploaded
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    busy = torch.cuda.Event()
    busy.record()
    for _ in range(5):
        for one in [ranks[rank].all_reduce(tensors[rank]) for rank in range(2)]:
            one.wait()
    assert not busy.query(), "the host waited for the device"
    torch.cuda.synchronize()
    assert tensors[0].eq(2.0**6).all()


@pytest.mark.gpu
def test_the_kernel_is_compiled_before_the_first_step() -> None:
    communicator = LocalGroup(4, strategy=Tree(2)).communicator(0)
    with counting.count_launches() as counted:
        for _ in range(2):
            communicator.check_wire(torch.bfloat16, CUDA)
    assert [(one.function, one.launches) for one in counted] == [("combine", 1)]


@pytest.mark.gpu
def test_futures_are_ordered_with_streams() -> None:
    group = LocalGroup(2, timeout_s=60)
    first, second = group.communicator(0), group.communicator(1)
    one, other = torch.ones(1000, device=CUDA), torch.ones(1000, device=CUDA)
    future = first.all_reduce(one).future()
    with torch.cuda.stream(torch.cuda.Stream(CUDA)):
        torch.cuda._sleep(20_000_000)
        other.mul_(3)
        second.all_reduce(other)
    assert future.wait()[0].eq(4).all()


@pytest.mark.gpu
def test_memory_comes_back_also_where_nobody_waits() -> None:
    group = LocalGroup(2, timeout_s=60)
    first, second = group.communicator(0), group.communicator(1)

    def steps() -> None:
        for number in range(300):
            held = [torch.full((50_000,), float(number), device=CUDA) for _ in range(2)]
            pendings = [first.all_reduce(held[0]), second.all_reduce(held[1])]
            if number % 2:
                for one in pendings:
                    one.wait()
                assert held[0][0].item() == 2.0 * number
            del held, pendings
        torch.cuda.synchronize()

    steps()
    before = torch.cuda.memory_allocated()
    steps()
    # Tensors have other addresses the second time, and tables of addresses are kept: each is 2 + 2 outputs + 2 x 2
    # steps of 8 bytes, which the allocator counts as 512. They are less than the 400,000 bytes of one step.
    assert torch.cuda.memory_allocated() <= before + 512 * combine.TABLES_KEPT


def test_every_other_collective(device: torch.device) -> None:
    def case(communicator: LocalCommunicator) -> None:
        rank, size = communicator.rank, communicator.size
        one = torch.full((3,), rank + 1, device=device)
        communicator.all_reduce(one, "max").wait()
        assert one.tolist() == [size] * 3
        pending, rows = communicator.all_gather(torch.tensor([rank, 10 * rank], device=device))
        pending.wait()
        assert rows.tolist() == [[peer, 10 * peer] for peer in range(size)]
        source = torch.arange(size, device=device) + 100 * rank
        output = torch.empty_like(source)
        communicator.all_to_all(output, source).wait()
        assert output.tolist() == [100 * peer + rank for peer in range(size)]
        sent = torch.tensor([float(rank)], device=device)
        communicator.broadcast(sent, 1)
        assert sent.item() == 1.0
        part = torch.full((5,), float(rank), device=device)
        communicator.reduce(part, 2).wait()
        assert rank != 2 or part.tolist() == [float(sum(range(size)))] * 5
        sparse = torch.sparse_coo_tensor(
            torch.tensor([[rank, 1]]), torch.tensor([1.0, 2.0]), (size,), check_invariants=True
        ).to(device)
        under_way = communicator.all_reduce_sparse(sparse)
        under_way.wait()
        wanted = [1.0] * size
        wanted[1] += 2.0 * size
        assert under_way.future().wait()[0].to_dense().tolist() == wanted

    LocalGroup(4, timeout_s=60).run(case)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_peers_on_several_devices_end_with_the_same_bytes(strategy: Strategy) -> None:
    devices = torch.cuda.device_count()

    def case(communicator: LocalCommunicator) -> torch.Tensor:
        device = torch.device("cuda", communicator.rank % devices)
        torch.cuda.set_device(device)
        one = drawn(communicator.rank, 100_003, torch.bfloat16).to(device)
        communicator.all_reduce(one).wait()
        return bits(one)

    results = LocalGroup(PEERS, strategy=strategy, timeout_s=60).run(case)
    held = [drawn(rank, 100_003, torch.bfloat16) for rank in range(PEERS)]
    reference.combine(held, held, strategy.parts(PEERS, 100_003))
    for one in results:
        assert torch.equal(one, bits(held[0]))
