"""Options of the command: fields of ReduceConfig, read from flags or environment variables."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import tempfile
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fusedreduce.config import EXCLUSIONS, ReduceConfig
from fusedreduce.planning import plan_file
from fusedreduce.wires import WIRES, any_encoded, is_own

PREFIX = "FUSEDREDUCE_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
# Fields that have no effect, or a harmful one, unless the script is written for them, each with the reason.
LEFT_OUT: Mapping[str, str] = {
    pair.one.partition("=")[0]: pair.reason for pair in EXCLUSIONS if pair.other == "fusedreduce run"
}
# By option what --help and docs/run.md say of it: fields of ReduceConfig, and behind them what is the command's own.
HELP: Mapping[str, str] = {
    "wire": "what travels: native (default), bf16, fp16, int8, int4 or a wire of your own; several, of which steps "
    "choose one: native,bf16,int8 (auto: native,bf16); by patterns of names: '*.bias=native,*=int8'",
    "wire_after": "with int8 and int4: so many steps travel at 16 bits first; default: 0",
    "least_sqnr_db": "with int8 and int4: a parameter whose signal-to-noise ratio is lower returns to 16 bits; "
    "default: not measured",
    "accumulation": "with bf16 and fp16, what gradients are added up in: wire (default), 16 bits, rounded at every "
    "hop; fp32, rounded once",
    "stochastic_rounding": "with int8 and int4: round up or down at random, so that errors average out over steps; "
    "those of a step grow by about 1.4",
    "seed": "of stochastic rounding; default: 0",
    "error_feedback": "with int8 and int4: add what a step has lost to the next one, for 8 bytes of memory per element",
    "stall_report_s": "on CUDA: log a bucket that takes longer; default: 80% of the process group's timeout",
    "overlap": "reduce when backward is done, to measure what overlap gains",
    "policy": "how parameters are cut into buckets: planned (default), by measured costs; ready, by size, in the order "
    "of readiness; static, torch's rule, the same in every run",
    "cap_policy": "a bucket ends once it has reached its limit (c10d, default) or before it would exceed it (strict)",
    "replan_every": "how often the plan is looked at again; default: 1000; 0: not after the first 30 steps",
    "link": "latency and bandwidth of one all-reduce, as 50,25, for the plan; default: measured",
    "plan": "a plan to keep to: the file that fusedreduce plan writes, or what plan_json() has returned",
    "check_finite": "look for NaN and Inf in every step: off (default); count, log on which rank and in which "
    "gradient; raise, end with an error",
    "ranks_per_node": "with int8 and int4: ranks of a node, whose sums alone are encoded; default: what torchrun says; "
    "1: every rank's gradients are",
    "trace": "write times of the first 100 steps, one file per rank, for fusedreduce trace and fusedreduce plan",
    "fallback": "what our reducer refuses torch's reduces; without it that is an error",
    "quiet": "print warnings alone: neither what was wrapped nor, at the end, bytes and time",
}
FIELDS = {field.name: field for field in dataclasses.fields(ReduceConfig) if field.name not in LEFT_OUT}
SWITCHES = ("fallback", "quiet")
OTHERS = ("trace", *SWITCHES)
# Of an option with a number, what it counts and a usual one.
_NUMBERS = {
    "wire_after": (" of steps", "1000"),
    "least_sqnr_db": (" of dB", "15"),
    "seed": ("", "1"),
    "stall_report_s": (" of seconds", "60"),
    "replan_every": (" of steps", "1000"),
    "ranks_per_node": (" of ranks", "8"),
}
_HINTS = typing.get_type_hints(ReduceConfig)
# What the package's own launcher sets for its ranks, a program of which this command may have started.
OF_OTHERS = ("FUSEDREDUCE_LAUNCHER_PID",)


def _measures(config: ReduceConfig) -> bool:
    return config.policy != "static" and config.overlap


def _encodes(config: ReduceConfig) -> bool:
    return any_encoded(config.named_wires() or ())


# By option what it needs of the others, and whether that is there. ReduceConfig, which may be one of many that differ
# in their wire or policy, takes these as they come. (A plan for another number of ranks is not used: then the others
# count, so that nothing is refused beside --plan.)
NEEDS: Mapping[str, tuple[str, Callable[[ReduceConfig], bool]]] = {
    "link": ("--policy planned or ready, without --no-overlap", _measures),
    "replan_every": ("--policy planned or ready, without --no-overlap", _measures),
    "seed": ("--stochastic-rounding", lambda config: config.stochastic_rounding),
    "ranks_per_node": ("--wire int8 or int4", _encodes),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of one run.

    Args:
        config: of every wrapper.
        trace: folder for the first steps' times; None: they are not recorded.
        fallback: see `fusedreduce.install`.
        quiet: print warnings only.
    """

    config: ReduceConfig
    trace: Path | None = None
    fallback: bool = False
    quiet: bool = False


def variable(name: str) -> str:
    """Name of an option's environment variable."""
    return PREFIX + name.upper()


def flag(name: str) -> str:
    """Name of an option's flag; "--no-..." if the field is True by default."""
    field = FIELDS.get(name)
    return f"--{'no-' if field is not None and field.default is True else ''}{name.replace('_', '-')}"


def is_switch(name: str) -> bool:
    """Whether the flag takes no value."""
    return name in SWITCHES or _HINTS.get(name) is bool


