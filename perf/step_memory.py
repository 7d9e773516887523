"""Memory of the step benchmark's variants on CPU: each in processes of its own, over what the model takes without DDP.

The resident set after the last step, its peak from before the wrapping on, and what the heap holds in use (exact:
gradients, buckets, wire). On a GPU the allocator tells all that in the run in which variants are timed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import harness
import models
import records
import step_counts
import step_training
import step_variants
from step_variants import BF16, FLOOR, HOOK_BF16, NATIVE_VIEWS, TORCH_DEFAULT, TORCH_VIEWS

MODEL = "many:200x50000"
STEPS = 10
MEASURED = (FLOOR, TORCH_DEFAULT, TORCH_VIEWS, NATIVE_VIEWS, BF16, HOOK_BF16)
Rows = Mapping[str, Mapping[str, int | None]]


def measure(rank: int, world: int, folder: str, name: str) -> NoReturn:
    """One rank, one variant: some steps, then what the process holds while its gradients live."""
    device = harness.begin(rank, world, folder)
    batch = models.batch(MODEL, rank, device)
    # What the first DDP of a process takes once (torch imports 800 modules for it: 80 MB) is no matter of the variant.
    harness.torch_ddp()(models.build("many:1x8"))(*models.batch("many:1x8", rank, device)).backward()
    module = models.build(MODEL)
    with contextlib.suppress(OSError):  # where that is not allowed the peak is that of the whole process
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    variant = step_variants.variants()[name]
    model = variant.build(module)
    for _ in range(STEPS):
        model.zero_grad(set_to_none=True)
        model(*batch).backward()
    usage = {
        "end_bytes": step_counts.resident_bytes("VmRSS"),
        "peak_bytes": step_counts.resident_bytes("VmHWM"),
        "heap_bytes": step_counts.heap_bytes(),
    }
    truth = step_training.Truth(step_training.Task(model=MODEL), models.build(MODEL), batch)
    truth.check(name, variant, model)
    storages = [p.grad.untyped_storage() for p in model.parameters() if p.grad is not None]
    usage["gradient_bytes"] = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    harness.finish(rank, folder, usage)


def memory(ranks: int) -> dict[str, dict[str, int | None]]:
    """Per variant the rank that holds most; `over_` is what it holds more than the floor."""
    rows: dict[str, dict[str, int | None]] = {}
    for name in MEASURED:
        usages = harness.run_ranks(measure, ranks, name)
        row = {key: None if usages[0][key] is None else max(usage[key] for usage in usages) for key in usages[0]}
        floor = rows.get(FLOOR, row)
        over = {
            f"over_{key}": step_counts.over(row[key], floor[key]) for key in ("end_bytes", "peak_bytes", "heap_bytes")
        }
        rows[name] = row | over
    return rows


def judge(rows: Rows) -> list[dict[str, Any]]:
    """Our bf16 is to be below torch's default, at its peak and at the end."""
    found = []
    for key, words in (("over_peak_bytes", "at its peak"), ("over_end_bytes", "at the end")):
        ours, theirs = (rows[name][key] for name in (BF16, TORCH_DEFAULT))
        assert ours is not None and theirs is not None
        what = f"memory of bf16 {words}, below torch DDP's"
        found.append(records.demand(what, ours / 1e6, "<", theirs / 1e6, unit=" MB"))
    return found
