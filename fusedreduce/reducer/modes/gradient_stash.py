"""What `.grad` holds and no backward of this step has made: kept apart, in modes where averages come later.

A landing writes averages of an earlier step into `.grad`. Where they are still there when the next backward begins
(gradients accumulate over several steps), they are all ranks' already, and must not be sent again:

    first backward since a step has ended    take: `.grad` is set aside, and None
    end of the synchronised backward         what the backwards made is sent; put back: `.grad` = aside + what landed

Zeroed gradients are None, or zeros that are added: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...buckets.deferred_errors import in_backward
from ...buckets.tensors import any_gradient


class GradientStash:
    """The gradients of one reducer that are set aside.

    Args:
        parameters: all of them.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._held: list[torch.Tensor | None] | None = None
        self._taken = False
        self._made = False  # a backward has made gradients since, as far as is known
        self.stepped = False  # an optimizer has, with what has landed last

    def stash(self) -> None:
        """A backward begins: unless it is not the first since a step has ended, sets aside what is there.

        If it makes no gradient (an autograd.grad), that is undone when it ends.
        """
        if self._taken:
            if any_gradient(self._parameters):
                self._made = True
            elif self._made:
                self._held = None  # the user has zeroed, and meant all of it
        else:
            self._taken = True
            if any_gradient(self._parameters):
                self._held = [parameter.grad for parameter in self._parameters]
                for parameter in self._parameters:
                    parameter.grad = None
        if in_backward():
            torch.autograd.Variable._execution_engine.queue_callback(self._settle)

    def keep(self) -> None:
        """What is there now has been made by backwards of this step, whether any of them was told of or not."""
        self._taken = True
        self._made = any_gradient(self._parameters)

    def stash_unused(self) -> None:
        """As `stash`, between two steps: what an optimizer has stepped with is not wanted again."""
        if self.stepped:
            for parameter in self._parameters:
                parameter.grad = None
        self.stash()

    def put_back(self) -> None:
        """A step has ended, or an earlier one has landed: adds what was set aside to what is there by now."""
        held, self._held, self._taken, self.stepped = self._held, None, False, False
        self._made = False
        for parameter, aside in zip(self._parameters, held or (), strict=False):
            landed = parameter.grad
            if aside is None:
                continue
            if landed is None:
                parameter.grad = aside
            elif aside.layout is torch.strided:
                parameter.grad = aside.add_(landed)
            else:
                parameter.grad = aside + landed

    def drop(self) -> None:
        """A step was given up."""
        self._held, self._taken, self._made = None, False, False

    def local(self) -> bool:
        """Whether backwards have made gradients since a step has ended."""
        return self._taken and any_gradient(self._parameters)

    def _settle(self) -> None:
        if self._taken and any_gradient(self._parameters):
            self._made = True
        elif self._taken and not self._made:
            self.put_back()
