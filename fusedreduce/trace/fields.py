"""Fields of JSON that came from elsewhere, each checked as it is taken out: a ValueError says what is wrong.

Whole numbers only: true and 1.0 are none, and neither is what would not fit into an int64 after one addition.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

MOST = (1 << 62) - 1
_SHOWN = 60  # characters of what is wrong
_WORD = re.compile(r"[A-Za-z0-9_:]{1,60}")


def refuse_constant(constant: str) -> NoReturn:
    """For json.loads(parse_constant=...), which else takes NaN and Infinity."""
    raise ValueError(f"{constant} is not JSON")


def field(row: Mapping[str, Any], name: str) -> Any:
    """What stands under `name`, whatever it is."""
    if name not in row:
        raise ValueError(f'"{name}" is missing')
    return row[name]


def integer(row: Mapping[str, Any], name: str, *, least: int = 0, most: int = MOST) -> int:
    """The whole number under `name`."""
    return integers([field(row, name)], f'"{name}"', least=least, most=most)[0]


def integers(found: Sequence[Any], what: str, *, least: int = 0, most: int = MOST) -> tuple[int, ...]:
    """`found`, if all of it are whole numbers of that range."""
    for value in found:
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"{what} must be whole, from {least} to {most}, got {short(value)}")
    return tuple(found)


def boolean(row: Mapping[str, Any], name: str) -> bool:
    """The true or false under `name`."""
    return cast("bool", _typed(field(row, name), bool, f'"{name}" must be true or false'))


def text(row: Mapping[str, Any], name: str) -> str:
    """The text under `name`."""
    return cast("str", _typed(field(row, name), str, f'"{name}" must be a text'))


def word(row: Mapping[str, Any], name: str) -> str:
    """The text under `name`, if it can be shown as it is: at most 60 letters, digits, `_` and `:`."""
    found = text(row, name)
    if not _WORD.fullmatch(found):
        raise ValueError(f'"{name}" must be a word, got {short(found)}')
    return found


def array(row: Mapping[str, Any], name: str) -> list[Any]:
    """The list under `name`."""
    return cast("list[Any]", _typed(field(row, name), list, f'"{name}" must be a list'))


def mapping(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The object under `name`."""
    return cast("dict[str, Any]", _typed(field(row, name), dict, f'"{name}" must be an object'))


def mappings(row: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The list of objects under `name`."""
    must = f'"{name}" must be a list of objects'
    return [cast("dict[str, Any]", _typed(found, dict, must)) for found in array(row, name)]


def short(found: object) -> str:
    """`found` for a message."""
    shown = repr(found)
    return shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."


def _typed(found: object, kind: type, must: str) -> object:
    if not isinstance(found, kind):
        raise ValueError(f"{must}, got {short(found)}")
    return found
