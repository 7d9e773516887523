"""Group: the one place in which a reducer keeps its communicator."""

from __future__ import annotations

from dataclasses import dataclass

from .protocol import Communicator


@dataclass(slots=True, eq=False)
class Group:
    """A cell that all parts of a reducer hold, so that other ranks are set in one place.

    Whoever issues or waits reads the communicator at that moment and keeps it no longer. What belongs to a collective
    in flight has the communicator of that collective.

    Args:
        communicator: the ranks of now.
    """

    communicator: Communicator
