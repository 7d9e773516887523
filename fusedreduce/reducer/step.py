"""Step: which gradients of one synchronised backward are ready, and which bucket is next. Pure; made anew for each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..buckets.parameters import Parameters
from ..errors import FusedReduceError
from ..planning.timeline import MISSING_NS


@dataclass
class StepTimes:
    """Marks of the latest synchronised step, host clock, ns of time.time_ns()."""

    forward_start: int = 0
    backward_start: int = 0
    backward_end: int = 0
    comm_start: int = 0
    comm_end: int = 0


class Step:
    """Readiness of the parameters and buckets in one synchronised step.

    Args:
        sizes: number of parameters in each bucket, in launch order.
        bucket_of: per parameter its bucket.
        parameters: all parameters of the reducer.
        fires: static graph: how many gradients each parameter gets; None: one.
        unused: parameters that get no gradient; they become ready with the first parameter that gets one.

    Attributes:
        pending: per bucket, how many of its parameters are not ready; and a 1 behind the last bucket, so that
            `pending[next_bucket] == 0` always says whether the next bucket may be launched.
        ready: per parameter, 1 if it is ready.
        skipped: the unused parameters, once they are ready.
        order: parameters in the order in which they became ready.
        next_bucket: the next bucket in plan order, neither launched nor skipped yet.
        launched: number of buckets that were launched.
        begun: a gradient of this step has been accumulated.
        callbacks: callbacks queued at the autograd engine that have not run yet.
        task: graph task of the backward that the latest of them belongs to; -1: there was none.
        from_outputs: the backward began at an output of forward.
        armed_ns: time.perf_counter_ns() when forward had ended.
        began_ns: the same when backward began, or when forward had ended if that was not seen.
        arrived_ns: per parameter, the same when its gradient was ready; 0: it has not been.
        launched_ns: per bucket, the same when its collective was issued; 0: it has not been.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        bucket_of: Sequence[int],
        parameters: Parameters,
        *,
        fires: Sequence[int] | None = None,
        unused: Sequence[int] = (),
    ) -> None:
        self._parameters = parameters
        self.bucket_of = bucket_of
        self._fires = fires
        self._remaining = None if fires is None else list(fires)
        self._unused = unused
        self.pending = [*sizes, 1]
        self.ready = bytearray(len(bucket_of))
        self.skipped: frozenset[int] = frozenset()
        self.order: list[int] = []
        self.next_bucket = 0
        self.launched = 0
        self.begun = False
        self.callbacks = 0
        self.task = -1
        self.from_outputs = False
        self.armed_ns = self.began_ns = time.perf_counter_ns()
        self.arrived_ns = [0] * len(bucket_of)
        self.launched_ns = [0] * len(sizes)

    def mark_ready(self, index: int, now_ns: int) -> bool:
        """Notes that a gradient was accumulated. With the first one the unused parameters become ready as well.

        Args:
            index: number of the parameter.
            now_ns: time.perf_counter_ns().

        Returns:
            Whether a bucket may have become ready with it.

        Raises:
            FusedReduceError: the parameter was ready already, or a static graph has changed.
        """
        self.begun = True
        first = bool(self._unused)
        if first:
            unused, self._unused = self._unused, ()
            self.skipped = frozenset(unused)
            for one in unused:
                self.ready[one] = 1
                self.pending[self.bucket_of[one]] -= 1
                self.arrived_ns[one] = now_ns
        if self._remaining is not None:
            self._remaining[index] -= 1
            if self._remaining[index] < 0:
                raise FusedReduceError(self._changed(index))
            if self._remaining[index] > 0:
                return first
        if self.ready[index]:
            raise FusedReduceError(self._twice(index))
        self.ready[index] = 1
        bucket = self.bucket_of[index]
        left = self.pending[bucket] - 1
        self.pending[bucket] = left
        self.arrived_ns[index] = now_ns
        self.order.append(index)
        return first or not left

    def count(self, index: int) -> None:
        """Notes a gradient of a static graph's first step, in which no parameter is ready before the end."""
        self.begun = True
        self.order.append(index)

    def is_ready(self, index: int) -> bool:
        """Whether a parameter is ready."""
        return bool(self.ready[index]) or self.pending[self.bucket_of[index]] == 0

    def all_ready(self) -> bool:
        """Whether every parameter is ready."""
        return sum(self.pending) == 1

    def begin_without_gradients(self) -> bool:
        """Makes every parameter ready, if all are unused and no backward has begun; returns whether it did."""
        if self.begun or len(self._unused) < len(self.ready):
            return False
        self.begun = True
        self.skipped, self._unused = frozenset(self._unused), ()
        self.make_all_ready()
        return True

    def make_all_ready(self) -> None:
        """Makes every bucket ready, at the end of a static graph's first step."""
        self.pending = [0] * len(self.launched_ns) + [1]

    def missing(self) -> list[int]:
        """Parameters that are not ready, ascending."""
        return [index for index in range(len(self.ready)) if not self.is_ready(index)]

    def ready_order(self) -> tuple[int, ...]:
        """Parameters in the order in which they became ready."""
        # A static graph's first step has an entry per gradient, of which the last is when it was final.
        return tuple(reversed(dict.fromkeys(reversed(self.order))))

    def ready_times(self) -> list[int]:
        """Per parameter when its gradient was ready, ns since forward had ended; 0: it had none."""
        return [one - self.armed_ns if one else 0 for one in self.arrived_ns]

    def bucket_times(self) -> list[tuple[int, int]]:
        """Per bucket when its last gradient was ready, and when it was launched; ns since backward began, or -1."""
        ready_ns = [0] * len(self.launched_ns)
        for bucket, arrived_ns in zip(self.bucket_of, self.arrived_ns, strict=True):
            ready_ns[bucket] = max(ready_ns[bucket], arrived_ns)
        times = zip(ready_ns, self.launched_ns, strict=True)
        return [tuple(one - self.began_ns if one else MISSING_NS for one in pair) for pair in times]  # type: ignore[misc]

    def _twice(self, index: int) -> str:
        return (
            f"Expected to mark a variable ready only once. Parameter at index {index} with name "
            f"{self._parameters.names[index]} has been marked as ready twice in this backward. Usual causes: 1) a "
            "parameter is used outside of forward, or in several forward-backward passes at once; 2) it is part of "
            "several reentrant checkpoints, which give it several gradients in one backward; 3) with "
            "find_unused_parameters it was found unused, but got a gradient (a reentrant checkpoint hides it from the "
            "search). static_graph=True copes with 2 and 3 where the graph does not change; non-reentrant checkpoints "
            "(use_reentrant=False) with all of them"
        )

    def _changed(self, index: int) -> str:
        assert self._fires is not None
        before = self._fires[index]
        return (
            "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, but "
            "then got used in the second iteration. this is not compatible with static_graph set to True. "
            f"{self._parameters.names[index]} (index {index}) got {before} gradient{'' if before == 1 else 's'} in the "
            "first iteration and gets more in this one: construct without static_graph=True where the graph changes"
        )


