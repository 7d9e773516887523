"""Fields of untrusted JSON, each checked when it is read; a ValueError says what is wrong.

An integer must be a JSON integer (not true, nor 1.0) that fits into an int64 after one addition.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

MOST = (1 << 62) - 1
_SHOWN = 60  # characters of a value in a message
_WORD = re.compile(r"[A-Za-z0-9_:]{1,60}")


def refuse_constant(constant: str) -> NoReturn:
    """Refuses NaN and Infinity, as `parse_constant` of json.loads."""
    raise ValueError(f"{constant} is not JSON")


def field(row: Mapping[str, Any], name: str) -> Any:
    """Returns the value of `name`, of any type."""
    if name not in row:
        raise ValueError(f'"{name}" is missing')
    return row[name]


def integer(row: Mapping[str, Any], name: str, *, least: int = 0, most: int = MOST) -> int:
    """Returns the value of `name`, an integer from `least` to `most`."""
    return integers([field(row, name)], f'"{name}"', least=least, most=most)[0]


def integers(values: Sequence[Any], what: str, *, least: int = 0, most: int = MOST) -> tuple[int, ...]:
    """Returns `values` if all of them are integers from `least` to `most`; `what` names them in the error."""
    for value in values:
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"{what} must be whole, from {least} to {most}, got {short(value)}")
    return tuple(values)


def boolean(row: Mapping[str, Any], name: str) -> bool:
    """Returns the value of `name`, true or false."""
    return cast("bool", _typed(field(row, name), bool, f'"{name}" must be true or false'))


def text(row: Mapping[str, Any], name: str) -> str:
    """Returns the value of `name`, a string."""
    return cast("str", _typed(field(row, name), str, f'"{name}" must be a text'))


def word(row: Mapping[str, Any], name: str) -> str:
    """Returns the value of `name`, a string of at most 60 letters, digits, `_` and `:`, which is safe to print."""
    value = text(row, name)
    if not _WORD.fullmatch(value):
        raise ValueError(f'"{name}" must be a word, got {short(value)}')
    return value


def array(row: Mapping[str, Any], name: str) -> list[Any]:
    """Returns the value of `name`, a list."""
    return cast("list[Any]", _typed(field(row, name), list, f'"{name}" must be a list'))


def mapping(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the value of `name`, an object."""
    return cast("dict[str, Any]", _typed(field(row, name), dict, f'"{name}" must be an object'))


def mappings(row: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Returns the value of `name`, a list of objects."""
    must = f'"{name}" must be a list of objects'
    return [cast("dict[str, Any]", _typed(value, dict, must)) for value in array(row, name)]


def short(value: object) -> str:
    """Writes a value for a message, shortened to 60 characters."""
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."


def _typed(value: object, kind: type, must: str) -> object:
    if not isinstance(value, kind):
        raise ValueError(f"{must}, got {short(value)}")
    return value
