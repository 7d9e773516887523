"""Stage: ranks in one thread, whose collectives are seen when the script says so; for ranks of different speeds.

The n-th all-reduces of all ranks meet. A rank sees no more of them than it has been `shown`; whoever waits for one that
is not `ready()` is told off, unless the stage is `patient`: then it blocks until its peers, in threads of their own,
have come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from fusedreduce.comm.protocol import ReduceOp

TIMEOUT_S = 10.0


class Waited(Exception):
    """Somebody waits for what is not there; no RuntimeError, so that nobody takes it for a failed collective."""


class Stage:
    """`size` ranks.

    Attributes:
        totals: the sums, in the order of the collectives.
        shown: per rank how many collectives it may see the end of.
        fail: number of the collective that fails for everybody.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.ranks = [StageRank(self, rank) for rank in range(size)]
        self.totals: list[torch.Tensor] = []
        self.shown = [0] * size
        self.patient = False
        self.fail = -1
        self.changed = threading.Condition()
        self.parts: list[dict[int, torch.Tensor]] = []
        self.asides: dict[str, dict[int, str]] = {}

    def show(self, rank: int, collectives: int) -> None:
        """`rank` sees so many more, as far as they are issued everywhere."""
        self.shown[rank] = min(self.shown[rank] + collectives, len(self.totals))

    def together(self, case: Callable[[int], Any]) -> list[Any]:
        """`case(rank)` on every rank at once, in threads; waiting is allowed."""
        results: list[Any] = [None] * self.size

        def run(rank: int) -> None:
            try:
                results[rank] = case(rank)
            except BaseException as error:
                results[rank] = error

        self.patient = True
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * TIMEOUT_S)
            assert not thread.is_alive(), "a rank hangs"
        self.patient = False
        self.shown = [len(self.totals)] * self.size
        return results

    def leave(self, number: int, rank: int, tensor: torch.Tensor) -> None:
        """One rank's part of a collective."""
        with self.changed:
            while len(self.parts) <= number:
                self.parts.append({})
            part = self.parts[number]
            part[rank] = tensor.clone()
            assert len({(one.dtype, one.numel()) for one in part.values()}) == 1, "ranks issue different collectives"
            if len(part) == self.size:
                assert len(self.totals) == number
                wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
                total = torch.zeros(tensor.numel(), dtype=wide)
                for one in range(self.size):
                    total += part[one]
                self.totals.append(total.to(tensor.dtype))
                self.changed.notify_all()

    def complete(self, number: int) -> bool:
        return number < len(self.totals)


class StageRank:
    """One rank; a Communicator as far as contributions need one."""

    def __init__(self, stage: Stage, rank: int) -> None:
        self._stage = stage
        self._rank = rank
        self.lost = ""
        self.issued = 0
        self.under_way = 0
        self.most_under_way = 0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._stage.size

    def timeout_s(self, device: torch.device | None = None) -> float:
        return TIMEOUT_S

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> StagePending:
        assert op == "sum"
        number, self.issued = self.issued, self.issued + 1
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        self._stage.leave(number, self._rank, tensor)
        tensor.fill_(float("nan"))
        return StagePending(self._stage, self, number, tensor)

    def compare_aside(self, key: str, text: str, device: torch.device) -> list[str]:
        stage = self._stage
        assert stage.patient, f"rank {self._rank} compares {key!r} within a step"
        with stage.changed:
            held = stage.asides.setdefault(key, {})
            held[self._rank] = text
            stage.changed.notify_all()
            if not stage.changed.wait_for(lambda: len(held) == stage.size, TIMEOUT_S):
                raise RuntimeError("a rank did not come")
        return [held[rank] for rank in range(stage.size)]


class StagePending:
    """A part of a collective."""

    def __init__(self, stage: Stage, rank: StageRank, number: int, tensor: torch.Tensor) -> None:
        self._stage = stage
        self._rank = rank
        self._number = number
        self._tensor = tensor
        self._waited = False

    def ready(self) -> bool:
        return self._number < self._stage.shown[self._rank.rank] or self._number == self._stage.fail

    def wait(self) -> None:
        stage = self._stage
        if self._number == stage.fail:
            raise RuntimeError("Connection closed by peer")
        if not self.ready():
            if not stage.patient:
                raise Waited(f"rank {self._rank.rank} waits for collective {self._number}")
            with stage.changed:
                if not stage.changed.wait_for(lambda: stage.complete(self._number), TIMEOUT_S):
                    raise RuntimeError(f"nobody came to collective {self._number}")
        if not self._waited:
            self._waited = True
            self._rank.under_way -= 1
            self._tensor.copy_(stage.totals[self._number])
