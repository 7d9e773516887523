"""Training steps with torch DDP, with our wrapper and with our hook: time, exposed synchronisation, operators, memory.

    python perf/bench_step.py                       # 2 ranks, two shapes, and the verdicts on them
    python perf/bench_step.py --models mlp resnet18 gpt2-tiny --clip --amp
    python perf/bench_step.py --models gpt2-small --device cuda --ranks 1 --clip

A step: zero_grad (to None), forward, backward, and with an optimizer also unscale (--amp), clip (--clip) and its step.
The two shapes are measured without an optimizer. All variants take turns step by step in one run, in an order that
changes each round, ranks starting together; every step begins with the same weights. What each leaves in gradients (and
weights) is first compared with what it must be; one that is wrong is an error and no number.

sync = median over all rounds and ranks of (step with the variant - plain step without DDP in that round), so with
--clip and --amp it holds these too. Ratios are to the best, in that run, of torch DDP's four forms; the strongest of
all that is torch's, its hooks too, is named beside. One of torch's forms takes part twice: the ratio of the two is the
noise. Ours without overlap shows what overlap brings, and the no-op hook what a hook costs that does nothing; neither
is a candidate. On a GPU time outside of collectives ("GPU ms") tells variants apart where steps do not.

Exit status 1 if something required is missed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import harness
import models
import records
import report_tables
import step_counts
import step_training
import step_variants
import torch
from render import share_of
from step_training import Task
from step_variants import BF16, FLOOR, HOOK_BF16, NATIVE, NATIVE_VIEWS, NOOP, TORCH_AGAIN, TORCH_DEFAULT

LARGE, SMALL = "many:200x50000", "many:2000x8"
FIRST_STEPS = 6  # with those that are not timed enough for buckets to settle
PLANNED_STEPS = 28  # of our wrapper among several ranks, whose plan settles in 31
REQUIRED = 1.0  # of the best of torch's, or less
GOAL = 0.75
HOOK_REQUIRED = 0.8  # of torch DDP as it comes


def measure(rank: int, world: int, folder: str, task: Task, device_type: str, steps: int) -> NoReturn:
    """One rank: checks, then times all variants in turns, then counts."""
    device = harness.begin(rank, world, folder, device_type)
    variants = step_variants.variants(clips=task.clips, scales=task.scales)
    # Weights, gradients, buckets, and the optimizer's state.
    copies = 3 + {"none": 0, "adamw": 2}[task.optimizer]
    sharing = world if device.type == "cpu" else -(-world // torch.cuda.device_count())
    remedy = "a smaller model, or fewer ranks"
    models.check_memory(task.model, len(variants), copies, sharing, device, remedy)
    truth, new = step_training.new_training(task, device, rank)
    # What the first DDP of a process takes once (torch imports 800 modules for it: 80 MB) is no matter of a variant.
    harness.torch_ddp()(models.build("many:1x8").to(device))(*models.batch("many:1x8", rank, device)).backward()
    cases, rows = {}, {}
    for name, variant in variants.items():
        before = step_counts.held_bytes(device)
        cases[name] = new(name, variant).case()
        first = PLANNED_STEPS if variant.side == "wrapper" and world > 1 else FIRST_STEPS
        rows[name] = step_counts.memory_of(cases[name], before, first, device)
    seconds = harness.take_turns(cases, steps, device)
    counts = {name: step_counts.count(case, device) for name, case in cases.items()}
    size = {"parameters": len(truth.before), "elements": sum(one.numel() for one in truth.before)}
    harness.finish(rank, folder, {"seconds": seconds, "counts": counts, "memory": rows, "size": size})


def row_of(model: str, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One model's row: per variant the spread of the step and of what it takes more than the floor, ratios, counts.

    The difference is taken round by round: on a machine with other work, this halves the scatter of the ratios.
    """
    each = [result["seconds"] for result in results]
    times = {name: [second for of_rank in each for second in of_rank[name]] for name in each[0]}
    rows: dict[str, dict[str, Any]] = {}
    for name, seconds in times.items():
        row: dict[str, Any] = records.spread(seconds, "step_ms")
        over = [step - floor for step, floor in zip(seconds, times[FLOOR], strict=True)]
        sync = records.spread(over, "sync_ms")
        row |= {key: None if name == FLOOR else took for key, took in sync.items()} | {"ratio": None}
        counts, floor_counts = (results[0]["counts"][one] for one in (name, FLOOR))
        row |= {f"over_{key}": step_counts.over(value, floor_counts[key]) for key, value in counts.items()}
        for key in ("held_bytes", "peak_bytes"):
            most = [result["memory"][name][key] for result in results]
            least = [result["memory"][FLOOR][key] for result in results]
            row[f"over_{key}"] = None if None in most + least else max(map(int.__sub__, most, least))
        row["samples_ms"] = [round(second * 1e3, 4) for second in seconds]
        rows[name] = row
    best = min(harness.torch_variants(), key=lambda name: rows[name]["sync_ms"])
    for name, row in rows.items():
        row["ratio"] = None if name == FLOOR else share_of(row["sync_ms"], rows[best]["sync_ms"])
    rivals = [name for name in step_variants.torch_side(clips=True) if name in rows and name not in (NOOP, TORCH_AGAIN)]
    return {
        "part": "steps",
        "case": model,
        **results[0]["size"],
        "torch_best": best,
        "strongest_of_torch": min(rivals, key=lambda name: rows[name]["sync_ms"]),
        "aa_ratio": share_of(rows[TORCH_AGAIN]["sync_ms"], rows[TORCH_DEFAULT]["sync_ms"]),
        "variants": rows,
    }


