"""Workers: persistent threads that run one job each, with the caller's settings of autograd and autocast.

Each has its share of the intra-op threads that the caller has. Threads wait for jobs without holding whoever gives
them, and end when the Workers object goes.

After an operator OpenMP's own threads keep spinning for some ms, for the next one to begin at once; meanwhile a worker
per core has half a core. So they are let go before workers begin, and the workers' own when those are done: the next
operator that wants them makes them anew, in some 10 us. (Had OpenMP known of more threads than there are cores it would
have stopped spinning by itself, everywhere and for good: the caller's optimizer then took three times as long.)

Nothing that the main thread does here can be left half done by an interrupt so that a worker waits for ever: it holds
no lock of Python's own classes, and waits for a flag.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch

from ...errors import FusedReduceError

T = TypeVar("T")
_Queue: TypeAlias = "queue.SimpleQueue[Callable[[], None] | None]"

_AUTOCAST_DEVICES = ("cpu", "cuda")
# Who waits looks at a flag so often, should the signal have been lost to an interrupt.
_LOOK_S = 0.1
_SOFT = 1  # omp_pause_soft: what threads keep for themselves stays
_default_lock = threading.Lock()


class Workers:
    """`count` threads, of which the n-th runs the n-th job.

    Args:
        count: how many.
        label: of the threads, for debuggers.
    """

    def __init__(self, count: int, label: str) -> None:
        self._queues: list[_Queue] = [queue.SimpleQueue() for _ in range(count)]
        self._threads = [
            threading.Thread(target=_work, args=(one,), name=f"fusedreduce-{label}-{number}", daemon=True)
            for number, one in enumerate(self._queues)
        ]
        self._lock = threading.Lock()
        self._intra_op = 0
        self._latest: _Round | None = None  # if it may be under way
        self._process = os.getpid()
        self.closed = False
        for thread in self._threads:
            thread.start()
        self._finalizer = weakref.finalize(self, _end, self._queues)

    def run(
        self, jobs: Sequence[Callable[[], T]], on_error: Callable[[int, BaseException], None] | None = None
    ) -> list[T]:
        """Runs each job in its own thread, with this thread's settings; what they returned, in order.

        Args:
            jobs: at most one per thread.
            on_error: called in the thread of a job that has raised, with its number and the error.

        Raises:
            FusedReduceError: after close().
            BaseException: the first that a job has raised, when all of them have ended.
        """
        settings = Settings()
        with self._lock:
            if self.closed:
                raise FusedReduceError("this DataParallel is closed, and what it has returned cannot be run backward")
            self._settle()
            self._share(torch.get_num_threads())
            if len(self._queues) > 1:
                _let_openmp_threads_go()
            round_ = _Round([settings.wrapped(job) for job in jobs], on_error)
            try:
                self._start(round_)
            except BaseException as error:  # of a signal
                round_.cancel()
                if on_error is not None:
                    on_error(0, error)
                round_.wait()
                raise
        return round_.results()

    def settle(self) -> None:
        """Waits for what runs though nobody waits for it any more: after a second interrupt."""
        with self._lock:
            self._settle()

    def are_here(self) -> bool:
        """Whether the threads are in this process, and not in one that it was forked from."""
        return self._process == os.getpid()

    def has(self, thread: threading.Thread) -> bool:
        """Whether it is one of these."""
        return thread in self._threads

    def close(self) -> None:
        """Ends the threads, and waits for it."""
        with contextlib.nullcontext() if self.has(threading.current_thread()) else self._lock:
            self.closed = True
            self._finalizer()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _settle(self) -> None:
        if self._latest is not None:
            self._latest.cancel()
            self._latest.wait()
            self._latest = None

    def _start(self, round_: _Round) -> None:
        self._latest = round_
        for task, one in zip(round_.tasks(), self._queues, strict=False):
            one.put(task)
        round_.wait()
        self._latest = None

    def _share(self, total: int) -> None:
        """Divides `total` intra-op threads among the workers."""
        if total == self._intra_op:
            return
        self._intra_op = total
        least, more = divmod(total, len(self._queues))
        shares = [max(1, least + (number < more)) for number in range(len(self._queues))]
        with _default_lock:
            # What a thread sets holds for itself, and for all threads that are started later.
            default = _in_new_thread(torch.get_num_threads)
            self._start(_Round([functools.partial(_set_intra_op, share) for share in shares], None))
            _in_new_thread(functools.partial(_set_intra_op, default))


class Settings:
    """What a thread has set for itself: autograd's modes, autocast, context variables."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind)) for kind in _AUTOCAST_DEVICES if torch.is_autocast_enabled(kind)
        ]
        self._cache = torch.is_autocast_cache_enabled()
        self._context = contextvars.copy_context()

    def wrapped(self, job: Callable[[], T]) -> Callable[[], T]:
        """`job` with these settings."""
        context = self._context.copy()

        def within() -> T:
            with self._applied():
                return context.run(job)

        return within

    @contextlib.contextmanager
    def _applied(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._inference:
                stack.enter_context(torch.inference_mode())
            for kind, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self._cache))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            yield


