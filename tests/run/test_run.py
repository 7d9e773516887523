"""`python -m fusedreduce.run`: what a program sees of it, which is nothing, and what is refused before it starts."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fusedreduce import ReduceConfig
from fusedreduce.config import Wire
from fusedreduce.run import __main__ as command
from fusedreduce.run import options
from fusedreduce.wires import WIRES

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
SITE = ROOT / "fusedreduce" / "run" / "site"
BESIDE = os.path.dirname(sys.executable)
RUN = ("-m", "fusedreduce.run", "--wire", "bf16")
# The same command; the last is the script that pip makes.
WAYS = (
    ("-m", "fusedreduce.run"),
    ("-m", "fusedreduce", "run"),
    ("-mfusedreduce.cli", "run"),
    ("bin/fusedreduce", "run"),
)


def started(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in os.environ.items() if not name.startswith("FUSEDREDUCE_")}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment | variables, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the probe as a script of a package, and a sitecustomize of the user's."""
    made = tmp_path_factory.mktemp("run")
    (made / "package").mkdir()
    (made / "package" / "__init__.py").touch()
    (made / "package" / "probe.py").write_text((HERE / "run_probe.py").read_text())
    (made / "theirs").mkdir()
    (made / "theirs" / "sitecustomize.py").write_text("import sys\nsys.theirs = __name__\n")
    (made / "bin").mkdir()
    (made / "bin" / "fusedreduce").write_text("import sys\nfrom fusedreduce.cli import main\nsys.exit(main())\n")
    (made / "trained").write_text("")
    return made


@pytest.mark.parametrize(
    ("interpreter", "program"),
    [
        ((), ("package/probe.py", "-m", "--wire", "x")),
        (("-u", "-O", "-Werror", "-X", "dev"), ("package/probe.py", "--", "-c")),
        ((), ("-m", "package.probe", "--child")),
        (("-P",), ("package/probe.py", "--child")),
        (("-P", "-s"), ("package/probe.py",)),
    ],
)
def test_a_program_sees_what_it_sees_without(
    folder: Path, interpreter: tuple[str, ...], program: tuple[str, ...]
) -> None:
    plain = started(*interpreter, *program, cwd=folder)
    ours = started(*interpreter, *RUN, *program, cwd=folder)
    assert plain.returncode == ours.returncode == 7
    wanted, seen = (one.stdout.splitlines() for one in (plain, ours))
    assert json.loads(seen[0]) == json.loads(wanted[0])
    assert seen[1:] == wanted[1:] == ["at exit"]
    assert ours.stderr == plain.stderr


@pytest.mark.parametrize("way", WAYS[1:])
def test_the_command_line_starts_a_program_as_the_module_does(folder: Path, way: tuple[str, ...]) -> None:
    interpreter, program = ("-u", "-Wignore"), ("package/probe.py", "run", "--wire", "x")
    plain = started(*interpreter, *program, cwd=folder)
    ours = started(*interpreter, *way, "--wire", "bf16", *program, cwd=folder)
    assert plain.returncode == ours.returncode == 7, ours.stderr
    assert json.loads(ours.stdout.splitlines()[0]) == json.loads(plain.stdout.splitlines()[0])
    assert ours.stderr == plain.stderr


def test_every_way_to_the_command_has_the_same_help_and_errors(folder: Path) -> None:
    for arguments in (("--help",), ("--wire", "x", "train.py"), ()):
        found = [started(*way, *arguments, cwd=folder) for way in WAYS]
        assert len({(one.returncode, one.stdout, one.stderr) for one in found}) == 1, found
        assert found[0].stdout.startswith("usage: fusedreduce run ") or found[0].stderr.startswith(
            "fusedreduce run: error: "
        )


def test_python_m_fusedreduce_has_every_command(folder: Path) -> None:
    shown = started("-m", "fusedreduce", "--help", cwd=folder).stdout
    assert re.findall(r"^    (\w+) ", shown, re.M) == ["run", "doctor", "demo", "trace", "plan", "bench"], shown


def test_the_command_line_becomes_the_program_before_it_imports_torch(folder: Path) -> None:
    """torch takes a second, which the program's own process takes again."""
    code = (
        "import os, sys; from fusedreduce.cli import main\n"
        "os.execvpe = lambda *_: sys.exit(str('torch' in sys.modules))\nmain()"
    )
    done = started("-c", code, "run", "--", "true", cwd=folder)
    assert done.stderr == "False\n"


