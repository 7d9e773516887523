"""What only a GPU can say, in one command of less than ten minutes: `make gpu-check`.

    python3 perf/gpu_check.py                        # wants one NVIDIA GPU, torch, triton, pytest; no network
    python3 perf/gpu_check.py --rehearse --out DIR   # the same programs on CPU at sizes that say nothing

Its steps are processes, one after another, each with a time limit, which it says before it begins (with an H100 and
16 cores, of which nothing was compiled yet, the tests took 115 s, kernels 90 s, encoded 20 s and memcheck 25 s; with an
H200 step 32 s and step-gpt2 72 s):

    tests       pytest -m gpu, several tests at a time where pytest-xdist is installed: most of their time is Triton's
                compiler's; where a test hangs or breaks the GPU, the others go on in another process
    kernels     bench_kernels.py: pack and unpack against the rate of a copy
    step        bench_step.py: launches, waits, GPU time and memory of a step that synchronises
    step-gpt2   the same of a GPT-2 that clips, with AdamW
    encoded     bench_encoded.py: encode, combine and decode against a copy
    memcheck    compute-sanitizer on tests of all kernels, where it is installed

Whatever is known is in a file at once: gpu_check_<hardware>_<date>.json after each step, beside it .jsonl after each
test and .log as it is printed, the benchmarks' records as each ends. Exit status 1 if a step fails or a demand is
missed.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

try:
    import records
except ModuleNotFoundError as missing:
    raise SystemExit(f"error: {missing.name} is not installed for {sys.executable}: name another GPU_PYTHON") from None

HERE = Path(__file__).resolve().parent
OUT = records.CHECKOUT / "out" / "gpu_check"
BUDGET_S = 580.0  # ten minutes, less what Python takes to start and the last step to end
LEAST_S = 15.0  # with less left no step begins
GRACE_S = 2.0  # between being asked to end and being killed
REHEARSED_PATIENCE = 4
PYTEST = ("-m", "pytest", "-q", "-p", "outcomes", "-p", "no:cacheprovider", "--continue-on-collection-errors")
OUTCOMES = "GPU_CHECK_OUTCOMES"  # as outcomes.py has it, which needs pytest
# What compute-sanitizer looks at: torch's kernels are not ours to check.
KERNELS = (
    *("_pack_kernel", "_unpack_kernel", "_walk_kernel"),
    *("_encode_kernel", "_combine_encoded_kernel", "_decode_kernel"),
    *("_parameter_totals_kernel", "_total_kernel", "_parameter_sources_kernel", "_first_source_kernel"),
)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One program: Python's arguments (of "tests" pytest's), and the tool that runs it, if it needs one."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    tool: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


# The benchmarks, by step: the time limit in seconds, the command line on a GPU, and that of a rehearsal.
BENCHMARKS = {
    "kernels": (
        90.0,
        "bench_kernels.py --device cuda --models one gpt2 --ways whole bucket --pairs fp32-bf16 bf16-bf16 fp32-fp32 "
        "--rounds 15 --limit-s 55 --no-check",
        "bench_kernels.py --device cpu --rehearse",
    ),
    "step": (
        60.0,
        "bench_step.py --device cuda --ranks 1 --models many:200x50000 --optimizer none --steps 12 --no-check",
        "bench_step.py --ranks 1 --models many:20x10 --steps 2 --rehearse",
    ),
    "step-gpt2": (
        110.0,
        "bench_step.py --device cuda --ranks 1 --models gpt2-small --clip --steps 12 --no-check",
        "bench_step.py --ranks 1 --models gpt2-tiny --clip --steps 2 --rehearse",
    ),
    "encoded": (
        30.0,
        "bench_encoded.py --device cuda --no-check",
        "bench_encoded.py --device cpu --rehearse",
    ),
}
# The files with tests that need a GPU: to collect all others takes longer than these.
GPU_FILES = (
    "tests/gpu",
    "tests/cli/test_demo.py",
    "tests/cli/test_doctor.py",
    "tests/cli/test_wire_costs.py",
    "tests/parallel/test_sync_server.py",
    "tests/trace/test_collective_metrics.py",
)
ON_GPU = ("-m", "gpu")
MOST_PROCESSES = 8
EVERY_KERNEL = ("tests/gpu/test_gpu.py", "tests/gpu/test_gpu_encoded.py")
REHEARSED_FILES = ("tests/gpu/test_gpu_graphs.py", "tests/gpu/test_gpu_large.py", "tests/gpu/test_gpu_ranks.py")


def steps(out: Path, rehearse: bool) -> tuple[Step, ...]:
    """All of them, in order; their records go to `out`."""
    selected = ("-m", "not gpu", *REHEARSED_FILES) if rehearse else (*ON_GPU, *GPU_FILES)
    tests = Step(name="tests", arguments=(*_at_a_time(), *selected), limit_s=170.0)
    benchmarks = []
    for name, (limit_s, on_gpu, rehearsed) in BENCHMARKS.items():
        script, *options = shlex.split(rehearsed if rehearse else on_gpu)
        arguments = (str(HERE / script), *options, "--out", str(out))
        benchmarks.append(Step(name=name, arguments=arguments, limit_s=limit_s))
    filters = [part for kernel in KERNELS for part in ("--kernel-name", f"kernel_substring={kernel}")]
    memcheck = Step(
        name="memcheck",
        arguments=("-m", "pytest", "-q", *EVERY_KERNEL, *ON_GPU, "-k", "equal_the_reference and small"),
        limit_s=45.0,
        tool=("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", *filters),
        # Each tensor is an allocation of its own: in torch's cache an access past one lies within another.
        environment=(("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),),
    )
    every = (tests, *benchmarks, memcheck)
    if not rehearse:
        return every
    # A rehearsal's machine may be busy, and its times say nothing.
    return tuple(dataclasses.replace(step, limit_s=REHEARSED_PATIENCE * step.limit_s) for step in every)


def _at_a_time() -> tuple[str, ...]:
    """pytest's arguments for several processes, half as many as there are cores: a test may start some of its own."""
    processes = min((os.cpu_count() or 1) // 2, MOST_PROCESSES)
    if processes < 2 or importlib.util.find_spec("xdist") is None:
        return ()
    return ("-n", str(processes), "--dist", "worksteal")


class Check:
    """One run of some steps; a rehearsal is on CPU."""

    def __init__(self, out: Path, rehearse: bool) -> None:
        self.rehearse, self._out, self._device = rehearse, out, "cpu" if rehearse else "cuda"
        self.stages: dict[str, dict[str, Any]] = {}
        self._path = self._write(None)
        self._log = self._path.with_suffix(".log")
        self._log.write_text("")

    def run(self, chosen: Sequence[Step], budget_s: float) -> None:
        """Runs steps, as far as the time goes, and writes the record after each."""
        ends_s = time.monotonic() + budget_s
        for step in chosen:
            began_s = time.monotonic()
            left_s = ends_s - began_s
            if step.tool and (self.rehearse or find_tool(step.tool[0]) is None):
                why = "a rehearsal has no GPU" if self.rehearse else f"{step.tool[0]} is not installed"
                result = _result("skipped", why)
            elif left_s < min(LEAST_S, step.limit_s):
                result = _result("failed", f"not begun: {max(0.0, left_s):.0f} s are left of {budget_s:.0f}")
            else:
                print(f"==> {step.name} (at most {min(step.limit_s, left_s):.0f} s)", flush=True)
                run = self._run_tests if step.name == "tests" else self._run_program
                result = run(step, began_s + min(step.limit_s, left_s))
                result["seconds"] = round(time.monotonic() - began_s, 1)
            self.stages[step.name] = result
            print(f"    {result['status']}: {result['reason']}", flush=True)
            self._write(self._path)

    def _run_program(self, step: Step, ends_s: float) -> dict[str, Any]:
        before = set(self._out.glob("*.json"))
        tool = (str(find_tool(step.tool[0])), *step.tool[1:]) if step.tool else ()
        command = (*tool, sys.executable, *step.arguments)
        status, said = self._run(step.name, command, ends_s, dict(step.environment))
        result = _result("ok" if status == 0 else "failed", said if status == 0 else f"{_how(status)}: {said}")
        for path in sorted(set(self._out.glob("*.json")) - before):
            demands = json.loads(path.read_text()).get("demands", ())
            result["demands"] += [{**one, "met": None} if self.rehearse else one for one in demands]
        return result

    def _run_tests(self, step: Step, ends_s: float) -> dict[str, Any]:
        """All of the step's tests, in as many processes as it takes."""
        path = self._path.with_suffix(".jsonl")
        path.write_text("")
        environment = {OUTCOMES: str(path)} | ({"TRITON_INTERPRET": "1"} if self.rehearse else {})
        selected, known = step.arguments, -1
        ended: dict[str, dict[str, Any]] = {}
        while True:
            status, said = self._run(step.name, (sys.executable, *PYTEST, *selected), ends_s, environment)
            lines = read_lines(path)
            collected: list[str] = next((line["collected"] for line in lines if "collected" in line), [])
            ended |= {line["ended"]: line for line in lines if "ended" in line}
            failing = {line["failing"]: f"{line['why']}; then " for line in lines if "failing" in line}
            for test in (line["began"] for line in lines if "began" in line):
                # It was running when its process ended.
                why = f"{failing.get(test, '')}{_how(status)}; see the log"
                ended.setdefault(test, {"outcome": "failed", "why": why, "properties": {}})
            left = [test for test in collected if test not in ended]
            if not left or status is None or len(ended) == known:
                break
            selected, known = (*_at_a_time(), *left), len(ended)
        passed, failed, skipped = (
            {test: one for test, one in ended.items() if one["outcome"] == outcome}
            for outcome in ("passed", "failed", "skipped")
        )
        wanted = len(ended) + len(left) - len(skipped)
        counts = f"{len(passed)} passed, {len(failed)} failed, {len(skipped)} skipped, {len(left)} not run"
        result = _result("ok" if passed and not failed and not left else "failed", counts if collected else said)
        passing = records.demand("tests that pass", len(passed), ">=", wanted)
        result["demands"] = [{**passing, "met": None} if self.rehearse else passing]
        result["skipped"] = [f"{test}: {one['why']}" for test, one in skipped.items()]
        result["skipped"] += [f"{test}: not run" for test in left]
        result["failed"] = {test: one["why"] for test, one in failed.items()}
        result["properties"] = {test: one["properties"] for test, one in passed.items() if one["properties"]}
        return result

    def _run(
        self, name: str, command: Sequence[str], ends_s: float, more: Mapping[str, str] | None = None
    ) -> tuple[int | None, str]:
        """Runs a program to its end, or to its deadline: its exit status (None: killed), and what it said last."""
        with self._log.open("a") as log:
            log.write(f"\n===== {name}: {' '.join(command)[:500]}\n")
            log.flush()
            begin = self._log.stat().st_size
            status = _run_group(command, {**_environment(), **(more or {})}, log, ends_s)
        lines = self._log.read_bytes()[begin:].decode(errors="replace").splitlines()
        said = [line.strip()[:300] for line in lines if line.strip()] or ["it said nothing"]
        return status, next((line for line in said if line.startswith("error: ")), said[-1])

    def _write(self, over: Path | None) -> Path:
        how: Any = {"rehearsal": self.rehearse, "over": over}
        return records.write(self._out, "gpu_check", self._device, **how, stages=self.stages)

    def summary(self) -> list[str]:
        """A line per step, then all that is wrong."""
        record = records.read(self._path, published=False)
        versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        lines = ["", "REHEARSED on CPU: no number says anything"] if self.rehearse else [""]
        lines.append(f"{record['hardware']}; {versions}; commit {record['commit']}")
        for name, stage in self.stages.items():
            lines.append(f"{name:10} {stage['status']:8} {stage.get('seconds', 0.0):5.0f} s  {stage['reason']}")
        for stage in self.stages.values():
            for test, why in stage.get("failed", {}).items():
                lines.append(f"FAILED {test}: {' '.join(why.split())[-200:]}")
        return [*lines, *(f"MISSED {line}" for line in self.missed()), f"files: {self._out}"]

    def missed(self) -> list[str]:
        """Demands that were not reached."""
        return [
            f"{name}: {one['what']} is {one['value']:.4g}, required {one['sign']} {one['bound']:.4g}"
            for name, stage in self.stages.items()
            for one in stage["demands"]
            if one["met"] is False
        ]

    def failed(self) -> bool:
        """Whether a step was not as it should be."""
        return any(stage["status"] == "failed" for stage in self.stages.values())


def _run_group(command: Sequence[str], environment: Mapping[str, str], log: TextIO, ends_s: float) -> int | None:
    """Runs a program in a process group of its own, of which nothing is left afterwards."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        cwd=records.CHECKOUT,
        start_new_session=True,
    )
    try:
        return process.wait(timeout=max(0.0, ends_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=GRACE_S)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    # Kernels are to be compiled, whatever the caller tests with otherwise.
    for name in ("TRITON_INTERPRET", "TRITON_ALWAYS_COMPILE", "TRITON_DEBUG", "CUDA_LAUNCH_BLOCKING", "PYTHONHOME"):
        environment.pop(name, None)
    search = [str(records.CHECKOUT), str(HERE), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(search), "PYTHONUNBUFFERED": "1"}
    # Else Gloo and NCCL look this machine's name and its network up, which some machines have not got.
    for name, value in (("GLOO_SOCKET_IFNAME", "lo"), ("NCCL_SOCKET_IFNAME", "lo"), ("NCCL_IB_DISABLE", "1")):
        environment.setdefault(name, value)
    return environment


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Lines of JSON, as far as they were written."""
    found = []
    for line in path.read_text().splitlines():
        with suppress(ValueError):  # the last, of a process that was killed meanwhile
            found.append(json.loads(line))
    return found


def find_tool(name: str) -> str | None:
    """A program of CUDA's, on PATH or where its toolkit is installed."""
    places = (path for folder in ("bin", "compute-sanitizer") for path in Path("/usr/local").glob(f"cuda*/{folder}"))
    return shutil.which(name) or next(filter(None, (shutil.which(name, path=str(place)) for place in places)), None)


def _result(status: str, reason: str) -> dict[str, Any]:
    return {"status": status, "reason": reason, "demands": [], "skipped": []}


def _how(status: int | None) -> str:
    if status is None:
        return "killed at its time limit"
    return f"ended by signal {-status}" if status < 0 else f"ended with exit status {status}"


def main() -> int:
    """Runs the steps, and prints what they found."""
    everything = [step.name for step in steps(OUT, False)]
    parser = records.Parser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="folder for the files (default: out/gpu_check)")
    parser.add_argument("--rehearse", action="store_true", help="on CPU, at sizes that say nothing")
    parser.add_argument("--only", nargs="+", choices=everything, metavar="STEP", help=", ".join(everything))
    parser.add_argument("--no-check", action="store_true", help="a demand that is missed leaves the exit status alone")
    asked = parser.parse_args()
    check = Check(asked.out.resolve(), asked.rehearse)
    chosen = [step for step in steps(asked.out.resolve(), asked.rehearse) if not asked.only or step.name in asked.only]
    print("at most: " + ", ".join(f"{step.name} {step.limit_s:.0f} s" for step in chosen), flush=True)
    check.run(chosen, BUDGET_S * (REHEARSED_PATIENCE if asked.rehearse else 1))
    print("\n".join(check.summary()))
    return int(check.failed() or (bool(check.missed()) and not asked.no_check))


if __name__ == "__main__":
    # Ended from outside, it ends its step too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    records.entry(main)
