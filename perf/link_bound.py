"""Arithmetic of the link benchmark, no network in it: the bound of a step, bursts, bytes on the wire, targets.

**The bound.** No way to average gradients over this link, however clever, ends a step sooner than

    max(local step, max over k of (r_k + 8 (B_k - burst) / C))

r_k is when the k-th gradient is ready without DDP, B_k the bytes that one rank must still send then: 2 (W - 1) / W of
all gradients that become ready at or after k, in the wire's dtype. C is the rate at which a plain TCP stream carries
payload over the same link, so headers are in it; the burst, which tbf lets through an idle link at once, is in neither.
Worked: two gradients of 1,000 and 3,000 fp32 elements, ready at 10 and 30 ms, on two ranks over 1 Mbit/s of payload,
no burst. From 30 ms on 12,000 bytes are left, 96 ms; from 10 ms on 16,000, 128 ms. The bound is
max(30, 10 + 128, 30 + 96) = 138 ms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from records import LEAST_RATIOS, demand, interval

from fusedreduce.reducer import wire_trial

MTU_BYTES = 1500
HEADER_BYTES = 14 + 20 + 20 + 12  # Ethernet, IPv4, TCP, its timestamps: what tbf counts of a packet beside payload
PAYLOAD_BYTES = MTU_BYTES - 20 - 20 - 12
FRAME_BYTES = PAYLOAD_BYTES + HEADER_BYTES
LEAST_BURST_BYTES = 64 * 1024
GSO_BYTES = 64 * 1024  # the largest packet that the kernel hands down before it is cut into frames
BURST_S = 1e-3
MISSED_SHARE = 0.03  # of the nominal rate: a link that is off by more is not published
BELOW_SHARE = 0.02  # a median below the bound by more than that is no measurement
# Headers of 64 KiB packets, acknowledgements, padding, agreements.
WIRE_SLACK_SHARE, WIRE_SLACK_BYTES = 0.02, 64 * 1024
ENCODED_SLACK_SHARE = 0.03  # norms and biases, of which "int8" and "int4" send four bytes an element
BARRIER_BYTES = 1024  # by how much a barrier's own bytes, which are taken off, may differ from one to the next
TARGET_MODELS = ("resnet18", "gpt2-7m", "mlp-8m")
TARGET_RATES_MBIT = (300, 1000)
TARGET_SHARE = {"bf16": 0.90, "native": 0.95}
# Of the step and of the bytes of our bf16, on two ranks at ENCODED_RATE_MBIT.
ENCODED_SHARES = {"int8": (0.60, 0.53), "int4": (0.40, 0.28)}
ENCODED_RATE_MBIT = 300
BOUND_SHARE = 0.95  # who is this near to the bound can do no more
# Of FSDP2's models: bytes that two ranks send for an element of a shard, and how much more is no fault of the wire.
SHARD_BYTES = {"bf16": 2.0, "int8": 1.03, "int4": 0.55}
SHARD_SLACK_SHARE = 0.02
SHARD_MODEL = "gpt2-7m"
# By kind of mesh, rate and wire the step as a share of torch's at fp32: the first quiet run's, and 10 % more.
SHARD_STEP_SHARES: Mapping[tuple[str, float], Mapping[str, float]] = {
    ("HSDP", 300): {"bf16": 0.65, "int8": 0.47, "int4": 0.36},
    ("HSDP", 1000): {"bf16": 0.81, "int8": 0.82, "int4": 0.71},
    ("FSDP2", 300): {"bf16": 0.90, "int8": 0.80, "int4": 0.74},
    ("FSDP2", 1000): {"bf16": 0.90, "int8": 0.85, "int4": 0.84},
}
AUTO, AUTO_WIRES = "ours auto", ("native", "bf16", "int8")  # it chooses among these
AUTO_SHARE, AUTO_NOISE = 1.03, 0.02
MOST_STEPS, MOST_COST = 80, 30
# Bytes an element.
ITEMSIZE = {"native": 4, "bf16": 2, "fp16": 2, "int8": 260 / 256, "int4": 34 / 64}


def burst_bytes(rate_mbit: float) -> int:
    """What tbf lets through at once: a whole packet must fit, and a timer's tick must not leave the link idle."""
    return max(LEAST_BURST_BYTES + GSO_BYTES, round(rate_mbit * 1e6 / 8 * BURST_S))


def on_the_line(payload_rate: float) -> float:
    """The rate of frames that carry payload at `payload_rate`: what a link's nominal rate is compared with."""
    return payload_rate * FRAME_BYTES / PAYLOAD_BYTES


def misses_nominal(payload_mbit: float, nominal_mbit: float | None) -> bool:
    """Whether a raw stream, its headers counted, is further from the nominal rate than may be published."""
    return nominal_mbit is not None and abs(on_the_line(payload_mbit) / nominal_mbit - 1) > MISSED_SHARE


