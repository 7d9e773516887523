"""Workers: persistent threads that run one job each, with the caller's settings of autograd and autocast.

Each has a share of the caller's intra-op threads. Waiting threads hold no reference to their Workers object, and end
when it is freed.

After an operator OpenMP's own threads spin for some ms, so that the next one begins at once; meanwhile a worker per
core would have half a core. So OpenMP's threads are ended before workers begin, and those of the workers when they are
done: the next operator starts them again, in some 10 us. (If OpenMP were configured for more threads than cores it
would stop spinning everywhere and for good; the caller's optimizer then took three times as long.)

An interrupt in the main thread cannot leave a worker waiting for ever: the main thread holds no lock of the threading
module's Python classes, and polls a flag.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch

from ...comm.waiting import end_at_exit
from ...errors import FusedReduceError

T = TypeVar("T")
_Queue: TypeAlias = "queue.SimpleQueue[Callable[[], None] | None]"

_AUTOCAST_DEVICES = ("cpu", "cuda")
# Interval at which a waiting thread polls the flag, in case an interrupt swallowed the signal.
_POLL_S = 0.1
_SOFT = 1  # omp_pause_soft: keeps thread-private data
_default_lock = threading.Lock()


class Workers:
    """`count` threads; thread n runs job n.

    Args:
        count: number of threads.
        label: part of the threads' names, for debuggers.
    """

    def __init__(self, count: int, label: str) -> None:
        self._queues: list[_Queue] = [queue.SimpleQueue() for _ in range(count)]
        self._threads = [
            threading.Thread(target=_work, args=(one,), name=f"fusedreduce-{label}-{number}", daemon=True)
            for number, one in enumerate(self._queues)
        ]
        self._lock = threading.Lock()
        self._intra_op = 0
        self._latest: _Batch | None = None  # the one that may be running
        self.closed = False
        for thread, one in zip(self._threads, self._queues, strict=True):
            end_at_exit(thread, functools.partial(one.put, None))
            thread.start()
        self._finalizer = weakref.finalize(self, _end, self._queues)

    def run(
        self, jobs: Sequence[Callable[[], T]], on_error: Callable[[int, BaseException], None] | None = None
    ) -> list[T]:
        """Runs each job in its own thread, with the calling thread's settings, and waits for all.

        Args:
            jobs: at most one per thread.
            on_error: called in the thread of a job that has raised, with its number and the error.

        Returns:
            The jobs' results, in order.

        Raises:
            FusedReduceError: after stop_threads().
            BaseException: the first error of a job, when all jobs have ended.
        """
        settings = ThreadSettings()
        with self._lock:
            self.refuse_closed()
            self._wait_until_idle()
            self._share(torch.get_num_threads())
            if len(self._queues) > 1:
                let_openmp_threads_go()
            batch = _Batch([settings.wrapped(job) for job in jobs], on_error)
            try:
                self._start(batch)
            except BaseException as error:  # of a signal
                batch.cancel()
                if on_error is not None:
                    on_error(0, error)
                batch.wait_until_ended()
                raise
        return batch.results()

    def refuse_closed(self) -> None:
        """Raises FusedReduceError after stop_threads()."""
        if self.closed:
            raise FusedReduceError("this DataParallel is closed: its outputs cannot be run backward any more")

    def wait_until_idle(self) -> None:
        """Waits for jobs that still run after a second interrupt ended the wait for them."""
        with self._lock:
            self._wait_until_idle()

    def are_gone(self) -> bool:
        """Whether threads have ended without `stop_threads`: in a process that was forked, or that ends."""
        return not self.closed and not all(thread.is_alive() for thread in self._threads)

    def has(self, thread: threading.Thread) -> bool:
        """Whether `thread` is one of these."""
        return thread in self._threads

    def stop_threads(self) -> None:
        """Ends the threads, and joins them."""
        with contextlib.nullcontext() if self.has(threading.current_thread()) else self._lock:
            self.closed = True
            self._finalizer()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _wait_until_idle(self) -> None:
        if self._latest is not None:
            self._latest.cancel()
            self._latest.wait_until_ended()
            self._latest = None

    def _start(self, batch: _Batch) -> None:
        self._latest = batch
        for task, one in zip(batch.tasks(), self._queues, strict=False):
            one.put(task)
        batch.wait_until_ended()
        self._latest = None

    def _share(self, total: int) -> None:
        """Divides `total` intra-op threads among the workers."""
        if total == self._intra_op:
            return
        self._intra_op = total
        least, more = divmod(total, len(self._queues))
        shares = [max(1, least + (number < more)) for number in range(len(self._queues))]
        with _default_lock:
            # set_num_threads applies to the calling thread, and to all threads that are started later.
            default = _in_new_thread(torch.get_num_threads)
            self._start(_Batch([functools.partial(_set_intra_op, share) for share in shares], None))
            _in_new_thread(functools.partial(_set_intra_op, default))


class ThreadSettings:
    """A thread's own settings: autograd's modes, autocast, context variables."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind)) for kind in _AUTOCAST_DEVICES if torch.is_autocast_enabled(kind)
        ]
        self._cache = torch.is_autocast_cache_enabled()
        self._context = contextvars.copy_context()

    def wrapped(self, job: Callable[[], T]) -> Callable[[], T]:
        """`job`, to be run with these settings."""
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
    """Whether this thread has a dispatch mode or saved-tensor hooks, which do not apply to jobs in other threads."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    )


class Turns:
    """Lets one of the user's threads at a time run the workers; others wait.

    The lock is one of the interpreter's own, entered by `with`: an interrupt comes before it is acquired, or within the
    block.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def lock_for(self, workers: Workers | None, *, again: bool = False) -> contextlib.AbstractContextManager[bool]:
        """The lock, as a context manager.

        Args:
            workers: the threads that it protects.
            again: this thread may hold the lock already.

        Raises:
            FusedReduceError: this thread holds the lock or is a worker, and would wait for itself.
        """
        owned: bool = self._lock._is_owned()  # type: ignore[attr-defined]
        if (owned and not again) or (workers is not None and workers.has(threading.current_thread())):
            raise FusedReduceError(
                "a DataParallel was called from within its own replicas' forward or backward, or from a step that its "
                "flush() calls: it would wait for itself"
            )
        return self._lock


