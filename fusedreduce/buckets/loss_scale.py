"""LossUnits: which unit gradients are in, scaled by a loss scaler or not, and what takes the scale off.

    a backward of a scaled loss begins   begin_scaled(scale); the unit belongs to that backward, whatever else is called
    local backward (no_sync)             gradients stay here, and keep the scale
    synchronised backward                the scale stays on during the wire and comes off in unpack

So what a synchronised backward leaves is unscaled, and another backward would add scaled gradients to it: that is an
error, found before anything is packed. Gradients that wait here in one scale when the next one comes are brought to
it, on the device.

Bookkeeping alone, but for gradients that were zeroed in place: that they are zero only their values say, and the host
waits for those. `zero_grad(set_to_none=True)`, torch's default, costs nothing.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import FusedReduceError
from .deferred_errors import in_backward
from .exchange import scalar
from .gradient_table import GradientTable
from .tensors import any_gradient


@dataclass(frozen=True, eq=False)
class LossScale:
    """One value of a loss scale. The same object as long as the value is the same.

    Args:
        scale: fp32, one element on a device.
        inverse: fp32, one element, its reciprocal as the scaler rounds it.
    """

    scale: torch.Tensor
    inverse: torch.Tensor

    @classmethod
    def of(cls, scale: torch.Tensor) -> LossScale:
        """Keeps `scale`, fp32, one element on a device; its reciprocal is the one that torch's unscale_ takes."""
        return cls(scale, scale.double().reciprocal().float())


class Unscaling:
    """What takes one step's loss scale off in unpack.

    Args:
        scale: that is on it; None: none.
    """

    def __init__(self, scale: LossScale | None) -> None:
        self.scale = scale
        self._factors: dict[tuple[torch.dtype, torch.device, float], torch.Tensor] = {}

    def factor(self, dtype: torch.dtype, device: torch.device, split: float) -> torch.Tensor | None:
        """The scale's inverse divided by `split`, one element of `dtype`; None: nothing is to come off."""
        if self.scale is None:
            return None if split == 1.0 else scalar(1.0 / split, dtype, device)
        key = (dtype, device, split)
        if key not in self._factors:
            self._factors[key] = self.scale.inverse.reshape(1).to(device, dtype) / split
        return self._factors[key]


class _Unit(enum.Enum):
    UNSCALED = "unscaled"  # as a reduction has left them, or of a scale that nobody told us
    LOCAL = "local"  # unscaled, and this rank's own
    NOTHING = "nothing"  # no gradient is there, or zeros only


