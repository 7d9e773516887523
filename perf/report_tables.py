"""Tables of docs/measurements.md: one function per benchmark, from its record to lines of Markdown.

What is lost is marked: **slower** beside a ratio above 1 to the strongest that it was measured with, **MISSED** beside
what was demanded and not reached. Keys that are not shown may be anything; one that is shown and missing is a KeyError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import report_link
from report_words import MISSED, MORE, SLOWER, Lines, Record, number, ratio_text, share_of, table

# Names in the records, as perf/kernel_cases.py and perf/step_variants.py give them.
OURS, NORMS = "ours", "ours, norms"
TORCH_CASE = "torch: "
NATIVE, NATIVE_VIEWS, BF16 = "ours native", "ours native, views", "ours bf16"
HOOK_BF16 = "fused_hook bf16, views"
DECIDING = (NATIVE, NATIVE_VIEWS, BF16, HOOK_BF16)
HEADLINE_PAIRS = ("fp32-bf16", "fp32-fp32", "bf16-bf16", "fp32-native", "bf16-native")
# Of perf/bench_modes.py: what it measures once and again; the scenarios that a reader decides by.
_MODE_BASE, _MODE_SUMMARY = "synchronous", ("pauses of 4, in turns", "always")


def origin(record: Record) -> Lines:
    """On what, with what, when and how a record came about."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return [
        f"On {record['hardware']}; {versions}; commit {record['commit']}, {record['created'][:10]}; other work kept "
        f"{record['others_cores']:.2f} cores busy.",
        "",
        f"    {record['command']}",
        "",
    ]


def is_torchs(name: str) -> bool:
    """Whether a variant has nothing of ours in it: torch's own, or what is rebuilt where torch lacks it."""
    return name.startswith(("torch", "rebuilt"))


def kernels(record: Record) -> Lines:
    """A line per list of gradients, pair of dtypes and call; cold, and the warm cache's time beside it."""
    rows = record["rows"]
    warm = {_kernel_key(row): row for row in rows if row["cache"] == "warm"}
    first: list[list[str]] = []
    rest: list[list[str]] = []
    for row in rows:
        if row["cache"] == "warm":
            continue
        base = NORMS if row["direction"] == "after" else OURS
        ours = row["cases"][base]
        theirs = {name: case for name, case in row["cases"].items() if name.startswith(TORCH_CASE)}
        best = min(theirs, key=lambda name: theirs[name]["median_us"])
        beside = warm.get(_kernel_key(row))
        lost = theirs[best]["ratio"] < 0.995
        cells = [
            f"{row['direction']}, {row['model']}, {row['pair']}, {row['way']}"
            + ("" if row["cache"] == "cold" else "*"),
            f"{ours['median_us']:,.1f}",
            f"{ours['p20_us']:,.1f} to {ours['p80_us']:,.1f}",
            number(None if beside is None else beside["cases"][base]["median_us"], 1),
            f"{ours['gbps']:,.1f}",
            number(ours.get("share_copy")),
            number(ours.get("share_cast")),
            str(ours["launches"]),
            best.removeprefix(TORCH_CASE),
            str(theirs[best]["launches"]),
            ratio_text(1 / theirs[best]["ratio"]),
            f"{row['noise']:.3f}",
        ]
        (first if lost or row["pair"] in HEADLINE_PAIRS else rest).append(cells)
    headings = ["call", "us", "p20 to p80", "warm us", "GB/s", "of copy", "of cast", "launches", "fastest of torch's"]
    headings += ["its launches", "ours / it", "twice the same"]
    lines = table(headings, first)
    if any(row["cache"] == "not cold" for row in rows):
        lines += ["", "\\* Too small to be rotated past the cache."]
    if rest:
        lines += ["", "<details><summary>Other pairs of dtypes, none of them lost</summary>", ""]
        lines += [*table(headings, rest), "", "</details>"]
    if record["copy_8gb_gbps"] is not None:
        lines += ["", f"A copy of 8 GB moves {record['copy_8gb_gbps']:,.0f} GB/s there."]
    return lines


