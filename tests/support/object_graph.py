"""What an object holds, its attributes and theirs: what it still refers to, and how it differs from another.

Followed are attributes, slots, containers, closures, partial functions, bound methods, finalizers, and weak references
too. Not followed: modules, classes, handles of torch's hooks (numbered for the whole process), and what a test names.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

_VALUES = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, enum.Enum)
_NOT_FOLLOWED = (types.ModuleType, type, types.BuiltinFunctionType, RemovableHandle)
_NOTHING = object()
_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)


def walk(root: object, leaf: Callable[[object], str]) -> Iterator[tuple[str, object]]:
    """Each object that `root` holds, by the shortest way to it, such as ".engine.maker.wires"; values more than once.

    Args:
        root: where to begin.
        leaf: of what is a value too, and not followed, the text that it is compared by; else "".
    """
    seen: set[int] = set()
    held = []  # so that no address is used twice
    waiting: deque[tuple[str, object]] = deque([("", root)])
    while waiting:
        path, found = waiting.popleft()
        found = behind(found)
        if isinstance(found, _VALUES) or leaf(found):
            yield path, found
        elif id(found) not in seen:
            seen.add(id(found))
            held.append(found)
            yield path, found
            waiting.extend((path + name, child) for name, child in children(found))


def differences(one: object, other: object, leaf: Callable[[object], str]) -> dict[str, tuple[str, str]]:
    """By the shortest way, where two objects hold what is not alike; nothing that is behind that.

    Args:
        one: an object.
        other: one of the same kind.
        leaf: as of `walk`.
    """
    seen: set[tuple[int, int]] = set()
    held = []
    found: dict[str, tuple[str, str]] = {}
    waiting: deque[tuple[str, object, object]] = deque([("", one, other)])
    while waiting:
        path, here, there = waiting.popleft()
        here, there = behind(here), behind(there)
        text, other_text = (leaf(each) or _text(each) for each in (here, there))
        if text != other_text:
            found[path] = text, other_text
        elif (id(here), id(there)) not in seen and not isinstance(here, _VALUES) and not leaf(here):
            seen.add((id(here), id(there)))
            held.append((here, there))
            mine, theirs = dict(children(here)), dict(children(there))
            for name in dict.fromkeys([*mine, *theirs]):
                waiting.append((path + name, mine.get(name, _NOTHING), theirs.get(name, _NOTHING)))
    return found


def children(found: Any) -> Iterator[tuple[str, object]]:
    """What an object holds at first hand, each with its part of the way, such as ".wires" or "[0]"."""
    if isinstance(found, _NOT_FOLLOWED):
        return
    if isinstance(found, weakref.finalize):
        known: Any = weakref.finalize._registry.get(found)  # type: ignore[attr-defined]
        if known is not None:
            yield from ((".func", known.func), (".args", known.args), (".kwargs", known.kwargs))
    elif isinstance(found, weakref.ReferenceType):
        yield "()", found()
    elif isinstance(found, Mapping):
        for key, value in found.items():
            named = repr(key) if isinstance(key, _VALUES) else type(key).__name__
            yield from ((f"[{named}]", value), (f"[key {named}]", key))
        if "weak" in type(found).__module__:
            return  # of what holds weakly, the attributes are how it does that
    elif isinstance(found, list | tuple | set | frozenset | deque):
        names = getattr(found, "_fields", None)
        yield from ((f".{names[place]}" if names else f"[{place}]", value) for place, value in enumerate(found))
    elif isinstance(found, functools.partial):
        yield from ((".func", found.func), (".args", found.args), (".keywords", found.keywords))
    elif isinstance(found, types.MethodType):
        yield ".__self__", found.__self__
    elif isinstance(found, types.FunctionType):
        yield from ((f".{name}", held) for name, held in cells(found).items())
        yield from ((".__defaults__", found.__defaults__), (".__kwdefaults__", found.__kwdefaults__))
    elif isinstance(found, torch.Tensor):
        return
    yield from ((f".{name}", value) for name, value in vars(found).items()) if hasattr(found, "__dict__") else ()
    yield from ((f".{name}", value) for name, value in slots(found).items())


def slots(found: object) -> dict[str, object]:
    """What its slots hold, those of its class and of that one's bases, by name."""
    found_in: dict[str, object] = {}
    for cls in type(found).__mro__:
        for name, member in vars(cls).items() if "__slots__" in vars(cls) else ():
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # it is empty
                    found_in[name] = member.__get__(found)
    return found_in


def cells(found: types.FunctionType) -> dict[str, object]:
    """What a function took along from where it was made, by name."""
    closed = zip(found.__code__.co_freevars, found.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in closed if cell != types.CellType()}


def is_value(found: object) -> bool:
    """Whether it is nothing but a value."""
    return isinstance(found, _VALUES)


def behind(found: Any) -> object:
    """What a weak proxy stands for; anything else as it is."""
    if isinstance(found, _PROXIES):
        try:
            method: Any = found.__repr__
            return method.__self__
        except ReferenceError:
            return None
    return found


def _text(found: object) -> str:
    if isinstance(found, torch.Tensor):
        values = found.tolist() if found.layout is torch.strided else ""
        return f"{found.dtype} {tuple(found.shape)} {values}"
    if found is _NOTHING:
        return "nothing"
    return repr(found) if isinstance(found, _VALUES) else type(found).__name__


def same_values(one: object, other: object) -> bool:
    """Whether two results are equal, the tensors in them bit for bit."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_values, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other) if not isinstance(one, torch.Tensor) and not isinstance(other, torch.Tensor) else False