def test_flags_in_front_of_m_in_one_word_with_it_are_the_programs_too(folder: Path) -> None:
    plain = started("-u", "-Wignore", "-bO", "package/probe.py", cwd=folder)
    ours = started("-u", "-Wignore", "-bOm", *RUN[1:], "package/probe.py", cwd=folder)
    assert json.loads(ours.stdout.splitlines()[0]) == json.loads(plain.stdout.splitlines()[0])


@pytest.mark.parametrize(
    ("flags", "variables"), [(("--plan", "./plan"), {}), ((), {"FUSEDREDUCE_PLAN": "package/../plan"})]
)
def test_a_program_finds_the_plan_from_any_folder(
    folder: Path, tmp_path: Path, flags: tuple[str, ...], variables: dict[str, str]
) -> None:
    text = '{"format": "fusedreduce-plan"}'
    (folder / "plan").write_text(text)
    code = f"import os; os.chdir({str(tmp_path)!r}); print(open(os.environ['FUSEDREDUCE_PLAN']).read())"
    done = started("-m", "fusedreduce.run", *flags, "--", sys.executable, "-c", code, cwd=folder, **variables)
    assert done.stdout == f"{text}\n", done.stderr


def test_a_program_that_is_no_python_ignores_no_more_signals(folder: Path) -> None:
    """Python ignores SIGPIPE, and a shell would go on doing so: `yes | head` would tell of a broken pipe."""
    shown = ("grep", "SigIgn", "/proc/self/status")
    plain = subprocess.run(shown, capture_output=True, text=True, check=True)
    assert started(*RUN, "--", *shown, cwd=folder).stdout == plain.stdout


def test_an_exception_has_no_frame_of_ours(folder: Path) -> None:
    (folder / "fails.py").write_text("def fails():\n    raise KeyError('x')\n\n\nfails()\n")
    plain, ours = started("fails.py", cwd=folder), started(*RUN, "fails.py", cwd=folder)
    assert (ours.returncode, ours.stderr) == (plain.returncode, plain.stderr) and "KeyError" in ours.stderr


def test_a_missing_script_is_pythons_to_tell(folder: Path) -> None:
    plain, ours = started("absent.py", cwd=folder), started(*RUN, "absent.py", cwd=folder)
    assert (ours.returncode, ours.stderr) == (plain.returncode, plain.stderr) and "absent.py" in ours.stderr


@pytest.mark.parametrize("theirs", ["import sys\nsys.theirs = __name__", "1 / 0", "import absent", None])
def test_another_sitecustomize_runs_as_without_ours(tmp_path: Path, theirs: str | None) -> None:
    if theirs is not None:
        (tmp_path / "sitecustomize.py").write_text(theirs)
    code = (
        "import sys; found = sys.modules.get('sitecustomize')\n"
        "print(getattr(sys, 'theirs', None), found and (found.__file__, found.__spec__.origin, sorted(vars(found))))\n"
        "print(sys.path, [one for one in sys.modules if 'torch' in one or one == 'typing'])"
    )
    plain = started("-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    ours = started("-c", code, cwd=tmp_path, PYTHONPATH=f"{SITE}{os.pathsep}{tmp_path}")
    assert (ours.stdout, ours.stderr) == (plain.stdout, plain.stderr)
    assert plain.returncode == ours.returncode == 0


def test_torchs_module_is_imported_as_without(folder: Path) -> None:
    probe = str(HERE / "run_hook_probe.py")
    plain, ours = started(probe, "0", cwd=folder), started(*RUN, probe, "0", cwd=folder)
    assert plain.returncode == ours.returncode == 0, ours.stderr
    assert json.loads(ours.stdout) == json.loads(plain.stdout)
    said = "fusedreduce: this program made no torch.nn.parallel.DistributedDataParallel, so fusedreduce did nothing\n"
    assert ours.stderr == plain.stderr + said
    for rank, wanted in (("0", plain.stderr + said), ("1", plain.stderr), (None, plain.stderr)):
        variables = {} if rank is None else {"RANK": rank}
        ended = started(*RUN, probe, rank or "0", "destroyed", cwd=folder, **variables)
        assert (ended.returncode, ended.stderr) == (0, wanted), "without RANK every rank would take itself for rank 0"


SHARDED = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
if sys.argv[1] != "imported":
    model = fully_shard(torch.nn.Linear(8, 8), mesh=mesh)
if sys.argv[1] == "ours":
    import fusedreduce
    fusedreduce.set_fsdp_comms(model, all_reduce="bf16")
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("imported", r"^fusedreduce: this program made no .*DistributedDataParallel, so fusedreduce did nothing\n$"),
        (
            "sharded",
            r"by fully_shard.*set_fsdp_comms\(model, all_reduce=\"bf16\"\)\n.*reduce_scatter=\"bf16\" instead\n$",
        ),
        ("ours", "^$"),
    ],
)
def test_a_model_that_fully_shard_has_sharded_is_met_with_a_line_to_write(
    folder: Path, tmp_path: Path, what: str, says: str
) -> None:
    (folder / "sharded.py").write_text(SHARDED)
    ended = started(*RUN, "sharded.py", what, str(tmp_path / "store"), cwd=folder, RANK="0")
    assert ended.returncode == 0, ended.stderr
    told = "".join(line for line in ended.stderr.splitlines(keepends=True) if "rank" not in line)
    assert re.search(says, told, re.DOTALL), ended.stderr


