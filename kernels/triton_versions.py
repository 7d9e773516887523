"""Differences between versions of Triton: all in this file, so that one can be dropped at once."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import triton

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
BEFORE_3_7 = VERSION < (3, 7)
# What each launch asks of `knobs.compilation`, since it is part of the key of a compilation. Only versions with which
# tests/kernels/test_kept_launch.py has passed; with others every launch is Triton's own.
_ASKED: Mapping[tuple[int, ...], tuple[str, ...]] = {
    **dict.fromkeys(((3, 6), (3, 7), (3, 8)), ("instrumentation_mode",)),
    (3, 9): ("instrumentation_mode", "fpsan_homomorphic_casts"),
}
KNOBS_OF_A_LAUNCH = _ASKED.get(VERSION, ())


def attributes_of_constexprs(values: Mapping[int, object]) -> dict[tuple[int], list[Any]]:
    """The attributes that a launch passes for constexprs, which have none; they are part of Triton's cache key.

    From 3.7 on this is an empty list for each. 3.6 does so for strings only, which it parses as attributes: a string
    with a capital D or S in it would be read as one.

    Args:
        values: of constexprs, by position in the kernel's signature.

    Returns:
        An empty list per position.
    """
    return {(place,): [] for place, value in values.items() if isinstance(value, str) or not BEFORE_3_7}


def mend_interpreter() -> None:
    """Lets the interpreter of 3.6 take a scalar as the end of a loop, as that of 3.7 does.

    A scalar is an array of one element there, and 3.6 calls int() on it, which numpy refuses from 2.4 on.
    """
    if not BEFORE_3_7:
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: scalar.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index