def must_send_bytes(numel: int, wire: str, ranks: int) -> float:
    """What one rank sends, at the least, for the average of so many elements."""
    return 2 * (ranks - 1) / ranks * numel * ITEMSIZE[wire]


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a link carries: payload in bit/s for as long as one likes, and a burst at once."""

    rate: float
    burst_bytes: int


def steady(rate_mbit: float | None, rates: Mapping[str, float]) -> Link:
    """The link that raw streams were seen on.

    Args:
        rate_mbit: nominal; None: not shaped, where the highest rate counts, and there is no burst.
        rates: bit/s of payload by size of message. Of a shaped link the largest messages count, less the burst.
    """
    if rate_mbit is None:
        return Link(rate=max(rates.values()), burst_bytes=0)
    size, burst = max(map(int, rates)), burst_bytes(rate_mbit)
    return Link(rate=rates[str(size)] * (size - burst) / size, burst_bytes=burst)


def quickest(rate_mbit: float | None, raw: Sequence[Mapping[str, Any]]) -> Link:
    """The link as the rank with the quickest stream sees it: what the bound is computed for."""
    links = [steady(rate_mbit, seen["rates"]) for seen in raw]
    return max(links, key=lambda link: link.rate)


def step_bound_s(
    local_s: float,
    ready: Sequence[tuple[float, int]],
    wire: str,
    ranks: int,
    link: Link,
) -> float:
    """The shortest step that is possible; see the top of this file.

    Args:
        local_s: the step without DDP.
        ready: of each gradient when it is ready, in seconds from the step's start, and its elements; in that order.
    """
    left = accumulate(numel for _, numel in reversed(ready))
    bounds = [
        ready_s + 8 * max(0.0, must_send_bytes(numel, wire, ranks) - link.burst_bytes) / link.rate
        for (ready_s, _), numel in zip(reversed(ready), left, strict=True)
    ]
    return max([local_s, *bounds])


def wrong_bytes(sent_bytes: float, numel: int, wire: str, ranks: int) -> str | None:
    """What is wrong with the bytes that all ranks together put on the wire in a step; None: nothing."""
    must = ranks * must_send_bytes(numel, wire, ranks)
    if sent_bytes < must - ranks * BARRIER_BYTES:
        return f"{sent_bytes:,.0f} bytes on the wire, {must:,.0f} are needed"
    share = ENCODED_SLACK_SHARE if wire in ENCODED_SHARES else WIRE_SLACK_SHARE
    if sent_bytes > must * (1 + share) + ranks * WIRE_SLACK_BYTES:
        return f"{sent_bytes:,.0f} bytes on the wire, {must:,.0f} are needed: more than headers explain"
    return None


def required_ms(torch_ms: float, bound_ms: float, share: float) -> float:
    """Of ours: a share of torch's best or, if that is more, what is as near to the bound as can be asked."""
    return max(share * torch_ms, bound_ms / BOUND_SHARE)


