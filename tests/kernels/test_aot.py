"""The command that compiles kernels ahead of time; what it compiles is what is launched, by test_machine_code.py."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from fusedreduce.kernels import aot
from fusedreduce.kernels.variants import Variant

SM_90, SM_80 = aot.TARGETS["sm_90"], aot.TARGETS["sm_80"]


def ended(result: str | None | BaseException) -> Future[str | None]:
    """What a process of the pool found."""
    future: Future[str | None] = Future()
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
    return future


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (None, None),
        ("CompilationError: at 3:4", "CompilationError: at 3:4"),
        (RuntimeError("a process ended\nabruptly"), "RuntimeError: a process ended"),
    ],
)
def test_each_architecture_once_and_what_fails_is_named(
    result: str | None | BaseException,
    why: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen = []

    def in_processes(
        work: object, targets: list[aot.Target], jobs: int
    ) -> list[list[tuple[Variant, Future[str | None]]]]:
        seen.extend([*targets, jobs])
        first, *others = aot.all_variants(SM_90)
        return [[(first, ended(result)), *((one, ended(None)) for one in others)] for _ in targets]

    monkeypatch.setattr(aot, "interpreted", lambda: False)
    monkeypatch.setattr(aot, "in_processes", in_processes)
    status = aot.main(["--arch", "sm_90", "--arch", "sm_80", "--arch", "sm_90", "--jobs", "3"])
    assert (status, seen) == (int(why is not None), [SM_90, SM_80, 3])
    label, count = aot.all_variants(SM_90)[0].label, len(aot.all_variants(SM_90)) - (why is not None)
    lines = [
        [f"FAILED {label} on {name}: {why}"] * (why is not None) + [f"{name}: {count} kernels compiled"]
        for name in ("sm_90", "sm_80")
    ]
    assert capsys.readouterr().out.splitlines() == [line for some in lines for line in some]


def test_what_the_compiler_raises_is_sent_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(variant: Variant, target: aot.Target) -> None:
        raise RuntimeError(f"{variant.label} on {target.name}\nand much more")

    monkeypatch.setattr(aot, "compile_variant", refuse)
    assert aot._compile_nth("sm_80", 2) == f"RuntimeError: {aot.all_variants(SM_80)[2].label} on sm_80"


@pytest.mark.parametrize(
    ("arguments", "says"), [(["--arch", "sm_90"], "TRITON_INTERPRET is set"), ([], "required: --arch")]
)
def test_usage(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(aot, "interpreted", lambda: True)
    with pytest.raises(SystemExit, match="2"):
        aot.main(arguments)
    assert says in capsys.readouterr().err
