"""The commands' options: each with what it needs of the others, their values checked, or refused in one line.

Every command adds its arguments by `add`, which demands to be told beside which others an argument has an effect, and
is run by `run_by`, which refuses one that has none.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusedreduce.planning.bucketing import MIB, BucketCaps


def torchrun(ranks: int, hosts: int | None = None) -> str:
    """The command that starts so many ranks, before the program's name.

    Args:
        ranks: in all.
        hosts: on which they are; None: each on its own.
    """
    hosts = hosts or ranks
    if hosts == 1:
        return f"torchrun --nproc-per-node={ranks}"
    # With ranks left over, the fullest host's.
    each = -(-ranks // hosts)
    return f"torchrun --nnodes={hosts} --nproc-per-node={each} --rdzv-backend=c10d --rdzv-endpoint=HOST:29500"


# How ranks are started: on several machines, for which this package is made, and under Slurm; then on one machine.
SEVERAL_MACHINES = (torchrun(4), f"srun --nodes=4 --ntasks-per-node=1 {torchrun(4)}")
ONE_MACHINE = torchrun(2, hosts=1)


@dataclass(frozen=True)
class Beside:
    """Other arguments, as the user writes them, beside which an argument has an effect.

    Args:
        given: all of these, such as "--model N".
        absent: none of these.
    """

    given: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()

    def missing(self, given: Collection[str]) -> list[str]:
        """Those that are to be given and are not."""
        return [typed for typed in self.given if _name(typed) not in given]

    def unwanted(self, given: Collection[str]) -> list[str]:
        """Those that are given and are not to be."""
        return [name for name in given if name in self.absent]

    def __str__(self) -> str:
        without = f"no {' or '.join(self.absent)}" if self.absent else ""
        return " and ".join(filter(None, [*self.given, without]))


ALWAYS = (Beside(),)


class Argument(argparse.Action):
    """An argument that knows beside which others it has an effect, and notes when it is given; see `add`."""

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        *,
        needs: tuple[Beside, ...],
        flag: bool,
        repeated: bool,
        **options: Any,
    ) -> None:
        if flag:
            options |= {"nargs": 0, "default": False}
        super().__init__(option_strings, dest, **options)
        self.needs = needs
        self._flag, self._repeated = flag, repeated

    @property
    def typed(self) -> str:
        """As the user writes it."""
        value = [] if self._flag else [self.metavar if isinstance(self.metavar, str) else self.dest.upper()]
        return " ".join([*self.option_strings[-1:], *value])

    def has_effect(self, given: Collection[str]) -> bool:
        """Whether it has an effect beside these."""
        return any(not needs.missing(given) and not needs.unwanted(given) for needs in self.needs)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        # A positional that was left out comes here too, with its default.
        if self.option_strings or values is not self.default:
            namespace.given = (*getattr(namespace, "given", ()), self)
        before = getattr(namespace, self.dest, None) if self._repeated else None
        setattr(namespace, self.dest, True if self._flag else [*before, *values] if before else values)


def add(
    container: Any,
    *names: str,
    needs: tuple[Beside, ...],
    flag: bool = False,
    repeated: bool = False,
    **options: Any,
) -> None:
    """Adds an argument to a parser, or to a group of one.

    Args:
        container: the parser or group.
        names: as for `add_argument`.
        needs: beside which others it has an effect, any of these; or ALWAYS.
        flag: it takes no value, and is False or True.
        repeated: it may be given several times, and its lists are joined.
        options: as for `add_argument`, except `action`.
    """
    container.add_argument(*names, action=Argument, needs=needs, flag=flag, repeated=repeated, **options)


def run_by(parser: argparse.ArgumentParser, run: Callable[[argparse.ArgumentParser, argparse.Namespace], int]) -> None:
    """Has a command run by a function, once no argument is found to have no effect.

    Args:
        parser: the command's.
        run: takes the parser and what was given, and returns the exit status.
    """

    def checked(arguments: argparse.Namespace) -> int:
        _refuse_idle(parser, getattr(arguments, "given", ()))
        return run(parser, arguments)

    parser.set_defaults(run=checked)


def _refuse_idle(parser: argparse.ArgumentParser, given: Sequence[Argument]) -> None:
    """Ends the command with status 2 if an argument that was given has no effect beside the others."""
    typed = {_name(argument.typed): argument.typed for argument in given}
    for argument in given:
        if argument.has_effect(typed):
            continue
        way = min(argument.needs, key=lambda needs: _distance(needs, typed))
        name = _name(argument.typed)
        kept = {_name(text): text for text in way.given}
        for other in given:
            # What has an effect beside these stays.
            if _name(other.typed) not in way.absent and other.has_effect({*kept, name}):
                kept.setdefault(_name(other.typed), other.typed)
        kept[name] = kept.pop(name, argument.typed)
        line = " ".join([parser.prog, *sorted(kept.values(), key=lambda text: text.startswith("-"))])
        beside = f"beside {' and '.join(other for other in typed if other != name)}" if len(typed) > 1 else "alone"
        ways = ", or ".join(map(str, argument.needs))
        parser.error(f"argument {name}: has no effect {beside}: it needs {ways}. Write: {line}")


def _distance(needs: Beside, given: Collection[str]) -> tuple[int, int]:
    """How much of what is given would have to change; of equal ways the one of which more is given comes first."""
    missing = len(needs.missing(given))
    return missing + len(needs.unwanted(given)), missing - len(needs.given)


def _name(typed: str) -> str:
    return typed.partition(" ")[0]


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Reads a whole number from `least` to `most`, for argparse."""

    def number(typed: str) -> int:
        if not typed.isdecimal() or int(typed) < least or (most is not None and int(typed) > most):
            to = "on" if most is None else f"to {most:,}"
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} {to}, got {typed!r}")
        return int(typed)

    return number


def names(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Reads names with commas between them, or `all`, for argparse."""

    def chosen(typed: str) -> tuple[str, ...]:
        wanted = tuple(known) if typed == "all" else tuple(dict.fromkeys(typed.split(",")))
        for name in wanted:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown name {name!r}: use {', '.join(known)} or all")
        return wanted

    return chosen


def bucket_caps(typed: str) -> BucketCaps:
    """Reads one limit of all buckets in MiB, as torch's bucket_cap_mb, for argparse."""
    try:
        cap_bytes = float(typed) * MIB
    except ValueError:
        cap_bytes = math.nan
    if not (math.isfinite(cap_bytes) and cap_bytes >= 1):
        raise argparse.ArgumentTypeError(f"must be MiB, at least one byte, got {typed!r}")
    return BucketCaps(first_bytes=int(cap_bytes), cap_bytes=int(cap_bytes), planned_bytes=int(cap_bytes))


def require(parser: argparse.ArgumentParser, *modules: str) -> None:
    """Ends the command with status 2 if a module of the demo extra cannot be imported."""
    missing = [name for name in modules if not importable(name)]
    if missing:
        parser.error(f"{' and '.join(missing)} cannot be imported: pip install '.[demo]' in the clone")


def importable(name: str) -> bool:
    """Whether a module is installed; it is not imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def writable(parser: argparse.ArgumentParser, out: Path) -> Path:
    """Makes a folder, and ends the command with status 2 if no file can be written there.

    Args:
        parser: reports the error.
        out: the folder given by --out.

    Returns:
        `out`.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            return out
    except OSError as error:
        parser.error(f"argument --out: {str(out)!r} is not a folder that can be written to: {error.strerror}")
