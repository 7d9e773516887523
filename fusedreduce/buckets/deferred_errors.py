"""DeferredErrors: errors while DDP runs backward, kept until they can be raised without harm.

A comm hook that raises leaves DDP's reducer unusable, and what a future's callback raises arrives as a RuntimeError
without its class. So errors are kept here and raised from callbacks of the autograd engine:

- If a reduction in flight has failed: before DDP's own callback, which would copy the buckets over the local gradients.
  (DDP queues its callback right after the hook of the last bucket returns.)
- If nothing was reduced: after DDP's own callback, so that DDP finishes its step and can be used again.
- After it also what every rank finds once all is reduced: a gradient that is not finite.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TypeAlias

import torch

from ..comm.protocol import Ranks
from ..errors import NonFiniteGradientError

Ending: TypeAlias = Callable[[Ranks], object]


class DeferredErrors:
    """The first error of a step, and how the reductions in flight end. Safe to use from any thread.

    Attributes:
        out_of_step: why this rank may have issued other collectives than its peers, so that its next one could be
            summed with another one of theirs; None: it has not.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._endings: list[Ending] = []
        self.out_of_step: str | None = None

    def pending(self) -> bool:
        """Whether an error waits to be raised."""
        return self._error is not None

    def remember(self, error: Exception, *, on_all_ranks: bool = False) -> None:
        """Keeps `error`, unless one is kept already.

        Args:
            error: what went wrong.
            on_all_ranks: every rank raises it at the same place, so all have left out the same collectives.
        """
        with self._lock:
            self._error = self._error or error
            if not on_all_ranks and self.out_of_step is None:
                self.out_of_step = f"{type(error).__name__}: {error}"

    def add(self, end: Ending) -> None:
        """Adds a reduction in flight. As backward ends `end` waits for it, and raises if it has failed.

        It takes the ranks, and must not hold them: a collective's callback holds this object, and with it the endings.
        """
        with self._lock:
            self._endings.append(end)

    def pop_error(self) -> Exception | None:
        """Returns the error and forgets it; None: there is none."""
        with self._lock:
            error, self._error = self._error, None
        return error

    def raise_at_the_end_of_backward(
        self,
        communicator: Ranks | None,
        end_step: Callable[[], None] | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        """Queues the raising of errors. Called by the hook of the last bucket.

        Outside backward (DDP's join) nothing is queued: who waits for the futures gets their errors.

        Args:
            communicator: the ranks of the reductions in flight; None: none could be started.
            end_step: called once all of them are done, if nothing went wrong; outside backward at once.
            before: called before anything waits for them; in backward only.
        """
        with self._lock:
            ends, self._endings = self._endings, []
        if in_backward():
            _queue_callback(functools.partial(self._raise, ends, communicator, end_step, before))
        elif end_step is not None and not self._any_failed(ends, communicator):
            error = self._ended(end_step)
            if error is not None:
                _raise(error)

    def _raise(
        self,
        ends: list[Ending],
        communicator: Ranks | None,
        end_step: Callable[[], None] | None,
        before: Callable[[], None] | None,
    ) -> None:
        if before is not None:
            before()
        failed = self._any_failed(ends, communicator)
        error = self.pop_error()
        if error is not None and failed:
            _raise(error)
        if error is None and end_step is not None and not failed:
            error = self._ended(end_step)
        if error is not None:
            raise_last(error)

    def _any_failed(self, ends: list[Ending], communicator: Ranks | None) -> bool:
        failed = False
        for end in ends:
            assert communicator is not None
            try:
                end(communicator)
            except Exception as error:
                failed = True
                self.remember(error)  # has no effect if the bucket's callback has kept it already, with its class
        return failed

    def _ended(self, end_step: Callable[[], None]) -> Exception | None:
        try:
            end_step()
        except NonFiniteGradientError as found:
            return found
        except Exception as error:
            self.remember(error)
            return self.pop_error()
        return None


def in_backward() -> bool:
    """Whether this thread is running a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def raise_last(error: Exception) -> None:
    """Queues the raising of `error` behind the callbacks of this backward that are queued by now."""
    _queue_callback(functools.partial(_raise, error))


def _raise(error: Exception) -> None:
    try:
        raise error
    finally:
        del error  # its traceback references this frame, and with it the caller's module


def _queue_callback(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)