def _kernel_key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return row["model"], row["pair"], row["way"], row["direction"]


def step(record: Record) -> Lines:
    """A table per model, and the memory of each variant."""
    lines: Lines = []
    for name, model in record["models"].items():
        parts = [f"{record['ranks']} ranks, {record['backend']}", f"optimizer {record['optimizer']}"]
        parts += [flag for flag, on in (("clipped", record["clip"]), ("scaled loss", record["amp"])) if on]
        best, strongest = model["torch_best"], model["strongest_of_torch"]
        strongest_ms = _strongest_ms(model)
        lines += [
            f"{name}: {model['parameters']:,} parameters, {model['elements']:,} elements; {', '.join(parts)}. The best "
            f"of torch DDP's forms is {best!r}, the strongest of all of torch's {strongest!r}; the same twice: "
            f"{number(model['aa_ratio'])}. Counts and memory are over no DDP's.",
            "",
        ]
        rows = []
        for variant, row in model["variants"].items():
            ours = _is_ours(variant)
            share = share_of(row.get("sync_ms"), strongest_ms)
            held = [None if row[key] is None else row[key] / 1e6 for key in ("over_held_bytes", "over_peak_bytes")]
            rows.append(
                [
                    variant,
                    number(row["step_ms"]),
                    f"{row['step_p20_ms']:,.2f} to {row['step_p80_ms']:,.2f}",
                    number(row.get("sync_ms")),
                    number(row.get("ratio")),
                    ratio_text(share) if ours else number(share),
                    *(number(row[f"over_{key}"], 0) for key in ("operators", "collectives", "launches")),
                    number(row["over_gpu_ms"], 3),
                    *(number(one, 1) for one in held),
                ]
            )
        headings = ["variant", "step ms", "p20 to p80", "sync ms", "of the best DDP's", "of the strongest", "operators"]
        lines += [*table([*headings, "collectives", "launches", "GPU ms", "held MB", "peak MB"], rows), ""]
    held_rows = record["memory"]["variants"]
    if held_rows:
        lines += [f"Memory of a process over no DDP's, MB after {record['memory']['steps']} steps, "]
        lines[-1] += f"{record['memory']['model']}:"
        keys = ("over_end_bytes", "over_peak_bytes", "over_heap_bytes")
        cells = [
            [name, *(number(None if row[key] is None else row[key] / 1e6, 1) for key in keys)]
            for name, row in held_rows.items()
        ]
        lines += ["", *table(["variant", "resident at the end", "its peak", "heap in use"], cells), ""]
    return lines[:-1]


def _strongest_ms(model: Record) -> float:
    strongest_ms: float = model["variants"][model["strongest_of_torch"]]["sync_ms"]
    return strongest_ms


def clip(record: Record) -> Lines:
    """A table per part and shape."""
    lines: Lines = []
    for part, shapes in record["parts"].items():
        for shape, cases in shapes.items():
            base = next(iter(cases))
            rivals = is_torchs(base)
            ranks = f"{record['ranks']} ranks" if part != "kernels" else "one process"
            rows = [
                [
                    name,
                    number(row["ms"]),
                    f"{row['p20_ms']:,.2f} to {row['p80_ms']:,.2f}",
                    ratio_text(row["ratio"]) if rivals and not is_torchs(name) else number(row["ratio"]),
                ]
                for name, row in cases.items()
            ]
            lines += [f"{part}, {shape} parameters, {ranks}:", ""]
            lines += [*table(["case", "ms", "p20 to p80", f"of {base!r}"], rows), ""]
    return lines[:-1]