@pytest.mark.parametrize(
    ("arguments", "variables", "says"),
    [
        (("--wire", "fp8", "x.py"), {}, "--wire .*unknown wire 'fp8': use one of 'native', 'bf16', 'fp16'"),
        (("x.py",), {"FUSEDREDUCE_WIRE": "fp8"}, "error: FUSEDREDUCE_WIRE='fp8': unknown wire"),
        (("--wire", "train.py"), {"FUSEDREDUCE_WIRE": "bf16"}, "error: --wire 'train.py': unknown wire 'train.py'"),
        (("--wire", "native,Bf61", "x.py"), {}, "--wire .*unknown wire 'Bf61': use one of .*; did you mean 'bf16'"),
        (("--wire", "auto,int8", "x.py"), {}, "'auto' stands for .'native', 'bf16'.: write these out in a list"),
        (("--wire", "native,", "x.py"), {}, "--wire 'native,': a name is missing.*--wire native,bf16,int8"),
        (("--wire", "", "x.py"), {}, "--wire '': a name is missing"),
        (
            ("--wire", "native", "bf16", "x.py"),
            {},
            "'bf16' is a wire and no script.*commas, as --wire native,bf16,int8",
        ),
        (("--error-feedback", "x.py"), {}, "error: --error-feedback: error_feedback=True and wire='native' exc"),
        (("--plan", "absent", "x.py"), {}, "--plan 'absent': No such file.*expected a file with a plan"),
        (("--plan", "package", "x.py"), {}, "--plan .*Is a directory: expected a file with a plan"),
        (("--plan", sys.executable, "x.py"), {}, "--plan .*is no bucket plan"),
        (("--plan", "package/probe.py", "x.py"), {}, "--plan .*is no bucket plan"),
        (("--trace", "trained", "x.py"), {}, "--trace 'trained': .*trained is a file: expected a folder"),
        (("--trace", "trained/in/it", "x.py"), {}, "--trace .*trained is a file: expected a folder"),
        (("--trace", "", "x.py"), {}, "--trace '': expected a folder"),
        (("--trace", "/proc/self", "x.py"), {}, "--trace .*no file can be written into /proc/self"),
        (
            ("x.py",),
            {"FUSEDREDUCE_TRACE": "trained"},
            "FUSEDREDUCE_TRACE='trained': .*trained is a file: expected a folder",
        ),
        (("--link", "50", "x.py"), {}, "--link .*'50'.*expected latency in us and Gbit/s.*such as --link 50,25"),
        (("--link", "50,fast", "x.py"), {}, "--link .*'50,fast'.*such as --link 50,25"),
        (("--link", "50,25,1", "x.py"), {}, "--link .*'50,25,1'.*such as --link 50,25"),
        (("--wire-after", "abc", "x.py"), {}, "--wire-after .*'abc'.*a whole number of steps.*--wire-after 1000"),
        (("--wire-after", "1.5", "x.py"), {}, "--wire-after .*'1.5'.*a whole number of steps.*--wire-after 1000"),
        (("x.py",), {"FUSEDREDUCE_WIRE_AFTER": ""}, "_WIRE_AFTER='': .*a whole number of steps"),
        (("--replan-every", "3", "x.py"), {}, "--replan-every .*at least 8"),
        (("--replan-every", "3k", "x.py"), {}, "--replan-every .*'3k'.*a whole number of steps.*-every 1000"),
        (("--ranks-per-node", "all", "x.py"), {}, "--ranks-per-node .*'all'.*a whole number of ranks.*-node 8"),
        (("--seed", "x", "x.py"), {}, "--seed .*'x'.*expected a whole number, such as --seed 1"),
        (("--least-sqnr-db", "15 dB", "x.py"), {}, "--least-sqnr-db .*'15 dB'.*a number of dB.*-sqnr-db 15"),
        (("--stall-report-s", "soon", "x.py"), {}, "--stall-report-s .*'soon'.*a number of seconds.*-report-s 60"),
        (("sh", "-c", "x"), {}, "sh is a command.*: fusedreduce run -- sh -c x"),
        (
            ("--wire", "bf16", "sh", "--a=b c"),
            {},
            "'?sh'? is a command.*fusedreduce run --wire bf16 -- sh '--a=b c'",
        ),
        (("torchrun", "x"), {"PATH": "/bin"}, rf"torchrun is a command.*: fusedreduce run -- {BESIDE}/torchrun x"),
        (("--", "package/probe.py", "x"), {}, "package/probe.py is a script.*: fusedreduce run package/probe.py x"),
        (("x.py",), {"FUSEDREDUCE_FALLBACK": "maybe"}, "FUSEDREDUCE_FALLBACK='maybe': use one of"),
        (("x.py",), {"FUSEDREDUCE_SYNC_MODE": "x"}, "FUSEDREDUCE_SYNC_MODE is no option.*flush"),
        (("x.py",), {"FUSEDREDUCE_WIRES": "bf16"}, "FUSEDREDUCE_WIRES is no option.*did you mean FUSEDREDUCE_WIRE?"),
        (("x.py",), {"FUSEDREDUCE_STALL": "5"}, "FUSEDREDUCE_STALL is no option.*unset it"),
        (("x.py",), {"FUSEDREDUCE_BUCKET_CAP_MB": "5"}, "FUSEDREDUCE_BUCKET_CAP_MB is no option.*unset it"),
        (("--sync-mode", "x", "x.py"), {}, "unrecognized arguments: --sync-mode"),
        ((), {}, "no program was given"),
        (("--wire", "bf16", "--"), {}, "no program was given"),
        (("--", "python3", "-uI", "x.py"), {}, "python -I ignores"),
        (("--", "/usr/bin/python3.11", "-W", "E", "-S", "x.py"), {}, "python -S ignores"),
        (("--", "python3", "-WE", "-uX", "dev", "-E", "x.py"), {}, "python -E ignores"),
    ],
)
def test_what_is_refused_before_anything_starts(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    variables: dict[str, str],
    says: str,
) -> None:
    def execvpe(*_: object) -> None:
        raise AssertionError("it has started")

    for name in [name for name in os.environ if name.startswith("FUSEDREDUCE_")]:
        monkeypatch.delenv(name)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(os, "execvpe", execvpe)
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as exited:
        command.main(arguments)
    [line] = capsys.readouterr().err.splitlines()
    assert exited.value.code == 2 and re.search(says, line), line


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("--", "no-such-command"), 127, "no-such-command: No such file"),
        (("--", "./package"), 126, "./package: Permission denied"),
        (("--version",), 0, ""),
    ],
)
def test_what_cannot_be_executed_has_the_status_of_a_shell(
    folder: Path, arguments: tuple[str, ...], status: int, says: str
) -> None:
    done = started("-m", "fusedreduce.run", *arguments, cwd=folder)
    assert done.returncode == status and re.search(says, done.stderr), done.stderr
    assert len(done.stderr.splitlines()) == (status != 0)


