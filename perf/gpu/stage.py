"""What the stages of `make gpu-check` share: arguments, a result that is always readable, findings against bounds.

A stage is a script of its own, which perf/gpu_check.py runs with the checkout and perf/ on PYTHONPATH:

    PYTHONPATH=.:perf python perf/gpu/stage_exact.py --out result.json --deadline 60 [--rehearse]

Its result is rewritten whenever something is known, so whoever kills it has all that it had found out by then.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import records
import torch
import triton

GIB = 2**30
MOST_CHARACTERS = 500
BEGAN = "FUSEDREDUCE_GPU_CHECK_BEGAN"


class Skipped(Exception):
    """A stage, or a part of one, cannot be done here; the message says why."""


class Stage:
    """One run of a stage.

    Args:
        out: file for the result.
        deadline_s: seconds after which the process is killed, from when the runner started it.
        rehearse: on CPU at sizes that say nothing, to try the program out.
        chosen: options of this stage's own.
    """

    def __init__(self, out: Path, deadline_s: float, rehearse: bool, chosen: Mapping[str, str] | None = None) -> None:
        self.rehearse = rehearse
        self.chosen = chosen or {}
        self.device = torch.device("cpu") if rehearse else torch.device("cuda", 0)
        self._out = out
        self._ends_s = _began_s() + deadline_s
        self._findings: list[dict[str, object]] = []
        self._skipped: list[str] = []
        self._content: dict[str, object] = {}
        self._status: dict[str, object] = {"status": "running", "reason": ""}
        self._write()

    def left_s(self) -> float:
        """Seconds until this process is killed."""
        return self._ends_s - time.monotonic()

    def note(self, **content: object) -> None:
        """Adds to the result what belongs to no bound."""
        self._content.update(content)
        self._write()

    def skip(self, what: str, why: object) -> None:
        """Notes a part that is not done."""
        self._skipped.append(f"{what}: {' '.join(str(why).split())[:200]}")
        self._write()

    def at_least(self, what: str, value: float, bound: float, unit: str = "") -> None:
        """Notes a number that should be `bound` or more."""
        self._find(what, value, bound, ">=", unit, value >= bound)

    def at_most(self, what: str, value: float, bound: float, unit: str = "") -> None:
        """Notes a number that should be `bound` or less."""
        self._find(what, value, bound, "<=", unit, value <= bound)

    def known(self) -> tuple[int, dict[str, object]]:
        """What `withdraw` can go back to."""
        return len(self._findings), dict(self._content)

    def withdraw(self, before: tuple[int, dict[str, object]]) -> None:
        """Takes back all numbers since then: a check has failed, so none of them is worth anything."""
        count, self._content = before
        del self._findings[count:]
        self._write()

    def end(self, status: str, reason: str = "") -> None:
        """Says how the stage ended."""
        said = " ".join(reason.split())
        # What a rank's process ended with stands last.
        said = said if len(said) <= MOST_CHARACTERS else f"{said[:180]} ... {said[-300:]}"
        self._status = {"status": status, "reason": said}
        self._write()

    def _find(self, what: str, value: float, bound: float, sign: str, unit: str, met: bool) -> None:
        # What was rehearsed is neither met nor missed.
        finding = {"what": what, "value": value, "sign": sign, "bound": bound, "unit": unit}
        self._findings.append({**finding, "met": None if self.rehearse else met})
        self._write()

    def _write(self) -> None:
        result = {**self._status, **self._content, "findings": self._findings, "skipped": self._skipped}
        beside = self._out.with_suffix(".writing")
        beside.write_text(json.dumps(result))
        beside.replace(self._out)


def entry(body: Callable[[Stage], None], **choices: Sequence[str]) -> None:
    """Runs a stage and ends the process: 0 if it is ok or skipped, else 1. `choices`: options of its own."""
    parser = records.Parser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--out", type=Path, required=True, help="file for the result")
    parser.add_argument("--deadline", type=float, required=True, help="seconds that it may take")
    parser.add_argument("--rehearse", action="store_true", help="on CPU, at tiny sizes")
    for name, values in choices.items():
        parser.add_argument(f"--{name}", choices=values, required=True)

    def main() -> int:
        arguments = parser.parse_args()
        if not arguments.rehearse:
            records.pick_device("cuda")
        chosen = {name: str(getattr(arguments, name)) for name in choices}
        stage = Stage(arguments.out, arguments.deadline, arguments.rehearse, chosen)
        try:
            with count_compilations() as hits:
                try:
                    body(stage)
                finally:
                    # Of stages after the first: what the first one did not compile ahead.
                    stage.note(compiled_anew=hits.count(False))
        except Skipped as why:
            stage.end("skipped", str(why))
        except records.BenchError as error:
            stage.end("failed", str(error))
            print(f"error: {error}", file=sys.stderr)
            return 1
        except Exception as error:  # a fault of the program under test, or of the stage: the log has where
            traceback.print_exc()
            stage.end("failed", f"{type(error).__name__}: {error}")
            return 1
        else:
            stage.end("ok")
        return 0

    records.entry(main)


def run_parts(stage: Stage, parts: Mapping[str, tuple[float, Callable[[Stage], None]]]) -> None:
    """Runs parts that do not need one another: what is wrong with one leaves the others their say.

    Args:
        stage: whose they are.
        parts: by name: seconds that must be left for it to begin, and what it does.

    Raises:
        BenchError: what was wrong, in the end.
    """
    faults: list[str] = []
    for name, (least_s, part) in parts.items():
        if stage.left_s() < least_s and not stage.rehearse:
            stage.skip(name, "no time left")
            continue
        with tolerate(stage, name, faults):
            part(stage)
    if faults:
        raise records.BenchError("; ".join(faults))


@contextlib.contextmanager
def tolerate(stage: Stage, name: str, faults: list[str]) -> Iterator[None]:
    """Notes what goes wrong in here, and goes on behind it; where a check fails nothing of the part is kept."""
    before = stage.known()
    try:
        yield
    except Skipped as why:
        stage.skip(name, why)
    except records.BenchError as error:
        stage.withdraw(before)
        faults.append(f"{name}: {error}")
    except Exception as error:  # a fault of the program under test, or of the stage: the log has where
        traceback.print_exc()
        faults.append(f"{name}: {type(error).__name__}: {error}")
    stage.note(faults=faults)


@contextlib.contextmanager
def count_compilations() -> Iterator[list[bool]]:
    """Kernels that Triton makes ready in this process while the context is open: whether its cache had them."""
    hits: list[bool] = []

    def note(*, cache_hit: bool, **_about: object) -> None:
        hits.append(cache_hit)
        if before is not None:
            before(cache_hit=cache_hit, **_about)

    before: Any = triton.knobs.compilation.listener
    triton.knobs.compilation.listener = note
    try:
        yield hits
    finally:
        triton.knobs.compilation.listener = before


def _began_s() -> float:
    """Of time.monotonic(), which all processes share: when the runner started this one; else now."""
    try:
        return min(time.monotonic(), float(os.environ[BEGAN]))
    except (KeyError, ValueError):
        return time.monotonic()


def free_bytes(device: torch.device) -> int:
    """Of the GPU's memory; plenty on CPU, where sizes are tiny."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 64 * GIB


def need_memory(device: torch.device, bytes_: int, what: str) -> None:
    """Raises BenchError if less than `bytes_` is free."""
    free = free_bytes(device)
    if free < bytes_:
        raise records.BenchError(f"{what} needs {bytes_ / GIB:.1f} GiB of the GPU's memory, {free / GIB:.1f} are free")


def synchronize(device: torch.device) -> None:
    """Waits for all that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
