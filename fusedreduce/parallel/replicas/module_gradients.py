"""ModuleGradients: gradients of the user's module, with the interface that clipping and loss scaling use of a Reducer.

    backward of a scaled loss begins      Scaling.begin_backward: Joined divides each replica's gradients by the scale
    end of a synchronised backward        end_backward: which step's sums `.grad` holds now, if any
    flush                                 end_flushed_step: the same for a step that was in flight

Gradients that leave the joined node are unscaled. So backwards with different loss scales, or with and without one,
can be accumulated. If a loss reaches a parameter not only through the replicas, that part of its gradient would stay
scaled: `check_loss` raises when such a loss is scaled.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ...buckets.loss_scale import LossScale
from ...buckets.parameters import Parameters
from ...buckets.stats.grad_stats import GradStats
from ...buckets.step_feature import Ended
from ...comm.group import Group
from ...comm.local.group import LocalGroup
from ...config import ReduceConfig
from ...errors import FusedReduceError
from ...reducer import optimizer_hooks
from ...reducer.modes.mode import DelayedAverages

_NAMES_SHOWN = 4


class Scaling:
    """The loss scales of the backwards that run now, in any thread."""

    def __init__(self) -> None:
        self._begun: list[weakref.ref[_Begun]] = []

    def begin_backward(self, scale: LossScale) -> None:
        """Called within a backward of a loss times `scale`, when it begins."""
        begun = _Begun(scale)
        self._begun.append(weakref.ref(begun, self._begun.remove))
        torch.autograd.Variable._execution_engine.queue_callback(begun)

    def running(self) -> LossScale | None:
        """The loss scale of the backward that runs in this thread; inside a checkpoint's, of the one around it."""
        begun = [one for held in reversed(self._begun) if (one := held()) is not None and not one.ended]
        task, thread = _task(), threading.get_ident()
        for is_it in (lambda one: one.task == task, lambda one: one.thread == thread):
            for one in filter(is_it, begun):
                return one.scale
        return None


class _Begun:
    """A backward that has begun. Autograd alone references it, as a final callback, and drops it on an error."""

    def __init__(self, scale: LossScale) -> None:
        self.scale = scale
        self.task = _task()
        self.thread = threading.get_ident()
        self.ended = False

    def __call__(self) -> None:
        self.ended = True


def _task() -> int:
    number: int = torch._C._current_graph_task_id()
    return number


@dataclass
class DelayedSums(DelayedAverages):
    """What `.grad` holds, in modes with delayed averages.

    Attributes:
        stepped: an optimizer has stepped since averages were applied.
        scales: loss scales of the steps in flight, in order.
    """

    stepped: bool = False
    scales: deque[LossScale | None] = field(default_factory=deque)


class ModuleGradients:
    """The gradients of the user's module.

    Args:
        parameters: the module's parameters that require a gradient.
        names: their names.
        scaling: loss scales of the backwards that run.

    Attributes:
        observed: measures and scales these gradients. (Statistics of the reductions are in the replicas' reducers.)
        steps: number of backwards that were reduced.
        late: state of modes with delayed averages.
        local_backward_expected: replicas have stashed gradients that are not reduced.
    """

    steps_in_backward = False

    def __init__(self, parameters: Sequence[torch.Tensor], names: Sequence[str], scaling: Scaling) -> None:
        self.parameters = tuple(parameters)
        self.names = tuple(names)
        self.scaling = scaling
        known = Parameters(self.parameters, self.names)
        alone = Group(LocalGroup(1).communicator(0))
        self.observed = GradStats(known, ["native"] * len(self.names), ReduceConfig(), alone)
        self.steps = 0
        self.late = DelayedSums()
        self.local_backward_expected = False
        self.note_clip: Callable[[Callable[[], torch.Tensor]], None]  # see `Reducer.note_clip`; set by what sums

    # Called by the runner

    def set_delayed(self, *, late: bool) -> None:
        """Sets whether averages come later than their own step, and forgets the steps in flight."""
        self.late = DelayedSums(flushed=self.late.flushed)
        if late:
            optimizer_hooks.enter(self)
        else:
            optimizer_hooks.leave(self)

    def end_backward(self, scale: LossScale | None, steps_in_flight: int) -> None:
        """Called when a backward has been reduced.

        Args:
            scale: of its loss.
            steps_in_flight: where each step's averages are applied as a whole, in order, later (BoundedStaleness): the
                number of steps in flight, this one included; else 0.
        """
        self.steps += 1
        late = self.late
        late.stepped, late.latest = False, Ended(0)
        if steps_in_flight:
            late.scales.append(scale)
            late.latest = self._applied(steps_in_flight)

    def end_flushed_step(self, steps_in_flight: int) -> None:
        """Called when `flush` has applied a step; `steps_in_flight` steps are still in flight."""
        self.late.flushed += 1
        self.late.latest = self._applied(steps_in_flight)._replace(number=0)

    def drop_stepped(self) -> None:
        """Called before averages are added to `.grad`: drops gradients that an optimizer has stepped with."""
        if self.late.stepped:
            for one in self.parameters:
                one.grad = None
        self.late.stepped = False

    # Methods of a Reducer that optimizers, clipping and loss scaling call

    def before_optimizer_step(self, *, closure: bool) -> None:
        """Called before an optimizer of these parameters steps."""
        self.late.stepped = True

    def check_finalized(self) -> None:
        """Does nothing: a backward returns when all gradients are reduced."""

    def begin_scaled(self, scale: LossScale) -> None:
        """Called when a backward of a loss times `scale` begins."""
        self.scaling.begin_backward(scale)

    def check_loss(self, loss: torch.Tensor) -> None:
        """Raises if a backward from `loss` would reach a parameter not only through the replicas.

        Raises:
            FusedReduceError: with the names of such parameters, and what to do.
        """
        found = _reached_around(loss, {id(one): name for one, name in zip(self.parameters, self.names, strict=True)})
        if found:
            raise FusedReduceError(
                f"the loss reaches {len(found)} parameters of this DataParallel not only through its replicas, "
                f"{', '.join(found[:_NAMES_SHOWN])}: by a weight penalty, say, or a call of `.module` itself. That "
                "part of their gradients would stay scaled. Run the backward of that term separately, without "
                "scaler.scale(): gradients from DataParallel are unscaled, so the two add up"
            )

    def _applied(self, steps_in_flight: int) -> Ended:
        """How the step that was applied last has ended, as all but `steps_in_flight` are."""
        ended = Ended(None)
        while len(self.late.scales) > steps_in_flight:
            ended = Ended(0, scale=self.late.scales.popleft())
        return ended


def _reached_around(loss: torch.Tensor, names: dict[int, str]) -> list[str]:
    """Names of the parameters that a graph reaches without passing the node of the replicas (Joined)."""
    found: dict[str, None] = {}
    stack, seen = [loss.grad_fn], {loss.grad_fn}
    while stack:
        node = stack.pop()
        if node is None:
            continue
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in names:
            found[names[id(variable)]] = None
        behind = getattr(node, "joins", 0)
        for below, _ in node.next_functions[behind:]:
            if below not in seen:
                seen.add(below)
                stack.append(below)
    return list(found)