def test_a_python_that_reads_no_sitecustomize_is_refused(folder: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from fusedreduce.run.__main__ import main; main(['x.py'])"
    done = started("-E", "-c", code, cwd=folder)
    assert done.returncode == 2 and "python -E ignores" in done.stderr, done.stderr


def test_every_field_is_an_option_or_left_out_for_a_reason() -> None:
    names = [one.name for one in dataclasses.fields(ReduceConfig)]
    assert sorted([*options.FIELDS, *options.LEFT_OUT]) == sorted(names)
    assert [*options.FIELDS, *options.OTHERS] == list(options.HELP)


def test_help_says_what_to_choose() -> None:
    """In a line or two each, with the default; a docstring is for who writes the argument in a program."""
    of_config = " ".join((ReduceConfig.__doc__ or "").split())
    for name, text in options.HELP.items():
        assert 10 < len(text) < 200 and not re.search(r"None|True|False|`|docs/", text), text
        assert text not in of_config
        assert options.is_switch(name) or name in ("plan", "trace") or "default" in text, name
        choices = tuple(WIRES) if name == "wire" else options.choices(name)
        assert all(re.search(rf"\b{one}\b", text) for one in choices), (name, choices)
    shown = command.make_parser().format_help()
    for name, text in options.HELP.items():
        assert text in " ".join(shown.replace("-\n", "-").split()) or "-" in text, name
        assert options.flag(name) in shown and options.variable(name) in shown


def test_the_page_has_every_flag_and_commands_that_parse() -> None:
    page = (ROOT / "docs" / "run.md").read_text()
    for name, text in options.HELP.items():
        value = "" if options.is_switch(name) else f" {options.metavar(name)}"
        row = re.search(
            rf"^\| `{re.escape(options.flag(name) + value)}` \| `{options.variable(name)}.*\| (.*) \|$", page, re.M
        )
        assert row, name
        assert re.sub(r"\[(.*?)\]\(.*?\)", r"\1", row[1]).replace("`", "") == text, "the page says what --help says"
    for name in options.LEFT_OUT:
        assert f"`{name}`, since" in page, name
    shell = "\n".join(re.findall("```sh\n(.*?)```", page, re.S)).replace("\\\n", " ")
    commands = re.findall(r"^.*(?:-m fusedreduce\.run|fusedreduce run) (.*)$", shell, re.M)
    assert len(commands) == 10
    for line in commands:
        typed, program = command.split_command(line.split())
        command.make_parser().parse_args(typed)
        assert typed[0] == "--wire" and program[0] in ("train.py", "-m", "--"), line


def test_wires_by_pattern_and_an_option_that_needs_its_wire() -> None:
    asked = {"FUSEDREDUCE_WIRE": "*.bias=native,layer[a=1]*=bf16,*=int8", "FUSEDREDUCE_ACCUMULATION": "fp32"}
    wires: dict[str, Wire] = {"*.bias": "native", "layer[a=1]*": "bf16", "*": "int8"}
    assert options.read(asked).config == ReduceConfig(wire=wires, accumulation="fp32")
    with pytest.raises(ValueError, match="_WIRE='\\*=int2': unknown wire 'int2'"):
        options.read({"FUSEDREDUCE_WIRE": "*=int2"})
    with pytest.raises(ValueError, match=r"_WIRE=.*'int8' has no pattern: use PATTERN=WIRE"):
        options.read({"FUSEDREDUCE_WIRE": "*.bias=native,int8"})


def test_options_of_flags_and_environment(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    plan.write_text('{"format": "fusedreduce-plan"}')
    given: dict[str, Any] = {
        "wire": "bf16",
        "stall_report_s": "2.5",
        "policy": "ready",
        "cap_policy": "strict",
        "replan_every": "8",
        "link": "50,25",
        "plan": str(plan),
        "check_finite": "count",
        "fallback": "yes",
    }
    found = options.read({options.variable(name): text for name, text in given.items()})
    config = ReduceConfig(
        wire="bf16",
        stall_report_s=2.5,
        policy="ready",
        cap_policy="strict",
        replan_every=8,
        link=(50.0, 25.0),
        plan=plan.read_text(),
        check_finite="count",
    )
    assert found == options.Options(config, fallback=True)
    assert options.read({}) == options.Options(ReduceConfig(), trace=None, fallback=False, quiet=False)
    assert options.read({"FUSEDREDUCE_TRACE": "a/../b"}).trace == Path.cwd() / "b"


@pytest.mark.parametrize(("words", "value"), [(("1", "true", "yes", "on"), True), (("0", "false", "no", "off"), False)])
def test_a_switch_means_the_same_in_capitals(words: tuple[str, ...], value: bool) -> None:
    for text in (spelt for word in words for spelt in (word, word.upper(), word.title())):
        found = options.read({"FUSEDREDUCE_QUIET": text, "FUSEDREDUCE_OVERLAP": text})
        assert (found.quiet, found.config.overlap) == (value, value), text


def test_a_flag_that_is_for_one_wire_goes_with_that_wire() -> None:
    """Each is checked with those before it."""
    for config, given in (
        (ReduceConfig(wire="bf16", accumulation="fp32"), {"wire": "bf16", "accumulation": "fp32"}),
        (
            ReduceConfig(wire="int8", stochastic_rounding=True, seed=7),
            {"wire": "int8", "stochastic_rounding": "1", "seed": "7"},
        ),
    ):
        variables = {options.variable(name): text for name, text in given.items()}
        assert options.read(variables) == options.Options(config)
        with pytest.raises(ValueError, match=r"^--(accumulation|stochastic-rounding)\b.*for the wires"):
            options.read({**variables, "FUSEDREDUCE_WIRE": "native"}, options.HELP)


@pytest.mark.parametrize(
    ("given", "beside", "says"),
    [
        ({"link": "1,2"}, {"policy": "static"}, "--link '1,2': has no effect, it needs --policy planned or ready"),
        ({"replan_every": "100"}, {"policy": "static"}, "--replan-every '100': has no effect, it needs --policy"),
        ({"replan_every": "0"}, {"overlap": "0"}, "--replan-every '0': has no effect.* without --no-overlap"),
        ({"seed": "0"}, {"wire": "int8"}, "--seed '0': has no effect, it needs --stochastic-rounding: leave it out"),
        ({"ranks_per_node": "2"}, {"wire": "bf16", "accumulation": "fp32"}, "--ranks-per-node '2': .* --wire int8 or"),
        ({"ranks_per_node": "2"}, {"wire": "*=bf16"}, "--ranks-per-node '2': has no effect"),
    ],
)
def test_an_option_without_effect_beside_the_others_is_refused(
    given: dict[str, str], beside: dict[str, str], says: str
) -> None:
    variables = {options.variable(name): text for name, text in {**given, **beside}.items()}
    with pytest.raises(ValueError, match=f"^{says}"):
        options.read(variables, given)
    [(name, text)] = given.items()
    with pytest.raises(ValueError, match=f"^{options.variable(name)}='{text}': has no effect"):
        options.read(variables)


def test_an_option_that_counts_where_a_plan_is_not_used_goes_with_it(tmp_path: Path) -> None:
    """It is of another number of ranks, or of wires by pattern of which one encodes."""
    (plan := tmp_path / "plan").write_text('{"format": "fusedreduce-plan"}')
    given = {"plan": str(plan), "link": "1,2", "replan_every": "8", "cap_policy": "strict"}
    given |= {"wire": "*.bias=native,*=int4", "ranks_per_node": "2"}
    found = options.read({options.variable(name): text for name, text in given.items()}).config
    assert (found.link, found.replan_every, found.ranks_per_node) == ((1.0, 2.0), 8, 2)
    assert found.cap_policy == "strict" and found.plan_text == plan.read_text()


def test_a_variable_that_something_else_of_the_package_reads_is_left_alone() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "fusedreduce").rglob("*.py"))
    read = set(re.findall(r"\"(FUSEDREDUCE_\w+)\"", sources))
    assert read == set(options.OF_OTHERS)
    assert options.read(dict.fromkeys(read, "1")) == options.read({})


