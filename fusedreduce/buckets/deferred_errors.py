"""DeferredErrors: what goes wrong while DDP runs backward, kept until it can be raised without harm.

A comm hook that raises leaves DDP's reducer unusable, and what a future's callback raises arrives as a RuntimeError
without its class. So errors are remembered here and raised from callbacks of the autograd engine:

- When a reduction under way has failed: before DDP's own callback, which would copy the buckets out over the local
  gradients. (DDP queues its callback right after the hook of the last bucket returns.)
- Otherwise, nothing having been reduced: after DDP's own callback, so that DDP finishes its step and can be used again.
- So too what is found out once all is reduced, which every rank raises: a gradient that is not finite.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from ..comm.protocol import Ranks
from ..comm.waiting import wait_for
from ..errors import FusedReduceError, NonFiniteGradientError


class DeferredErrors:
    """The first error of a step, and the reductions under way. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._following: list[torch.futures.Future[Any]] = []
        # Why this rank may be out of step with its peers, so that its next collective could be summed with another
        # one of theirs; None while it is not.
        self.out_of_step: str | None = None

    def pending(self) -> bool:
        """Whether an error waits to be raised."""
        return self._error is not None

    def remember(self, error: Exception, *, met_by_all: bool = False) -> None:
        """Keeps `error` unless one is kept already.

        Args:
            error: what went wrong.
            met_by_all: every rank has met it at this very place, so all of them have left out the same collectives.
        """
        with self._lock:
            self._error = self._error or error
            if not met_by_all and self.out_of_step is None:
                self.out_of_step = f"{type(error).__name__}: {error}"

    def clear(self) -> None:
        """Starts anew: the process group has been replaced."""
        with self._lock:
            self._error, self.out_of_step, self._following = None, None, []

    def add_future(self, future: torch.futures.Future[Any]) -> None:
        """Has the end of backward wait for a reduction."""
        with self._lock:
            self._following.append(future)

    def pop_error(self) -> Exception | None:
        """The error, which is forgotten then."""
        with self._lock:
            error, self._error = self._error, None
        return error

    def raise_at_the_end_of_backward(self, communicator: Ranks | None, close: Callable[[], None] | None = None) -> None:
        """Called by the hook of the last bucket. Outside backward (DDP's join) whoever waits for the futures raises.

        Args:
            communicator: the ranks that the reductions under way are of; None: nothing could be started.
            close: called once all of them are done, if nothing went wrong, and outside backward at once.
        """
        with self._lock:
            following, self._following = self._following, []
        if in_backward():
            _queue_callback(functools.partial(self._raise, following, communicator, close))
        elif close is not None and not self._any_failed(following, communicator):
            error = self._closed(close)
            if error is not None:
                _raise(error)

    def _raise(
        self, following: list[torch.futures.Future[Any]], communicator: Ranks | None, close: Callable[[], None] | None
    ) -> None:
        failed = self._any_failed(following, communicator)
        error = self.pop_error()
        if error is not None and failed:
            _raise(error)
        if error is None and close is not None and not failed:
            error = self._closed(close)
        if error is not None:
            _queue_callback(functools.partial(_raise, error))

    def _any_failed(self, following: list[torch.futures.Future[Any]], communicator: Ranks | None) -> bool:
        failed = False
        for future in following:
            assert communicator is not None
            try:
                wait_for(future, "the reduction of a bucket", communicator)
            except FusedReduceError as error:
                failed = True
                self.remember(error)  # unless the bucket's own callback has, in the error's own class
        return failed

    def _closed(self, close: Callable[[], None]) -> Exception | None:
        try:
            close()
        except NonFiniteGradientError as found:
            return found
        except Exception as error:
            self.remember(error)
            return self.pop_error()
        return None


def in_backward() -> bool:
    """Whether this thread is running a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def _raise(error: Exception) -> None:
    try:
        raise error
    finally:
        del error  # its traceback holds this frame, and with it the caller's module


def _queue_callback(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)
