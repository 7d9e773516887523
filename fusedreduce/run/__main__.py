"""The command itself: checks the flags, sets the environment, and executes the program it was given."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import NoReturn

import fusedreduce

from . import options

_SITE = Path(__file__).resolve().parent / "site"
_NAME = "python -m fusedreduce.run"
_DESCRIPTION = """
Runs a training script, unchanged, with fusedreduce's reducer within torch's DistributedDataParallel.

  %(prog)s [flags] train.py ARGUMENTS
  %(prog)s [flags] -m package.module ARGUMENTS
  %(prog)s [flags] -- COMMAND ARGUMENTS       a launcher: torchrun, accelerate launch, ...
  torchrun [its flags] -m fusedreduce.run [flags] train.py ARGUMENTS

Each flag can be set by its environment variable too; a flag overrides the variable."""
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
    parser = _parser()
    typed, program = _split(argv)
    given = vars(parser.parse_args(typed))
    environment = dict(os.environ)
    environment |= {options.variable(name): text for name, text in given.items() if text is not None}
    blind = [letter for letter, name in _BLIND.items() if getattr(sys.flags, name)]
    try:
        options.read(environment)
        if not program or program in (["-m"], ["--"]):
            raise ValueError("no program was given: a script, -m and a module, or -- and a command")
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


def _set(environment: MutableMapping[str, str]) -> None:
    """Puts site/ first on PYTHONPATH, once, and makes the plan's path absolute: programs may change their folder."""
    paths = environment.get("PYTHONPATH")
    others = [one for one in paths.split(os.pathsep) if one != str(_SITE)] if paths else []
    environment["PYTHONPATH"] = os.pathsep.join([str(_SITE), *others])
    plan = options.variable("plan")
    if plan in environment:
        environment[plan] = os.path.abspath(environment[plan])


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=_NAME,
        usage="%(prog)s [flags] (SCRIPT | -m MODULE | -- COMMAND) [ARGUMENTS]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fusedreduce {fusedreduce.__version__}")
    for name in (*options.FIELDS, *options.SWITCHES):
        flag, text = options.flag(name), options.described(name).replace("%", "%%")
        if options.is_switch(name):
            value = "0" if flag.startswith("--no-") else "1"
            text = f"{text} [{options.variable(name)}={value}]"
            parser.add_argument(flag, dest=name, action="store_const", const=value, help=text)
        else:
            text = f"{text} [{options.variable(name)}]"
            parser.add_argument(flag, dest=name, metavar=options.metavar(name), help=text)
    return parser


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """This command's flags, and the program after them."""
    alone = {"-h", "--help", "--version"}
    alone |= {options.flag(name) for name in (*options.FIELDS, *options.SWITCHES) if options.is_switch(name)}
    at = 0
    while at < len(argv) and argv[at].startswith("-") and argv[at] not in ("-m", "--"):
        at += 1 if argv[at] in alone or "=" in argv[at] else 2
    return list(argv[:at]), list(argv[at:])


def _interpreter_flags() -> list[str]:
    """Flags of this interpreter, in front of `-m fusedreduce.run`."""
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    if before and before[-1] == "fusedreduce.run":
        before.pop()
    last = before.pop() if before else ""
    start = last.removesuffix("fusedreduce.run").removesuffix("m")
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