class _Batch:
    """Jobs that run together. Tasks that an interrupt has left in a queue do nothing.

    Args:
        jobs: one per task.
        on_error: see `Workers.run`.

    Attributes:
        ended: no job runs or will run; threads then hold no reference to one.
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
        """A callable per job, each to be called by one thread."""
        return [functools.partial(self._run, number) for number in range(len(self._jobs))]

    def cancel(self) -> None:
        """Drops the jobs that have not begun."""
        with self._lock:
            self._waiting.clear()
            if self._running == 0:
                self._end()

    def wait_until_ended(self) -> None:
        """Blocks until all jobs have ended."""
        while not self.ended:
            self._signal.acquire(timeout=_POLL_S)

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
                let_openmp_threads_go()
            with self._lock:
                self._running -= 1
                if self._running == 0 and not self._waiting:
                    self._end()

    def results(self) -> list[Any]:
        """The jobs' results, in order. Raises the first error."""
        errors, self._errors = self._errors, []
        if not errors:
            return [self._results.pop(number) for number in range(len(self._results))]
        try:
            raise errors[0]
        finally:
            errors.clear()  # its traceback holds this frame


def _set_intra_op(count: int) -> None:
    """Sets the number of intra-op threads of the calling thread."""
    torch.get_num_threads()  # a thread's first call would overwrite what was set before it
    torch.set_num_threads(count)


def _in_new_thread(call: Callable[[], T]) -> T:
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


@functools.cache
def pause_openmp() -> Callable[[int], int] | None:
    """omp_pause_resource_all of the OpenMP library that torch has loaded; None if it has none."""
    try:
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        pause: Callable[[int], int] = torch_cpu.omp_pause_resource_all
    except (OSError, AttributeError):
        return None
    return pause


def let_openmp_threads_go() -> None:
    """Ends the threads that OpenMP keeps for the calling thread."""
    pause = pause_openmp()
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
