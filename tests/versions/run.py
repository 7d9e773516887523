"""Runs tests with other versions of torch and Triton, and writes docs/versions.md.

    python tests/versions/run.py         # each Triton, over the torch of this environment: kernels and machine code
    python tests/versions/run.py full    # besides: environments with the oldest and the newest torch: every test

Tritons lie in .versions/triton-VERSION, environments in .versions/torch-VERSION; they are installed once. Rows of
docs/versions.md are replaced by those that were run. Exit status 1 if a test failed that is no known exception.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as tree
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "versions.md"
INSTALLED = ROOT / ".versions"
TRITONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
ENVIRONMENTS = (("2.11.0", "3.6.0"), ("2.15.0", "3.9.0"))
HEAD = ("torch", "triton", "what", "passed", "failed", "exceptions", "on")
KERNELS, MACHINE_CODE, SUITE, CONFORMANCE = "kernels, launches", "machine code", "every test", "torch's own tests"
OTHERS = "machine code of others"
# By version of torch or Triton how the names of those begin that fail there and are left so; docs/versions.md says why.
_WITHOUT_A_DRIVER = (
    "test_exclusions::test_what_the_table_excludes_is_refused_and_all_else_trains[wrapper-mixed_precision]",
    "test_installed::test_mixed_precision_has_its_own_hook",
    "test_installed::test_a_hook_of_the_constructors_own_is_counted_once",
)
KNOWN = {
    "3.6.0": (
        "encode[",
        "combine_encoded[",
        "test_casts::test_kernels_of_ones_own_compile_by_the_rules_and_have_the_definitions_bits",
    ),
    "3.7.1": (
        *(f"pack[fp64, wire {wire}, stats, div] on sm_120" for wire in ("bf16", "fp16")),
        *(f"combine[{dtype}, stacked] on gfx1100" for dtype in ("fp32", "bf16", "fp16", "fp64")),
        *(
            f"pack[fp64, wire {wire}{stats}{divides}] on gfx1100"
            for wire in ("fp64", "bf16", "fp16")
            for stats in ("", ", stats")
            for divides in ("", ", div")
        ),
    ),
    "3.8.0": (
        "pack[mixed, wire bf16, stats, div] on sm_100",
        "encode[int8, mixed, stats] on sm_100",
        *(
            f"combine[{dtype}{more}] on gfx942"
            for dtype in ("fp32", "bf16", "fp16", "fp64")
            for more in ("", ", stacked")
        ),
    ),
    "3.9.0": (
        "decode[int8, mixed, stats] on sm_100",
        "encode[int8, mixed, stats, feedback, stochastic] on gfx942",
        "encode[int8, mixed, stats, div, feedback, stochastic] on gfx942",
        "test_casts::test_kernels_of_ones_own_compile_by_the_rules_and_have_the_definitions_bits",
        "test_host_calls::test_a_bucket_calls_few_python_functions_on_cuda[{'wire': 'int8'}]",
    ),
    "2.11.0": (
        *_WITHOUT_A_DRIVER,
        "test_dropin::test_a_cap_of_less_than_a_byte_is_what_it_is_for_torch",
        "test_dispatch::test_a_pickle_is_torchs_and_takes_the_settings_of_who_loads_it",
    ),
    "2.15.0": _WITHOUT_A_DRIVER,
}
_SHOWN = 12


@dataclass(frozen=True)
class Row:
    """What one run found.

    Args:
        torch: version.
        triton: version.
        what: was run.
        passed: how many tests, or kernels.
        failed: how many.
        exceptions: which failed.
    """

    torch: str
    triton: str
    what: str
    passed: int
    failed: int
    exceptions: tuple[str, ...]

    @property
    def unknown(self) -> bool:
        """Whether something failed that is no known exception."""
        known = (*KNOWN.get(self.triton, ()), *KNOWN.get(self.torch, ()))
        return not all(name.startswith(known) for name in self.exceptions)

    def cells(self) -> tuple[str, ...]:
        """As a row of the page."""
        named = ", ".join(f"`{name}`" for name in self.exceptions[:_SHOWN])
        more = f", {len(self.exceptions) - _SHOWN} more" if len(self.exceptions) > _SHOWN else ""
        today = datetime.date.today().isoformat()
        return self.torch, self.triton, self.what, str(self.passed), str(self.failed), named + more or "none", today


def over_this_torch(triton: str) -> Iterator[Row]:
    """Kernels and machine code with one Triton, over the torch of this environment."""
    environment = dict(os.environ)
    if triton != version("triton"):
        folder = INSTALLED / f"triton-{triton}"
        if not (folder / ".installed").exists():
            pip = (sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--no-deps")
            _run(*pip, "--target", folder, f"triton=={triton}")
            (folder / ".installed").touch()
        environment["PYTHONPATH"] = str(folder)
    torch = version("torch").partition("+")[0]
    yield pytest_row(sys.executable, torch, triton, KERNELS, environment, "tests/kernels")
    yield machine_code(torch, triton, MACHINE_CODE, environment)
    if triton == version("triton"):
        yield machine_code(torch, triton, OTHERS, environment, "--arch=others")


def machine_code(torch: str, triton: str, what: str, environment: Mapping[str, str], *flags: str) -> Row:
    """The row of a run of the compile check."""
    search = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), str(ROOT / "tests")]))
    command = (sys.executable, "-m", "support.machine_code", *flags)
    told = _run(*command, environment={**environment, "PYTHONPATH": search}, check=False)
    compiled = re.search(r"^(\d+) kernels compiled, \d+ unsupported, (\d+) rules broken", told, re.MULTILINE)
    if compiled is None or "not judged" in told:
        return Row(torch, triton, what, 0, 1, ("not read",))
    broken = sorted(set(re.findall(r"^FAILED (.+? on \w+)[,:]", told, re.MULTILINE)))
    if not broken and compiled[2] != "0":
        broken = ["rules without a name"]
    return Row(torch, triton, what, int(compiled[1]) - len(broken), len(broken), tuple(broken))


def installed(torch: str, triton: str) -> Path:
    """The interpreter of an environment with these versions, which is made if it is not there."""
    folder = INSTALLED / f"torch-{torch}"
    python = folder / "bin" / "python"
    if not (folder / ".installed").exists():
        _run(sys.executable, "-m", "venv", "--clear", folder)
        others = folder / "constraints.txt"
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        others.write_text("\n".join(line for line in lines if not re.match(r"(torch|triton|setuptools)==", line)))
        pip = (python, "-m", "pip", "install", "--quiet", "--constraint", others)
        _run(*pip, f"torch=={torch}", f"triton=={triton}")
        _run(*pip, "--editable", f"{ROOT}[test]")
        (folder / ".installed").touch()
    return python


def in_environment(torch: str, triton: str) -> Iterator[Row]:
    """Every test, and torch's own tests, in an environment with these versions."""
    python = installed(torch, triton)
    yield pytest_row(python, torch, triton, SUITE, os.environ, "tests")
    told = _run(python, "tests/conformance/run.py", check=False)
    counted = re.search(r"^ours (\d+), torch (\d+)", told, re.MULTILINE)
    if counted is None:
        yield Row(torch, triton, CONFORMANCE, 0, 1, ("the run failed",))
        return
    faults = re.findall(r"^FAULT\s+(\w+)", told, re.MULTILINE)
    yield Row(torch, triton, CONFORMANCE, int(counted[1]), len(faults), tuple(faults))


