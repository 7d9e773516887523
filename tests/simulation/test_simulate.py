"""The simulation: one rank is the planner's model, many are a plain loop, and more noise never ends earlier."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sweep import sweep

from fusedreduce.cli import simulate as command
from fusedreduce.cli.arguments import bucket_caps
from fusedreduce.planning.bucketing import MIB, BucketCaps
from fusedreduce.planning.cost_model import FREE, FS_PER_NS, Costs, Linear
from fusedreduce.planning.plan import Plan
from fusedreduce.planning.timeline import MISSING_NS, Problem, timeline
from fusedreduce.simulation.clusters import Row, Steps
from fusedreduce.simulation.models import MODELS
from fusedreduce.simulation.networks import (
    ACCELERATORS,
    NETWORKS,
    Network,
    copies,
    costs,
    exchange_lines,
    fastest_fs,
    lines,
    link,
)
from fusedreduce.simulation.noise import QUIET, Noise, moments_of, ready_times
from fusedreduce.simulation.simulate import (
    POLICIES,
    Outcome,
    agreed,
    compare,
    on_network,
    policy_plans,
    problem_of,
)
from fusedreduce.wires import WIRES

line = st.builds(Linear, fixed_ns=st.integers(0, 50), fs_per_byte=st.integers(0, 3 * FS_PER_NS))
noises = st.builds(
    Noise,
    jitter=st.sampled_from([0.0, 0.01, 0.3, 2.0]),
    straggler_share=st.sampled_from([0.0, 0.2, 1.0]),
    straggler_slowdown=st.sampled_from([1.0, 1.5, 4.0]),
    seed=st.integers(0, 5),
)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, Plan]:
    """A problem, and any plan for it: members and launch order as they come."""
    count = draw(st.integers(1, 12))
    known = st.one_of(st.integers(0, 200), st.sampled_from([0, 100]))
    times = draw(st.lists(st.one_of(known, st.just(MISSING_NS)), min_size=count, max_size=count))
    sizes = draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))
    problem = Problem(
        ready_ns=tuple(times),
        wire_bytes=tuple(sizes),
        size_bytes=tuple(2 * size for size in sizes),
        groups=("",) * count,
        alone=frozenset(),
        cap_bytes=100,
        costs=Costs(wire=draw(line), pack=draw(line), unpack=draw(line)),
    )
    order = draw(st.permutations(range(count)))
    cuts = sorted({0, count, *draw(st.lists(st.integers(0, count), max_size=5))})
    return problem, tuple(tuple(order[a:b]) for a, b in zip(cuts, cuts[1:], strict=False))


def simulate(problem: Problem, plan: Plan, *arguments: Any, **options: Any) -> list[Outcome]:
    """Simulates one plan; other arguments as for `compare`."""
    return compare(problem, {"": plan}, *arguments, **options)[""]


@given(problems(), st.integers(1, 5))
@sweep(300)
def test_ranks_without_noise_are_the_timeline(case: tuple[Problem, Plan], ranks: int) -> None:
    problem, plan = case
    expected = timeline(plan, problem)
    (step,) = simulate(problem, plan, ranks)
    assert step.done == expected.done
    assert step.finish.tolist() == [expected.finish] * ranks
    assert step.alone.tolist() == [max(problem.ready_fs)] * ranks
    assert step.exposed_ns == (expected.finish - max(problem.ready_fs)) / FS_PER_NS


@given(problems(), st.integers(1, 4), noises)
@sweep(300)
def test_ranks_with_noise_are_a_plain_loop(case: tuple[Problem, Plan], ranks: int, noise: Noise) -> None:
    problem, plan = case
    moments, places = moments_of(problem)
    (times,) = ready_times(moments, ranks, noise, 1)
    (step,) = simulate(problem, plan, ranks, noise=noise)
    ready = [[int(times[rank, place]) for place in places] for rank in range(ranks)]
    sizes = [sum(problem.wire_bytes[number] for number in members) for members in plan]
    heads, done = [0] * ranks, list[int]()
    packs = channel = 0
    for members, size in zip(plan, sizes, strict=True):
        packs += problem.costs.pack.fs(size)
        for rank in range(ranks):
            heads[rank] = max(heads[rank], *(ready[rank][number] for number in members))
        channel = max(channel, *(head + packs for head in heads)) + problem.costs.wire.fs(size)
        done.append(channel)
    assert step.done == tuple(done)
    for rank in range(ranks):
        now = max(ready[rank]) + packs
        for done_fs, size in zip(done, sizes, strict=True):
            now = max(now, done_fs) + problem.costs.unpack.fs(size)
        assert step.finish[rank] == now
        assert step.alone[rank] == max(ready[rank])


@given(problems(), noises, st.sampled_from([0.0, 0.1, 1.0]), st.integers(0, 3))
@sweep(200)
def test_more_noise_and_more_ranks_never_end_earlier(
    case: tuple[Problem, Plan], noise: Noise, more: float, others: int
) -> None:
    problem, plan = case
    worse = dataclasses.replace(
        noise, jitter=noise.jitter + more, straggler_slowdown=noise.straggler_slowdown * (1 + more)
    )
    before = simulate(problem, plan, 3, noise=noise, steps=2)
    after = simulate(problem, plan, 3, noise=worse, steps=2)
    larger = simulate(problem, plan, 3 + others, noise=noise, steps=2)
    quiet = simulate(problem, plan, 3)[0]
    for one, two, many in zip(before, after, larger, strict=True):
        assert (two.finish >= one.finish).all() and (two.alone >= one.alone).all()
        assert (many.finish[:3] >= one.finish).all() and (many.alone[:3] >= one.alone).all()
        assert all(b >= a for a, b in zip(one.done, two.done, strict=True))
        assert (one.finish >= quiet.finish).all()


def _two(wire_ns: int = 5) -> Problem:
    """Ready at 10 and 20 ns; one byte each, so many ns to reduce; 1 ns to unpack."""
    return Problem(
        ready_ns=(20, 10),
        wire_bytes=(1, 1),
        size_bytes=(1, 1),
        groups=("", ""),
        alone=frozenset(),
        cap_bytes=1,
        costs=Costs(wire=Linear(fixed_ns=wire_ns, fs_per_byte=0), unpack=Linear(fixed_ns=1, fs_per_byte=0)),
    )


def test_everybody_waits_for_a_straggler() -> None:
    (step,) = simulate(_two(), ((1,), (0,)), 3, noise=Noise(straggler_share=0.01, straggler_slowdown=2))
    assert (step.alone // FS_PER_NS).tolist() == [40, 20, 20]
    assert (step.finish // FS_PER_NS).tolist() == [46, 46, 46]
    assert step.exposed_ns == 6, "waiting for slower ranks is not communication's"


def test_noise_is_the_same_for_the_same_seed_and_for_every_plan() -> None:
    noise = Noise(jitter=0.2, seed=3)
    first, second = (compare(_two(), {"a": ((1,), (0,)), "b": ((0, 1),)}, 4, noise=noise, steps=3) for _ in range(2))
    for name in ("a", "b"):
        for one, two in zip(first[name], second[name], strict=True):
            assert one.done == two.done and (one.finish == two.finish).all()
    assert all((one.alone == two.alone).all() for one, two in zip(first["a"], first["b"], strict=True))
    assert len({step.done for step in first["a"]}) == 3, "steps differ"
    assert simulate(_two(), ((1,), (0,)), 4, noise=Noise(jitter=0.2, seed=4))[0].done != first["a"][0].done


def test_what_ranks_agree_on_is_later_than_it_would_be_without_noise() -> None:
    problem = _two()
    assert agreed(problem, 4, QUIET) is problem
    known = agreed(problem, 64, Noise(jitter=0.2))
    assert all(a > b for a, b in zip(known.ready_ns, problem.ready_ns, strict=True))
    assert agreed(problem, 3, Noise(straggler_share=0.1, straggler_slowdown=3)).ready_ns == (60, 30)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("jitter", -0.1),
        ("jitter", float("nan")),
        ("straggler_share", 1.1),
        ("straggler_slowdown", 0.5),
        ("straggler_slowdown", float("inf")),
        ("seed", -1),
    ],
)
def test_noise_that_makes_no_sense_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} must be from"):
        Noise(**{field: value})  # type: ignore[arg-type]


def test_what_cannot_be_simulated_is_refused() -> None:
    plan = ((1,), (0,))
    with pytest.raises(ValueError, match="ranks must be at least 1, got 0"):
        simulate(_two(), plan, 0)
    with pytest.raises(ValueError, match="ranks must be at least 1, got 0"):
        simulate(_two(), plan, 0, NETWORKS["ndr"])
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        simulate(_two(), plan, 1, steps=0)
    with pytest.raises(ValueError, match="ready after 9000 s is too late"):
        simulate(dataclasses.replace(_two(), ready_ns=(9 * 10**12, 0)), plan, 1)
    with pytest.raises(ValueError, match="cannot simulate 4000 s with delays of up to 121 times that"):
        simulate(dataclasses.replace(_two(), ready_ns=(4 * 10**12, 0)), plan, 1, noise=Noise(jitter=1))
    with pytest.raises(ValueError, match="cannot simulate 6000 s of collectives"):
        simulate(_two(3 * 10**12), plan, 1)
    empty = dataclasses.replace(_two(), ready_ns=(), wire_bytes=(), size_bytes=(), groups=())
    with pytest.raises(ValueError, match="no parameters"):
        simulate(empty, (), 1)


def _us(line: Linear) -> float:
    return line.fixed_ns / 1000


def test_lines_by_hand() -> None:
    """Alpha-beta formulas; 1 GB/s is a million fs per byte."""
    lone = lines(NETWORKS["25gbe"], 8)
    assert _us(lone["ring"]) == pytest.approx(8.4 + 14 * 14.0)
    assert lone["ring"].fs_per_byte == round(2 * 7 / 8 / 3 * 1e6)
    assert _us(lone["tree"]) == pytest.approx(8.4 + 2 * 3 * 14.0)
    assert lone["tree"].fs_per_byte == round(2 / (3 * 0.92) * 1e6)
    assert _us(lone["tree LL"]) == pytest.approx(6.8 + 2 * 3 * 5.0)
    assert lone["ring LL"].fs_per_byte == pytest.approx(2 * lone["ring"].fs_per_byte, abs=1)
    assert not any("hierarchical" in name for name in lone)
    inside = lines(NETWORKS["nvlink"], 8)
    assert _us(inside["ring"]) == pytest.approx(8.4 + 14 * 3.4), "no hop between hosts"
    assert inside["ring"].fs_per_byte == round(2 * 7 / 8 / (20.6 * 18) * 1e6)
    many = lines(NETWORKS["nvlink"], 64)
    assert _us(many["ring"]) == pytest.approx(8.4 + 14 * 14.0 + (126 - 14) * 3.4)
    assert _us(many["tree"]) == pytest.approx(8.4 + 2 * (3 * 14.0 + 7 * 3.4))
    assert _us(many["hierarchical ring"]) == pytest.approx(8.4 + 14 * 3.4 + 14 * 14.0)
    assert many["hierarchical ring"].fs_per_byte == round((2 * 7 / 8 / (20.6 * 18) + 2 * 7 / 8 / 48 / 8) * 1e6)
    assert lines(NETWORKS["ndr"], 1) == {"none": FREE}


@pytest.mark.parametrize("network", NETWORKS.values(), ids=str)
def test_lines_of_any_number_of_ranks(network: Network) -> None:
    before = 0
    for ranks in (2, 3, 7, 8, 9, 12, 16, 100, 4096, 16384):
        choices = lines(network, ranks)
        ring = choices["ring"]
        assert all(line.fixed_ns > 0 and line.fs_per_byte > 0 for line in choices.values())
        assert ring.fixed_ns > before, "a ring's latency grows with every rank"
        before = ring.fixed_ns
        # Below 2 (W - 1) / W over the links that a rank has, nothing is possible.
        speed = network.nvlink_gb_per_s if ranks <= network.ranks_per_host else network.port_gb_per_s * 8
        if network.ranks_per_host == 1:
            speed = network.port_gb_per_s
        assert min(line.fs_per_byte for line in choices.values()) >= int(2 * (ranks - 1) / ranks / speed * 1e6)


def test_ethernet_by_name_by_hand() -> None:
    """94 % of the line, 25 us a hop: of 4 ranks 6 hops, and 1.5 times the bytes."""
    for name, gbit_per_s in (("1gbe", 1.0), ("10gbe", 10.0)):
        ring = lines(NETWORKS[name], 4)["ring"]
        assert ring.fixed_ns == 8_400 + 6 * 25_000
        assert ring.fs_per_byte == pytest.approx(1.5 * 8e6 / (0.94 * gbit_per_s), rel=1e-4)
        learned = link(NETWORKS[name], 4)
        assert learned.fs_per_byte == pytest.approx(ring.fs_per_byte, rel=0.05)


def test_an_exchange_by_hand() -> None:
    """Two ranks gather, in one phase; four exchange 3 messages in each of two; hosts of eight add up inside first."""
    ethernet, nvlink, wide = NETWORKS["10gbe"], NETWORKS["nvlink"], 4.0
    gathered = exchange_lines(ethernet, 2, wide)["exchange"]
    assert gathered.fixed_ns == 8_400 + 25_000
    assert gathered.fs_per_byte == lines(ethernet, 2)["ring"].fs_per_byte, "as many bytes as an all-reduce"
    shards = exchange_lines(ethernet, 4, wide)["exchange"]
    assert shards.fixed_ns == 2 * (8_400 + 3 * 25_000)
    assert shards.fs_per_byte == lines(ethernet, 4)["ring"].fs_per_byte
    inside = exchange_lines(nvlink, 8, wide)["exchange"]
    assert inside.fs_per_byte == round(1.75 * 1e6 / (20.6 * 18))
    across = exchange_lines(nvlink, 32, wide)["exchange"]
    # 7 / 8 of 4 bytes of fp32 and of the encoded one by NVLink; 1.5 of an eighth through each port.
    assert across.fs_per_byte == pytest.approx(1e6 * (7 / 8 * 5 / (20.6 * 18) + 1.5 / 8 / 48), rel=1e-3)
    assert exchange_lines(ethernet, 1, wide) == {"none": FREE} and link(ethernet, 1, wide=wide) == FREE


def test_the_fastest_algorithm_is_a_ring_for_few_ranks_and_much_data_and_a_tree_else() -> None:
    few, many = lines(NETWORKS["100gbe"], 8), lines(NETWORKS["100gbe"], 4096)
    assert min(few, key=lambda name: few[name].fs(2**30)) == "ring"
    assert min(many, key=lambda name: many[name].fs(2**20)) == "tree"
    assert min(many, key=lambda name: many[name].fs(2**10)) == "tree LL"
    assert fastest_fs(list(few.values()), 2**30) == few["ring"].fs(2**30)


def test_costs_are_a_line_through_the_buckets_seen() -> None:
    copy = copies(ACCELERATORS["h100"], wire_itemsize_bytes=2)
    assert copy.fs_per_byte == round(3 / 3350 * 1e6), "read 4 bytes and write 2 for each 2 on the wire"
    ring = lines(NETWORKS["100gbe"], 8)["ring"]
    found = costs(NETWORKS["100gbe"], 8, [2**28, 2**29, 2**30], copy)
    assert found is not None and (found.pack, found.unpack) == (copy, copy)
    assert found.wire.fs_per_byte == pytest.approx(ring.fs_per_byte, rel=1e-6)
    assert costs(NETWORKS["100gbe"], 8, [2**20, 2**20], copy) is None, "one size"
    assert costs(NETWORKS["100gbe"], 1, [2**20, 2**21], copy) is None, "nobody to talk to"


def _resnet(itemsize_bytes: int = 4, accelerator: str = "a100") -> Problem:
    workload = MODELS["resnet50"].workload(accelerator)
    copy = copies(ACCELERATORS[accelerator], wire_itemsize_bytes=2, gradient_itemsize_bytes=itemsize_bytes)
    return problem_of(workload, copy, wire_itemsize_bytes=2, gradient_itemsize_bytes=itemsize_bytes)


def test_plans_of_the_policies() -> None:
    problem = on_network(_resnet(), NETWORKS["25gbe"], 64)
    plans = policy_plans(problem)
    assert tuple(plans) == POLICIES
    for plan in plans.values():
        assert sorted(number for members in plan for number in members) == list(range(161))
    last = {name: timeline(plan, problem).last_done for name, plan in plans.items()}
    assert last["planned"] <= last["capped"] < last["ready"] == last["static"]
    assert _largest_bytes(plans["capped"], problem) <= 25 * MIB < _largest_bytes(plans["planned"], problem)
    unknown = policy_plans(_resnet())
    assert unknown["planned"] == unknown["capped"] == unknown["ready"], "the wire's costs are not known"


def test_a_cap_of_ones_own_limits_every_policy() -> None:
    caps = BucketCaps(cap_bytes=4 * MIB)
    workload = MODELS["resnet50"].workload("a100")
    problem = on_network(problem_of(workload, FREE, wire_itemsize_bytes=4), NETWORKS["100gbe"], 8, caps)
    plans = policy_plans(problem, caps)
    assert len(plans["static"]) > 2 * len(policy_plans(problem)["static"])
    assert plans["planned"] == plans["capped"]
    for members in plans["planned"]:
        assert len(members) == 1 or _largest_bytes((members,), problem) <= 4 * MIB
    wider = policy_plans(problem, dataclasses.replace(caps, planned_bytes=8 * MIB))
    assert wider["capped"] == plans["capped"]
    assert 4 * MIB < max(_largest_bytes((one,), problem) for one in wider["planned"] if len(one) > 1) <= 8 * MIB


def _largest_bytes(plan: Plan, problem: Problem) -> int:
    return max(sum(problem.size_bytes[number] for number in members) for members in plan)


@pytest.mark.parametrize(
    ("itemsize_bytes", "network", "static_ms", "planned_ms"),
    [
        (2, "25gbe", (12.5, 14), 0.4),
        (2, "100gbe", (3.2, 3.8), 0.3),
        (4, "25gbe", (3.5, 4), 0.4),
        (4, "100gbe", (1, 1.3), 0.3),
    ],
)
def test_resnet50_on_ethernet(
    itemsize_bytes: int, network: str, static_ms: tuple[float, float], planned_ms: float
) -> None:
    """13 ms against 0.4, and 3.4 against 0.3, hold for 16-bit gradients: of fp32 ones the caps take half as many."""
    problem = on_network(_resnet(itemsize_bytes), NETWORKS[network], 64)
    found = compare(problem, policy_plans(problem), 64, NETWORKS[network])
    exposed_ms = {name: steps[0].exposed_ns / 1e6 for name, steps in found.items()}
    assert static_ms[0] < exposed_ms["static"] < static_ms[1]
    assert exposed_ms["planned"] <= exposed_ms["capped"] < planned_ms


def test_sixteen_thousand_ranks() -> None:
    problem = on_network(_resnet(accelerator="h100"), NETWORKS["nvlink"], 16384)
    (step,) = simulate(problem, policy_plans(problem)["static"], 16384, NETWORKS["nvlink"], noise=Noise(jitter=0.05))
    assert step.finish.shape == (16384,) and np.ptp(step.alone) > 0
    assert 0 < step.exposed_ns < 1e6


def _arguments(*typed: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cap-mb", type=bucket_caps)
    command.add_arguments(parser)
    return parser.parse_args(typed)


def _row(static: float, ready: float, capped: float, planned: float, noisy: float | None = None) -> Row:
    quiet = Steps(100.0, {"static": static, "ready": ready, "capped": capped, "planned": planned})
    noise = Steps(100.0, {**quiet.exposed_ms, "planned": planned if noisy is None else noisy})
    return Row(NETWORKS["ndr"], 8, quiet, noise, dict.fromkeys(POLICIES, 1))


@pytest.mark.parametrize(
    ("row", "planned", "capped"),
    [
        (_row(10, 10, 5, 0), "", ""),
        (_row(10, 10, 9.9, 9.9), "no gain", "no gain"),
        (_row(10, 10, 10, 10.01), "no gain", "no gain"),
        (_row(10, 12, 10, 11), "LOSES 0.91% to static", "no gain"),
        (_row(10, 4, 10, 9), "LOSES 4.81% to ready", "LOSES 5.77% to ready"),
        (_row(10, 10, 1, 3), "LOSES 1.98% to capped", ""),
        (_row(10, 10, 12, 0), "", "LOSES 1.82% to static"),
        (_row(10, 10, 10, 0, 12), "LOSES 1.82% to static, noise", "no gain"),
    ],
)
def test_verdicts(row: Row, planned: str, capped: str) -> None:
    for policy, verdict in (("planned", planned), ("capped", capped)):
        assert row.verdict(policy) == verdict
        assert row.loses(policy) == verdict.startswith("LOSES")
        assert row.gains(policy) == (not verdict)


def test_shares_are_of_the_step() -> None:
    steps = Steps(80.0, {"static": 20.0, "planned": 5.0})
    assert (steps.share("static"), steps.saved(), steps.saved(by="static")) == (0.2, 0.15, 0)


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    typed = ("--model", "resnet50", "--network", "25gbe,ndr", "--ranks", "2,8", "--wire", "bf16")
    command.run(_arguments(*typed, "--straggler", "0.1:1.5"))
    out = capsys.readouterr().out
    title, _, heads, rule, *lines = out.splitlines()
    assert title == "ResNet-50, wire bf16; 256 images per rank, fp32 gradients: ms exposed"
    assert "static  " in heads and "planned, noise" in heads and set(rule) == {"-"}
    assert [line.split()[:3] for line in lines[:2]] == [["25", "GbE", "2"], ["25", "GbE", "8"]]
    assert "InfiniBand" in lines[2] and lines[2].endswith("no gain")
    assert not lines[4] and lines[5].startswith("Exposed, in ms and as a share of the step: from where the slowest")
    assert "\n\nResNet-50: ms of a step by wire, planned, without noise; torch: with its buckets\n" in out
    assert "25 GbE                 8   109.7  103.8  bf16\n" in out, "torch's DDP sends fp32"
    assert "Verdict: bf16, by the column `use`, saves 5% of a step." in out
    command.run(_arguments(*typed, "--straggler", "0.1:1.5"))
    assert capsys.readouterr().out == out


def test_every_wire_is_simulated_and_the_last_lines_say_which_to_use(capsys: pytest.CaptureFixture[str]) -> None:
    command.run(_arguments("--model", "resnet50", "--network", "1gbe,ndr", "--ranks", "4"))
    out = capsys.readouterr().out
    names = [line.split(",")[1] for line in out.splitlines() if line.startswith("ResNet-50, wire ")]
    assert names == [f" wire {wire}; 256 images per rank" for wire in WIRES]
    slow, fast = [line.split() for line in out.splitlines() if line.startswith(("1 GbE", "400 Gb")) and "(" not in line]
    took_ms = [float(cell) for cell in slow[5:10]]
    assert took_ms[0] > took_ms[1] == took_ms[2] > took_ms[3] > took_ms[4], "a link that decides"
    assert slow[-1] == "int4" and fast[-2:] == ["torch's", "DDP"]
    assert "Verdict: int4, by the column `use`, saves 84% of a step." in out
    assert 'fusedreduce.ReduceConfig(wire="int4"))' in out and "-m fusedreduce.run --wire int4 train.py" in out


def test_a_bucket_that_is_exchanged_is_padded_for_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """Among 4,096 ranks it is 4 million elements or a multiple: what is sent grows, and so does the step."""
    shown = []
    for wire in ("bf16", "int8"):
        command.run(_arguments("--model", "resnet50", "--network", "100gbe", "--ranks", "64,4096", "--wire", wire))
        rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.lstrip().startswith("100 GbE")]
        shown.append([float(row[4]) for row in rows[:2]])
    (bf16, bf16_many), (int8, int8_many) = shown
    assert int8_many - int8 > bf16_many - bf16


def test_options_change_what_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for more in ([], ["--gradients", "bf16"], ["--batch", "64"], ["--accelerator", "h100"], ["--cap-mb", "5"]):
        typed = ["--model", "resnet50", "--network", "25gbe", "--ranks", "8", "--wire", "native", *more]
        command.run(_arguments(*typed))
        shown.append(capsys.readouterr().out.splitlines()[4])
    assert len(set(shown)) == len(shown)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["--model", "bert"], "unknown name 'bert': use resnet50, vit-l, gpt2-xl, moe or all"),
        (["--network", ""], "unknown name ''"),
        (["--ranks", "8,0"], "must be a whole number from 1 to 65,536, got '0'"),
        (["--ranks", "1e3"], "must be a whole number from 1 to 65,536, got '1e3'"),
        (["--jitter", "-1"], "jitter must be from 0 to 1000"),
        (["--straggler", "0.1"], "must be SHARE:SLOWDOWN, such as 0.01:1.2"),
        (["--straggler", "2:2"], "straggler_share must be from 0 to 1"),
        (["--seed", "x"], "must be a whole number"),
    ],
)
def test_bad_options(typed: Sequence[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        _arguments(*typed)
    assert stopped.value.code == 2 and says in capsys.readouterr().err