def host(record: Record) -> Lines:
    """Slopes per parameter and per bucket, points, and where ours spends it."""
    lines: Lines = []
    for sweep, variants in record["slopes"].items():
        rows = [
            [name, *(number(line[key][part]) for key in ("us", "calls") for part in ("slope", "intercept", "worst"))]
            for name, line in variants.items()
        ]
        headings = ["variant", f"us per {sweep}", "us besides", "worst point off", f"calls per {sweep}"]
        lines += [f"Host time of a step over no DDP's, against the number of {sweep}s:", ""]
        lines += [*table([*headings, "calls besides", "worst point off"], rows), ""]
    for point in record["points"]:
        variants = point["variants"]
        torchs = min(row["us"] for name, row in variants.items() if is_torchs(name))
        rows = [
            [
                name,
                f"{row['us']:,.0f}",
                f"{row['p20_us']:,.0f} to {row['p80_us']:,.0f}",
                f"{row['calls']:,.0f}",
                "-" if name == "no DDP" else (ratio_text if _is_ours(name) else number)(share_of(row["us"], torchs)),
            ]
            for name, row in variants.items()
        ]
        lines += [f"{point['parameters']:,} parameters in {point['buckets']:,} buckets:", ""]
        lines += [*table(["variant", "us", "p20 to p80", "Python calls", "of torch's least"], rows), ""]
    stages = record["stages"]
    rows = [
        [f"{name}: {stage}", f"{one['us']:,.0f}", f"{one['calls']:,.0f}"]
        for name, found in stages["variants"].items()
        for stage, one in found.items()
    ]
    lines += [f"Stages of ours, {stages['parameters']:,} parameters in {stages['buckets']:,} buckets:", ""]
    return [*lines, *table(["stage", "us per step", "calls per step"], rows)]


def _is_ours(name: str) -> bool:
    return "ours" in name or "fused" in name


def schedule(record: Record) -> Lines:
    """What plans gain and what looking costs."""
    lines: Lines = []
    if record["gains"]:
        policies = list(next(iter(record["gains"].values()))["ratio_to_torch"])
        rows = [
            [
                name,
                number(row["torch_ms"]),
                *(f"{ratio_text(row['ratio_to_torch'][one])} ({row['buckets'][one]})" for one in policies),
                f"{row['noise']:.3f}",
            ]
            for name, row in record["gains"].items()
        ]
        lines += ["Step, as a share of torch DDP's (buckets):", ""]
        lines += [*table(["model", "torch DDP ms", *policies, "twice the same"], rows), ""]
    if record["costs"]:
        rows = [
            [shape, number(row["step_ms"])]
            + [
                f"{row[key]:.3%}{_over(row[key], record['allowed'][key])}"
                for key in ("recording_share", "looking_share")
            ]
            + [number(row["look_ms"]), f"{row['noise_share']:+.2%}"]
            for shape, row in record["costs"].items()
        ]
        lines += ["What recording and looking cost:", ""]
        headings = ["shape", "step ms", "recording, of a step", "looking, of training", "ms per look", "twice the same"]
        lines += [*table(headings, rows), ""]
    return lines[:-1]


def _over(value: float, allowed: float) -> str:
    return "" if value < allowed else f" {MISSED}"


def prediction(record: Record) -> Lines:
    """Each model's error, and its points."""
    required = record["required"]
    rows, points = [], []
    for name, model in record["models"].items():
        low = model["judged"] and model["rank_correlation"] < required["rank_correlation"]
        correlation = f"{model['rank_correlation']:.2f}{f' {MISSED}' if low else ''}"
        rows.append([name, "yes" if model["judged"] else "no", correlation, f"{model['median_error']:.0%}"])
        points += [
            [
                f"{name}: {key}",
                str(one["buckets"]),
                number(one["predicted_ms"]),
                number(one["measured_ms"]),
                f"{one['error']:.0%}",
            ]
            for key, one in sorted(model["points"].items(), key=lambda item: float(item[1]["predicted_ms"]))
        ]
    mark = f" {MISSED}" if record["median_error"] > required["median_error"] else ""
    lines = table(["model", "judged", "rank correlation", "median error"], rows)
    lines += ["", f"{record['points_judged']} points judged, median error {record['median_error']:.1%}{mark}.", ""]
    lines += ["<details><summary>Every point</summary>", ""]
    return [*lines, *table(["plan", "buckets", "predicted ms", "measured ms", "error"], points), "", "</details>"]


