"""The wires, by name: the one place that knows them; what else has to know a wire asks here.

A wire of one's own is a `CastWire` or an `Encoding` in a module of one's own, and its name is where it lies, such as
"my_wire:TOP16": so every process finds it, and it is compared, logged and pickled as text.
"""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from .kernels.cast import CastWire
from .kernels.encodings import ENCODINGS, Encoding

if TYPE_CHECKING:  # the command line checks settings before anything imports torch
    import torch

NATIVE = "native"  # gradients travel in their own dtype
WIRES: Mapping[str, CastWire | Encoding | None] = {
    NATIVE: None,
    "bf16": CastWire("bfloat16"),
    "fp16": CastWire("float16"),
    **ENCODINGS,
}
PLAIN_WIRES = tuple(name for name in WIRES if name not in ENCODINGS)  # of elements, which backends add up


@functools.cache
def wire_format(wire: str) -> CastWire | Encoding | None:
    """What travels on a wire; one of the user's own is imported. None: gradients in their own dtype.

    Raises:
        ValueError: there is no such wire; says what to write.
    """
    if wire in WIRES:
        return WIRES[wire]
    module, _, name = wire.partition(":")
    if "," in wire and not module.isidentifier():
        several = tuple(wire.split(","))
        raise ValueError(f"unknown wire {wire!r}: for several, of which steps choose one, write wire={several!r}")
    if not module or not name:
        near = difflib.get_close_matches(wire.lower(), WIRES, 1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        own = "or 'MODULE:NAME' for one of your own"
        raise ValueError(f"unknown wire {wire!r}: use one of {_named(WIRES)}, {own}{meant}")
    line = f"write {name} = fusedreduce.CastWire(...), or fusedreduce.Encoding(...), in {module.replace('.', '/')}.py"
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the user's module raises
        came = f"{type(error).__name__}: {error}"
        raise ValueError(f"wire {wire!r} cannot be imported ({came}): {line}, in a folder of sys.path") from error
    if not isinstance(found, CastWire | Encoding):
        raise ValueError(f"wire {wire!r} is {found!r}, and no wire: {line}")
    return found


def check_wire(wire: object) -> None:
    """Raises ValueError, which says what to write, if `wire` is no wire's name."""
    if isinstance(wire, CastWire | Encoding):
        raise ValueError(f"a wire is given by its name: write wire='MODULE:NAME', where NAME = {wire!r} in MODULE.py")
    if not isinstance(wire, str):
        raise ValueError(f"unknown wire {wire!r}: use one of {_named(WIRES)}")
    wire_format(wire)


def is_own(wire: str) -> bool:
    """Whether it is the name of a wire of the user's own, which only the user's program may be able to import."""
    return wire not in WIRES and ":" in wire


def described(wire: str) -> str:
    """A wire as ranks compare it: its name, and what one of the user's own is."""
    if not is_own(wire):
        return wire
    found = wire_format(wire)
    return f"{wire} ({found.name if isinstance(found, Encoding) else wire_dtype(wire)})"


def like(wire: str) -> str:
    """For a wire of the user's own the built-in one of the same dtype or bits, which costs the same; else the name."""
    if not is_own(wire):
        return wire
    found = wire_format(wire)
    same = "bits" if isinstance(found, Encoding) else "dtype_name"
    return next(name for name, one in WIRES.items() if getattr(one, same, None) == getattr(found, same))


def cast_of(wire: str) -> CastWire | None:
    """How gradients are rounded to a wire of 16-bit elements; None: they are not, or are encoded."""
    found = wire_format(wire)
    return found if isinstance(found, CastWire) else None


def encoding_of(wire: str) -> Encoding | None:
    """How blocks of a wire are encoded; None: they are not."""
    found = wire_format(wire)
    return found if isinstance(found, Encoding) else None


def block_of(wire: str) -> tuple[int, int]:
    """(elements, bytes) of the smallest part of a wire: a block, or one element; of "native" none is known."""
    encoding = encoding_of(wire)
    return (1, 2) if encoding is None else (encoding.block_numel, encoding.block_bytes)


@functools.cache  # called for every bucket by the hook
def wire_dtype(wire: str) -> torch.dtype | None:
    """The dtype of a wire of elements; None: the gradients' own."""
    cast = cast_of(wire)
    return None if cast is None else cast.torch_dtype


def is_accumulated(wire: str) -> bool:
    """Whether accumulation="fp32" concerns the wire: its sum is rounded to nearest, as are its contributions."""
    cast = cast_of(wire)
    return cast is not None and cast.rounding is None


def any_accumulated(wires: Collection[str]) -> bool:
    """Whether accumulation="fp32" concerns one of `wires`."""
    return any(map(is_accumulated, set(wires)))


def any_encoded(wires: Collection[str]) -> bool:
    """Whether one of `wires` is encoded."""
    return any(encoding_of(wire) is not None for wire in set(wires))


def possible_wire(gradient: torch.Tensor, wire: str) -> str:
    """Returns `wire`; "native" for a gradient like `gradient` that it cannot encode."""
    encoding = encoding_of(wire)
    if encoding is None or (gradient.numel() >= encoding.block_numel and not gradient.is_complex()):
        return wire
    return NATIVE


def wire_for(gradient: torch.Tensor, wire: str) -> str:
    """Returns what a gradient like `gradient` travels on where all have one `wire`: "native" if it is not encoded.

    Gradients of one dimension (norms, biases) are not, unless a pattern of names says so.
    """
    return NATIVE if encoding_of(wire) is not None and gradient.ndim < 2 else possible_wire(gradient, wire)


def wire_bytes(gradient: torch.Tensor, wire: str) -> int:
    """Returns the bytes on the wire of a gradient like `gradient`; a complex one is sent as real pairs."""
    encoding = encoding_of(wire)
    if encoding is not None:
        return -(-gradient.numel() // encoding.block_numel) * encoding.block_bytes
    if gradient.is_complex():
        return 2 * gradient.numel() * (wire_dtype(wire) or gradient.dtype.to_real()).itemsize
    return gradient.numel() * (wire_dtype(wire) or gradient.dtype).itemsize


def _named(wires: Collection[str]) -> str:
    return ", ".join(map(repr, wires))
