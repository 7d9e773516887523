"""Where Triton's interpreter is switched on: before anything imports triton, unless told otherwise or on a GPU."""

from __future__ import annotations

import gc
import os
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

try:
    import hypothesis
except ModuleNotFoundError:  # not on every machine with a GPU
    hypothesis = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from support.ranks import RankPool

if "TRITON_INTERPRET" not in os.environ and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Written by slow.py: what `make quick` leaves out, as `folder/file.py::function`, one a line, and files that
# begin first.
SLOW = frozenset(Path(__file__).with_name("slow.txt").read_text().split())
LONGEST = {name: place for place, name in enumerate(Path(__file__).with_name("longest.txt").read_text().split())}

if hypothesis is not None:
    # Interpreted kernels are slow and their speed says nothing; the examples are what counts.
    too_slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("default", deadline=None, suppress_health_check=too_slow)
    hypothesis.settings.load_profile("default")
    # For planted faults: that a test fails is enough, and making its example smaller takes minutes.
    phases = [phase for phase in hypothesis.Phase if phase not in (hypothesis.Phase.shrink, hypothesis.Phase.explain)]
    hypothesis.settings.register_profile("planted", phases=phases)


class NeedsHypothesis(pytest.Module):
    """A file of tests that cannot be imported here."""

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        """Skips all of them."""
        pytest.skip("hypothesis is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Without hypothesis the files that import it are skipped, and counted as skipped; the others run."""
    if hypothesis is None and re.search(r"^(from|import) hypothesis\b", module_path.read_text(), re.MULTILINE):
        module: pytest.Module = NeedsHypothesis.from_parent(parent, path=module_path)
        return module
    return None


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """What has been imported and compiled stays, so the garbage collector need not look at it again: in a process that
    has compiled models, a collection of everything takes a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def no_active_ddp() -> Iterator[None]:
    """torch's own wrapper, in ranks that are threads, may leave itself the process's active one. What is compiled in a
    later test would be cut by its buckets."""
    yield
    torch.nn.parallel.DistributedDataParallel._active_ddp_module = None


@pytest.fixture(autouse=True)
def streams_of_stand_ins(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a torch built for GPUs too, stand-ins for torch.cuda's functions say which stream is current."""
    if request.node.get_closest_marker("gpu") is None:
        from fusedreduce.kernels import current_stream

        monkeypatch.setattr(current_stream, "raw_stream", None)


@pytest.fixture(autouse=True)
def paths_found_anew() -> Iterator[None]:
    """What a test replaces, which decides the path, is nobody else's."""
    from fusedreduce.kernels import dispatch, encoded

    def forget() -> None:
        dispatch.unchecked.cache_clear()
        encoded.unchecked.cache_clear()

    forget()
    yield
    forget()


@pytest.fixture
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What computes in a test on CPU, and the same random numbers for it: the torch path, which is what users on CPU
    get, or, where the test is parametrized with "interpreter", the kernels through Triton's interpreter."""
    from support.inside import take_torch_path  # not before TRITON_INTERPRET is set

    torch.manual_seed(0)
    asked: str = getattr(request, "param", "torch")
    if asked == "torch":
        take_torch_path(monkeypatch)
    return asked


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    from support.ranks import group_of_one  # not before TRITON_INTERPRET is set

    with group_of_one():
        yield


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """A test with this argument runs on CPU in the ordinary suite, and, marked gpu, once more on a GPU."""
    if request.param == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    from triton import knobs

    if not knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1")
    return torch.device("cpu")


@pytest.fixture
def group(device: torch.device) -> Iterator[None]:
    """A process group of one, on a GPU NCCL's."""
    from support.ranks import group_of_one

    with group_of_one(device.type):
        yield


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    """Two ranks on the torch path."""
    yield from _pool(2)


@pytest.fixture(scope="module")
def three() -> Iterator[RankPool]:
    """Three ranks on the torch path."""
    yield from _pool(3)


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    """Four ranks on the torch path."""
    yield from _pool(4)


@pytest.fixture(scope="module", params=["INFO", "DETAIL"])
def debugged(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Two ranks with torch's debugging at a level: with DETAIL, every collective is compared across ranks first."""
    yield from _pool(2, {"TORCH_DISTRIBUTED_DEBUG": request.param})


def _pool(world: int, environment: Mapping[str, str] | None = None) -> Iterator[RankPool]:
    from support.ranks import RankPool

    pool = RankPool(world, environment)
    yield pool
    pool.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--full`, which `make full` gives."""
    parser.addoption("--full", action="store_true", help="the longest tests too, and sweeps with all their examples")


def pytest_configure(config: pytest.Config) -> None:
    """Before test files are imported: their settings ask for `--full`. Tests send SIGINT, which a shell has its
    background jobs ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from support import sweep

    sweep.full = config.getoption("full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what is slow and what starts rank processes, for `make quick`; leaves out what is for `--full` alone, and
    skips, so that they are counted, tests marked gpu where there is no GPU. The longest files come first."""
    items.sort(key=lambda item: LONGEST.get(item.nodeid.removeprefix("tests/").partition("::")[0], len(LONGEST)))
    for item in items:
        if isinstance(item, pytest.Function) and "RankPool" in item.function.__annotations__.values():
            item.add_marker(pytest.mark.ranks)
        if any(item.get_closest_marker(mark) for mark in ("ranks", "slow")):
            item.user_properties.append(("never quick", "by its file"))  # for slow.py
        if item.nodeid.removeprefix("tests/").partition("[")[0] in SLOW:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU on this machine"))
    left_out = [] if config.getoption("full") else [item for item in items if item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.get_closest_marker("full") is None]
