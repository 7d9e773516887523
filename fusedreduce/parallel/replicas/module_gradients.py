"""The module's own gradients, as clipping, loss scaling and optimizers see them: what a reducer is to those elsewhere.

    backward of a scaled loss begins      Scaling.begin: Joined takes the scale off each replica's gradients
    end of a synchronised backward        ended: whose averages these are, or that there are none yet
    flush                                 landed: the same for a step that comes late

What comes out of the joined node has no loss scale on it, whatever backwards are added up. So two backwards of
different scales, or with and without one, may be accumulated. A loss that also reaches a parameter on another way than
through the replicas would leave its scale on there: that is found where the loss is scaled.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ...buckets.loss_scale import LossScale
from ...buckets.stats.grad_stats import Observed
from ...comm.local.group import LocalGroup
from ...config import ReduceConfig
from ...errors import FusedReduceError
from ...reducer import optimizer_hooks as optimizer_steps

_NAMES_SHOWN = 4


class Scaling:
    """The loss scales of the backwards that run now: of one, or of several threads'."""

    def __init__(self) -> None:
        self._begun: list[weakref.ref[_Begun]] = []

    def begin(self, scale: LossScale) -> None:
        """A backward of a loss times `scale` begins; called within it."""
        begun = _Begun(scale)
        self._begun.append(weakref.ref(begun, self._begun.remove))
        torch.autograd.Variable._execution_engine.queue_callback(begun)

    def running(self) -> LossScale | None:
        """That of the backward that runs in this thread; within one of a checkpoint's, that of the one around it."""
        begun = [one for held in reversed(self._begun) if (one := held()) is not None and not one.ended]
        task, thread = _task(), threading.get_ident()
        for is_it in (lambda one: one.task == task, lambda one: one.thread == thread):
            for one in filter(is_it, begun):
                return one.scale
        return None


class _Begun:
    """A backward that has begun. Only autograd keeps it, as what is called at its end: one that raises drops it."""

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
class Landed:
    """What `.grad` has been given last, in modes where averages come later than their own step.

    Attributes:
        withheld: nothing yet, as averages come later.
        landed_scale: that was on the loss whose averages came last.
        flushed: landings in `flush`.
        stepped: an optimizer has stepped since.
        scales: of the steps under way, in order.
    """

    withheld: bool = False
    landed_scale: LossScale | None = None
    flushed: int = 0
    stepped: bool = False
    scales: deque[LossScale | None] = field(default_factory=deque)


class RealGradients:
    """The gradients of the parameters that replicas have in common.

    Args:
        parameters: the module's own.
        names: theirs.
        scaling: of all backwards.

    Attributes:
        observed: measures and multiplies them. What reductions find out in passing is of the replicas'.
        steps: backwards that have reduced.
        late: for other modes than the synchronous one.
        local_backward_expected: replicas hold gradients that have not been reduced.
    """

    steps_in_backward = False
    shares_parameters = False

    def __init__(self, parameters: Sequence[torch.Tensor], names: Sequence[str], scaling: Scaling) -> None:
        self.parameters = tuple(parameters)
        self.names = tuple(names)
        self.scaling = scaling
        self.observed = Observed(self.parameters, self.names, ReduceConfig(), LocalGroup(1).communicator(0))
        self.steps = 0
        self.late = Landed()
        self.local_backward_expected = False

    # What the team tells

    def attend(self, *, late: bool) -> None:
        """Averages come later than their own step, or not."""
        self.late = Landed(flushed=self.late.flushed)
        if late:
            optimizer_steps.enter(self)
        else:
            optimizer_steps.leave(self)

    def ended(self, scale: LossScale | None, under_way: int, *, keeps: bool) -> None:
        """A backward has reduced.

        Args:
            scale: that was on its loss.
            under_way: steps whose averages have not come, with this one.
            keeps: each step's averages come as one, in order.
        """
        self.steps += 1
        late = self.late
        late.stepped, late.withheld, late.landed_scale = False, False, None
        if keeps:
            late.scales.append(scale)
            late.withheld = not self._land(under_way)

    def landed(self, under_way: int) -> None:
        """A step has landed in `flush`."""
        self.late.flushed += 1
        self.late.withheld = False
        self._land(under_way)

    def drop_stepped(self) -> None:
        """Before averages are added to `.grad`: what an optimizer has stepped with is not wanted again."""
        if self.late.stepped:
            for one in self.parameters:
                one.grad = None
        self.late.stepped = False

    # What is asked of a reducer

    def before_optimizer_step(self, *, closure: bool) -> None:
        """An optimizer of these parameters is about to step."""
        self.late.stepped = True

    def check_finalized(self) -> None:
        """Every backward has ended when it returns."""

    def begin_scaled(self, scale: LossScale) -> None:
        """A backward of a loss times `scale` begins."""
        self.scaling.begin(scale)

    def check_loss(self, loss: torch.Tensor) -> None:
        """Raises if a backward from `loss` reaches a parameter on another way than through the replicas.

        Raises:
            FusedReduceError: with the names of those, and what to do.
        """
        found = _reached_around(loss, {id(one): name for one, name in zip(self.parameters, self.names, strict=True)})
        if found:
            raise FusedReduceError(
                f"the loss reaches {len(found)} parameters of this DataParallel on another way than through its "
                f"replicas, {', '.join(found[:_NAMES_SHOWN])}: by a penalty on weights, say, or a call of the module "
                "itself. The loss scale would stay on there. Run the backward of that term by itself, without "
                "scaler.scale: what comes out of DataParallel has no scale on it, and they add up"
            )

    def _land(self, under_way: int) -> bool:
        landed, late = False, self.late
        while len(late.scales) > under_way:
            late.landed_scale, landed = late.scales.popleft(), True
        return landed


def _reached_around(loss: torch.Tensor, names: dict[int, str]) -> list[str]:
    """Names of the parameters that a graph reaches, but for the part that stands for replicas (see Joined)."""
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
