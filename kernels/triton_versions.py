"""Differences between versions of Triton: all in this file, so that one can be dropped at once."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any

import triton

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
# What each launch asks of `knobs.compilation`, since it is part of the key of a compilation. Only versions with which
# `make versions` has passed: with others every launch is Triton's own, and the machine code is not judged.
TESTED: Mapping[tuple[int, ...], tuple[str, ...]] = {
    **dict.fromkeys(((3, 6), (3, 7), (3, 8)), ("instrumentation_mode",)),
    (3, 9): ("instrumentation_mode", "fpsan_homomorphic_casts"),
}
KNOBS_OF_A_LAUNCH = TESTED.get(VERSION, ())
if max(TESTED) < VERSION:
    newest = ".".join(map(str, max(TESTED)))
    logging.getLogger(__name__).warning(
        "fusedreduce has been tested with triton up to %s; this is %s", newest, triton.__version__
    )


def settle_key(function: object, within: tuple[object, ...] = ()) -> None:
    """Makes the key by which Triton's cache knows a jit function one that does not depend on what was launched before.

    In it are the global constants of functions that it calls, but only of those that have a key already: so a kernel
    had one key where it was the first to be launched and another elsewhere, and a cache that another program, or
    another order of launches, had filled was of no use. Those that are called get theirs first here.

    Args:
        function: a jit function; anything else is left alone.
        within: those on the way to it, which it may call in turn; no set, as to hash one is to ask for its key.
    """
    if not isinstance(function, triton.JITFunction) or function in within:
        return
    if getattr(function, "hash", None) is not None:
        return
    for name in function.fn.__code__.co_names:
        settle_key(function.fn.__globals__.get(name), (*within, function))
    _ = function.cache_key


def attributes_of_constexprs(values: Mapping[int, object]) -> dict[tuple[int], list[Any]]:
    """The attributes that a launch passes for constexprs, which have none; they are part of Triton's cache key.

    From 3.7 on this is an empty list for each. 3.6 does so for strings only, which it parses as attributes: a string
    with a capital D or S in it would be read as one.

    Args:
        values: of constexprs, by position in the kernel's signature.

    Returns:
        An empty list per position.
    """
    return {(place,): [] for place, value in values.items() if isinstance(value, str) or VERSION >= (3, 7)}


def mend_interpreter() -> None:
    """Lets kernels run in the interpreters of 3.6 and 3.9 as they do in those between."""
    if VERSION < (3, 7):
        _take_scalars_as_ends()
    if VERSION == (3, 9):
        _take_combined_masks()


def _take_scalars_as_ends() -> None:
    """Loops may end at a scalar: an array of one element, on which 3.6 calls int(), which numpy refuses from 2.4 on."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: scalar.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index


def _take_combined_masks() -> None:
    """Masks may be made by `&`: of comparisons, which carry the dtype of what they compare, 3.9 makes integers."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    operate = interpreter.InterpreterBuilder.binary_op

    def operate_on_booleans(builder: Any, left: Any, right: Any, operation: Any) -> Any:
        result = operate(builder, left, right, operation)
        return interpreter.TensorHandle(result.data, triton.language.int1) if result.data.dtype == bool else result

    interpreter.InterpreterBuilder.binary_op = operate_on_booleans
