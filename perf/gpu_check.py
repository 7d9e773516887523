"""Everything that only a GPU can say, in one command of less than nine minutes: `make gpu-check`.

    python3 perf/gpu_check.py                        # on a machine with one NVIDIA GPU, torch and triton; no network
    python3 perf/gpu_check.py --rehearse --out DIR   # the same programs on CPU at sizes that say nothing, in a minute

Stages run one after another, each in processes of its own with a deadline, at which they are killed; what a stage had
found out by then is kept. After each, gpu_check_<hardware>_<date>.json is rewritten. In the end there are at most six
files: that one, a page that sums it up (.md), the log, and records of benchmarks for perf/results.

Exit status 1 if a stage is not ok (an optional one may be skipped) or a bound is missed.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

try:
    import records
except ModuleNotFoundError as missing:
    raise SystemExit(f"error: {missing.name} is not installed for {sys.executable}: name another GPU_PYTHON") from None

STAGES = Path(__file__).resolve().parent / "gpu"
OUT = records.CHECKOUT / "out" / "gpu_check"
BUDGET_S = 528.0  # nine minutes, less what Python takes to start and a last stage to end
MOST_FILES = 6
GRACE_S = 2.0  # between being asked to end and being killed
PAGE_LINES = 70
REHEARSED_PATIENCE = 4


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One process: `command` with --out FILE --deadline SECONDS behind it.

    `tools` must be on PATH (or in a place where CUDA's toolkit lies), else it is skipped. An optional stage may be.
    `environment`: variables, None to unset one. `least_s`: not started with less than this left of the budget.
    """

    name: str
    command: tuple[str, ...]
    deadline_s: float
    tools: tuple[str, ...] = ()
    optional: bool = False
    least_s: float = 15.0
    environment: Mapping[str, str | None] = field(default_factory=dict)
    why_skipped: str | None = None


def stages(rehearse: bool) -> tuple[Stage, ...]:
    """All of them, in order."""

    def one(name: str, deadline_s: float, *arguments: str, script: str = "", **options: Any) -> Stage:
        command = (sys.executable, str(STAGES / f"stage_{script or name}.py"), *arguments)
        return Stage(name=name, command=command, deadline_s=deadline_s, **options)

    def profiler(name: str, tool: str) -> Stage:
        return one(
            name,
            60.0,
            "--tool",
            name,
            script="profile",
            tools=(tool,),
            optional=True,
            least_s=25.0,
            environment={} if name == "ncu" else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            why_skipped="needs a GPU" if rehearse else None,
        )

    every = (
        # 30 s to import torch from a cold disk, which the stages behind it then find in memory; 25 s to compile.
        one("versions", 75.0),
        one("exact", 60.0, environment={"TRITON_INTERPRET": "1"} if rehearse else {}),
        one("headline", 75.0),
        one("sweep", 100.0),
        one("chain", 75.0),
        one("streams", 60.0),
        profiler("ncu", "ncu"),
        profiler("memcheck", "compute-sanitizer"),
        profiler("initcheck", "compute-sanitizer"),
    )
    if not rehearse:
        return every
    # A rehearsal's machine may be busy, and its times say nothing.
    return tuple(
        dataclasses.replace(
            stage, command=(*stage.command, "--rehearse"), deadline_s=REHEARSED_PATIENCE * stage.deadline_s
        )
        for stage in every
    )


# Running stages


def run_all(
    chosen: Sequence[Stage],
    record: dict[str, Any],
    path: Path,
    *,
    budget_s: float = BUDGET_S,
    began_s: float | None = None,
) -> None:
    """Runs stages into `record["stages"]`, and rewrites `path` after each; the log lies beside it.

    `began_s`: of time.monotonic(), from when the budget counts; default: now.
    """
    ends_s = (time.monotonic() if began_s is None else began_s) + budget_s
    results: dict[str, Any] = record.setdefault("stages", {})
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        work = Path(folder)
        for name in ("triton", "tmp", "keep"):
            (work / name).mkdir()
        with path.with_suffix(".log").open("w") as log:
            for stage in chosen:
                left_s = ends_s - time.monotonic()
                missing = _missing_tool(stage.tools)
                if stage.why_skipped is not None:
                    result = _unread("skipped", stage.why_skipped)
                elif missing:
                    result = _unread("skipped", f"{missing} is not installed")
                elif left_s < stage.least_s:
                    result = _unread(
                        "skipped", f"{max(0.0, left_s):.0f} s are left of {budget_s:.0f}, it needs {stage.least_s:.0f}"
                    )
                else:
                    print(f"==> {stage.name} (at most {min(stage.deadline_s, left_s):.0f} s)", flush=True)
                    result = run_stage(stage, work, log, min(stage.deadline_s, left_s))
                results[stage.name] = {**result, "optional": stage.optional}
                print(f"    {stage.name}: {_status_words(results[stage.name])}", flush=True)
                _write_json(path, record)
        record["files"] = _keep(work / "keep", path)
        _write_json(path, record)