def modes(record: Record) -> Lines:
    """Accuracy by mode, and each scenario's steps, rank by rank."""
    lines: Lines = []
    if record["accuracy"]:
        lines += [
            f"Accuracy on the held-out digits, {record['ranks']} ranks, {record['steps']} steps, in the mean over "
            f"{record['seeds']} seeds; drift is the largest of all runs:",
            "",
        ]
        rows = [
            [
                name,
                f"{row['accuracy']:.2%}",
                f"{row['lowest']:.2%} to {row['highest']:.2%}",
                number(row["lost_points"]),
                *(f"{row[key]:.2g}" if row[key] else "0" for key in ("drift", "relative_drift")),
            ]
            for name, row in record["accuracy"].items()
        ]
        headings = ["mode", "accuracy", "lowest to highest", "points lost", "drift", "relative drift"]
        lines += [*table(headings, rows), ""]
    for scenario, found in record["stragglers"].items():
        ranks = range(len(next(iter(found.values()))["ms"]))
        rows = [
            [
                name,
                *(
                    f"{row['ms'][rank]:,.2f} ({row['p20_ms'][rank]:,.2f} to {row['p80_ms'][rank]:,.2f})"
                    for rank in ranks
                ),
                *(number(one) if name.startswith(_MODE_BASE) else ratio_text(one) for one in row["ratio"]),
                *(number(one) for one in row.get("held_up_ms", [None] * len(ranks))),
                *(number(one) for one in row["flush_ms"]),
            ]
            for name, row in found.items()
        ]
        named = [[f"{what}, rank {rank}" for rank in ranks] for what in ("ms", "ratio", "held up", "flush")]
        lines += [
            f"{scenario}; a sleep is {record['sleep_ms']:g} ms, a block {record['block_steps']} steps; ratios to "
            f"{next(iter(found))!r}:",
            "",
            *table(["mode", *(heading for group in named for heading in group)], rows),
            "",
        ]
    return lines[:-1]


def data_parallel(record: Record) -> Lines:
    """A table per model."""
    lines: Lines = []
    for name, ways in record["models"].items():
        rows = [
            [
                way,
                number(row["median_ms"]),
                f"{row['p20_ms']:,.2f} to {row['p80_ms']:,.2f}",
                *((ratio_text if _is_ours(way) else number)(row[key]) for key in ("ratio", "ratio_to_torch")),
            ]
            for way, row in ways.items()
        ]
        lines += [f"{name}, {record['replicas']} replicas, {record['threads']} threads:", ""]
        lines += [*table(["way", "ms", "p20 to p80", "of one replica", "of torch.nn.DataParallel"], rows), ""]
    return lines[:-1]


def gpu_check(record: Record) -> Lines:
    """Stages and what they found."""
    stages = record["stages"]
    rows = [[name, one["status"], number(one.get("seconds"), 0), _cell(one["reason"])] for name, one in stages.items()]
    lines = table(["stage", "status", "s", "why"], rows)
    findings = [
        [
            f"{name}: {_cell(one['what'])}",
            _found(one),
            f"{one['sign']} {one['bound']:.4g}{one['unit']}",
            {True: "met", False: MISSED}.get(one["met"], "-"),
        ]
        for name, stage in stages.items()
        for one in stage["findings"]
    ]
    if findings:
        lines += ["", *table(["what", "measured", "demanded", ""], findings)]
    skipped = [f"- {name}, {_cell(one)}" for name, stage in stages.items() for one in stage["skipped"]]
    return lines + (["", "Left out:", "", *skipped] if skipped else [])


def _found(finding: Record) -> str:
    value = finding["value"]
    return "nothing finite" if value is None else f"{value:.4g}{finding['unit']}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")


