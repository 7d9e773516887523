"""Collective sessions: configuration, results, handles and ends; threads as peers, and nodes of threads."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import sweep
from support.collective_cases import (
    PLACES,
    TIMEOUT_S,
    Peers,
    caught,
    good,
    run_threads,
    tasks,
    values,
)
from support.inside import kept_by, keys_of, peers_of
from support.timeouts import PATIENT_S, settles

from fusedreduce.collective import (
    Centralized,
    CollectiveConfig,
    InvalidConfig,
    LocalGroup,
    MultipleUnregister,
    RegisterNotFirstOperation,
    Ring,
    Session,
    Tree,
    register,
)
from fusedreduce.collective.node_collectives import number_of, ordered_key
from fusedreduce.collective.payload import copies, is_dense
from fusedreduce.comm.local.strategies import Strategy

OPS = ("sum", "mean", "min", "max", "product")


# The options.


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"world_size": 0}, "world_size must be an integer of at least 1, got 0"),
        ({"world_size": True}, "world_size"),
        ({"strategy": "tree"}, "strategy must be Centralized"),
        ({"reduce_strategy": None}, "reduce_strategy must be"),
        ({"broadcast_strategy": Tree}, "broadcast_strategy must be"),
        ({"timeout_s": 0}, "timeout_s must be a positive number"),
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"timeout_s": True}, "timeout_s"),
        ({"global_address": "localhost:1"}, "global_address given without global_rank, global_world_size"),
        ({"global_rank": 0, "global_world_size": 2}, "global_rank, global_world_size given without global_address"),
        ({"global_address": "x", "global_rank": 0, "global_world_size": 2}, "global_address must be 'host:port'"),
        ({"global_address": "x:0", "global_rank": 0, "global_world_size": 2}, "global_address must be"),
        ({"global_address": 5, "global_rank": 0, "global_world_size": 2}, "global_address must be"),
        (
            {"global_address": "x:1", "global_rank": 2, "global_world_size": 2},
            "global_rank must be an integer from 0 to 1",
        ),
        ({"global_address": "x:1", "global_rank": 0, "global_world_size": 0}, "global_world_size must be"),
        ({"global_group": "world"}, "global_group must be a torch.distributed group"),
        ({"global_group": "world", "global_rank": 0}, "global_group and global_rank exclude each other"),
    ],
)
def test_options_are_checked_and_the_missing_ones_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        CollectiveConfig(**options)


def test_a_config_is_frozen_compares_and_is_plain_values() -> None:
    config = CollectiveConfig(world_size=2, strategy=Ring())
    assert config == CollectiveConfig(world_size=2, strategy=Ring()) != CollectiveConfig(world_size=2)
    assert config.to_dict() == {
        "world_size": 2,
        "strategy": "Ring()",
        "reduce_strategy": "Tree(arity=2)",
        "broadcast_strategy": "Tree(arity=2)",
        "timeout_s": 300.0,
        "global_group": False,
        "global_address": None,
        "global_rank": None,
        "global_world_size": None,
    }
    with pytest.raises(AttributeError):
        config.world_size = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        CollectiveConfig(2)  # type: ignore[call-arg]
    address = CollectiveConfig(global_address="[::1]:29500", global_rank=1, global_world_size=2)
    assert address.host_and_port() == ("::1", 29500) and "global_rank" not in address.agreed()


# Rows 3.49 and 3.50 of the reference: burn's own tests, and what they lack.

# In a ring of more peers than elements upstream falls back to a tree; where peers do not divide a size, its slices run
# out of range.
ALL_REDUCES: list[tuple[Strategy, int, tuple[int, ...]]] = [
    *((strategy, 4, (4,)) for strategy in (Centralized(), Tree(2), Tree(5))),
    (Ring(), 3, (3, 3)),
    (Ring(), 4, (3,)),
    *((strategy, 4, shape) for strategy in (Tree(1), Tree(3), Ring()) for shape in ((5,), (7, 3), (2, 3, 11))),
]


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize(("strategy", "size", "shape"), ALL_REDUCES, ids=str)
def test_all_reduce_as_upstream(strategy: Strategy, size: int, shape: tuple[int, ...], op: str) -> None:
    expected = sum((values(peer, shape) for peer in range(size)), start=torch.zeros(shape))
    expected = expected / size if op == "mean" else expected
    results = Peers(size).run(lambda s: s.all_reduce(values(s.peer, shape), op), strategy=strategy)
    for result in results:
        assert torch.equal(result, expected)


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("strategy", [Centralized(), Tree(2), Tree(5)], ids=str)
def test_reduce_as_upstream(strategy: Strategy, op: str) -> None:
    expected = sum((values(peer) for peer in range(4)), start=torch.zeros(4)) / (4 if op == "mean" else 1)
    results = Peers(4).run(lambda s: s.reduce(values(s.peer), op, 0), reduce_strategy=strategy)
    assert torch.equal(results[0], expected) and results[1:] == [None] * 3


@pytest.mark.parametrize("sender", [0, 2])
@pytest.mark.parametrize("strategy", [Centralized(), Tree(2), Tree(5)], ids=str)
def test_broadcast_as_upstream(strategy: Strategy, sender: int) -> None:
    results = Peers(4).run(
        lambda s: s.broadcast(values(sender) if s.peer == sender else None), broadcast_strategy=strategy
    )
    assert all(torch.equal(result, values(sender)) for result in results)


# Values.


@pytest.mark.parametrize("op", OPS)
def test_every_op_and_dtype(peers: Peers, op: str) -> None:
    """In fp32 (fp64) with one rounding; the same bits on every peer."""
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    if op != "mean":
        dtypes += [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
    held = {
        dtype: [
            torch.randint(1, 9, (5, 3), generator=torch.Generator().manual_seed(peer)).to(dtype)
            for peer in range(peers.total)
        ]
        for dtype in dtypes
    }

    def case(session: Session) -> list[torch.Tensor]:
        reduced = []
        for dtype in dtypes:
            tensor = held[dtype][session.peer]
            kept = tensor.clone()
            everywhere = session.all_reduce(tensor, op)
            assert torch.equal(tensor, kept)
            at_root = session.reduce(tensor, op, root=1)
            if session.peer == 1:
                assert at_root is not None and torch.equal(at_root, everywhere)
            else:
                assert at_root is None
            reduced.append(everywhere)
        return reduced

    results = peers.run(case)
    for index, dtype in enumerate(dtypes):
        exact = torch.stack([one.double() for one in held[dtype]])
        by_op = {"sum": exact.sum(0), "mean": exact.sum(0) / peers.total, "product": exact.prod(0)}
        by_op |= {"min": exact.amin(0), "max": exact.amax(0)}
        for result in results:
            if op == "mean":
                wide = (exact.sum(0).float() / peers.total) if dtype is not torch.float64 else by_op[op]
                assert torch.equal(result[index], wide.to(dtype))
            elif dtype.is_floating_point:
                assert torch.equal(result[index], by_op[op].float().to(dtype) if dtype.itemsize < 8 else by_op[op])
            else:  # modulo 2^n, as torch's own sums
                assert torch.equal(result[index], by_op[op].to(torch.int64).to(dtype))


def test_a_16_bit_sum_is_rounded_once(peers: Peers) -> None:
    """256 + 1 + 1 in bf16, rounded after each addition, is 256; 65504 + 65504 - 65504 in fp16 inf."""
    n = peers.total
    small = [256.0, 1.0, 1.0, 0.0]
    large = [65504.0, 65504.0, -65504.0, -1024.0]

    def case(session: Session) -> tuple[torch.Tensor, torch.Tensor]:
        one = session.all_reduce(torch.tensor([small[session.peer]], dtype=torch.bfloat16))
        return one, session.all_reduce(torch.tensor([large[session.peer]], dtype=torch.float16))

    for one, other in peers.run(case):
        assert one.item() == 258.0
        assert other.item() == torch.tensor(sum(large[:n])).half().item()


@pytest.mark.parametrize("op", OPS)
def test_a_nan_survives_and_an_infinity(peers: Peers, op: str) -> None:
    nan, inf = float("nan"), float("inf")
    n = peers.total

    def case(session: Session) -> torch.Tensor:
        tensor = torch.tensor([1.0, 2.0, -3.0, 4.0])
        if session.peer == n - 1:
            tensor = torch.tensor([nan, -nan, inf, -inf])
        return session.all_reduce(tensor, op)

    for result in peers.run(case):
        assert result[:2].isnan().all(), result
        if op in ("sum", "mean"):
            assert result[2:].tolist() == [inf, -inf]
        elif op in ("min", "max"):
            assert result[2:].tolist() == ([-3.0, -inf] if op == "min" else [inf, 4.0])


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=8),
    st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
)
def test_floats_as_ordered_integers(numbers: list[float], dtype: torch.dtype, largest: bool) -> None:
    tensor = torch.tensor(numbers, dtype=dtype)
    key = ordered_key(tensor, "max" if largest else "min")
    back = number_of(key, dtype)
    nan = tensor.isnan()
    assert torch.equal(back.isnan(), nan) and torch.equal(back[~nan], tensor[~nan])
    best = number_of((key.max() if largest else key.min()).view(1), dtype)
    expected = tensor.max() if largest else tensor.min()
    assert best.isnan().item() if nan.any() else best.item() == expected.item()


# Shapes.


def _shaped(peer: int) -> dict[str, torch.Tensor]:
    base = values(peer, (2, 3, 4, 5))
    return {
        "0-dim": torch.tensor(float(peer)),
        "empty": torch.empty(0, 3),
        "plain": base,
        "transposed": base[0, 0].t(),
        "strided": base[:, :, ::2, 1:4],
        "channels-last": base.to(memory_format=torch.channels_last),
        "expanded": values(peer, (3, 1)).expand(3, 4),
        "different on each": base if peer else base.to(memory_format=torch.channels_last),
    }


def test_shape_and_strides_are_the_callers(peers: Peers) -> None:
    n = peers.total
    expected = {
        name: sum((_shaped(peer)[name] for peer in range(1, n)), start=one.clone()) for name, one in _shaped(0).items()
    }

    def case(session: Session) -> None:
        for name, tensor in _shaped(session.peer).items():
            for result in (session.all_reduce(tensor), session.reduce(tensor, "sum", session.size - 1)):
                if result is None:
                    assert session.peer != session.size - 1
                    continue
                assert result.shape == tensor.shape and torch.equal(result, expected[name]), name
                if is_dense(tensor.shape, tensor.stride()):
                    assert result.stride() == tensor.stride(), name
            sent = session.broadcast(tensor if session.peer == 1 else None, root=1)
            source = _shaped(1)[name]
            assert torch.equal(sent, source), name
            if is_dense(source.shape, source.stride()):
                assert sent.stride() == source.stride(), name

    assert peers.run(case) == [None] * n


def test_results_are_detached_and_new(peers: Peers) -> None:
    def case(session: Session) -> None:
        tensor = values(session.peer).requires_grad_()
        for result in (session.all_reduce(tensor), session.broadcast(tensor if session.peer == 0 else None)):
            assert not result.requires_grad and result.grad_fn is None
            result.fill_(-1.0)  # nobody else sees that
        again = session.all_reduce(torch.ones(4))
        assert torch.equal(again, torch.full((4,), float(session.size)))
        assert torch.equal(tensor.detach(), values(session.peer))
        with torch.inference_mode():
            assert session.all_reduce(torch.ones(2)).sum() == 2 * session.size

    assert peers.run(case) == [None] * peers.total


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int16, torch.bfloat16, torch.float64], ids=str
)
def test_a_tensor_of_any_dtype_can_be_broadcast(peers: Peers, dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, 5.0]]).to(dtype)
    results = peers.run(lambda s: s.broadcast(tensor if s.peer == s.size - 1 else None))
    for result in results:
        assert result.dtype is dtype and result.shape == (2, 3)
        assert torch.equal(result.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("peers_", range(1, 8))
@pytest.mark.parametrize("strategy", [Centralized(), Tree(1), Tree(2), Tree(3), Ring()], ids=str)
def test_copies_reach_every_peer_once_from_one_that_has_it(strategy: Strategy, peers_: int) -> None:
    for source in range(peers_):
        have = {source}
        for giver, taker in copies(strategy, peers_, source):
            assert giver in have and taker not in have
            have.add(taker)
        assert have == set(range(peers_))


# Handles.


def test_many_operations_are_under_way_and_waited_for_in_any_order(peers: Peers) -> None:
    n = peers.total

    def case(session: Session) -> None:
        order = list(range(12))
        random.Random(session.peer).shuffle(order)
        handles = []
        for turn in range(12):
            tensor = torch.full((2,), float(session.peer + turn))
            handles.append(
                session.all_reduce_async(tensor)
                if turn % 3 == 0
                else session.reduce_async(tensor, "max", root=turn % n)
                if turn % 3 == 1
                else session.broadcast_async(tensor if session.peer == turn % n else None)
            )
            tensor.fill_(-5.0)  # it has been read
        for turn in order:
            result = handles[turn].wait()
            assert handles[turn].ready() and handles[turn].wait() is result
            if turn % 3 == 1:
                assert (result is not None) == (session.peer == turn % n)
            if result is not None:
                value = {0: sum(range(n)) + n * turn, 1: n - 1 + turn, 2: turn % n + turn}[turn % 3]
                assert torch.equal(result, torch.full((2,), float(value)))

    assert peers.run(case) == [None] * n


def test_a_handle_is_not_ready_before_the_last_peer_and_soon_after_it(peers: Peers) -> None:
    last, looked = peers.total - 1, threading.Barrier(peers.total)

    def case(session: Session) -> None:
        session.all_reduce(torch.zeros(1))
        if session.peer == last:
            looked.wait(PATIENT_S)
        handle = session.all_reduce_async(torch.ones(3))
        if session.peer != last:
            assert not handle.ready()
            looked.wait(PATIENT_S)
        assert settles(handle.ready)
        result = handle.wait()
        assert result is not None and torch.equal(result, torch.full((3,), float(session.size)))

    assert peers.run(case) == [None] * peers.total


def test_one_thread_may_drive_all_local_peers_with_handles() -> None:
    """Registering blocks, so that takes a thread each; operations do not."""
    peers = Peers(3)
    sessions = peers.each(peers.register)
    for turn in range(3):
        handles = [session.all_reduce_async(values(session.peer)) for session in sessions]
        for handle in handles if turn % 2 else reversed(handles):
            assert torch.equal(handle.wait(), values(0) + values(1) + values(2))
    run_threads([session.finish for session in sessions])


# The end.


@pytest.mark.parametrize("place", PLACES)
def test_finish_ends_it_for_all_and_the_group_can_be_registered_with_again(place: str) -> None:
    peers = Peers(*PLACES[place], real=True)
    for _ in range(3):

        def case(session: Session) -> Session:
            good(session)
            return session

        for session in peers.run(case):
            assert "over" in repr(session)
            assert type(caught(lambda s=session: s.all_reduce(torch.ones(1)))) is RegisterNotFirstOperation  # type: ignore[misc]
            assert type(caught(session.finish)) is MultipleUnregister
            session.reset()  # harmless


def test_a_peer_alone_needs_no_group() -> None:
    with register(0) as session:
        assert session.size == 1
        assert torch.equal(session.all_reduce(torch.ones(2), "mean"), torch.ones(2))
        assert torch.equal(session.broadcast(torch.ones(2)), torch.ones(2))
        assert session.reduce(torch.ones(2)) is not None
    assert torch.equal(register(0).all_reduce(torch.ones(2, dtype=torch.int8)), torch.ones(2, dtype=torch.int8))


def test_operations_leave_nothing_behind(peers: Peers) -> None:
    n = peers.total
    times = 500 if sweep.full else 100
    rooms: list[Any] = []
    keys: list[int] = []

    def case(session: Session) -> None:
        for turn in range(times):
            total = session.all_reduce(torch.full((3,), session.peer + turn))
            assert total[0].item() == sum(range(n)) + turn * n
        session.reduce(torch.ones(1))
        operations, waited = kept_by(session)
        assert len(operations) <= 1 and not waited
        if session.peer == 0:
            rooms.append(weakref.ref(peers_of(session)))
            if peers.nodes > 1:
                keys.append(sum("operation" in key for key in keys_of(session)))

    before = tasks()
    assert peers.run(case) == [None] * n
    gc.collect()
    assert rooms[0]() is None
    assert all(count <= 3 + peers.nodes for count in keys)
    assert settles(lambda: tasks() <= before), (before, tasks())


@pytest.mark.parametrize("end", ["finish", "reset", "close", "nothing", "refused"])
def test_a_group_is_not_kept_by_those_that_registered_with_it(end: str) -> None:
    def used() -> list[weakref.ref[Any]]:
        store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]
        group, world = LocalGroup(2), torch.distributed.ProcessGroup(store, 0, 1)
        config = CollectiveConfig(world_size=3 if end == "refused" else 2, timeout_s=TIMEOUT_S, global_group=world)

        def peer(number: int) -> None:
            session = register(number, "cpu", config, group)
            {"finish": session.finish, "reset": session.reset}.get(end, lambda: None)()

        for one in run_threads([lambda: peer(0), lambda: peer(1)]):
            assert isinstance(one, InvalidConfig if end == "refused" else type(None))
        if end == "close":
            group.close()
        elif end == "finish":
            for alone in (world, None):
                register(0, "cpu", CollectiveConfig(global_group=None if alone else world), alone).finish()
        return [weakref.ref(group), weakref.ref(world)]

    alive = used()
    gc.collect()
    assert [one() for one in alive] == [None, None]


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=4))
def test_dense_strides(axes: list[tuple[int, int]]) -> None:
    shape = [length for length, _ in axes]
    order = sorted(range(len(axes)), key=lambda axis: axes[axis][1])
    tensor = torch.empty([shape[axis] for axis in order])
    back = tensor.permute([order.index(axis) for axis in range(len(axes))])
    assert is_dense(back.shape, back.stride())
    if tensor.numel() > 1:
        assert not is_dense([*back.shape, 2], [*back.stride(), 0])
        assert not is_dense(back.shape, [2 * step for step in back.stride()])
