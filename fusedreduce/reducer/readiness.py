"""ReadinessTracker: which gradients of the current step are ready, and which parameters are hooked.

Once a step has shown which parameter completes each bucket, only that parameter, the bucket's sentinel, keeps its hook
(on CPU also those that complete a group within a bucket, which is then packed while it is in the cache). That is sound
in a step whose backward began at an output of forward with every `.grad` None: any `.grad` that exists then was made by
this backward. In any other step every parameter is hooked again. And in every step each gradient must, before it is
overwritten, be the tensor that was packed, at the same version.

Called under the reducer's lock.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..buckets.loss_scale import LossScaleState
from ..buckets.tensors import any_gradient
from ..errors import FusedReduceError
from ..trace.step_clock import StepClock
from .parameter_hooks import ParameterHooks
from .pipeline import Pipeline
from .step import Step

# Steps in a row that would have done with sentinels alone, before the other hooks are removed again (4 us each).
_CLEAN_STEPS = 3


class ReadinessTracker:
    """Which gradients of the current step are ready, and which parameters are hooked.

    Args:
        hooks: on the parameters.
        pipeline: has the buckets, and packs groups of them early.
        clock: records times.
        units: the loss-scale state, which notes each backward.
        static_graph: every step uses the same parameters equally often.

    Attributes:
        step: the current step, or the last one.
        sentinels: the hooked parameters while only sentinels are hooked: by parameter its bucket, the groups that it
            completes there, and whether it completes the bucket. Empty: every parameter is hooked.
        fires: static graph: how many gradients each parameter gets; None: not known yet.
    """

    def __init__(
        self,
        hooks: ParameterHooks,
        pipeline: Pipeline,
        clock: StepClock,
        units: LossScaleState,
        *,
        static_graph: bool,
    ) -> None:
        self.static_graph = static_graph
        self.sentinels: dict[int, tuple[int, list[int], bool]] = {}
        self.fires: list[int] | None = None
        self._hooks = hooks
        self._pipeline = pipeline
        self._clock = clock
        self._units = units
        self._parameters = pipeline.maker.parameters
        self._names = pipeline.maker.names
        self._devices = [parameter.device for parameter in self._parameters]
        self._counted = [0] * len(self._parameters)
        self._clean_steps = 0
        self.set_buckets()

    # Between steps

    def set_buckets(self) -> None:
        """Begins anew with the pipeline's buckets, which are new, and every parameter hooked."""
        self.hook_all(once=True)
        self.begin_step()

    def restart(self) -> None:
        """Forgets the gradient counts of a step that was given up. `set_buckets` must follow."""
        self._counted = [0] * len(self._parameters)
        self.fires = None

    def remove_hooks(self) -> None:
        """Removes the hooks from the parameters for good."""
        self.sentinels = {}
        self._hooks.remove()

    def hook_all(self, *, once: bool = False) -> None:
        """Hooks every parameter.

        Args:
            once: for one step: only sentinels stay hooked after the next clean one.
        """
        if self.sentinels:
            self.sentinels = {}
            self._clean_steps = 0
            self._hooks.hook_all()
        if once:
            self._clean_steps = _CLEAN_STEPS

    def hook_sentinels(self) -> None:
        """After a step with all hooks: keeps those of the sentinels alone, if the next steps can do with them."""
        step = self.step
        never = self._hooks.dtypes_change or any(fires != 1 for fires in self.fires or ())
        never = never or self._hooks.users_hook_gradients()
        if never or not step.complete or len(step.order) != len(self._parameters):
            return
        self._clean_steps = self._clean_steps + 1 if step.clean else 0
        if self._clean_steps < _CLEAN_STEPS:
            return
        self.sentinels = self._pipeline.buckets.sentinels(step.order)
        self._hooks.hook(self.sentinels)

    # A step

    def begin_forward(self) -> None:
        """Called before a forward, when there may be no autograd graph: replaces nodes that had a hook."""
        if self.sentinels:
            buckets = self._pipeline.buckets
            self._hooks.renew_nodes(lambda index: buckets.streams.of_nodes(buckets.bucket_of[index]))

    @property
    def counting(self) -> bool:
        """Whether this is a static graph's first step: gradients are counted, and none is final before its end."""
        return self.static_graph and self.fires is None

    def begin_step(self, unused: Sequence[int] = ()) -> None:
        """Begins a synchronised step.

        Args:
            unused: parameters that get no gradient in it.
        """
        buckets = self._pipeline.buckets
        fires = self.fires if self.static_graph else None
        self.step = Step(buckets.sizes, buckets.bucket_of, self._names, fires=fires, unused=unused)

    def begin_backward(self) -> bool:
        """Notes that a backward has reached an output of forward.

        Returns:
            Whether it is the first output that this backward reaches.

        Raises:
            FusedReduceError: see `LossScaleState.note_backward`.
        """
        step = self.step
        if step.from_outputs and step.task == torch._C._current_graph_task_id():
            return False
        # Another root of this backward, or of a partial one; else a new backward, which has made no gradient yet.
        again = step.from_outputs and (step.begun or step.callbacks > 0)
        step.from_outputs = True
        self._units.note_backward(first_output=not (again or step.begun))
        if not again:
            step.clean = not any_gradient(self._parameters)
            self._clock.backward_began()
        if self.sentinels and (again or not step.clean or self._hooks.users_hook_gradients()):
            if again:
                self._mark_unseen()
            self.hook_all()
        return True

    def count(self, index: int) -> None:
        """Counts a gradient in a static graph's first step."""
        self._counted[index] += 1
        self.step.count(index)
        self._record_stream(index)

    def mark_ready(self, index: int) -> bool:
        """Notes that a hooked parameter has its gradient.

        Returns:
            Whether a bucket may have become ready.

        Raises:
            FusedReduceError: the parameter was ready already, or, with sentinels, the backward did not begin at an
                output of forward.
        """
        if self.sentinels:
            return self._mark_sentinel(index)
        self._mark_one(index)
        buckets = self._pipeline.buckets
        if index in buckets.large and self.step.is_ready(index):
            self._pipeline.pack_early(self.step, buckets.bucket_of[index], buckets.large[index])
        return True

    def end_backward(self) -> bool:
        """Called when a backward has ended.

        Returns:
            Whether all gradients of the step are ready; they are not after one of several partial backwards.
        """
        step = self.step
        late = bool(self.sentinels) and not step.all_ready() and self._mark_unseen()
        if not step.begun:
            return False
        if self.counting:
            self.fires = list(self._counted)
            step.make_all_ready()
        elif late or not step.all_ready():
            self.hook_all()  # a bucket's gradients were made in another order than before, or are still to come
        return step.all_ready()

    def missing(self) -> list[int]:
        """Indices of the parameters that have no gradient in this step yet, ascending."""
        counting = self.counting
        return [index for index in self.step.missing() if not (counting and self._counted[index])]

    # Within

    def _mark_one(self, index: int) -> None:
        """Marks one parameter as ready, and with the first one all that are unused."""
        step, buckets = self.step, self._pipeline.buckets
        if step.callbacks == 0:
            step.clean = False  # a backward that did not begin at an output of forward
        if buckets.streams.unrecorded:
            self._record_stream(index)
        for one in step.mark_ready(index):
            self._clock.gradient_ready(one)
            bucket = buckets.bucket_of[one]
            if step.bucket_is_ready(bucket):
                self._clock.bucket_ready(bucket)

    def _record_stream(self, index: int) -> None:
        streams = self._pipeline.buckets.streams
        if index in streams.unrecorded:
            streams.record(index, self._devices[index])

    def _mark_sentinel(self, index: int) -> bool:
        """Notes a sentinel's gradient; returns whether its bucket is ready."""
        step = self.step
        if not step.from_outputs:
            self.hook_all()
            raise FusedReduceError(
                f"{self._names[index]} got a gradient from a backward that did not begin at an output of forward, but "
                "the ones before it did. Return from forward every tensor that the loss is computed from. To go on, "
                "call reset() on every rank: every parameter is hooked again after it"
            )
        step.mark_sentinel(index)
        bucket, groups, completes = self.sentinels[index]
        for group in groups:
            self._pipeline.pack_early(step, bucket, group)
        reduction = self._pipeline.buckets.reductions[bucket]
        if not completes:
            return False
        if reduction.is_complete():
            self._clock.bucket_ready(bucket)
            step.mark_bucket_ready(bucket, reduction.members.numbers)
        else:
            # Another order than before. The bucket must be launched as soon as its last gradient is ready, not at the
            # end of backward: peers whose order is the old one launch theirs there, among the user's own collectives.
            self._mark_unseen()
            self.hook_all()
        return True

    def _mark_unseen(self) -> bool:
        """Marks parameters without a hook that have a gradient, in a step that began with none; returns if any have."""
        late = [
            index
            for index, parameter in enumerate(self._parameters)
            if not self.step.is_ready(index) and parameter.grad is not None
        ]
        for index in late:
            self._mark_one(index)
        return bool(late)
