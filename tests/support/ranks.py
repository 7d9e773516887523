"""Rank processes that stay alive across the tests of a file: `@on_ranks` has a test's body run on all of them.

They are forked from one process that has imported what cases import and has no threads yet: otherwise that takes each
rank three seconds. What Triton reads from the environment while it is imported is fixed there, so ranks that need it
otherwise are spawned; torch's debugging is set in each rank.
"""

from __future__ import annotations

import datetime
import faulthandler
import functools
import gc
import inspect
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from support import executed
from support.timeouts import PATIENT_S, SETUP_S

# A net: what ranks wait for in a case is collectives, which have a timeout of their own.
CASE_TIMEOUT_S = 600.0
POOLS = {2: "two", 3: "three", 4: "four"}  # fixtures of conftest.py
RANKS_ENVIRONMENT = {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
# NCCL between ranks that share a GPU, and each say that they are on a host of their own: by sockets of this machine.
ONE_GPU_ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "2",
}
PRELOADED = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "fusedreduce._public",
    "pytest",
    "support.ddp_models",
]


def on_ranks(
    world: int | None = None, *, pool: str | None = None
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Runs the body of a test, `test(rank, world, ...)`, on every rank of a pool; all must return the same.

    Its other arguments are what pytest gives the test: parameters, and fixtures whose value can be sent to a process.

    Args:
        world: number of ranks; None: what the test's parameter `world` says.
        pool: the fixture that has the ranks, where they are of another kind than those of `conftest.py`.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(request: pytest.FixtureRequest, **arguments: Any) -> None:
            __tracebackhide__ = True
            ranks = request.getfixturevalue(pool or POOLS[arguments.pop("world", world)])
            arguments.pop(pool or "", None)
            try:
                first, *others = returned = ranks.run(_run_body, test, arguments)
            except AssertionError as error:
                pytest.fail(str(error), pytrace=False)
            if any(other != first for other in others):
                shown = "\n".join(f"rank {rank}: {one!r}" for rank, one in enumerate(returned))
                pytest.fail(f"ranks do not return the same:\n{shown}", pytrace=False)

        signature = inspect.signature(body)
        own = ("rank",) if world is None and pool is None else ("rank", "world")
        asked = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("request", pool) if name]
        asked += [one.replace(kind=one.KEYWORD_ONLY) for name, one in signature.parameters.items() if name not in own]
        test.__dict__["__signature__"] = signature.replace(parameters=asked)
        marked: Callable[..., None] = pytest.mark.ranks(test)
        return marked

    return decorate


def _run_body(rank: int, world: int, test: Any, arguments: Mapping[str, Any]) -> Any:
    return test.__wrapped__(rank, world, **arguments)