def run_stage(stage: Stage, work: Path, log: Any, limit_s: float) -> dict[str, Any]:
    """Runs one stage to its end or to its deadline. Its result, with status, reason and seconds."""
    out = work / f"{stage.name}.json"
    log.write(f"\n===== {stage.name}: {' '.join(Path(part).name for part in stage.command[1:])}\n")
    log.flush()
    command = [*stage.command, "--out", str(out), "--deadline", f"{limit_s:.1f}"]
    began_s = time.monotonic()
    before = Path(log.name).stat().st_size
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(stage, work),
            cwd=records.CHECKOUT,
            start_new_session=True,
        )
    except OSError as error:
        return {**_unread("failed", f"{stage.command[0]} cannot be run: {error.strerror}"), "seconds": 0.0}
    try:
        status: int | None = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        _end(process)
    result = _result(out)
    if status is None:
        result |= {"status": "deadline", "reason": f"killed after {limit_s:.0f} s; what it had by then is kept"}
    elif result["status"] in ("ok", "skipped") and status != 0:
        result |= {"status": "failed", "reason": f"exit status {status} after it said {result['status']}; see the log"}
    elif result["status"] == "running":
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        last = _last_line(Path(log.name), before)
        result |= {"status": "failed", "reason": f"ended with {how} before it was done; see the log{last}"}
    result["seconds"] = round(time.monotonic() - began_s, 1)
    return result