def pytest_row(
    python: str | Path, torch: str, triton: str, what: str, environment: Mapping[str, str], tests: str
) -> Row:
    """The row of a run of pytest."""
    report = ROOT / "out" / "versions" / f"{torch}-{triton}.xml"
    report.unlink(missing_ok=True)
    command = (python, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-m", "not gpu", f"--junit-xml={report}")
    interpreted = {**environment, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    print(_run(*command, tests, environment=interpreted, check=False)[-2000:])
    cases = list(tree.parse(report).iter("testcase")) if report.exists() else []
    if not cases:
        return Row(torch, triton, what, 0, 1, ("the run failed",))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    places = (((case.get("classname") or "").rpartition(".")[2], case.get("name") or "") for case in failed)
    functions: dict[str, list[str]] = {}
    for file, test in places:
        functions.setdefault(f"{file}::{test.partition('[')[0]}", []).append(f"{file}::{test}")
    names = tuple(tests[0] if len(tests) == 1 else f"{name} x {len(tests)}" for name, tests in functions.items())
    return Row(torch, triton, what, len(cases) - len(failed) - len(skipped), len(failed), names)


def _run(*command: str | Path, environment: Mapping[str, str] | None = None, check: bool = True) -> str:
    print("==>", *command, flush=True)
    plain = {name: value for name, value in (environment or os.environ).items() if value}
    return subprocess.run(
        [*map(str, command)], cwd=ROOT, env=plain, check=check, text=True, stdout=subprocess.PIPE
    ).stdout


def written(page: str, rows: Sequence[Row]) -> str:
    """The page with these rows in its table, in place of earlier ones of the same versions and kind."""
    before, head, rest = page.partition(_line(HEAD) + _line(["---"] * len(HEAD)))
    assert head, "the page has no table"
    known = {}
    lines = rest.splitlines(keepends=True)
    table = [line for line in lines if line.startswith("|")]
    for line in table:
        cells = tuple(cell.strip() for cell in line.strip().strip("|").split("|"))
        known[cells[:3]] = cells
    known.update({row.cells()[:3]: row.cells() for row in rows})
    return before + head + "".join(map(_line, sorted(known.values(), key=_in_order))) + "".join(lines[len(table) :])


def _in_order(cells: tuple[str, ...]) -> tuple[object, ...]:
    torch, triton, what = cells[:3]
    order = (KERNELS, MACHINE_CODE, OTHERS, SUITE, CONFORMANCE)
    return what in (SUITE, CONFORMANCE), _numbers(torch), _numbers(triton), order.index(what)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", nargs="?", choices=("quick", "full"), default="quick")
    parser.add_argument("--only", metavar="VERSION", help="of Triton, or of the environment's torch")
    chosen = parser.parse_args(arguments)
    (ROOT / "out" / "versions").mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for triton in TRITONS:
        if chosen.only in (None, triton):
            rows += over_this_torch(triton)
    for torch, triton in ENVIRONMENTS if chosen.what == "full" else ():
        if chosen.only in (None, torch):
            rows += in_environment(torch, triton)
    PAGE.write_text(written(PAGE.read_text(), rows))
    for row in rows:
        print(*row.cells(), sep=" | ")
    return int(any(row.unknown for row in rows))


if __name__ == "__main__":
    sys.exit(main())