class LossUnits:
    """The unit of the gradients of some parameters.

    Args:
        parameters: theirs.
        table: measures and multiplies them.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], table: GradientTable) -> None:
        self._parameters = parameters
        self._table = table
        self._scalers: dict[int, weakref.ref[object]] = {}
        self._running: LossScale | None = None  # the backward that runs now
        self._stays = False  # what it makes
        self._coming: LossScale | _Unit | None = None  # of this synchronised step's gradients; None: none has come
        self._held: LossScale | _Unit = _Unit.UNSCALED  # of what is there
        # Of what was there when it began: that it was local, and else, if unscaled, the largest absolute value.
        self._local = False
        self._largest: torch.Tensor | None = None

    @property
    def attached(self) -> bool:
        """Whether a loss scaler takes part."""
        return bool(self._scalers)

    def attach(self, scaler: object) -> None:
        """`scaler` takes part as long as it lives."""
        key, scalers = id(scaler), self._scalers
        scalers[key] = weakref.ref(scaler, lambda _: scalers.pop(key, None))

    def detach(self, scaler: object) -> None:
        """`scaler` takes part no more."""
        self._scalers.pop(id(scaler), None)

    def scalers(self) -> list[object]:
        """Those that take part."""
        return [scaler for held in list(self._scalers.values()) if (scaler := held()) is not None]

    def begin_scaled(self, scale: LossScale, *, stays: bool) -> None:
        """A backward of a loss times `scale` begins; called within it, before it has made any gradient.

        Args:
            scale: its loss scale.
            stays: nothing is reduced: gradients, if any come here, stay on this rank.
        """
        self._look()
        if (
            self._held is _Unit.NOTHING
            and self._coming is None
            and self._running is None
            and any_gradient(self._parameters)
        ):
            self._held = _Unit.LOCAL  # of a local backward that came to no parameter with a hook
        self._largest, self._local = None, self._held is _Unit.LOCAL
        if self._held is _Unit.UNSCALED:
            self._largest = self._table.measure().total[1]
        elif isinstance(self._held, LossScale) and self._held is not scale:
            ratio = scale.scale.reshape(1) * self._held.inverse.reshape(1)
            self._table.multiply(ratio)
            self._held = scale
        self._stays = stays
        self._running = scale
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def arm(self) -> None:
        """A synchronised backward may come, in whatever unit."""
        self._coming = None
        self._settle()

    def new_forward(self) -> None:
        """Between two backwards."""
        self._settle()

    def note_backward(self, *, first_output: bool = False) -> None:
        """A synchronised backward has come to an output of forward, or to a gradient.

        Args:
            first_output: to an output, before any gradient of this step: it may be an autograd.grad, which leaves none.

        Raises:
            FusedReduceError: a step of several backwards, only some of which are scaled; or see `reduced_next`.
        """
        if not self._scalers:
            return
        came = self._running or _Unit.UNSCALED
        if first_output or self._coming is None:
            self._coming = came
        elif self._coming is not came:
            if isinstance(came, LossScale) and isinstance(self._coming, LossScale):
                raise FusedReduceError("the loss scale has changed within one step: call update() after its last one")
            came_text, had_text = ("scaled", "unscaled") if self._running else ("unscaled", "scaled")
            raise FusedReduceError(_mixed(came_text, had_text, _RESET))
        if not first_output:
            self.reduced_next()

    def reduced_next(self) -> None:
        """A synchronised backward is about to be packed.

        Raises:
            FusedReduceError: it has added to gradients in another unit.
        """
        if not self.attached:
            return
        if self.scaled_step():
            self._judge(_RESET)
        elif isinstance(self._held, LossScale):
            raise FusedReduceError(_mixed("unscaled", "scaled", _RESET))

    def added_here(self) -> None:
        """A backward has added to the gradients, and they stay as they are.

        Raises:
            FusedReduceError: they are in another unit than what was added.
        """
        if not self.attached:
            return
        if self._running is not None:
            self._judge("")
            self._held = self._running
        elif isinstance(self._held, LossScale):
            raise FusedReduceError(_mixed("unscaled", "scaled", ""))
        else:
            self._held = _Unit.LOCAL

    def unscaling(self) -> Unscaling:
        """What takes the scale off the synchronised step under way."""
        return Unscaling(self._coming if isinstance(self._coming, LossScale) else None)

    def scaled_step(self) -> bool:
        """Whether the synchronised step under way is of a scaled loss."""
        return isinstance(self._coming, LossScale)

    def reduced(self) -> None:
        """A synchronised backward is done, or was given up on the way: what is there is unscaled, in part at least."""
        self._held = _Unit.UNSCALED

    def unscaled_now(self) -> bool:
        """Whether no gradient waits here with its scale on."""
        return not isinstance(self._held, LossScale)

    def _end(self) -> None:
        running, self._running = self._running, None
        # With few hooks not every gradient is told of.
        if self._stays and running is not None and self._held is _Unit.NOTHING and any_gradient(self._parameters):
            self._held = running

    def _settle(self) -> None:
        if not in_backward():
            self._running = None  # that backward has raised
        self._look()

    def _look(self) -> None:
        if self.attached and not any_gradient(self._parameters):
            self._held = _Unit.NOTHING

    def _judge(self, remedy: str) -> None:
        """What was there, unscaled, when a scaled backward began must have been zeros.

        Values are looked at where a reduction has left them, the same on every rank. What ranks have each for
        themselves is refused whatever it is: else one would raise, and the others wait.
        """
        largest, self._largest = self._largest, None
        local, self._local = self._local, False
        if local or (largest is not None and largest.item() != 0.0):  # NaN too
            raise FusedReduceError(_mixed("scaled", "unscaled", remedy))
        if largest is not None:
            self._held = _Unit.NOTHING


# Nothing has been packed, but the reducer waits for the rest of that backward.
_RESET = "reset() on every rank and "


def _mixed(came: str, had: str, remedy: str) -> str:
    return (
        f"a backward has added {came} gradients to {had} ones (a synchronised backward takes the loss scale off), and "
        f"the sum is worth nothing: call {remedy}zero_grad() before the next step. Every backward of a step takes "
        "scaler.scale(loss); to accumulate over several, run all but the last one under no_sync()"
    )
