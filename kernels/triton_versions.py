"""Where Triton 3.6 differs from later versions in what the kernels need: all of it, so that it can go at once."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import triton

BEFORE_3_7 = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)


def attributes_of_constexprs(values: Mapping[int, object]) -> dict[tuple[int], list[Any]]:
    """What a launch writes down as attributes of constexprs, which have none; keys of Triton's cache hold it.

    From 3.7 on an empty list for each. Before that for strings only, each being taken for a description of attributes;
    one with a capital D or S in it would be read as one.

    Args:
        values: of constexprs, by place in the kernel's signature.
    """
    return {(place,): [] for place, value in values.items() if isinstance(value, str) or not BEFORE_3_7}


def mend_interpreter() -> None:
    """Has the interpreter of 3.6 take a scalar as a loop's end, as that of 3.7 does.

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
