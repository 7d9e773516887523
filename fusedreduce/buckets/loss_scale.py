"""LossScaleState: whether gradients are multiplied by a loss scale, by which one, and how unpack removes it.

    a backward of a scaled loss begins   begin_scaled(scale): holds for that backward, whatever else is called
    local backward (no_sync)             gradients stay on this rank, and keep the scale
    synchronised backward                gradients travel scaled, and unpack removes the scale

So a synchronised backward leaves unscaled gradients, and another backward would add scaled ones to them: that is an
error, found before anything is packed. Gradients of local backwards are brought to the next backward's scale, on the
device, if it is another one.

All this is bookkeeping on the host, but for gradients that were zeroed in place: only their values say that they are
zero, and the host waits for those. `zero_grad(set_to_none=True)`, torch's default, costs nothing.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ..errors import FusedReduceError
from ..kernels.current_stream import current_stream
from .deferred_errors import in_backward
from .gradient_table import GradientTable
from .parameters import Parameters
from .tensors import any_gradient


@dataclass(frozen=True, eq=False)
class LossScale:
    """One value of a loss scale; the same object as long as the value is the same.

    Args:
        scale: fp32, one element on a device.
        inverse: fp32, one element, its reciprocal as the scaler rounds it.
    """

    scale: torch.Tensor
    inverse: torch.Tensor
    _factors: dict[object, torch.Tensor] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, scale: torch.Tensor) -> LossScale:
        """Keeps `scale`, fp32, one element on a device; its reciprocal is the one that torch's unscale_ takes."""
        return cls(scale, scale.double().reciprocal().float())

    def factor(self, dtype: torch.dtype, device: torch.device, split: float = 1.0) -> torch.Tensor:
        """What removes the scale from a bucket, and at the same time its split.

        Args:
            dtype: compute dtype of the bucket.
            device: of the bucket.
            split: see `data_path.divisor_split`.

        Returns:
            One element of `dtype` on `device`, the scale's inverse divided by `split`.
        """
        # By stream: wrappers that have one scaler may end their steps on several, and nothing orders those.
        key = (dtype, device, split, current_stream(device) if device.type == "cuda" else None)
        if key not in self._factors:
            self._factors[key] = self.inverse.reshape(1).to(device, dtype) / split
        return self._factors[key]


class _Unit(enum.Enum):
    UNSCALED = "unscaled"  # left by a reduction, or by a backward whose scale is not known
    LOCAL = "local"  # unscaled, and this rank's own
    NOTHING = "nothing"  # no gradient exists, or only zeros