def test_flags_win_and_the_folder_comes_first_once(folder: Path) -> None:
    code = "import os, sys; print([os.environ.get(one) for one in sys.argv[1:]])"
    names = ("FUSEDREDUCE_WIRE", "FUSEDREDUCE_POLICY", "FUSEDREDUCE_OVERLAP", "PYTHONPATH")
    inner = ("--", sys.executable, "-c", code, *names)
    nested = ("-m", "fusedreduce.run", "--wire", "fp16", "--no-overlap", *inner)
    done = started(*RUN, "--", sys.executable, *nested, cwd=folder, FUSEDREDUCE_POLICY="ready")
    path = os.pathsep.join([str(SITE), str(ROOT)])
    assert done.stdout == f"{['fp16', 'ready', '0', path]}\n", done.stderr


@pytest.mark.parametrize(
    ("argv", "typed"),
    [
        (["--wire", "bf16", "--quiet", "train.py", "--wire", "x"], 3),
        (["--wire=bf16", "-m", "package", "--quiet"], 1),
        (["--no-overlap", "--", "torchrun", "--", "x"], 1),
        (["train.py", "--", "-m"], 0),
    ],
)
def test_where_our_flags_end(argv: list[str], typed: int) -> None:
    assert command.split_command(argv) == (argv[:typed], argv[typed:])