def _last_line(path: Path, begin: int) -> str:
    """What a stage said last, behind a colon: most often why it ended."""
    lines = path.read_bytes()[begin:].decode(errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    return f": {said[-1][:200]}" if said else ""


def _environment(stage: Stage, work: Path) -> dict[str, str]:
    environment = dict(os.environ)
    # Kernels are to be compiled, whatever the caller tests with otherwise.
    for name in ("TRITON_INTERPRET", "TRITON_ALWAYS_COMPILE", "TRITON_DEBUG", "CUDA_LAUNCH_BLOCKING", "PYTHONHOME"):
        environment.pop(name, None)
    search = [str(records.CHECKOUT), str(STAGES.parent), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {
        "PYTHONPATH": os.pathsep.join(search),
        "PYTHONUNBUFFERED": "1",
        # One cache for all stages: what the first one compiles, the others find.
        "TRITON_CACHE_DIR": str(work / "triton"),
        "TMPDIR": str(work / "tmp"),
        "FUSEDREDUCE_GPU_CHECK_KEEP": str(work / "keep"),
        records.COMMAND: f"python perf/gpu_check.py --only {stage.name}",
        # A stage's time runs from here: importing torch may take ten seconds of it.
        "FUSEDREDUCE_GPU_CHECK_BEGAN": str(time.monotonic()),
    }
    # Else Gloo and NCCL look this machine's name and its network up, which some machines have not got.
    for name, value in (("GLOO_SOCKET_IFNAME", "lo"), ("NCCL_SOCKET_IFNAME", "lo"), ("NCCL_IB_DISABLE", "1")):
        environment.setdefault(name, value)
    for name, wanted in stage.environment.items():
        if wanted is None:
            environment.pop(name, None)
        else:
            environment[name] = wanted
    return environment


def _end(process: subprocess.Popen[Any]) -> None:
    """Ends a stage's process if it still runs, and all that it started, in sessions of their own or not."""
    below = _descendants(process.pid)
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_S)
    # The group outlives its leader where a child does.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid, started in below:
        if _started(pid) == started:  # not a later process of the same number
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    process.wait()


def _descendants(pid: int) -> list[tuple[int, str]]:
    """Processes below one, each with when it started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        for child in children.get(todo.pop(), ()):
            todo.append(child)
            found.append((child, _started(child)))
    return found


def _stat(pid: int) -> list[str]:
    """/proc/PID/stat behind the command's name: state, parent, ...; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _started(pid: int) -> str:
    fields = _stat(pid)
    return fields[19] if len(fields) > 19 else ""


def _result(out: Path) -> dict[str, Any]:
    try:
        result = json.loads(out.read_text())
    except FileNotFoundError:
        return _unread("running", "")
    except (OSError, ValueError) as error:
        return _unread("failed", f"it left no JSON that can be read: {error}")
    known = ("ok", "failed", "skipped", "running")
    if not isinstance(result, dict) or result.get("status") not in known:
        return _unread("failed", "it left JSON that is no result of a stage")
    return {**_unread("", ""), **result}


def _unread(status: str, reason: str) -> dict[str, Any]:
    return {"status": status, "reason": reason, "findings": [], "skipped": []}


def _missing_tool(tools: Sequence[str]) -> str:
    return next((tool for tool in tools if find_tool(tool) is None), "")


def find_tool(name: str) -> str | None:
    """A program of CUDA's, on PATH or where its toolkit is installed."""
    found = shutil.which(name)
    if found:
        return found
    places: Iterator[Path] = (
        path
        for pattern in (f"cuda*/bin/{name}", f"cuda*/compute-sanitizer/{name}")
        for path in sorted(Path("/usr/local").glob(pattern), reverse=True)
    )
    nsight = sorted(Path("/opt/nvidia/nsight-compute").glob(f"*/{name}"), reverse=True)
    return next((str(path) for path in (*places, *nsight) if os.access(path, os.X_OK)), None)


def _keep(folder: Path, path: Path) -> list[str]:
    """Moves records that stages left beside the result: no more than the limit allows. The names of all files."""
    own = [path.name, path.with_suffix(".md").name, path.with_suffix(".log").name]
    kept = []
    for left in sorted(folder.glob("*.json"))[: MOST_FILES - len(own)]:
        shutil.move(str(left), path.parent / left.name)
        kept.append(left.name)
    return own + kept


def _write_json(path: Path, record: Mapping[str, Any]) -> None:
    beside = path.with_suffix(".writing")
    beside.write_text(json.dumps(_finite(record), indent=1, allow_nan=False) + "\n")
    beside.replace(path)


def _finite(value: Any) -> Any:
    """A stage's numbers may be NaN where something is wrong; JSON has no such thing."""
    if isinstance(value, Mapping):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Judging


def faults(record: Mapping[str, Any]) -> list[str]:
    """Stages that are not as they should be, with why."""
    wrong = []
    for name, result in record["stages"].items():
        fine = result["status"] == "ok" or (result["status"] == "skipped" and result["optional"])
        if not fine:
            wrong.append(f"{name}: {_status_words(result)}")
    return wrong


def missed(record: Mapping[str, Any]) -> list[str]:
    """Bounds that were not reached, as text."""
    return [
        f"{name}: {finding['what']} is {_number(finding)}, required {_bound(finding)}"
        for name, result in record["stages"].items()
        for finding in result["findings"]
        if finding["met"] is False
    ]


def summary(record: Mapping[str, Any]) -> str:
    """One page of Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    title = "gpu-check, REHEARSED on CPU: the numbers say nothing" if record["rehearsal"] else "gpu-check"
    lines = [
        f"# {title}",
        "",
        f"{record['hardware']}; {versions}; commit {record['commit']}; {record['created']}; "
        f"{record.get('seconds', 0.0):.0f} s.",
        "",
        "| stage | status | s | why |",
        "| --- | --- | ---: | --- |",
    ]
    for name, result in record["stages"].items():
        seconds = "" if "seconds" not in result else f"{result['seconds']:.0f}"
        lines.append(f"| {name} | {result['status']} | {seconds} | {_cell(result['reason'])} |")
    rows = [
        f"| {name} | {_cell(finding['what'])} | {_number(finding)} | {_bound(finding)} | {_verdict(finding)} |"
        for name, result in record["stages"].items()
        for finding in sorted(result["findings"], key=lambda one: one["met"] is not False)
    ]
    skips = [f"- {name}, {one}" for name, result in record["stages"].items() for one in result["skipped"]]
    counts = [sum(_verdict(one) == word for one in _findings(record)) for word in ("met", "MISSED", "rehearsed")]
    told = f"{counts[0]} bounds met, {counts[1]} missed" + (f", {counts[2]} rehearsed" if counts[2] else "")
    lines += ["", f"## {told}", ""]
    if rows:
        room = max(8, PAGE_LINES - len(lines) - len(skips) - 8)
        # What was missed comes first where not all has room.
        shown = rows if len(rows) <= room else sorted(rows, key=lambda row: "MISSED" not in row)[:room]
        lines += ["| stage | what | measured | required | |", "| --- | --- | ---: | ---: | --- |", *shown]
        if len(shown) < len(rows):
            lines.append(f"\n{len(rows) - len(shown)} more are in the JSON.")
    if skips:
        lines += ["", "## Parts left out", "", *skips[:12]]
        if len(skips) > 12:
            lines.append(f"- {len(skips) - 12} more, in the JSON")
    lines += ["", f"Files: {', '.join(record.get('files', []))}"]
    return "\n".join(lines) + "\n"


def _findings(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [finding for result in record["stages"].values() for finding in result["findings"]]


def _verdict(finding: Mapping[str, Any]) -> str:
    return {True: "met", False: "MISSED", None: "rehearsed"}[finding["met"]]


def _number(finding: Mapping[str, Any]) -> str:
    value = finding["value"]
    return "nothing finite" if value is None else f"{value:.4g}{finding['unit']}"


def _bound(finding: Mapping[str, Any]) -> str:
    return f"{finding['sign']} {finding['bound']:.4g}{finding['unit']}"


def _status_words(result: Mapping[str, Any]) -> str:
    seconds = f" in {result['seconds']:.0f} s" if "seconds" in result else ""
    return f"{result['status']}{seconds}" + (f", {result['reason']}" if result["reason"] else "")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[:160]


def main() -> int:
    """Runs the stages, writes result, page and log."""
    began_s = time.monotonic()
    everything = [stage.name for stage in stages(False)]
    parser = records.Parser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="folder for the files (default: out/gpu_check)")
    parser.add_argument("--rehearse", action="store_true", help="on CPU, at sizes that say nothing")
    parser.add_argument("--only", nargs="+", choices=everything, metavar="STAGE", help=", ".join(everything))
    parser.add_argument("--no-check", action="store_true", help="a bound that is missed leaves the exit status alone")
    arguments = parser.parse_args()
    if importlib.util.find_spec("triton") is None:
        raise records.BenchError(f"triton is not installed for {sys.executable}: name another GPU_PYTHON")
    if not arguments.rehearse:
        records.pick_device("cuda")
    elif arguments.out.resolve().is_relative_to(records.RESULTS.resolve()):
        raise records.BenchError("a rehearsal leaves nothing in perf/results: name another folder")
    device = "cpu" if arguments.rehearse else "cuda"
    neighbours = records.Neighbours()
    record: dict[str, Any] = {
        "schema": records.SCHEMA,
        "what": "gpu_check",
        **records.provenance(device),
        "others_cores": 0.0,
        "rehearsal": arguments.rehearse,
    }
    records.make_folder(arguments.out)
    path = arguments.out.resolve() / f"gpu_check_{record['device']}_{str(record['created'])[:10]}.json"
    chosen = [stage for stage in stages(arguments.rehearse) if arguments.only is None or stage.name in arguments.only]
    budget_s = BUDGET_S * (REHEARSED_PATIENCE if arguments.rehearse else 1)
    run_all(chosen, record, path, budget_s=budget_s, began_s=began_s)
    record["seconds"] = round(time.monotonic() - began_s, 1)
    record["others_cores"] = round(neighbours.cores(), 2)
    _write_json(path, record)
    page = summary(record)
    path.with_suffix(".md").write_text(page)
    print(f"\n{page}")
    wrong, short = faults(record), missed(record)
    for line in wrong:
        print(f"NOT OK {line}")
    for line in short:
        print(f"MISSED {line}")
    return 1 if wrong or (short and not arguments.no_check) else 0


if __name__ == "__main__":
    # Ended from outside, it ends its stage too, and leaves what the stages before had found out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    records.entry(main)
