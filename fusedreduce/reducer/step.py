"""Step: which gradients of one synchronised backward are ready, and which bucket is next. Pure; made anew for each."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import FusedReduceError


class Step:
    """Readiness of the parameters and buckets in one synchronised step.

    Args:
        sizes: number of parameters in each bucket, in launch order.
        bucket_of: per parameter its bucket.
        names: of the parameters.
        fires: static graph: how many gradients each parameter gets; None: one.
        unused: parameters that get no gradient; they become ready with the first parameter that gets one.

    Attributes:
        skipped: the unused parameters, once they are ready.
        order: parameters in the order in which they became ready.
        next_bucket: the next bucket in plan order, neither launched nor skipped yet.
        launched: number of buckets that were launched.
        begun: a gradient of this step has been accumulated.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        bucket_of: Sequence[int],
        names: Sequence[str],
        *,
        fires: Sequence[int] | None = None,
        unused: Sequence[int] = (),
    ) -> None:
        self._names = names
        self._pending = list(sizes)
        self._bucket_of = bucket_of
        self._ready = bytearray(len(names))
        self._fires = fires
        self._remaining = None if fires is None else list(fires)
        self._unused = list(unused)
        self.skipped: frozenset[int] = frozenset()
        self.order: list[int] = []
        self.next_bucket = 0
        self.launched = 0
        self.begun = False
        self.callbacks = 0  # queued at the autograd engine and not yet run
        self.task = -1  # graph task of the backward that the latest of them belongs to
        self._sentinels: set[int] = set()  # those that have their gradient
        self.complete = True  # every parameter had a gradient when the step ended
        self.from_outputs = False  # the backward began at an output of forward
        self.clean = False  # every gradient was None when the backward began

    def mark_ready(self, index: int) -> list[int]:
        """Notes that a gradient was accumulated.

        Returns:
            The parameters that are ready now and were not before, in order.

        Raises:
            FusedReduceError: the parameter was ready already, or a static graph has changed.
        """
        self.begun = True
        now = []
        if self._unused:
            now, self._unused = self._unused, []
            self.skipped = frozenset(now)
            for one in now:
                self._mark(one)
        if self._remaining is not None:
            self._remaining[index] -= 1
            if self._remaining[index] < 0:
                raise FusedReduceError(self._changed(index))
            if self._remaining[index] > 0:
                return now
        self._mark(index)
        self.order.append(index)
        return [*now, index]

    def count(self, index: int) -> None:
        """Notes a gradient of a static graph's first step, in which no parameter is ready before the end."""
        self.begun = True
        self.order.append(index)

    def mark_bucket_ready(self, bucket: int, members: Sequence[int]) -> None:
        """Makes a bucket ready whose gradients are all there, though only its sentinel is hooked.

        Raises:
            FusedReduceError: it was ready already.
        """
        self.begun = True
        if self._pending[bucket] == 0:
            raise FusedReduceError(self._twice(members[-1]))
        self._pending[bucket] = 0

    def mark_sentinel(self, index: int) -> None:
        """Notes the gradient of a sentinel, a parameter that completes a bucket or a group within one.

        Raises:
            FusedReduceError: it is the second one in this backward.
        """
        self.begun = True
        if index in self._sentinels:
            raise FusedReduceError(self._twice(index))
        self._sentinels.add(index)

    def is_ready(self, index: int) -> bool:
        """Whether a parameter is ready."""
        return bool(self._ready[index]) or self._pending[self._bucket_of[index]] == 0

    def bucket_is_ready(self, bucket: int) -> bool:
        """Whether all parameters of a bucket are ready."""
        return self._pending[bucket] == 0

    def head_is_ready(self) -> bool:
        """Whether the next bucket in plan order may be launched."""
        return self.next_bucket < len(self._pending) and self._pending[self.next_bucket] == 0

    def all_launched(self) -> bool:
        """Whether every bucket has been launched or skipped."""
        return self.next_bucket == len(self._pending)

    def all_ready(self) -> bool:
        """Whether every parameter is ready."""
        return not any(self._pending)

    def begin_without_gradients(self) -> bool:
        """Makes every parameter ready, if all are unused and no backward has begun; returns whether it did."""
        if self.begun or len(self._unused) < len(self._names):
            return False
        self.begun = True
        self.skipped, self._unused = frozenset(self._unused), []
        self.make_all_ready()
        return True

    def make_all_ready(self) -> None:
        """Makes every bucket ready, at the end of a static graph's first step."""
        self._pending = [0] * len(self._pending)

    def missing(self) -> list[int]:
        """Parameters that are not ready, ascending."""
        return [index for index in range(len(self._ready)) if not self.is_ready(index)]

    def _mark(self, index: int) -> None:
        if self.is_ready(index):
            raise FusedReduceError(self._twice(index))
        self._ready[index] = 1
        self._pending[self._bucket_of[index]] -= 1

    def _twice(self, index: int) -> str:
        return (
            f"Expected to mark a variable ready only once. {self._names[index]} (index {index}) has been marked "
            "as ready twice in this backward. Usual causes: 1) a parameter is used outside of forward, or in "
            "several forward-backward passes at once; 2) it is part of several reentrant checkpoints, which give "
            "it several gradients in one backward; 3) with find_unused_parameters it was found unused, but got a "
            "gradient (a reentrant checkpoint hides it from the search). static_graph=True copes with 2 and 3 "
            "where the graph does not change; non-reentrant checkpoints (use_reentrant=False) with all of them"
        )

    def _changed(self, index: int) -> str:
        assert self._fires is not None
        before = self._fires[index]
        return (
            "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, but "
            "then got used in the second iteration. this is not compatible with static_graph set to True. "
            f"{self._names[index]} (index {index}) got {before} gradient{'' if before == 1 else 's'} in the first "
            "iteration and gets more in this one: construct without static_graph=True where the graph changes"
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
        text += f"\nRank {rank}: the last synchronised backward failed; call reset() on every rank. {failure}"
    else:
        text += "\nIf a backward raised, call reset() on every rank."
    if missing and debug_hint:
        text += (
            " (For more of torch's own checks set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or "
            "DETAIL.)"
        )
    return text
