"""GradientStash: what `.grad` holds and no backward of this step has made, in modes where averages come later.

Averages of an earlier step are written into `.grad`. If they are still there when the next backward begins (gradients
accumulate over several steps), they are averages over all ranks already, and must not be reduced again:

    first backward since a step has ended    stash: `.grad` is stashed, and set to None
    end of the synchronised backward         what the backwards made is reduced; put_back: `.grad` = stash + averages

Zeroed gradients need no stash: they are None, or zeros, which add nothing.
"""

from __future__ import annotations

import torch

from ...buckets.deferred_errors import in_backward
from ...buckets.parameters import Parameters
from ...buckets.tensors import any_gradient


class GradientStash:
    """The stashed gradients of one reducer.

    Args:
        parameters: all parameters of the reducer.

    Attributes:
        stepped: an optimizer has stepped with the averages that were applied last.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._stashed: list[torch.Tensor | None] | None = None
        self._begun = False
        self._made = False  # a backward is known to have made gradients since
        self.stepped = False

    def stash(self) -> None:
        """Called when a backward begins: stashes what `.grad` holds, if it is the first since a step has ended.

        If the backward makes no gradient (an autograd.grad), that is undone at its end.
        """
        if self._begun:
            if any_gradient(self._parameters.tensors):
                self._made = True
            elif self._made:
                self._stashed = None  # the user has zeroed the gradients, the stashed ones too
        else:
            self._begun = True
            if any_gradient(self._parameters.tensors):
                self._stashed = [parameter.grad for parameter in self._parameters.tensors]
                for parameter in self._parameters.tensors:
                    parameter.grad = None
        if in_backward():
            torch.autograd.Variable._execution_engine.queue_callback(self._undo_if_empty)

    def keep(self) -> None:
        """Takes what `.grad` holds now for gradients of this step's backwards, so that it is not stashed."""
        self._begun = True
        self._made = any_gradient(self._parameters.tensors)

    def end_local(self) -> None:
        """Puts the stash back at the end of no_sync, unless its backwards have made gradients, for the next step."""
        if self.local():
            self.keep()
        else:
            self.put_back()

    def stash_unused(self) -> None:
        """Stashes between two steps; drops gradients that an optimizer has stepped with already."""
        if self.stepped:
            for parameter in self._parameters.tensors:
                parameter.grad = None
        self.stash()

    def put_back(self) -> None:
        """Adds the stash to `.grad`, after a step has ended or an earlier one was applied."""
        stashed, self._stashed, self._begun, self._made = self._stashed, None, False, False
        if stashed is None or any_gradient(self._parameters.tensors):
            self.stepped = False  # else `.grad` becomes again what it was
        for parameter, kept in zip(self._parameters.tensors, stashed or (), strict=False):
            average = parameter.grad
            if kept is None:
                continue
            if average is None:
                parameter.grad = kept
            elif kept.layout is torch.strided:
                parameter.grad = kept.add_(average)
            else:
                parameter.grad = kept + average

    def drop(self) -> None:
        """Drops the stash of a step that was given up."""
        self._stashed, self._begun, self._made, self.stepped = None, False, False, False

    def local(self) -> bool:
        """Whether `.grad` holds gradients of local backwards since a step has ended."""
        return self._begun and any_gradient(self._parameters.tensors)

    def _undo_if_empty(self) -> None:
        if self._begun and any_gradient(self._parameters.tensors):
            self._made = True
        elif self._begun and not self._made:
            self.put_back()
