"""The command itself: checks the flags, sets the environment, and executes the program it was given."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import NoReturn

import fusedreduce
from fusedreduce.wires import WIRES

from . import options

_SITE = Path(__file__).resolve().parent / "site"
_NAME = "fusedreduce run"
_DESCRIPTION = """
Runs a training script, unchanged, with fusedreduce's reducer within torch's DistributedDataParallel.

  %(prog)s [flags] train.py ARGUMENTS
  %(prog)s [flags] -m package.module ARGUMENTS
  %(prog)s [flags] -- COMMAND ARGUMENTS       a launcher: torchrun, accelerate launch, ...
  torchrun [its flags] -m fusedreduce.run [flags] train.py ARGUMENTS

`python -m fusedreduce.run` is the same. Each flag can be set by its environment variable too, and overrides that."""
_EPILOG = """
Exit status: that of the program; 2 if a flag or variable is wrong, before anything has started; 126 or 127 if the
command after -- cannot be run or is not found."""
# Flags of Python's command line with which it ignores PYTHONPATH or sitecustomize.
_BLIND = {"I": "isolated", "E": "ignore_environment", "S": "no_site"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{_NAME}: error: {message} (see {_NAME} --help)\n")


def main(argv: Sequence[str]) -> NoReturn:
    """Replaces this process by the program at the end of `argv`.

    Args:
        argv: the command line without the program's name: flags, then the program with its arguments.
    """
    parser = make_parser()
    typed, program = split_command(argv)
    given = {name: text for name, text in vars(parser.parse_args(typed)).items() if text is not None}
    environment = dict(os.environ) | {options.variable(name): text for name, text in given.items()}
    blind = [letter for letter, name in _BLIND.items() if getattr(sys.flags, name)]
    try:
        if not options.names_own_wire(environment):
            options.read(environment, given)
        if not program or program in (["-m"], ["--"]):
            raise ValueError("no program was given: a script, -m and a module, or -- and a command")
        _check_kind(typed, program)
        launches = program[0] == "--"
        program = program[1:] if launches else program
        if launches:
            blind = _blind_flags(program)
        if blind:
            raise ValueError(
                f"python -{blind[0]} ignores PYTHONPATH or sitecustomize, which this command needs to reach the "
                "program and its child processes: leave that flag out, or call fusedreduce.install() in the script"
            )
        if not launches:
            program = [sys.executable, *_interpreter_flags(), *program]
    except ValueError as error:
        parser.error(str(error))
    _set(environment)
    # Python ignores these, and a program that is not Python would inherit that.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvpe(program[0], program, environment)
    except OSError as error:
        parser.exit(127 if isinstance(error, FileNotFoundError) else 126, f"{_NAME}: {program[0]}: {error.strerror}\n")


def _check_kind(typed: Sequence[str], program: Sequence[str]) -> None:
    """Raises ValueError, with the line to write, for a launcher that lacks its --, and for a script that has one."""
    first, *rest = program[program[0] == "--" :]
    if first in WIRES and not os.path.exists(first):
        raise ValueError(f"{first!r} is a wire and no script: write several with commas, as --wire native,bf16,int8")
    # Beside Python lies what is installed with it, such as torchrun, though an environment may not be activated.
    command = first if shutil.which(first) else shutil.which(first, path=os.path.dirname(sys.executable))
    if program[0] not in ("--", "-m") and command and not os.path.exists(first):
        slip, line = f"{first} is a command and no script: put -- in front of it", [*typed, "--", command, *rest]
    elif program[0] == "--" and not command and first.endswith(".py") and os.path.isfile(first):
        slip, line = f"{first} is a script and no command: leave -- out", [*typed, first, *rest]
    else:
        return
    raise ValueError(f"{slip}: {shlex.join([*_NAME.split(), *line])}")


def _set(environment: MutableMapping[str, str]) -> None:
    """Puts site/ first on PYTHONPATH, once, and makes paths absolute: programs may change their folder."""
    paths = environment.get("PYTHONPATH")
    others = [one for one in paths.split(os.pathsep) if one != str(_SITE)] if paths else []
    environment["PYTHONPATH"] = os.pathsep.join([str(_SITE), *others])
    for path in map(options.variable, ("plan", "trace")):
        if path in environment:
            environment[path] = os.path.abspath(environment[path])


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=_NAME,
        usage="%(prog)s [flags] (SCRIPT | -m MODULE | -- COMMAND) [ARGUMENTS]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fusedreduce {fusedreduce.__version__}")
    for name, text in options.HELP.items():
        flag, text = options.flag(name), text.replace("%", "%%")
        if options.is_switch(name):
            value = "0" if flag.startswith("--no-") else "1"
            text = f"{text} [{options.variable(name)}={value}]"
            parser.add_argument(flag, dest=name, action="store_const", const=value, help=text)
        else:
            text = f"{text} [{options.variable(name)}]"
            parser.add_argument(flag, dest=name, metavar=options.metavar(name), help=text)
    return parser


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """This command's flags, and the program after them."""
    alone = {"-h", "--help", "--version"}
    alone |= {options.flag(name) for name in options.HELP if options.is_switch(name)}
    at = 0
    while at < len(argv) and argv[at].startswith("-") and argv[at] not in ("-m", "--"):
        at += 1 if argv[at] in alone or "=" in argv[at] else 2
    return list(argv[:at]), list(argv[at:])


def _interpreter_flags() -> list[str]:
    """Flags of this interpreter, in front of the script or of `-m` and the module that it was started with."""
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    spec = sys.modules["__main__"].__spec__
    if spec is None and before[-1:] == sys.argv[:1]:
        return before[:-1]
    module = "" if spec is None else spec.name.removesuffix(".__main__")
    if before and before[-1] == module:
        before.pop()
    last = before.pop() if before else ""
    start = last.removesuffix(module).removesuffix("m")
    if not last.startswith("-") or start == last:
        raise ValueError(f"start it as {_NAME}")
    return before if start == "-" else [*before, start]


def _blind_flags(command: Sequence[str]) -> list[str]:
    """Flags of a Python command with which it would not import sitecustomize; none if it is another program."""
    found: list[str] = []
    if not os.path.basename(command[0]).startswith("python"):
        return found
    arguments = iter(command[1:])
    for one in arguments:
        if not one.startswith("-") or one.startswith("--"):
            break
        for place, letter in enumerate(one[1:], 2):
            if letter in "cm":
                return found
            if letter in "WX":
                if place == len(one):
                    next(arguments, "")
                break
            if letter in _BLIND:
                found.append(letter)
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