class RankPool:
    """`world` processes joined in one group. A case that fails or hangs ends the pool; the next starts anew.

    Args:
        world: number of ranks.
        environment: of the ranks, which are spawned and not forked where it says whether kernels are interpreted.
        backend: "gloo", or "nccl", with a GPU for each rank where there are as many; ranks are spawned then.
    """

    def __init__(self, world: int, environment: Mapping[str, str] | None = None, *, backend: str = "gloo") -> None:
        self.world = world
        self._environment = dict(environment or {})
        self._backend = backend
        self._processes: list[Any] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._pipes: list[Connection] = []

    def run(self, case: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Runs `case(rank, world, *arguments)` on every rank; returns what each returned, in rank order."""
        if not self._processes:
            try:
                self._start()
            except BaseException:
                self.close()
                raise
        for pipe in self._pipes:
            pipe.send((executed.recording(case), arguments))
        results: list[Any] = []
        failures: list[str] = []
        for rank, pipe in enumerate(self._pipes):
            # A rank that failed leaves its peers waiting: they are not waited for as long.
            if not pipe.poll(CASE_TIMEOUT_S if not failures else 2.0):
                failures.append(f"rank {rank} did not answer:\n{self._where(rank)}")
                continue
            try:
                kind, value = pipe.recv()
            except EOFError:
                self._processes[rank].join(10)
                kind, value = "failed", f"its process has ended, exit code {self._processes[rank].exitcode}"
            if kind == "failed":
                failures.append(f"rank {rank}:\n{value}")
            else:
                value = executed.result_of(value)
            results.append(value)
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return results

    def _where(self, rank: int) -> str:
        """The stack of each thread of a rank, should it be there."""
        assert self._folder is not None
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        text, before, until = "", "", time.monotonic() + 10
        while not (text and text == before) and time.monotonic() < until:
            time.sleep(0.1)
            text, before = (Path(self._folder.name) / f"stacks{rank}").read_text(), text
        return text

    def close(self) -> None:
        """Ends every rank."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(10)
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fusedreduce-ranks-")
        store = Path(self._folder.name) / "store"
        spawned = self._backend == "nccl" or "TRITON_INTERPRET" in self._environment
        with _starting(self._environment if spawned else None) as context:
            for rank in range(self.world):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve,
                    args=(rank, self.world, str(store), self._backend, self._environment, theirs),
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
        # No rank waits in the group for one that is still importing.
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(SETUP_S), f"rank {rank} has not started within {SETUP_S:g} s"
            pipe.recv()
        for pipe in self._pipes:
            pipe.send("go on")


class Program:
    """A Python program in a process of its own, forked as ranks are; what it prints goes into files.

    It saves a new interpreter's imports. Of that it has not the end: no finalizer of a module runs.

    Args:
        source: what runs as `__main__`.
        arguments: that it finds in sys.argv.
        environment: variables that it has beside this process's and the ranks'; of PYTHONPATH it has the folders.
        folder: in which it runs; None: this process's.
    """

    def __init__(
        self,
        source: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._output = tempfile.TemporaryDirectory(prefix="fusedreduce-program-")
        self._paths = [str(Path(self._output.name) / name) for name in ("out", "err")]
        beside = {**os.environ, **RANKS_ENVIRONMENT, **(environment or {})}
        with _starting(None) as context:
            self._process = context.Process(
                target=_run_program, args=(source, arguments, beside, folder, self._paths), daemon=True
            )
            self._process.start()

    def ended(self, timeout_s: float = SETUP_S) -> tuple[int, str, str]:
        """Its exit status, minus a signal's number where one has ended it, and what it has written to both files."""
        self._process.join(timeout_s)
        assert self._process.exitcode is not None, f"it has not ended within {timeout_s:g} s"
        out, err = (Path(path).read_text() for path in self._paths)
        return self._process.exitcode, out, err

    def printed(self) -> str:
        """What it has printed when it has ended, as it must, without an error."""
        status, out, err = self.ended()
        self.close()
        assert status == 0, err
        return out

    def runs(self) -> bool:
        """Whether it has not ended."""
        alive: bool = self._process.is_alive()
        return alive

    def close(self) -> None:
        """Ends it, should it be there or be stopped."""
        self._process.kill()
        self._process.join()
        self._output.cleanup()


def _run_program(
    source: str, arguments: Sequence[str], environment: Mapping[str, str], folder: Path | None, paths: Sequence[str]
) -> None:
    for descriptor, path in enumerate(paths, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv[1:] = arguments
    if folder is not None:
        os.chdir(folder)
    exec(compile(source, "<program>", "exec"), {"__name__": "__main__"})


@contextmanager
def group_of_one(device_type: str = "cpu") -> Iterator[None]:
    """A group of this process alone: on a GPU NCCL's, on CPU torch's fake backend: Gloo's threads may abort a process
    that destroys its group or ends, with plain DDP too, and this process runs all the other tests."""
    import torch.distributed as dist

    if device_type != "cuda":
        with fake_group(1):
            yield
        return
    with tempfile.TemporaryDirectory(prefix="fusedreduce-ranks-") as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


@contextmanager
def fake_group(world: int, rank: int = 0) -> Iterator[None]:
    """A group of whose ranks this process is one, and the others send nothing: torch's fake backend."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _starting(environment: Mapping[str, str] | None) -> Iterator[Any]:
    """Within it processes of the context are forked from the one that has imported; given an environment, spawned."""
    context: Any = multiprocessing.get_context("forkserver" if environment is None else "spawn")
    context.set_forkserver_preload(PRELOADED)
    # Python 3.11 tells the process that ranks are forked from nothing of sys.path.
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    with _environment({**RANKS_ENVIRONMENT, "PYTHONPATH": path, **(environment or {})}):
        yield context


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(rank: int, world: int, store: str, backend: str, environment: Mapping[str, str], pipe: Connection) -> None:
    import torch
    import torch.distributed as dist
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config
    from torch._C._distributed_c10d import set_debug_level_from_env

    os.environ.update(environment)
    set_debug_level_from_env()
    torch.set_num_threads(1)
    device = None
    if backend == "nccl":
        gpus = torch.cuda.device_count()
        if gpus < world:
            os.environ.update(ONE_GPU_ENVIRONMENT, NCCL_HOSTID=f"rank{rank}")
        device = torch.device("cuda", rank % gpus)
        torch.cuda.set_device(device)
    faulthandler.register(signal.SIGUSR1, Path(store).with_name(f"stacks{rank}").open("w"))
    install_importhook(get_config())  # failures of a test file's asserts show values here too
    gc.freeze()  # what was imported before the fork stays, and so do the pages that it shares
    pipe.send("started")
    pipe.recv()
    timeout = datetime.timedelta(seconds=PATIENT_S)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout, device_id=device
    )
    while True:
        try:
            case, arguments = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(1000 + rank)
            pipe.send(("done", case(rank, world, *arguments)))
        except BaseException as error:
            where = error.__traceback__
            while where is not None and where.tb_frame.f_code.co_filename in (__file__, executed.__file__):
                where = where.tb_next
            pipe.send(("failed", "".join(traceback.format_exception(error.with_traceback(where)))))
