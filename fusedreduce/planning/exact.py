"""Exact search over all cuts of groups that share a channel, for small models: branch and bound with dominance.

Walks through the parameters in ready order: at each, its group's open bucket is closed or stays open. Of the partial
plans that leave the same buckets open, one that has launched no fewer buckets than another and frees the channel no
earlier is dropped, as is one whose remaining work, done without a gap, would not beat the best known score.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .bucket_group import BucketGroup
from .several_groups import Cuts, Score

# Partial plans examined, times groups: a tenth of a second on a slow core.
MOST_PARTIALS = 40_000

_Opened = tuple[int, ...]  # per group: where its open bucket starts


class _Bucket(NamedTuple):
    """A bucket that was closed, and the one before it."""

    group: int
    start: int
    before: _Bucket | None


class _Partial(NamedTuple):
    """A partial plan.

    Attributes:
        buckets: how many have been launched.
        free: when the channel has reduced them, in fs.
        packs: all their packing, in fs.
        last: the last of them.
    """

    buckets: int
    free: int
    packs: int
    last: _Bucket | None


def better(groups: Sequence[BucketGroup], known: Score) -> Cuts | None:
    """Finds the best cuts.

    Args:
        groups: all groups that share the channel.
        known: the score to beat.

    Returns:
        Starts of each group's buckets, from the end; None if none beat `known`, or if MOST_PARTIALS were examined
        before the search was complete.
    """
    walk = sorted(
        (place, index, end) for index, group in enumerate(groups) for end, place in enumerate(group.places[1:], 1)
    )
    if len(walk) * len(groups) > MOST_PARTIALS:
        return None
    ready = [groups[index].ready[end] for _, index, end in walk]
    fronts: dict[_Opened, list[_Partial]] = {(0,) * len(groups): [_Partial(0, 0, 0, None)]}
    examined = 0
    for (_, index, end), next_ready in zip(walk, [*ready[1:], 0], strict=True):
        group = groups[index]
        following = _Fronts(groups, next_ready, known)
        for opened, front in fronts.items():
            examined += len(front) * len(groups)
            start = opened[index]
            if end < len(group) and group.lowest[end + 1] <= start:  # or it would never be within the cap
                following.add(opened, front)
            closed = [_close(partial, group, index, start, end) for partial in front]
            following.add((*opened[:index], end, *opened[index + 1 :]), closed)
        fronts = following.kept
        if examined > MOST_PARTIALS or not fronts:
            return None
    (front,) = fronts.values()
    cuts: Cuts = [[] for _ in groups]
    bucket = min(front, key=lambda partial: (partial.free, partial.buckets)).last
    while bucket:
        cuts[bucket.group].append(bucket.start)
        bucket = bucket.before
    return cuts


def _close(partial: _Partial, group: BucketGroup, index: int, start: int, end: int) -> _Partial:
    packs = partial.packs + group.pack_fixed + group.packs[end] - group.packs[start]
    free = max(partial.free, group.ready[end] + packs) + group.wire_fixed + group.wires[end] - group.wires[start]
    return _Partial(partial.buckets + 1, free, packs, _Bucket(index, start, partial.last))


class _Fronts:
    """The partial plans that may still be best, by the buckets that they leave open."""

    def __init__(self, groups: Sequence[BucketGroup], next_ready: int, known: Score) -> None:
        self.kept: dict[_Opened, list[_Partial]] = {}
        self._groups = groups
        self._ready = next_ready
        self._known = known

    def add(self, opened: _Opened, partials: list[_Partial]) -> None:
        """Adds those that can beat the known score and that no other dominates."""
        waiting = [(group, start) for group, start in zip(self._groups, opened, strict=True) if start < len(group)]
        rest = sum(group.wire_fixed + group.wires[-1] - group.wires[start] for group, start in waiting)
        front = self.kept.get(opened, [])
        for partial in partials:
            begins = max(partial.free, self._ready + partial.packs if waiting else 0)
            if (begins + rest, partial.buckets + len(waiting)) >= self._known:
                continue
            if any(other.buckets <= partial.buckets and other.free <= partial.free for other in front):
                continue
            front = [other for other in front if other.buckets < partial.buckets or other.free < partial.free]
            front.append(partial)
        if front:
            self.kept[opened] = front
