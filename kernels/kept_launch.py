"""Launches of a kernel that an earlier launch has compiled: what `JITFunction.run` does last.

First it binds arguments, looks at their types and makes a key of them, 12 us in all; but launches of one Variant differ
in addresses and numbers alone. What else it asks of its settings is asked here too, and where the answer is another
than at the first launch, or somebody wants to see launches, `launch` declines. (That the constants which a kernel was
compiled with have not changed is not asked: they are this package's own.)
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import triton
from triton.compiler import CompiledKernel

from .triton_versions import KNOBS_OF_A_LAUNCH

_driver, _runtime, _compilation = triton.runtime.driver, triton.knobs.runtime, triton.knobs.compilation


class KeptLaunch:
    """A compiled kernel on the device that was current when it was launched.

    Args:
        kernel: the jit function.
        compiled: what its launch returned.
        constants: values of the constexprs, in the order of the kernel's last parameters.
    """

    @staticmethod
    def serves(compiled: object) -> bool:
        """Whether such a launch can be kept: by a version of Triton that is known, and not in its interpreter."""
        return bool(KNOBS_OF_A_LAUNCH) and isinstance(compiled, CompiledKernel)

    def __init__(self, kernel: Any, compiled: Any, constants: Iterable[object]) -> None:
        self._kernel = kernel
        self._compiled = compiled  # from Triton 3.8 on its module is unloaded with it
        self._run, self._function, self._metadata = compiled.run, compiled.function, compiled.packed_metadata
        self._constants = tuple(constants)
        self._driver = _driver.active
        self._device = self._driver.get_current_device()
        self._of_compilation = operator.attrgetter(*KNOBS_OF_A_LAUNCH)
        self._settings = self._asked_settings()

    def launch(self, programs: int, arguments: Sequence[object]) -> bool:
        """Launches on the current stream of that device, which has to be the current one.

        Args:
            programs: how many.
            arguments: those that are no constexprs.

        Returns:
            False if nothing was launched, because `JITFunction.run` is wanted.
        """
        driver = _driver.active
        if driver is not self._driver or self._settings != self._asked_settings() or _is_watched(self._kernel):
            return False
        stream = driver.get_current_stream(self._device)
        self._run(
            programs, 1, 1, stream, self._function, self._metadata, None, None, None, *arguments, *self._constants
        )
        return True

    def _asked_settings(self) -> tuple[object, ...]:
        return self._kernel.debug or _runtime.debug, self._of_compilation(_compilation)


def _is_watched(kernel: Any) -> bool:
    """Whether there are hooks: a single function, or a chain of some."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return bool(
        getattr(enter, "calls", enter)
        or getattr(leave, "calls", leave)
        or kernel.pre_run_hooks
        or getattr(_runtime, "add_stages_inspection_hook", None)
    )
