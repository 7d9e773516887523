"""The command line: `fusedreduce run`, `doctor`, `demo`, `trace`, `plan`, `bench`; also by `python -m fusedreduce`."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

import fusedreduce
from fusedreduce.run.__main__ import main as run


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def commands() -> Sequence[ModuleType]:
    """The commands but `run`: what has an `add_parser`."""
    from . import bench, demo, doctor, plan, trace

    return doctor, demo, trace, plan, bench


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments without the program's name; None: those of this process.

    Returns:
        The exit status: 0 if all went well, 1 if the command failed or found something broken, 2 on wrong usage, 128
        plus the signal's number if interrupted. (`run` does not return: it becomes the program that it is given.)
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["run"]:
        run(argv[1:])
    from . import report  # and torch, for which `run` need not wait

    parser = _Parser(
        prog="fusedreduce",
        description="Gradients averaged across ranks with one fused kernel on each side of one collective per bucket.",
        epilog="Exit status: 0 all went well; 1 what was run failed or found something broken; 2 wrong usage; 128 plus "
        "its number when a signal ended it.",
        allow_abbrev=False,
    )
    found = report.versions()
    beside = ", ".join(f"{name} {found[name] or 'missing'}" for name in ("torch", "triton"))
    parser.add_argument("--version", action="version", version=f"fusedreduce {fusedreduce.__version__} ({beside})")
    subparsers = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    subparsers.add_parser("run", help="run a training script, unchanged, with fusedreduce within torch's own class")
    # Each sets `run`: the parsed arguments -> the exit status.
    for command in commands():
        command.add_parser(subparsers)
    if argv[:1] and argv[0] not in subparsers.choices and any(word.endswith(".py") for word in argv):
        parser.error(f"{argv[0]!r} is no command. To run a training script: {parser.prog} run {shlex.join(argv)}")
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:  # by the command, whose help has its options
        subparsers.choices[arguments.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"{parser.prog} {arguments.command}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of a pipe has exited (`| head`). Python flushes once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return status
