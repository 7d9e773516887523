"""StepFeature: what rides on the steps of a reducer. A step calls it at moments, in one order on every rank.

    forward    a forward begins
    begin      the step is armed                         waited    all that was issued has been waited for
    opened     before the first bucket: may issue        counted   all ranks have taken part in the step
    sent       a bucket is launched                      landed    the gradients are written: may issue
    behind     behind the last bucket: may issue         raises    behind all else, and behind other reducers
    late       before anything is waited for: may issue  dropped   the step is given up, on every rank

What issues at a moment does so on every rank or on none. The order of the features at a moment is that of their
collectives, so it is protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ..trace.step_profile import StepProfile
from .loss_scale import LossScale
from .reduction import Reduction


class Ended(NamedTuple):
    """How a step has ended.

    Args:
        number: of the step whose averages the gradients are; None: there are none.
        left: numbers of the parameters whose gradients were not written.
        elsewhere: that step was launched in other buckets than those in use.
        scale: its loss scale, which was removed.
        measured: statistics of its gradients were collected.
    """

    number: int | None
    left: Sequence[int] = ()
    elsewhere: bool = False
    scale: LossScale | None = None
    measured: bool = True


class LateSums(Protocol):
    """The buckets of a step, some of which may have to wait for an answer of the other ranks."""

    def launch_late(self, numbers: Collection[int]) -> Iterator[None]:
        """Starts the sums of the sparse gradients of parameters `numbers`; yields behind each."""
        ...


class StepFeature:
    """Does nothing at any moment. Called under the reducer's lock, without autograd from `opened` on."""

    @property
    def in_use(self) -> bool:
        """Whether there may be anything to do in a step with the buckets and the mode in use: the same on every rank
        for one that issues."""
        raise NotImplementedError

    @property
    def acts(self) -> bool:
        """Whether, of one that is in use, the next step is to do more than count: the same on every rank."""
        return True

    def forward(self) -> None:
        """A forward begins, of the step or of a backward that is not reduced; not every caller says so."""

    def begin(self, rounds: int) -> None:
        """The step is armed.

        Args:
            rounds: synchronised steps of all ranks before it.
        """

    def opened(self, profile: StepProfile | None) -> int:
        """The step's first bucket is next; returns how many collectives were issued.

        Args:
            profile: of the step; None: it is not profiled on this rank.

        Raises:
            CollectiveError: a collective could not be issued.
        """
        return 0

    def sent(self, reduction: Reduction) -> None:
        """A bucket has been launched."""

    def behind(self) -> int:
        """The last bucket has been launched; returns how many collectives were issued. (Not with Asynchronous.)

        Raises:
            CollectiveError: a collective could not be issued.
        """
        return 0

    def late(self, buckets: LateSums) -> Iterable[object]:
        """The end of the step, before this rank alone may raise.

        Args:
            buckets: of the step.

        Returns:
            An item for each collective, behind which it is issued: one that fails leaves those before it counted.

        Raises:
            AgreementError, CollectiveError: as what it waits for.
        """
        return ()

    def waited(self) -> None:
        """The gradients have been waited for: so is what was issued beside them.

        Or they are left in flight (BoundedStaleness): what has been handed over with them is not waited for.
        """

    def counted(self, profile: StepProfile | None) -> bool:
        """All ranks have taken part in the step, this one maybe without inputs (join).

        Args:
            profile: as in `opened`.

        Returns:
            Whether `in_use` or `acts` has changed.
        """
        return False

    def landed(self, ended: Ended) -> int:
        """The step has left gradients, or none; returns how many collectives were issued."""
        return 0

    def raises(self) -> None:
        """Raises for what the step has found and done all the same."""

    def new_group(self) -> None:
        """Forgets what is of the ranks before, whom others have replaced, also where it is not in use."""

    def dropped(self) -> None:
        """Forgets a step that is given up on every rank, also where it is not in use."""

    def own_set_aside(self, reductions: Sequence[Reduction]) -> AbstractContextManager[object]:
        """Context of a step on a rank without inputs (join), of which nothing may stay on this rank.

        Args:
            reductions: of the buckets in use.
        """
        return nullcontext()


@dataclass(frozen=True)
class Moments:
    """What the features in use do at each moment, in their order: a step meets no other.

    Args:
        features: all those that do anything.
        forward, begin, opened, sent, behind, late, waited, counted, landed, raises: their methods, see `StepFeature`.
    """

    features: tuple[StepFeature, ...] = ()
    forward: tuple[Callable[[], None], ...] = ()
    begin: tuple[Callable[[int], None], ...] = ()
    opened: tuple[Callable[[StepProfile | None], int], ...] = ()
    sent: tuple[Callable[[Reduction], None], ...] = ()
    behind: tuple[Callable[[], int], ...] = ()
    late: tuple[Callable[[LateSums], Iterable[object]], ...] = ()
    waited: tuple[Callable[[], None], ...] = ()
    counted: tuple[Callable[[StepProfile | None], bool], ...] = ()
    landed: tuple[Callable[[Ended], int], ...] = ()
    raises: tuple[Callable[[], None], ...] = ()

    @classmethod
    def of(cls, known: Sequence[StepFeature]) -> Moments:
        """Those of the features that are in use among `known`."""
        used = tuple(one for one in known if one.in_use)
        acting = tuple(one for one in used if one.acts)
        return cls(used, *(_overridden(used if moment == "counted" else acting, moment) for moment in _MOMENTS))


_MOMENTS = ("forward", "begin", "opened", "sent", "behind", "late", "waited", "counted", "landed", "raises")


def _overridden(features: Sequence[StepFeature], moment: str) -> tuple[Any, ...]:
    nothing = getattr(StepFeature, moment)
    return tuple(getattr(one, moment) for one in features if getattr(type(one), moment) is not nothing)
