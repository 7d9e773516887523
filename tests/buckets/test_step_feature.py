"""Moments: a step meets the features in use, in their order, and of each only what it does something at."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from fusedreduce.buckets.step_feature import Moments, StepFeature
from fusedreduce.trace.step_profile import StepProfile

MOMENTS = ("begin", "opened", "sent", "behind", "late", "waited", "counted", "landed", "raises")


class Feature(StepFeature):
    """One that may be off, or have nothing to do but to count."""

    def __init__(self, *, used: bool, acting: bool) -> None:
        self._used, self._acting = used, acting

    @property
    def in_use(self) -> bool:
        return self._used

    @property
    def acts(self) -> bool:
        return self._acting


def of(moments: Collection[str], *, used: bool, acting: bool) -> StepFeature:
    """A feature that does something at these moments."""
    made = type("Made", (Feature,), dict.fromkeys(moments, _nothing))
    return made(used=used, acting=acting)  # type: ignore[no-any-return]


def _nothing(*_: object) -> None:
    pass


features = st.builds(of, st.sets(st.sampled_from(MOMENTS)), used=st.booleans(), acting=st.booleans())


@given(st.lists(features, max_size=6))
def test_a_step_calls_what_features_in_use_do_in_their_order_and_nothing_else(known: list[StepFeature]) -> None:
    found = Moments.of(known)
    assert list(found.features) == [one for one in known if one.in_use]
    for name in MOMENTS:
        expected = [
            getattr(one, name)
            for one in known
            if one.in_use and (one.acts or name == "counted") and name in vars(type(one))
        ]
        assert list(getattr(found, name)) == expected


def test_a_feature_that_does_nothing_changes_nothing_and_issues_nothing() -> None:
    nothing = Feature(used=True, acting=True)
    profile: StepProfile | None = None
    assert (nothing.opened(profile), nothing.behind(), nothing.counted(profile)) == (0, 0, False)
    with nothing.own_set_aside([]):
        assert Moments.of([nothing]) == Moments((nothing,))