def missed(record: Record) -> Lines:
    """What a record was to reach and did not, or what cannot be judged, a bullet each."""
    what = record["what"]
    if family(what) == "kernels":
        return [
            f"{one['direction']} {one['model']} {one['pair']} {one['way']}: {one['what']} is {one['figure']:.3f}, "
            + (f"at least {one['least']:.2f}" if "least" in one else f"at most {one['most']:.2f}")
            for one in record["verdicts"]
            if not one["met"]
        ]
    if family(what) == "link":
        return report_link.missed(record)
    if family(what) in ("modes", "data_parallel"):
        return [
            _not_judged(one) or f"{one['what']} {number(one['figure'])}, at most {one['most']:g}"
            for one in record["verdicts"]
            if not one["met"]
        ]
    if what.startswith("step"):
        return [_not_judged(one) or _step_missed(one) for one in record["verdicts"] if not one["met"]]
    if what == "gpu_check":
        return [
            f"{name}: {_cell(one['what'])} is {_found(one)}, {one['sign']} {one['bound']:.4g}{one['unit']} is demanded"
            for name, stage in record["stages"].items()
            for one in stage["findings"]
            if one["met"] is False
        ]
    if what == "prediction":
        required = record["required"]
        found = [
            f"{name}: rank correlation {one['rank_correlation']:.2f}, at least {required['rank_correlation']}"
            for name, one in record["models"].items()
            if one["judged"] and one["rank_correlation"] < required["rank_correlation"]
        ]
        error = record["median_error"]
        over = (
            [f"median error {error:.1%}, at most {required['median_error']:.0%}"]
            if error > required["median_error"]
            else []
        )
        return found + over
    if what.startswith("schedule"):
        return [
            f"{shape}: {key.replace('_', ' ')} {row[key]:.3%}, less than {allowed:.1%}"
            for shape, row in record["costs"].items()
            for key, allowed in record["allowed"].items()
            if row[key] >= allowed
        ]
    return []


def _not_judged(verdict: Record) -> str:
    return f"{verdict['what']}: not judged, {verdict['why_not']}" if verdict["met"] is None else ""


def _step_missed(verdict: Record) -> str:
    if "required" not in verdict:
        return str(verdict["what"])
    return f"{verdict['what']}: {number(verdict['ratio'])} of {verdict['of']!r}, at most {verdict['required']:.2f}"


def summary(record: Record) -> Lines:
    """What a reader decides by: a line or two of a record, with what is lost in them; [] for most."""
    what = record["what"]
    if family(what) == "kernels":
        return _kernels_summary(record)
    if what == "step" or (record["device"] != "cpu" and re.fullmatch(r"step-\d+ranks", what)):  # as many as GPUs
        return [*_step_summary(record), *_memory_summary(record)]
    if what == "link":
        return report_link.summary(record)
    if what == "clip":
        return _clip_summary(record)
    if what == "modes":
        return _modes_summary(record)
    if what == "data_parallel":
        return _data_parallel_summary(record)
    if what == "gpu_check":
        stages = record["stages"].values()
        judged = [one["met"] for stage in stages for one in stage["findings"] if one["met"] is not None]
        fine = sum(stage["status"] == "ok" for stage in stages)
        return [f"`make gpu-check`: {fine} of {len(stages)} stages ok, {sum(judged)} of {len(judged)} demands met"]
    return []


def _kernels_summary(record: Record) -> Lines:
    """A line per direction."""
    lines = []
    for direction in ("pack", "unpack"):
        rows = [row for row in record["rows"] if row["cache"] != "warm" and row["direction"] == direction]
        if not rows:
            continue
        theirs = [[case["ratio"] for name, case in row["cases"].items() if name.startswith(TORCH_CASE)] for row in rows]
        ratios = [1 / min(found) for found in theirs]
        slower = sum(ratio > 1.005 for ratio in ratios)
        lost = f", {slower} of them {SLOWER}" if slower else ""
        shares = [row["cases"][OURS]["share_copy"] for row in rows if "share_copy" in row["cases"][OURS]]
        rate = f"; {_range(shares)} of a copy's rate" if shares else ""
        lines.append(
            f"{direction}, {len(rows)} cases{lost}: {_range(ratios)} of the time of the fastest of torch's ways{rate}"
        )
    return lines


