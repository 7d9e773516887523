"""ReducerState: the lifecycle of a reducer. docs/design.md ("States") says what each call does in each state."""

from __future__ import annotations

import enum


class ReducerState(enum.Enum):
    """The lifecycle of a reducer."""

    IDLE = "idle"  # no synchronised backward is expected, or the last one is done: gradients stay local
    ARMED = "armed"  # the next backward is reduced
    LAUNCHED = "launched"  # all buckets are in flight; finalize() completes the step
    FAILED = "failed"  # a hook, kernel, collective or build of buckets raised: reset() is needed
    LOST = "lost"  # reset, but the group of ranks cannot be used any more: set_communicator() is needed
    CLOSED = "closed"  # closed for good


IDLE, ARMED, LAUNCHED, FAILED, LOST, CLOSED = ReducerState  # Python 3.11 takes 0.2 us to read one from the class