def modes_are_active() -> bool:
    """Whether this thread has a mode that no other thread could take over: what it runs is to be run here."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    )


class Turns:
    """One thread of the user's at a time has workers run something; others wait.

    A lock of the interpreter's own, entered by `with`: an interrupt comes before it is held, or within the block.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def take(self, workers: Workers | None, *, again: bool = False) -> contextlib.AbstractContextManager[bool]:
        """To be entered for the turn.

        Args:
            workers: whose.
            again: may be taken within a turn of this thread.

        Raises:
            FusedReduceError: this thread is within one, and would wait for itself.
        """
        owned: bool = self._lock._is_owned()  # type: ignore[attr-defined]
        if (owned and not again) or (workers is not None and workers.has(threading.current_thread())):
            raise FusedReduceError(
                "a DataParallel was called within its own replicas' forward or backward, or within flush, which waits "
                "for what it calls"
            )
        return self._lock


class _Round:
    """Jobs that are under way together. What is left of one in a queue after an interrupt does nothing.

    Args:
        jobs: what the tasks run.
        on_error: see `Workers.run`.

    Attributes:
        ended: set when none runs and none will; threads then hold nothing of theirs.
    """

    def __init__(
        self, jobs: Sequence[Callable[[], Any]], on_error: Callable[[int, BaseException], None] | None
    ) -> None:
        self._jobs: list[Callable[[], Any] | None] = list(jobs)
        self.ended = False
        self._signal = threading.Lock()
        self._signal.acquire()
        self._lock = threading.Lock()
        self._waiting = set(range(len(jobs)))
        self._running = 0
        self._results: dict[int, Any] = {}
        self._errors: list[BaseException] = []
        self._on_error = on_error

    def tasks(self) -> list[Callable[[], None]]:
        """One per job, each to be called by a thread."""
        return [functools.partial(self._run, number) for number in range(len(self._jobs))]

    def cancel(self) -> None:
        """Those that have not begun never will."""
        with self._lock:
            self._waiting.clear()
            if self._running == 0:
                self._end()

    def wait(self) -> None:
        """Until it has ended."""
        while not self.ended:
            self._signal.acquire(timeout=_LOOK_S)

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            self._signal.release()

    def _run(self, number: int) -> None:
        with self._lock:
            if number not in self._waiting:
                return
            self._waiting.discard(number)
            self._running += 1
            job, self._jobs[number] = self._jobs[number], None
        assert job is not None
        try:
            self._results[number] = job()
        except BaseException as error:
            with self._lock:
                self._errors.append(error)
            if self._on_error is not None:
                self._on_error(number, error)
        finally:
            del job
            if torch.get_num_threads() > 1:
                _let_openmp_threads_go()
            with self._lock:
                self._running -= 1
                if self._running == 0 and not self._waiting:
                    self._end()

    def results(self) -> list[Any]:
        """In order; raises what was raised first."""
        errors, self._errors = self._errors, []
        if not errors:
            return [self._results.pop(number) for number in range(len(self._results))]
        try:
            raise errors[0]
        finally:
            errors.clear()  # its traceback holds this frame


def _set_intra_op(count: int) -> None:
    """Sets the number of intra-op threads of the thread that calls it."""
    torch.get_num_threads()  # a thread's first call takes the default over, whatever was set before
    torch.set_num_threads(count)


def _in_new_thread(call: Callable[[], T]) -> T:
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


@functools.cache
def _pause_openmp() -> Callable[[int], int] | None:
    """OpenMP's omp_pause_resource_all, of the library that torch has loaded; None: it has none."""
    try:
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        pause: Callable[[int], int] = torch_cpu.omp_pause_resource_all
    except (OSError, AttributeError):
        return None
    return pause


def _let_openmp_threads_go() -> None:
    """Ends the threads that OpenMP keeps for the one that calls this."""
    pause = _pause_openmp()
    if pause is not None:
        pause(_SOFT)


def _work(jobs: _Queue) -> None:
    while True:
        job = jobs.get()
        if job is None:
            return
        job()
        del job  # it holds tensors


def _end(queues: Sequence[_Queue]) -> None:
    for one in queues:
        one.put(None)
