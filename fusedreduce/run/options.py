"""Options of the command: fields of ReduceConfig, read from flags or environment variables."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fusedreduce.config import ENCODED_WIRES, WIRES, ReduceConfig
from fusedreduce.planning import plan_file

PREFIX = "FUSEDREDUCE_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
# Fields that have no effect, or a harmful one, unless the script is written for them.
LEFT_OUT: Mapping[str, str] = {
    "op": "a script that was written for torch's class expects averages",
    "grad_stats": "the script would have to read them (fusedreduce.reducer_of(model).grad_stats())",
    "sync_mode": "the script would have to call flush() before it evaluates and saves",
}
FIELDS = {one.name: one for one in dataclasses.fields(ReduceConfig) if one.name not in LEFT_OUT}
SWITCHES: Mapping[str, str] = {
    "fallback": "where fusedreduce refuses a model, use torch's reducer on all ranks, in place of an error",
    "quiet": "print only warnings: neither what was wrapped nor, at the end, what was sent",
}
_HINTS = typing.get_type_hints(ReduceConfig)


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of one run.

    Args:
        config: of every wrapper.
        fallback: see `fusedreduce.install`.
        quiet: print warnings only.
    """

    config: ReduceConfig
    fallback: bool
    quiet: bool


def variable(name: str) -> str:
    """Name of an option's environment variable."""
    return PREFIX + name.upper()


def flag(name: str) -> str:
    """Name of an option's flag; "--no-..." if the field is True by default."""
    field = FIELDS.get(name)
    return f"--{'no-' if field is not None and field.default is True else ''}{name.replace('_', '-')}"


def is_switch(name: str) -> bool:
    """Whether the flag takes no value."""
    return name in SWITCHES or _HINTS[name] is bool


def read(environment: Mapping[str, str]) -> Options:
    """Reads the options from environment variables.

    Args:
        environment: the variables by name.

    Returns:
        The options; defaults for those that are not set.

    Raises:
        ValueError: a value that is not accepted, or a variable that is no option; names flag and variable.
    """
    for name, why in LEFT_OUT.items():
        if variable(name) in environment:
            raise ValueError(
                f"{variable(name)} is no option of this command: {why}. Unset it, and call "
                "fusedreduce.install() in the script"
            )
    for name in sorted(name for name in environment if name.startswith(PREFIX)):
        near = difflib.get_close_matches(name.removeprefix(PREFIX).lower(), [*FIELDS, *SWITCHES], 1, 0.75)
        if near and name != variable(near[0]):
            raise ValueError(f"{name} is no option of this command: did you mean {variable(near[0])}?")
    given: dict[str, Any] = {}
    for name in (*FIELDS, *SWITCHES):
        text = environment.get(variable(name))
        if text is None:
            continue
        try:
            given[name] = _parser(name)(text)
            if name in FIELDS:
                ReduceConfig(**{one: given[one] for one in given if one in FIELDS})
        except (OSError, ValueError) as error:
            raise ValueError(f"{flag(name)} ({variable(name)}={text!r}): {error}") from None
    switches = {name: given.pop(name, False) for name in SWITCHES}
    return Options(ReduceConfig(**given), **switches)


def metavar(name: str) -> str:
    """Placeholder of an option's value in --help."""
    words = {"plan": "FILE", "link": "US,GBIT_S", "replan_every": "STEPS", "stall_report_s": "SECONDS"}
    words |= {"wire_after": "STEPS", "least_sqnr_db": "DB", "ranks_per_node": "RANKS", "seed": "NUMBER"}
    if name == "wire":
        return "{" + ",".join((*WIRES, *ENCODED_WIRES)) + ",PATTERN=WIRE}"
    return words.get(name) or "{" + ",".join(map(str, typing.get_args(_HINTS[name]))) + "}"


def described(name: str) -> str:
    """Help text of an option; of a field, the text in ReduceConfig's docstring."""
    if name in SWITCHES:
        return SWITCHES[name]
    text = {
        "plan": "a file with a plan to keep to, as plan_json() gives it",
        "overlap": "start all reductions when backward is done, to measure what overlap gains",
        "link": "latency in us and Gbit/s of one all-reduce, such as 50,25, for the cost model; else both are measured",
    }.get(name)
    if text is None:
        found = re.search(rf"^ +{name}: (.*(?:\n {{12}}.*)*)", ReduceConfig.__doc__ or "", re.M)
        text = " ".join(found[1].split()).replace(" Reducer and wrapper only.", "") if found else ""
    return text


def _parser(name: str) -> Callable[[str], Any]:
    if is_switch(name):
        return _switch
    if name == "plan":
        return _file
    if name == "link":
        return _link
    if name == "wire":
        return _wire
    kinds = typing.get_args(_HINTS[name]) or (_HINTS[name],)
    return next((kind for kind in (float, int) if kind in kinds), str)


def _switch(text: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise ValueError(f"use one of {', '.join((*_TRUE, *_FALSE))}")
    return text.lower() in _TRUE


def _wire(text: str) -> str | dict[str, str]:
    """A wire, or wires by pattern."""
    if "=" not in text:
        return text
    pairs = [one.rpartition("=") for one in text.split(",")]
    alone = [wire for pattern, _, wire in pairs if not pattern]
    if alone:
        raise ValueError(f"{alone[0]!r} has no pattern: use PATTERN=WIRE,..., such as *.bias=native,*=int8")
    return {pattern: wire for pattern, _, wire in pairs}


def _link(text: str) -> tuple[float, ...]:
    return tuple(float(one) for one in text.split(","))


def _file(text: str) -> str:
    """Text of a plan file; the wrapper checks later whether it fits the model."""
    content = Path(os.path.abspath(text)).read_text()
    try:
        kind = json.loads(content)["format"]
    except (ValueError, TypeError, KeyError):
        kind = None
    if kind != plan_file.FORMAT:
        raise ValueError("the file is no bucket plan, as plan_json() returns it")
    return content
