"""Exchange: nodes compare what they want through a key-value store, beside their collectives, with one verdict each.

A node is a process; of ranks, each is one. Per exchange n, under the prefix:
    d/n/node   what that node wants
    c/n        how many nodes have said so, and (from bit 32 on) how many of those want to finish
    v/n        the verdict, set once by compare_set: by the last node to come, or by one whose patience is over. Who
               comes later reads it, so that a node is never in a collective whose peers have given up
    t/n        how many nodes have read it; the last one deletes all four

Nobody ever blocks in the store: a TCPStore's client has one lock, which a wait would keep from this process's other
threads. Who waits looks again and again, at intervals that grow to a tenth of the time that it has waited.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Protocol

_FINISHING = 1 << 32
_LEAST_PAUSE_S = 30e-6
_MOST_PAUSE_S = 0.02


class KeyValueStore(Protocol):
    """The part of torch.distributed.Store that is used: nothing that blocks."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def delete_key(self, key: str, /) -> bool: ...


class Exchange:
    """One node's end. Every exchange has a number, or name, that none had before.

    Args:
        store: of all nodes.
        prefix: of these exchanges' keys; nobody else's.
        node: this one's number.
        nodes: how many there are.
    """

    def __init__(self, store: KeyValueStore, prefix: str, node: int, nodes: int) -> None:
        self._store = store
        self._prefix = prefix
        self._node = node
        self._nodes = nodes

    def post(
        self, number: int | str, text: str, finishing: bool, decide: Callable[[Mapping[int, str]], str]
    ) -> str | None:
        """Says what this node wants; the verdict, if that can be found now.

        Args:
            number: of the exchange.
            text: what it wants.
            finishing: whether that is to finish; with others that do not, the verdict need not wait for the rest.
            decide: makes a verdict of what nodes want.
        """
        self._store.set(self._key("d", number, self._node), text)
        count = self._store.add(self._key("c", number), 1 + (_FINISHING if finishing else 0))
        finished, came = divmod(count, _FINISHING)
        if came == self._nodes or 0 < finished < came:
            return self.propose(number, decide(self.present(number)))
        return None

    def present(self, number: int | str) -> dict[int, str]:
        """What the nodes that have come want. Only before `take`."""
        keys = {node: self._key("d", number, node) for node in range(self._nodes)}
        return {node: self._store.get(key).decode() for node, key in keys.items() if self._store.check([key])}

    def propose(self, number: int | str, verdict: str) -> str:
        """Makes this the verdict, unless there is one; the verdict."""
        return self._store.compare_set(self._key("v", number), "", verdict).decode()

    def look(self, number: int | str) -> str | None:
        """The verdict, if it is there. Only before `take`."""
        key = self._key("v", number)
        return self._store.get(key).decode() if self._store.check([key]) else None

    def wait(self, number: int | str, until_s: float) -> str | None:
        """The verdict, or None if there is none by `until_s`, time.monotonic()."""
        began_s = time.monotonic()
        while True:
            found = self.look(number)
            now_s = time.monotonic()
            if found is not None or now_s >= until_s:
                return found
            pause_s = min(max((now_s - began_s) / 10, _LEAST_PAUSE_S), _MOST_PAUSE_S)
            time.sleep(min(pause_s, max(until_s - now_s, 0.0)))

    def take(self, number: int | str) -> None:
        """This node has read the verdict. Each calls it once."""
        with contextlib.suppress(RuntimeError):  # the host has gone; whatever comes next will say so
            if self._store.add(self._key("t", number), 1) == self._nodes:
                keys = [self._key("d", number, node) for node in range(self._nodes)]
                for key in [*keys, self._key("c", number), self._key("v", number), self._key("t", number)]:
                    self._store.delete_key(key)

    def wait_until_taken(self, number: int | str, until_s: float) -> None:
        """Returns when every node has read the verdict of an exchange that this one took, or at `until_s`."""
        with contextlib.suppress(RuntimeError):
            while self._store.check([self._key("t", number)]) and time.monotonic() < until_s:
                time.sleep(0.001)

    def first_failure(self, text: str) -> str:
        """What the first node said that could not go on, so that all say the same; `text` where nobody can be asked."""
        with contextlib.suppress(RuntimeError):
            return self._store.compare_set(f"{self._prefix}/failed", "", text).decode()
        return text

    def _key(self, what: str, number: int | str, node: int | None = None) -> str:
        return f"{self._prefix}/{what}/{number}" + ("" if node is None else f"/{node}")
