"""What a reducer is made of: its objects, classes and attributes, and the places that hold what one place could.

Counted is what keeps state: each object of a class of this package, with its `__dict__` and slots; a named tuple; a
plain tuple that could be an object, whose items are of several kinds, though not the values that stand in a list; a
closure, with what it took along; a partial function and a SimpleNamespace. Lists and mappings are ways to them. Not
counted, and not gone into, are the communicator, its group, torch's objects and the model.

A holder is a place, "Class.attribute" and on from there, through which an object of this package has something without
another of its objects in between: bare, in a container or a closure, behind a partial function, a bound method or a
weak reference. What modules and classes of this package hold is looked at too.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fusedreduce.comm.protocol import Communicator
from support.object_graph import behind, cells, children, is_value, slots

_CONTAINERS = (Sequence, Set, Mapping, deque)
# By kind, and by place: the ways to the objects that have it there.
Holders = dict[str, defaultdict[str, list[str]]]
_PACKAGE = "fusedreduce"
_NEEDED = tuple(name for name, member in vars(Communicator).items() if isinstance(member, types.FunctionType))


@dataclass
class Made:
    """What one reducer is made of.

    Args:
        attributes: of each object that is counted: by its way from the reducer, its class and how many it has.
        holders: of the "communicator", the "parameters" and the "names".
    """

    attributes: dict[str, tuple[str, int]]
    holders: Holders

    @property
    def figures(self) -> tuple[int, int, int]:
        """How many objects, classes and attributes."""
        counts = [count for _, count in self.attributes.values()]
        return len(counts), len(self.classes), sum(counts)

    @property
    def classes(self) -> dict[str, list[int]]:
        """By class: how many objects, and how many attributes they have together."""
        found: dict[str, list[int]] = {}
        for name, count in self.attributes.values():
            known = found.setdefault(name, [0, 0])
            known[0] += 1
            known[1] += count
        return found

    def largest(self) -> dict[str, int]:
        """The most attributes that an object of each class has; without what has no class of its own."""
        found: dict[str, int] = {}
        for name, count in self.attributes.values():
            if name[:1] != "<":
                found[name] = max(count, found.get(name, 0))
        return found


class _Search:
    """Where the communicator, the parameters and the names are held. Arguments: those of `made_of`."""

    def __init__(self, communicator: Any, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        self._group = communicator.group
        self._wanted: dict[str, set[Any]] = {
            "parameters": {one.data_ptr() for one in parameters},
            "names": set(names),
        }
        self.holders: Holders = {kind: defaultdict(list) for kind in ("communicator", *self._wanted)}

    def stops(self, value: object) -> bool:
        """Whether it is not gone into."""
        return self._has_group(value) or _foreign(value)

    def look(self, owner: str, way: str, first: Iterable[tuple[str, object]]) -> list[tuple[str, object]]:
        """Notes what an owner holds, of which `first` is at first hand; returns all of it, each with its way."""
        held = list(self._held(first))
        found = [("communicator", place) for place, value in held if self._has_group(value)]
        for kind, contents in self._wanted.items():
            found += [(kind, place) for place in _that_have(held, contents)]
        for kind, place in found:
            self.holders[kind][owner + re.sub(r"\[[^]]*\]", "[]", place)].append(way + place)
        return [(way + place, value) for place, value in held]

    def _has_group(self, value: object) -> bool:
        return value is self._group or is_communicator(value)

    def _held(self, first: Iterable[tuple[str, object]]) -> Iterator[tuple[str, object]]:
        """All that an object has, up to the next object of this package, which is the last; each place once."""
        seen: dict[int, object] = {}
        waiting = deque(first)
        while waiting:
            place, value = waiting.popleft()
            value = behind(value)
            yield place, value
            if id(value) not in seen and not (is_value(value) or is_ours(value) or self.stops(value)):
                seen[id(value)] = value
                waiting.extend((place + name, child) for name, child in children(value))


def made_of(root: Any, communicator: Any, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> Made:
    """Looks at a reducer.

    Args:
        root: where to begin.
        communicator: whose `group` it is about; anything else with that group, and any other communicator, is one too.
        parameters: all of its parameters: whoever has the memory of each has them.
        names: all of their names.
    """
    search = _Search(communicator, parameters, names)
    attributes: dict[str, tuple[str, int]] = {}
    seen: dict[int, object] = {}  # which holds them, so that no address is used twice
    waiting = deque([("", root)])
    while waiting:
        way, found = waiting.popleft()
        if id(found) in seen or search.stops(found):
            continue
        if (record := _record(found, in_list=way.endswith("]"))) is not None:
            seen[id(found)] = found
            attributes[way] = record
        if is_ours(found):
            seen[id(found)] = found
            waiting.extend(search.look(type(found).__name__, way, children(found)))
    return Made(attributes, search.holders)


def held_by_modules(communicator: Any, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> Holders:
    """What outlives every reducer: names of this package's modules, and what its classes share.

    Args:
        communicator: as of `made_of`.
        parameters: as of `made_of`.
        names: as of `made_of`.
    """
    search = _Search(communicator, parameters, names)
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] != _PACKAGE or not isinstance(module, types.ModuleType):
            continue
        for each, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == module.__name__:
                shared = [(f".{own}", held) for own, held in vars(value).items() if not callable(held)]
                search.look(f"class {each}", each, shared)
            elif isinstance(value, (*_CONTAINERS, types.SimpleNamespace)) or is_communicator(value):
                search.look(name, name, [(f".{each}", value)])
    return search.holders


def is_communicator(value: object) -> bool:
    """Whether it is an object with all that the protocol of communicators asks for."""
    return not isinstance(value, type) and all(hasattr(type(value), name) for name in _NEEDED)


def is_ours(value: object) -> bool:
    """Whether it is an object of a class of this package."""
    return type(value).__module__.partition(".")[0] == _PACKAGE and not is_value(value)


def _foreign(value: object) -> bool:
    if isinstance(value, nn.Module | types.ModuleType | logging.Logger) or type(value).__module__ == "typing":
        return True
    if isinstance(value, torch.Tensor) or type(value).__module__.partition(".")[0] != "torch":
        return False
    return not isinstance(value, _CONTAINERS)


def _is_data(value: object) -> bool:
    return is_value(value) or isinstance(value, torch.Tensor | torch.Size)


def _key(value: object) -> object:
    """What two that are the same thing have in common: a tensor's memory, a text's words."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr() if value.layout is torch.strided else None
    return value if isinstance(value, str) else None