def unfinalized_text(rank: int) -> str:
    """Says that a step waits for `finalize_backward`, in torch's words."""
    return (
        "Expected to have finalized the prior backward pass before starting a new one, or using its gradients. Call "
        f"finalize_backward() after backward() when require_manual_backward_finalization is true. (rank {rank})"
    )


def unfinished_text(
    missing: Sequence[int],
    names: Sequence[str],
    rank: int,
    *,
    find_unused: bool,
    static_graph: bool,
    failure: str = "",
    debug_hint: bool = False,
) -> str:
    """The error text for a backward that left buckets unreduced: every missing parameter, and what may be the cause.

    Args:
        missing: indices of the parameters that got no gradient.
        names: of all parameters.
        rank: of this process.
        find_unused: find_unused_parameters is on.
        static_graph: static_graph is on.
        failure: what the backward raised; empty: not known.
        debug_hint: point to TORCH_DISTRIBUTED_DEBUG.
    """
    text = "Expected to have finished reduction in the prior iteration before starting a new one. "
    if static_graph:
        text += (
            "This error indicates that your training graph has changed in this iteration, e.g., one parameter is used "
            "in first iteration, but then got unused in the second iteration. this is not compatible with static_graph "
            "set to True."
        )
    else:
        text += "This error indicates that your module has parameters that were not used in producing loss. "
        if find_unused:
            text += (
                "Since `find_unused_parameters=True` is enabled, not all of `forward`'s outputs were returned to the "
                "caller of the wrapper, or the backward raised before it was done."
            )
        else:
            text += (
                # torch's words, which users look for.
                "Detect them by passing the keyword argument `find_unused_parameters=True`, and make sure that all "
                "`forward` function outputs participate in calculating loss; or the backward raised before it was done."
            )
    if missing:
        numbers = " ".join(map(str, missing))
        text += f"\nParameter indices which did not receive grad for rank {rank}: {numbers}"
        text += (
            f"\nParameters which did not receive grad for rank {rank}: {', '.join(names[index] for index in missing)}"
        )
    else:
        text += f"\nOn rank {rank} every parameter received its gradient, but the backward did not run to its end"
    if failure:
        text += f"\nRank {rank}: the last synchronised step failed; call reset() on every rank. {failure}"
    else:
        text += "\nIf a backward raised, call reset() on every rank."
    if missing and debug_hint:
        text += (
            " (For more of torch's own checks set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or "
            "DETAIL.)"
        )
    return text
