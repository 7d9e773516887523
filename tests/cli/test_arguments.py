"""Every argument of every command says beside which others it has an effect, and is refused beside others."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import pytest

from fusedreduce.cli import commands, main
from fusedreduce.cli.arguments import ALWAYS, Argument, Beside, bucket_caps

# A value for each argument that takes one, by command where they differ.
VALUES: Mapping[str, Any] = {
    "FOLDER": "/nowhere",
    "--trace": "/nowhere",
    "--out": "/nowhere/out",
    "--model": {"doctor": "1M", "plan": "moe"},
    "--network": "10gbe",
    "--backward-ms": "5",
    "--costs": "1,2",
    "--cap-mb": "5",
    "--gradients": "bf16",
    "--accelerator": "h100",
    "--straggler": "0.1:2",
    "--jitter": "0.05",  # its default, given all the same
    "--wire": "bf16",
}


def parsers() -> Iterator[argparse.ArgumentParser]:
    made = argparse.ArgumentParser(prog="fusedreduce").add_subparsers()
    for command in commands():
        command.add_parser(made)
    yield from made.choices.values()


COMMANDS = {parser.prog.split()[1]: parser for parser in parsers()}
EVERY = [(name, action) for name, parser in COMMANDS.items() for action in parser._actions if action.dest != "help"]
NEEDY = [(name, action) for name, action in EVERY if isinstance(action, Argument) and action.needs != ALWAYS]


def shown(value: Any) -> str | None:
    return value.typed if isinstance(value, Argument) else None


@pytest.mark.parametrize(("command", "action"), EVERY, ids=shown)
def test_an_argument_has_its_place(command: str, action: argparse.Action) -> None:
    """It is added by `arguments.add`, and what it needs is what others of the command are called."""
    assert isinstance(action, Argument), f"{command}: add it by arguments.add"
    others = [other for _, other in EVERY if isinstance(other, Argument) and other in COMMANDS[command]._actions]
    typed = [other.typed for other in others]
    for needs in action.needs:
        assert set(needs.given) <= set(typed), "as the help writes it"
        assert set(needs.absent) <= {text.partition(" ")[0] for text in typed}


def words(command: str, *typed: str) -> list[str]:
    """Arguments with values."""
    found = [command]
    for text in typed:
        name = text.partition(" ")[0]
        value = VALUES.get(name, "3")
        value = value if isinstance(value, str) else value[command]
        takes_one = " " in text
        found += [name, *([value] if takes_one else [])] if name.startswith("-") else [value]
    return found


def refused(typed: list[str], capsys: pytest.CaptureFixture[str]) -> str | None:
    """What is said of an argument without effect; None: nothing is. The command may fail later, without a folder."""
    with suppress(SystemExit):
        main(typed)
    said: str = capsys.readouterr().err
    return said if "has no effect" in said else None


@pytest.mark.parametrize(("command", "action"), NEEDY, ids=shown)
def test_an_argument_is_refused_beside_what_takes_its_effect(
    command: str, action: Argument, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the line that the message says to write is taken."""
    monkeypatch.setattr(f"fusedreduce.cli.{command}._run", lambda parser, arguments: 0)
    for needs in action.needs:
        fine = [*needs.given, action.typed]
        assert refused(words(command, *fine), capsys) is None, fine
        for wrong in worse(needs, action):
            if any(not other.missing(names(wrong)) and not other.unwanted(names(wrong)) for other in action.needs):
                continue
            said = refused(words(command, *wrong), capsys)
            assert said is not None, wrong
            ways = ", or ".join(map(str, action.needs))
            found = re.search(
                r"argument (\S+): has no effect (.*): it needs (.*)\. Write: fusedreduce (.*) \(see", said
            )
            assert found is not None and "\n" not in said.strip(), said
            if found[1] == action.typed.partition(" ")[0]:
                assert found[3] == ways
            written = shlex.split(found[4])
            assert refused(words(command, *rejoined(written[1:])), capsys) is None, found[4]


def worse(needs: Beside, action: Argument) -> Iterator[list[str]]:
    """What it needs without one of these, or with one that takes its effect."""
    for left_out in needs.given:
        yield [*(text for text in needs.given if text != left_out), action.typed]
    for unwanted in needs.absent:
        (typed,) = {
            other.typed
            for _, other in EVERY
            if isinstance(other, Argument) and other.typed.partition(" ")[0] == unwanted and same_command(other, action)
        }
        yield [*needs.given, typed, action.typed]


def same_command(one: Argument, other: Argument) -> bool:
    return any(one in parser._actions and other in parser._actions for parser in COMMANDS.values())


def names(typed: list[str]) -> list[str]:
    return [text.partition(" ")[0] for text in typed]


def rejoined(written: list[str]) -> list[str]:
    """Words of a command as options with their values."""
    found: list[str] = []
    for word in written:
        if found and found[-1].startswith("-") and " " not in found[-1] and not word.startswith("-"):
            found[-1] += f" {word}"
        else:
            found.append(word)
    return found


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            "plan --simulate --costs 20,100",
            "fusedreduce plan: error: argument --costs: has no effect beside --simulate: it needs FOLDER and no "
            "--simulate or --network. Write: fusedreduce plan FOLDER --costs US,GBIT (see fusedreduce plan --help)\n",
        ),
        ("plan traces --simulate --model moe", "argument --model: has no effect beside FOLDER and --simulate: it "),
        ("plan traces --jitter 0.05", "argument --jitter: has no effect beside FOLDER: it needs --simulate. Write: "),
        ("plan traces --wires --simulate", "argument --wires: has no effect beside FOLDER and --simulate: it needs "),
        ("doctor --backward-ms 5", "argument --backward-ms: has no effect alone: it needs --model N and no --trace."),
        ("doctor --model 1M --trace x", "Write: fusedreduce doctor --model N (see fusedreduce doctor --help)"),
        ("doctor --model 1M --ranks 8", "Write: fusedreduce doctor --model N --network NAME --ranks N ("),
    ],
)
def test_the_message_says_what_came_what_it_needs_and_what_to_write(
    typed: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in (refused(typed.split(), capsys) or "")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("doctor extra", "fusedreduce doctor: error: unrecognized arguments: extra (see fusedreduce doctor --help)"),
        ("plan a b", "fusedreduce plan: error: unrecognized arguments: b (see fusedreduce plan --help)"),
        ("demo --foo", "fusedreduce demo: error: unrecognized arguments: --foo (see fusedreduce demo --help)"),
        ("--wire int8 train.py", "To run a training script: fusedreduce run --wire int8 train.py (see fusedreduce --"),
        ("train.py --lr 1", "To run a training script: fusedreduce run train.py --lr 1 (see fusedreduce --help)"),
        ("doktor", "argument COMMAND: invalid choice: 'doktor'"),
    ],
)
def test_what_is_not_understood_names_the_command_that_helps(
    typed: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(typed.split())
    assert exited.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize("cap_mb", [0.5, 25.0])
def test_a_cap_that_is_given_limits_planned_buckets_too(cap_mb: float) -> None:
    """Also torch's default, which limits none that a plan cuts where it is not given."""
    caps = bucket_caps(str(cap_mb))
    assert caps.first_bytes == caps.cap_bytes == caps.planned_limit_bytes == int(cap_mb * 2**20)
