"""All ways to cut lanes that share a channel, for small models.

A walk forward through the parameters in ready order: at each, its lane's open bucket is closed or stays open. Of the
ways that leave the same buckets open, one that has launched no fewer buckets than another and frees the channel no
earlier is dropped; and so is one whose remaining work, done without a gap, would not beat what is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .bucket_group import Lane
from .several_groups import Cuts, Score

# Ways looked at, times lanes: a tenth of a second on a slow core.
MOST_WAYS = 40_000

_Opened = tuple[int, ...]  # per lane: where its open bucket starts


class _Bucket(NamedTuple):
    """One that was closed, and the one before it."""

    lane: int
    start: int
    before: _Bucket | None


class _Way(NamedTuple):
    """What has been launched: how many buckets, when the channel is free, all packing (fs); and the last of them."""

    buckets: int
    free: int
    packs: int
    last: _Bucket | None


def better(lanes: Sequence[Lane], known: Score) -> Cuts | None:
    """The best cuts of all.

    Args:
        lanes: all that share the channel.
        known: the score to beat.

    Returns:
        Starts of each lane's buckets, from the end; None if nothing beats what is known, or if MOST_WAYS were looked at
        before that was certain.
    """
    walk = sorted(
        (place, index, end) for index, lane in enumerate(lanes) for end, place in enumerate(lane.places[1:], 1)
    )
    if len(walk) * len(lanes) > MOST_WAYS:
        return None
    ready = [lanes[index].ready[end] for _, index, end in walk]
    fronts: dict[_Opened, list[_Way]] = {(0,) * len(lanes): [_Way(0, 0, 0, None)]}
    looked_at = 0
    for (_, index, end), next_ready in zip(walk, [*ready[1:], 0], strict=True):
        lane = lanes[index]
        following = _Fronts(lanes, next_ready, known)
        for opened, front in fronts.items():
            looked_at += len(front) * len(lanes)
            start = opened[index]
            if end < len(lane) and lane.lowest[end + 1] <= start:  # or it would never be within the cap
                following.add(opened, front)
            closed = [_close(way, lane, index, start, end) for way in front]
            following.add((*opened[:index], end, *opened[index + 1 :]), closed)
        fronts = following.kept
        if looked_at > MOST_WAYS or not fronts:
            return None
    (front,) = fronts.values()
    cuts: Cuts = [[] for _ in lanes]
    bucket = min(front, key=lambda way: (way.free, way.buckets)).last
    while bucket:
        cuts[bucket.lane].append(bucket.start)
        bucket = bucket.before
    return cuts


def _close(way: _Way, lane: Lane, index: int, start: int, end: int) -> _Way:
    packs = way.packs + lane.pack_fixed + lane.packs[end] - lane.packs[start]
    free = max(way.free, lane.ready[end] + packs) + lane.wire_fixed + lane.wires[end] - lane.wires[start]
    return _Way(way.buckets + 1, free, packs, _Bucket(index, start, way.last))


class _Fronts:
    """The ways that nothing speaks against yet, by the buckets that they leave open."""

    def __init__(self, lanes: Sequence[Lane], next_ready: int, known: Score) -> None:
        self.kept: dict[_Opened, list[_Way]] = {}
        self._lanes = lanes
        self._ready = next_ready
        self._known = known

    def add(self, opened: _Opened, ways: list[_Way]) -> None:
        """Keeps those that can beat what is known, and that no other is as good as."""
        waiting = [(lane, start) for lane, start in zip(self._lanes, opened, strict=True) if start < len(lane)]
        rest = sum(lane.wire_fixed + lane.wires[-1] - lane.wires[start] for lane, start in waiting)
        front = self.kept.get(opened, [])
        for way in ways:
            begins = max(way.free, self._ready + way.packs if waiting else 0)
            if (begins + rest, way.buckets + len(waiting)) >= self._known:
                continue
            if any(other.buckets <= way.buckets and other.free <= way.free for other in front):
                continue
            front = [other for other in front if other.buckets < way.buckets or other.free < way.free]
            front.append(way)
        if front:
            self.kept[opened] = front