def _step_summary(record: Record) -> Lines:
    """A line per model."""
    return [
        f"synchronising {name}, {record['ranks']} ranks, as a share of {model['strongest_of_torch']!r}: "
        + ", ".join(
            f"{variant} {ratio_text(share_of(model['variants'][variant]['sync_ms'], _strongest_ms(model)))}"
            for variant in DECIDING
            if variant in model["variants"]
        )
        for name, model in record["models"].items()
    ]


def _memory_summary(record: Record) -> Lines:
    """One line, if memory was measured."""
    held = {name: row["over_peak_bytes"] for name, row in record["memory"]["variants"].items()}
    shown = {name: held[name] for name in held if (_is_ours(name) or is_torchs(name)) and held[name] is not None}
    least = min((value for name, value in shown.items() if is_torchs(name)), default=None)
    if least is None:
        return []
    words = [
        f"{name} {number(value / 1e6, 1)}{f' {MORE}' if _is_ours(name) and value > least else ''}"
        for name, value in shown.items()
    ]
    return [f"peak of memory, MB above {record['memory']['model']} without DDP: {', '.join(words)}"]


def _clip_summary(record: Record) -> Lines:
    """One line: the steps that clip, by what else they do."""
    words = []
    for part, does in (("clip", "clips"), ("scale", "scales its loss and clips")):
        shapes = record["parts"].get(part, {}).values()
        ratios = [
            row["ratio"]
            for cases in shapes
            for name, row in cases.items()
            if not is_torchs(name) and "not clipped" not in name
        ]
        if ratios:
            slower = sum(ratio > 1.005 for ratio in ratios)
            lost = f" ({slower} of {len(ratios)} ways {SLOWER})" if slower else ""
            words.append(f"a step that {does} takes {_range(ratios)} of torch's{lost}")
    return ["; ".join(words)] if words else []


def _modes_summary(record: Record) -> Lines:
    """What modes cost in accuracy, and what they hide."""
    lines = []
    accuracy = {name: row for name, row in record["accuracy"].items() if not name.startswith(_MODE_BASE)}
    if accuracy:
        words = [f"{name} {number(row['lost_points'])}" for name, row in accuracy.items()]
        lines.append(f"points of accuracy that a mode loses against synchronous, digits: {', '.join(words)}")
    for scenario, found in record["stragglers"].items():
        words = [
            f"{name} {' and '.join(map(ratio_text, row['ratio']))}"
            for name, row in found.items()
            if not name.startswith(_MODE_BASE)
        ]
        if scenario.startswith(_MODE_SUMMARY):
            lines.append(f"{scenario}: a step of each rank, as a share of synchronous's: {', '.join(words)}")
    return lines


def _data_parallel_summary(record: Record) -> Lines:
    """One line: forward on the whole batch, of the strongest that it is measured beside."""
    key = "ratio" if record["device"] == "cpu" else "ratio_to_torch"
    words = [
        f"{name} {ratio_text(ways['ours'][key])}"
        for name, ways in record["models"].items()
        if ways["ours"][key] is not None
    ]
    beside = "one replica with all threads" if key == "ratio" else "torch.nn.DataParallel"
    return [f"DataParallel, {record['replicas']} replicas, as a share of {beside}: {', '.join(words)}"] if words else []


def _range(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


TABLES: Mapping[str, Callable[[Record], Lines]] = {
    "kernels": kernels,
    "step": step,
    "link": report_link.link,
    "clip": clip,
    "host": host,
    "schedule": schedule,
    "prediction": prediction,
    "modes": modes,
    "data_parallel": data_parallel,
    "gpu_check": gpu_check,
}


def family(what: str) -> str | None:
    """Which table a record has: "step-clip" that of step, gpu-check's headline that of kernels. None: none."""
    if what == "headline":
        return "kernels"
    for name in TABLES:
        if what == name or what.startswith((f"{name}-", f"{name}_")):
            return name
    return None