def demands(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each model and rate that has a target: what is required of bf16 and native, where the cell is published."""
    found = []
    for cell in (row for row in rows if row["part"] == "steps"):
        if cell["case"] not in TARGET_MODELS or cell["rate_mbit"] not in TARGET_RATES_MBIT:
            continue
        if cell["not_published"] is not None:
            continue
        for wire, share in TARGET_SHARE.items():
            name, best = cell["ours_best"].get(wire), cell["torch_best"].get(wire)
            if name is None or best is None:
                continue
            ours = cell["variants"][name]
            torch_ms, bound_ms = cell["variants"][best]["step_ms"], cell["bound_ms"][wire]
            found.append(
                demand(
                    f"{cell['case']} at {cell['rate_mbit']:g} Mbit/s, {wire}",
                    ours["step_ms"],
                    "<=",
                    required_ms(torch_ms, bound_ms, share),
                    unit=" ms",
                    why_not=ours["failed"],
                    of=best,
                    ratio=ours["step_ms"] / torch_ms,
                    torch_ms=torch_ms,
                    bound_ms=bound_ms,
                )
            )
    return found


def encoded_demands(rows: Sequence[Mapping[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """What is required of int8 and int4 beside our bf16, of two ranks: of the step, and of the bytes on the wire."""
    found: list[dict[str, Any]] = []
    for cell in rows if ranks == 2 else ():
        judged = cell["part"] == "steps" and cell["not_published"] is None and cell["rate_mbit"] == ENCODED_RATE_MBIT
        if not judged or cell["case"] not in TARGET_MODELS or "bf16" not in cell["ours_best"]:
            continue
        bf16 = cell["variants"][cell["ours_best"]["bf16"]]
        for wire, shares in ENCODED_SHARES.items():
            if wire not in cell["ours_best"]:
                continue
            ours = cell["variants"][cell["ours_best"][wire]]
            for what, key, share in zip(("step", "bytes"), ("step_ms", "sent_bytes"), shares, strict=True):
                name = f"{cell['case']} at {cell['rate_mbit']:g} Mbit/s, {wire}: {what}, of our bf16's"
                failed = ours["failed"] or bf16["failed"]
                found.append(demand(name, ours[key] / bf16[key], "<=", share, why_not=failed))
    return found


def fixed_pick(cell: Mapping[str, Any]) -> str | None:
    """The variant whose wire the rule takes from the medians of those with one wire; None: they have not all run."""
    fixed = {wire: cell["variants"].get(f"ours {wire}") for wire in AUTO_WIRES}
    if any(row is None or row["failed"] for wire, row in fixed.items() if wire != "int8"):
        return None
    took = {wire: [row["step_ms"]] for wire, row in fixed.items() if row is not None and not row["failed"]}
    return f"ours {wire_trial.pick(took)}"


def auto_demands(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of one that chooses among wires: its step beside that of the wire that the rule takes, where noise allows.

    Where the same variant twice differs, or the interval of the rounds' ratios leaves a miss open, nothing is demanded.
    """
    found: list[dict[str, Any]] = []
    for cell in rows:
        judged = cell["part"] == "steps" and cell["not_published"] is None and AUTO in cell["variants"]
        fixed = fixed_pick(cell) if judged else None
        if fixed is None or cell["aa_ratio"] is None or abs(cell["aa_ratio"] - 1) > AUTO_NOISE:
            continue
        auto, single = cell["variants"][AUTO], cell["variants"][fixed]
        ratios = [took_ms / of_ms for took_ms, of_ms in zip(auto["samples_ms"], single["samples_ms"], strict=True)]
        if len(ratios) < LEAST_RATIOS:
            continue
        ratio, low, high = interval(ratios)
        if low <= AUTO_SHARE < ratio:
            continue
        name = f"{cell['case']} at {cell['link']}, auto, of {fixed}: step"
        found.append(demand(name, ratio, "<=", AUTO_SHARE, why_not=auto["failed"], low=low, high=high))
        if auto["chosen_behind"] is not None:
            found.append(demand(f"{name}s until the wire is chosen", auto["chosen_behind"], "<=", MOST_STEPS))
            found.append(demand(f"{name}s that the trial has cost", trial_cost(auto), "<=", MOST_COST))
    return found


def trial_cost(auto: Mapping[str, Any]) -> float:
    """How many steps on the chosen wire the trial has taken longer than as many steps on that."""
    took = dict(zip(auto["tried"], auto["tried_ms"], strict=True))
    steps = wire_trial.BLOCKS * wire_trial.block(len(took))
    return float(sum(steps * (ms / took[auto["chosen"]] - 1) for ms in took.values()))


def reduced_bytes(cell: Mapping[str, Any], kind: str, name: str) -> float | None:
    """Bytes that one of two ranks sends in the reductions of a model of FSDP2's, per element of a shard.

    Without replicas the ranks gather parameters too. What that takes is what torch's sends beyond its reduce-scatter,
    which over Gloo is an all-reduce: as much as torch's HSDP sends. None: the variant did not take part, or has failed.
    """
    names = [name, *(("torch FSDP2", "torch HSDP") if kind == "FSDP2" else ())]
    rows = [cell["variants"].get(one) for one in names]
    if any(row is None or row["failed"] for row in rows):
        return None
    sent = [float(row["sent_bytes"]) for row in rows]
    gathers = sent[1] - sent[2] if kind == "FSDP2" else 0.0
    shard_share = 1.0 if kind == "HSDP" else 0.5
    return (sent[0] - gathers) / 2 / (shard_share * float(cell["elements"]))


def shard_demands(rows: Sequence[Mapping[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """What is required of FSDP2's models on two ranks: bytes of their reductions, and the step beside torch's."""
    found: list[dict[str, Any]] = []
    for cell in rows if ranks == 2 else ():
        if cell["part"] != "steps" or cell["not_published"] is not None:
            continue
        for kind in ("HSDP", "FSDP2"):
            for wire, most_bytes in SHARD_BYTES.items():
                sent = reduced_bytes(cell, kind, f"{kind} {wire}")
                if sent is None:  # nor did torch's, for want of which nothing is judged
                    continue
                name = f"{cell['case']} at {cell['link']}, {kind} {wire}"
                found.append(demand(f"{name}: bytes an element", sent, "<=", most_bytes * (1 + SHARD_SLACK_SHARE)))
                share = SHARD_STEP_SHARES.get((kind, cell["rate_mbit"] or 0), {}).get(wire)
                torchs = cell["variants"].get(f"torch {kind}")
                if share is not None and cell["case"] == SHARD_MODEL and torchs is not None and not torchs["failed"]:
                    ratio = cell["variants"][f"{kind} {wire}"]["step_ms"] / torchs["step_ms"]
                    found.append(demand(f"{name}: step, of torch's", ratio, "<=", share))
    return found