def read(environment: Mapping[str, str], typed: Collection[str] = ()) -> Options:
    """Reads the options from environment variables.

    Args:
        environment: the variables by name.
        typed: names of the options that the user gave as flags.

    Returns:
        The options; defaults for those that are not set.

    Raises:
        ValueError: a value that is not accepted or has no effect beside the others, or a variable that is no option;
            names the flag, or the variable where that was given.
    """
    for name, why in LEFT_OUT.items():
        if variable(name) in environment:
            raise ValueError(
                f"{variable(name)} is no option of this command: {why}. Unset it, and call "
                "fusedreduce.install() in the script"
            )
    for name in sorted(name for name in environment if name.startswith(PREFIX)):
        if name not in (*map(variable, HELP), *OF_OTHERS):
            near = difflib.get_close_matches(name.removeprefix(PREFIX).lower(), HELP, 1, 0.6)
            meant = f"did you mean {variable(near[0])}?" if near else "unset it"
            raise ValueError(f"{name} is no option of this command: {meant}")
    given: dict[str, Any] = {}
    for name in HELP:
        text = environment.get(variable(name))
        if text is None:
            continue
        try:
            given[name] = _parser(name)(text)
            if name in FIELDS:
                ReduceConfig(**{one: given[one] for one in given if one in FIELDS})
        except ValueError as error:
            raise ValueError(f"{_given(name, text, typed)}: {error}") from None
    others = {name: given.pop(name) for name in OTHERS if name in given}
    config = ReduceConfig(**given)
    for name, (needed, is_there) in NEEDS.items():
        if name in given and not is_there(config):
            came = _given(name, environment[variable(name)], typed)
            raise ValueError(f"{came}: has no effect, it needs {needed}: leave it out")
    return Options(config, **others)


def names_own_wire(environment: Mapping[str, str]) -> bool:
    """Whether a wire is the program's own: it may lie beside a script that only the program's process can import from,
    and so the options are checked there."""
    asked = environment.get(variable("wire"), "").split(",")
    return any(is_own(one.rpartition("=")[2]) for one in asked)


def _given(name: str, text: str, typed: Collection[str]) -> str:
    """An option with its value, as the user gave it."""
    if name not in typed:
        return f"{variable(name)}={text!r}"
    return flag(name) if is_switch(name) else f"{flag(name)} {text!r}"


def metavar(name: str) -> str:
    """Placeholder of an option's value in --help."""
    words = {"plan": "FILE", "trace": "FOLDER", "link": "US,GBIT_S", "stall_report_s": "SECONDS", "seed": "NUMBER"}
    words |= {"wire_after": "STEPS", "replan_every": "STEPS", "least_sqnr_db": "DB", "ranks_per_node": "RANKS"}
    if name == "wire":
        return "{" + ",".join(WIRES) + ",MODULE:NAME,PATTERN=WIRE,auto}"
    return words.get(name) or "{" + ",".join(choices(name)) + "}"


def choices(name: str) -> Sequence[str]:
    """The values of an option that takes one of a few words; none of another."""
    return [word for word in typing.get_args(_HINTS.get(name)) if isinstance(word, str)]


def _parser(name: str) -> Callable[[str], Any]:
    if is_switch(name):
        return _switch
    known: Mapping[str, Callable[[str], Any]] = {"plan": _file, "trace": _folder, "link": _link, "wire": _wire}
    return known.get(name) or (_number(name) if name in _NUMBERS else str)


def _number(name: str) -> Callable[[str], float]:
    kind = float if float in (typing.get_args(_HINTS[name]) or (_HINTS[name],)) else int
    of, usual = _NUMBERS[name]

    def number(text: str) -> float:
        try:
            return kind(text)
        except ValueError:
            what = "a number" if kind is float else "a whole number"
            raise ValueError(f"expected {what}{of}, such as {flag(name)} {usual}") from None

    return number


def _switch(text: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise ValueError(f"use one of {', '.join((*_TRUE, *_FALSE))}")
    return text.lower() in _TRUE


def _wire(text: str) -> str | tuple[str, ...] | dict[str, str]:
    """A wire, several, or wires by pattern."""
    names = tuple(one.strip() for one in text.split(","))
    if "=" not in text:
        if not all(names):
            raise ValueError("a name is missing: write the wires that steps may choose as in --wire native,bf16,int8")
        return names if len(names) > 1 else names[0]
    pairs = [one.rpartition("=") for one in names]
    alone = [wire for pattern, _, wire in pairs if not pattern]
    if alone:
        raise ValueError(f"{alone[0]!r} has no pattern: use PATTERN=WIRE,..., such as *.bias=native,*=int8")
    return {pattern: wire for pattern, _, wire in pairs}


def _link(text: str) -> tuple[float, float]:
    try:
        latency_us, gbit_per_s = map(float, text.split(","))
    except ValueError:
        raise ValueError("expected latency in us and Gbit/s of one all-reduce, such as --link 50,25") from None
    return latency_us, gbit_per_s


def _file(text: str) -> str:
    """Text of a plan file; the wrapper checks later whether it fits the model."""
    try:
        content = Path(os.path.abspath(text)).read_text()
        kind = json.loads(content)["format"]
    except OSError as error:
        raise ValueError(f"{error.strerror}: expected a file with a plan, as fusedreduce plan writes it") from None
    except (ValueError, TypeError, KeyError):
        kind = None
    if kind != plan_file.FORMAT:
        raise ValueError("the file is no bucket plan, as plan_json() returns it and fusedreduce plan writes it")
    return content


def _folder(text: str) -> Path:
    """A folder, which need not be there, in which files can be made; nothing is left in it."""
    folder = Path(os.path.abspath(text))
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not text or not there.is_dir():
        came = f"{there} is a file: " if text else ""
        raise ValueError(f"{came}expected a folder, which is made where it is missing")
    try:
        with tempfile.TemporaryFile(dir=there):
            return folder
    except OSError as error:
        raise ValueError(f"no file can be written into {there}: {error.strerror}") from None