def _that_have(held: Iterable[tuple[str, object]], wanted: set[Any]) -> Iterator[str]:
    """The containers that have all of it, but for those around one that does."""
    known: dict[int, tuple[object, bool]] = {}

    def has(value: object) -> bool:
        """Whether it has all, or something in it does."""
        if id(value) not in known:
            known[id(value)] = value, False  # it may be in itself
            known[id(value)] = value, wanted <= set(contents(value, {}))
        return known[id(value)][1]

    def contents(value: object, within: dict[int, object]) -> Iterator[object]:
        if not isinstance(value, _CONTAINERS) or isinstance(value, str | bytes) or id(value) in within:
            return
        within[id(value)] = value
        for _, item in children(value):
            item = behind(item() if isinstance(item, weakref.ReferenceType) else item)
            yield _key(item)
            yield from contents(item, within) if not is_ours(item) else ()

    for place, value in held:
        if isinstance(value, _CONTAINERS) and not isinstance(value, str | bytes) and has(value):
            items = (behind(item) for _, item in children(value))
            if not any(has(item) for item in items if isinstance(item, _CONTAINERS)):
                yield place


def _record(value: Any, *, in_list: bool) -> tuple[str, int] | None:
    """The class and the number of attributes of what keeps state; None: it does not."""
    if is_ours(value):
        own = {*getattr(value, "__dict__", ()), *slots(value), *getattr(value, "_fields", ())}
        return type(value).__name__, len(own)
    if isinstance(value, tuple) and type(value).__module__.partition(".")[0] != "torch":
        if len({type(item) for item in value}) < 2 or (in_list and all(map(_is_data, value))):
            return None
        return f"<{type(value).__name__}>", len(value)
    if isinstance(value, types.FunctionType) and cells(value):
        return f"<{value.__qualname__}>", len(cells(value))
    if isinstance(value, functools.partial):
        return "<partial>", len(value.args) + len(value.keywords)
    if isinstance(value, types.SimpleNamespace):
        return "<SimpleNamespace>", len(vars(value))
    return None