class LossScaleState:
    """The loss scale, if any, that is on the gradients of some parameters.

    Args:
        parameters: the parameters.

    Attributes:
        attached: the loss scalers that are attached, by id.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self.attached: dict[int, weakref.ref[object]] = {}
        self._running: LossScale | None = None  # of the backward that runs now
        self._of_step: LossScale | _Unit | None = None  # of this synchronised step's gradients; None: none exists yet
        self._of_gradients: LossScale | _Unit = _Unit.UNSCALED  # of what `.grad` holds
        # Of `.grad` when that backward began: it was local; else, if unscaled, its largest absolute value.
        self._local = False
        self._largest: torch.Tensor | None = None

    @functools.cached_property
    def table(self) -> GradientTable:
        """Measures or multiplies all gradients as they are now; made where somebody asks."""
        return GradientTable(self._parameters)

    def attach(self, scaler: object) -> None:
        """Attaches `scaler` for as long as it lives."""
        key, scalers = id(scaler), self.attached
        scalers[key] = weakref.ref(scaler, lambda _: scalers.pop(key, None))

    def detach(self, scaler: object) -> None:
        """Detaches `scaler`."""
        self.attached.pop(id(scaler), None)

    def scalers(self) -> list[object]:
        """The attached loss scalers."""
        return [scaler for reference in list(self.attached.values()) if (scaler := reference()) is not None]

    def begin_scaled(self, scale: LossScale) -> None:
        """Notes that a backward of a loss times `scale` begins; called within it, before it has made any gradient.

        Args:
            scale: its loss scale.
        """
        self._note_if_none()
        if (
            self._of_gradients is _Unit.NOTHING
            and self._of_step is None
            and self._running is None
            and any_gradient(self._parameters.tensors)
        ):
            self._of_gradients = _Unit.LOCAL  # set by the user
        self._largest, self._local = None, self._of_gradients is _Unit.LOCAL
        if self._of_gradients is _Unit.UNSCALED:
            self._largest = self.table.measure().total[1]
        elif isinstance(self._of_gradients, LossScale) and self._of_gradients is not scale:
            ratio = scale.scale.reshape(1) * self._of_gradients.inverse.reshape(1)
            self.table.multiply(ratio)
            self._of_gradients = scale
        self._running = scale
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def arm(self) -> None:
        """Called before a synchronised backward, scaled or not."""
        self._of_step = None
        if self.attached:
            self.new_forward()

    def new_forward(self) -> None:
        """Called between two backwards."""
        if not in_backward():
            self._running = None  # the backward has raised
        self._note_if_none()

    @contextlib.contextmanager
    def own_set_aside(self) -> Iterator[None]:
        """Context of a step on a rank without inputs (join), in which there are no gradients."""
        own = self._of_step, self._of_gradients
        self._of_step, self._of_gradients = None, _Unit.NOTHING
        try:
            yield
        finally:
            self._of_step, self._of_gradients = own

    def note_backward(self, *, first_output: bool = False) -> None:
        """Notes that a synchronised backward has reached an output of forward, or a gradient.

        Args:
            first_output: an output, before any gradient of this step: it may be an autograd.grad, which leaves none.

        Raises:
            FusedReduceError: only some of a step's backwards are scaled, or by different scales; or as
                `check_before_reduction`.
        """
        if not self.attached:
            return
        unit = self._running or _Unit.UNSCALED
        if first_output or self._of_step is None:
            self._of_step = unit
        elif self._of_step is not unit:
            if isinstance(unit, LossScale) and isinstance(self._of_step, LossScale):
                raise FusedReduceError(
                    "the loss scale has changed between two backwards of one step, whose sum is worth nothing: call "
                    "scaler.update() once per step, after its last backward. Now reset() on every rank and zero_grad()"
                )
            added, present = ("scaled", "unscaled") if self._running else ("unscaled", "scaled")
            raise FusedReduceError(_mixed(added, present, _RESET))
        if not first_output:
            self.check_before_reduction()

    def check_before_reduction(self) -> None:
        """Checks, before anything is packed, that a synchronised backward has not mixed scaled and unscaled gradients.

        Raises:
            FusedReduceError: it has.
        """
        if not self.attached:
            return
        if isinstance(self._of_step, LossScale):
            self._check_zeros(_RESET)
        elif isinstance(self._of_gradients, LossScale):
            raise FusedReduceError(_mixed("unscaled", "scaled", _RESET))

    def added_here(self) -> None:
        """Notes that a backward has added to gradients that are not reduced now.

        Raises:
            FusedReduceError: it has mixed scaled and unscaled gradients.
        """
        if not self.attached:
            return
        if self._running is not None:
            self._check_zeros("")
            self._of_gradients = self._running
        elif isinstance(self._of_gradients, LossScale):
            raise FusedReduceError(_mixed("unscaled", "scaled", ""))
        else:
            self._of_gradients = _Unit.LOCAL

    def scale_of_step(self) -> LossScale | None:
        """The loss scale of the current synchronised step; None: its gradients are not scaled."""
        return self._of_step if isinstance(self._of_step, LossScale) else None

    def reduced(self) -> None:
        """Notes that a synchronised step is done, or was given up: gradients are unscaled, in part at least."""
        self._of_gradients = _Unit.UNSCALED

    def unscaled_now(self) -> bool:
        """Whether no local gradient has a loss scale on."""
        return not isinstance(self._of_gradients, LossScale)

    def _end(self) -> None:
        self._running = None

    def _note_if_none(self) -> None:
        if self.attached and not any_gradient(self._parameters.tensors):
            self._of_gradients = _Unit.NOTHING

    def _check_zeros(self, remedy: str) -> None:
        """Checks that unscaled gradients that existed when a scaled backward began were zeros.

        Values are read only where a reduction has left them, the same on every rank. Gradients that are each rank's own
        are refused whatever they are: else one rank could raise while the others wait.
        """
        largest, self._largest = self._largest, None
        local, self._local = self._local, False
        if local or (largest is not None and largest.item() != 0.0):  # NaN too
            raise FusedReduceError(_mixed("scaled", "unscaled", remedy))
        if largest is not None:
            self._of_gradients = _Unit.NOTHING


# Nothing has been packed, but the reducer still waits for the rest of that backward.
_RESET = "reset() on every rank and "


def _mixed(added: str, present: str, remedy: str) -> str:
    return (
        f"a backward has added {added} gradients to {present} ones (a synchronised backward removes the loss scale), "
        f"so the sum is worth nothing: call {remedy}zero_grad() before the next step. Call scaler.scale(loss) for "
        "every backward of a step, and to accumulate over several run all but the last one under no_sync()"
    )