# Verdict


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One demand: of the best of `candidates` on a model.

    Args:
        base: whose synchronisation is what is compared with; None: the best of torch DDP's forms.
    """

    model: str
    what: str
    candidates: tuple[str, ...]
    base: str | None = None
    required: float = REQUIRED
    goal: float | None = GOAL


VERDICTS = (
    Judged(model=SMALL, what="native", candidates=(NATIVE, NATIVE_VIEWS)),
    Judged(model=LARGE, what="native", candidates=(NATIVE, NATIVE_VIEWS)),
    Judged(model=LARGE, what="bf16", candidates=(BF16,)),
    Judged(
        model=LARGE, what="hook bf16", candidates=(HOOK_BF16,), base=TORCH_DEFAULT, required=HOOK_REQUIRED, goal=None
    ),
)


def judge(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What is demanded of the models that were measured: of time, and that bf16 holds less memory than torch's DDP."""
    found: list[dict[str, Any]] = []
    measured = {row["case"]: row for row in rows}
    for judged in VERDICTS:
        if judged.model not in measured or any(
            name not in measured[judged.model]["variants"] for name in judged.candidates
        ):
            continue
        variants = measured[judged.model]["variants"]
        base = judged.base or measured[judged.model]["torch_best"]
        best = min(judged.candidates, key=lambda name: variants[name]["sync_ms"])
        ratio = share_of(variants[best]["sync_ms"], variants[base]["sync_ms"])
        why_not = f"{base!r} takes no time that can be measured: too few steps" if ratio is None else None
        what = f"{judged.what}, {judged.model}"
        found.append(
            records.demand(what, ratio, "<=", judged.required, why_not=why_not, of=base, by=best, goal=judged.goal)
        )
    if LARGE in measured:
        held = [measured[LARGE]["variants"][name]["over_held_bytes"] for name in (BF16, TORCH_DEFAULT)]
        ours_mb, theirs_mb = (None if one is None else one / 1e6 for one in held)
        found.append(records.demand(f"memory of bf16, {LARGE}", ours_mb, "<", theirs_mb, unit=" MB", of=TORCH_DEFAULT))
    return found


# Command line


def options() -> argparse.Namespace:
    """What was asked for.

    Raises:
        BenchError: it makes no sense.
    """
    parser = records.Parser(description=__doc__)
    parser.add_argument(
        "--models", nargs="+", metavar="NAME", help=f"default: {LARGE} {SMALL}; {', '.join(models.NAMES)}"
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes of one thread each (default: 2)")
    parser.add_argument("--steps", type=int, default=24, help="timed rounds (default: 24)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--optimizer", choices=("none", "adamw"), help="default: adamw with --models, else none")
    parser.add_argument("--clip", action="store_true", help="clip to half of the gradients' norm")
    parser.add_argument("--amp", action="store_true", help="scale the loss")
    parser.add_record()
    asked = parser.parse_args()
    if asked.ranks < 1 or asked.steps < 2:
        parser.error("at least 1 rank and 2 steps")
    asked.optimizer = asked.optimizer or ("adamw" if asked.models or asked.clip or asked.amp else "none")
    if asked.optimizer == "none" and (asked.clip or asked.amp):
        parser.error("--clip and --amp need an optimizer")
    device = records.pick_device(asked.device)
    if device.type == "cuda" and asked.ranks > torch.cuda.device_count():
        parser.error(f"{asked.ranks} ranks, but {torch.cuda.device_count()} GPUs: nccl wants one each")
    for name in asked.models or ():
        models.shape_of(name)
    return asked


def record_name(asked: argparse.Namespace) -> str:
    """Runs of different settings lie beside each other: "step" for the default, else what differs."""
    parts = ["step", *(["models"] if asked.models else [])]
    parts += [flag for flag in ("clip", "amp") if getattr(asked, flag)]
    parts += [] if asked.ranks == 2 else [f"{asked.ranks}ranks"]
    return "-".join(parts)


def main() -> int:
    """Runs every model, prints tables and demands, writes one JSON."""
    asked = options()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the ranks' profilers announce every start and stop
    rows: list[dict[str, Any]] = []
    for name in asked.models or (LARGE, SMALL):
        task = Task(model=name, optimizer=asked.optimizer, clips=asked.clip, scales=asked.amp)
        rows.append(row_of(name, harness.run_ranks(measure, asked.ranks, task, asked.device, asked.steps)))
    return report_tables.publish(
        asked,
        record_name(asked),
        asked.device,
        ranks=asked.ranks,
        steps=asked.steps,
        backend=harness.BACKENDS[asked.device],
        optimizer=asked.optimizer,
        clip=asked.clip,
        amp=asked.amp,
        rows=rows,
        demands=judge(rows),
    )


if __name__ == "__main__":
    records.entry(main)
