"""DataParallel: one process drives several devices; each has a replica of the module and gets a part of the batch.

    dp = fusedreduce.DataParallel(model, ["cuda:0", "cuda:1"])
    for inputs, targets in data:
        loss(dp(inputs), targets).backward()     # .grad of the module's parameters: the sum over replicas
        optimizer.step()
        optimizer.zero_grad()

It does what torch.nn.DataParallel does, with this package's reducer and kernels in place of copies, and on CPU too.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo  # unlike torch.compiler.disable it imports torch._dynamo at the first call
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..config import FlushReport, ReduceConfig, SyncMode, checked
from ..errors import FusedReduceError
from ..reducer.optimizer_hooks import flush_step
from ..reducer.reducer import Reducer
from .replicas.autograd_bridge import ForwardRun, Output
from .replicas.module_gradients import ModuleGradients, Scaling
from .replicas.replicate import check_module
from .replicas.runner import ReplicaRunner
from .replicas.scatter_gather import (
    flatten,
    joined,
    one_each,
    pieces,
    same_on_all,
    scattered,
    warn_of_scalars,
)
from .replicas.thread_pool import Turns, Workers

_logger = logging.getLogger(__name__)
_TYPES = ("cpu", "cuda")


class DataParallel(nn.Module):
    """Replicas of `module` on `devices`, trained as one.

    Args:
        module: is moved to the first device. Its parameters are those of this module, and get all gradients.
        devices: of one type; a device may be listed several times, which is for tests: it logs a warning that one
            replica is as fast or faster. On CPU each has a share of the intra-op threads.
        reduce: how gradients are reduced; `op` is always "sum". None: ReduceConfig().
        dim: dimension of inputs and outputs along which samples lie.
        broadcast_buffers: copy the module's buffers to all replicas before each forward. Changes that replica 0 makes
            to buffers are kept, those of others are lost, as in torch.nn.DataParallel.
        timeout_s: seconds that replicas wait for each other in a reduction.
        threads: True: one thread per replica; False: replicas run one after another in the caller's thread; None: True
            on CPU, whose operators are not asynchronous. Dropout on CPU draws from one generator, which threads share:
            its numbers are reproducible without threads only.

    Raises:
        ValueError: no devices, or devices of several types, or neither CPU nor CUDA; timeout_s not above 0; threads on
            CUDA; the mode Asynchronous without threads; a module that is not initialised, on "meta", sharded, or
            parallel already.
        TypeError: an argument of another type; a TorchScript module.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device | str | int],
        *,
        reduce: ReduceConfig | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        timeout_s: float = 300.0,
        threads: bool | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"DataParallel takes an nn.Module, got {type(module).__name__}")
        if isinstance(devices, ReduceConfig):
            raise TypeError(f"devices must be a list of devices, got {devices!r}: write reduce={devices!r}")
        config = checked(reduce, "reduce")
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise TypeError(f"dim must be an integer, got {dim!r}")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0, got {timeout_s!r}")
        self._devices = _checked_devices(devices)
        self._config = dataclasses.replace(config, op="sum")
        self.dim = dim
        self.broadcast_buffers = broadcast_buffers
        self._timeout_s = timeout_s
        self._threads = self._devices[0].type == "cpu" if threads is None else bool(threads)
        if self._threads and self._devices[0].type == "cuda":
            raise ValueError(
                "threads=True is for CPUs: autograd runs all backwards of a CUDA device on one thread, which would "
                "wait for itself. Leave threads at None"
            )
        self._sync = True
        self._closed = False
        self._turns = Turns()
        self._scaling = Scaling()
        self._workers: Workers | None = None
        self._runner: ReplicaRunner | None = None
        for name, one in module.named_modules():
            if isinstance(one, DataParallel | nn.DataParallel | DistributedDataParallel):
                raise ValueError(
                    f"{name or 'the module'} is a {type(one).__name__}, which cannot be replicated: pass its .module"
                )
        named = [*module.named_parameters(), *module.named_buffers()]
        if all(one.device.type != "meta" for _, one in named):
            # Tensors on "meta" have no data to move, and are refused next.
            module.to(self._devices[0])
        check_module(module, self._devices[0])
        self.module = module
        self._make_runner()
        if len(set(self._devices)) < len(self._devices):
            _logger.warning(
                "%d replicas share %s, which takes as long as one replica with all of its threads, or up to twice as "
                "long: it is for trying out, without GPUs, what runs on several. Train the module itself there, give "
                "DataParallel a GPU per replica, or run a process per device with DistributedDataParallel",
                len(self._devices),
                ", ".join(dict.fromkeys(map(str, self._devices))),
            )

    # Properties

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each replica."""
        return self._devices

    @property
    def reduce_config(self) -> ReduceConfig:
        """The options of the reduction."""
        return self._config

    @property
    def sync_mode(self) -> SyncMode:
        """The mode in use: which step's sums `.grad` holds after a backward; see ReduceConfig."""
        return self._config.sync_mode

    @property
    def reducers(self) -> tuple[Reducer, ...]:
        """The reducer of each replica's parameters.

        Empty if nothing is trained, and if gradients are added in place: with all replicas on one device, wire
        "native", the synchronous mode and no statistics.

        Raises:
            ValueError: after close().
        """
        return tuple(self._current().sums.reducers)

    @property
    def gradients(self) -> ModuleGradients:
        """The module's gradients, as `clip_grad_norm_` and `FusedGradScaler` use them.

        Raises:
            ValueError: no parameter requires a gradient; or after close().
        """
        real = self._current().real
        if not real.parameters:
            raise ValueError("no parameter of this DataParallel requires a gradient")
        return real

    def extra_repr(self) -> str:
        """The text that `print` shows in parentheses: devices and dimension."""
        return f"devices={[str(one) for one in self._devices]}, dim={self.dim}"

    # Forward

    @_disable_dynamo
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Scatters the arguments, runs the replicas, and concatenates their outputs on the first device.

        Args:
            args: of the module. Tensors with dimensions are divided along `dim` into parts whose sizes differ by at
                most 1, larger ones first; everything else goes to every replica unchanged.
            kwargs: of the module, scattered in the same way.

        Returns:
            The outputs, nested as the module returned them. 0-dim outputs, losses say, become a vector, as with
            torch.nn.DataParallel; values that are no tensors must be the same on all replicas.

        Raises:
            ValueError: after close(); fewer samples than devices; inputs with different numbers of samples; no tensor
                to scatter; outputs that cannot be gathered.
            TypeError: a PackedSequence.
            Exception: an error of a replica, with a note that says which.
        """
        with self._exclusive_use(again=True):
            return self._forward(args, kwargs)

    @_disable_dynamo
    def forward_parallel(self, inputs: Sequence[Any]) -> list[Any]:
        """Runs the replicas on one input each, without scattering and gathering.

        Each output's loss should be the mean over its replica's samples. Its gradient is multiplied by that replica's
        share of all samples when it enters the replica, so that parameters and inputs get the gradient of the mean over
        all samples, whether losses are summed or run backward one by one.

        Args:
            inputs: per device one argument, or a tuple or list of arguments.

        Returns:
            Each replica's output, on its device.

        Raises:
            ValueError: not as many inputs as devices, or an input without samples; after close().
            TypeError: a PackedSequence.
            Exception: an error of a replica, with a note that says which.
        """
        with self._exclusive_use(again=True):
            return self._forward_parallel(inputs)

    # Training

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards of forwards within the context are not reduced through the wire.

        In the synchronous mode `.grad` still gets the sum over replicas, not rounded to the wire's dtype. In other
        modes replicas stash their gradients until the next backward of a forward outside the context reduces them;
        `zero_grad` of this module drops them.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients, as `Module.zero_grad` does, and those stashed under `no_sync`.

        Args:
            set_to_none: set `.grad` to None; False: fill with zeros.
        """
        super().zero_grad(set_to_none)
        runner = self._runner
        if runner is not None:
            runner.drop_stash()

    def set_sync_mode(self, mode: SyncMode) -> None:
        """Changes the mode from the next backward on. Call `flush` first.

        Args:
            mode: Synchronous(), BoundedStaleness(k) or Asynchronous(); see `ReduceConfig.sync_mode`.

        Raises:
            ValueError: an option excludes the mode, or it is not a mode; after close().
            FusedReduceError: steps are in flight, or gradients of backwards under no_sync() wait to be reduced.
        """
        config = dataclasses.replace(self._config, sync_mode=mode)
        with self._exclusive_use():
            self._current().set_sync_mode(config)
            self._config = config

    def flush(self, *optimizers: Optimizer, step: Callable[[], None] | None = None) -> FlushReport:
        """Applies the sums of every step in flight, in order.

        Args:
            optimizers: each is stepped after each step's sums have been applied; gradients are None afterwards.
            step: called in place of stepping. With neither, `.grad` holds the total of all steps.

        Returns:
            How many steps were applied, and how far parameters were apart.

        Raises:
            ValueError: optimizers together with `step`, or with a loss scaler, which has to decide on each of their
                steps; after close().
            TypeError: an optimizer that is not a torch optimizer.
            FusedReduceError: gradients of backwards under no_sync() wait to be reduced.
            Exception: an error of `step`; steps that were not applied are dropped then.
        """
        with self._exclusive_use():
            runner = self._current()
            return runner.flush(flush_step(optimizers, step, scaled=bool(runner.real.observed.units.attached)))

    def reduce_state_dict(self) -> dict[str, Any]:
        """The steps in flight, to keep in a checkpoint beside the module's and the optimizer's state. Waits for them.

        Returns:
            Plain tensors, numbers and names; see `Reducer.state_dict`.

        Raises:
            ValueError: after close().
            FusedReduceError: gradients of backwards under no_sync() wait to be reduced.
        """
        with self._exclusive_use():
            return self._current().state()

    def load_reduce_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a checkpoint of steps in flight.

        Args:
            state: what `reduce_state_dict` returned.

        Raises:
            ValueError: it is damaged, or belongs to another model, number of devices or mode; after close().
            FusedReduceError: steps are in flight here, or gradients of backwards under no_sync() wait to be reduced.
        """
        with self._exclusive_use():
            self._current().load_state(dict(state))

    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """Norm over the module's gradients as they are now; one launch, which the host does not wait for.

        Args:
            norm_type: 2 or inf.

        Returns:
            0-dim tensor of fp64 on the first device.

        Raises:
            ValueError: another norm_type; no parameter requires a gradient; or after close().
        """
        return self.gradients.observed.grad_norm(norm_type)

    def verify_replicas(self) -> None:
        """Compares all replicas' parameters with the module's, byte for byte.

        Raises:
            ValueError: after close().
            FusedReduceError: parameters differ; with their names and replicas.
        """
        with self._exclusive_use():
            self._current().replicas.verify()

    # Lifecycle

    def close(self) -> None:
        """Ends the threads and frees the replicas; the module stays as it is. May be called twice.

        Waits for a forward, backward or flush of another thread; those that wait for their turn raise.

        Raises:
            FusedReduceError: called by a replica's thread, within its forward or backward.
        """
        with self._turns.lock_for(self._workers, again=True):
            self._closed = True
            if self._runner is not None:
                self._runner.release()
            self._runner = None
            if self._workers is not None:
                self._workers.stop_threads()
            self._workers = None

    def __enter__(self) -> DataParallel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_runner": None, "_workers": None, "_turns": None, "_scaling": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._turns, self._scaling = Turns(), Scaling()

    # Private

    def _exclusive_use(self, *, again: bool = False) -> AbstractContextManager[bool]:
        """Context manager to hold while using the replicas; `again` for forward, which checkpoints run in backward."""
        return self._turns.lock_for(self._workers, again=again)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this DataParallel is closed: make a new one of its .module")

    def _make_runner(self) -> ReplicaRunner:
        if self._workers is None:
            self._workers = Workers(len(self._devices) if self._threads else 1, "replica")
        with torch.inference_mode(False):  # the replicas' parameters outlive this forward
            self._runner = ReplicaRunner(
                self.module,
                self._devices,
                self._workers,
                self._config,
                self._timeout_s,
                threads=self._threads,
                turns=self._turns,
                scaling=self._scaling,
            )
        return self._runner

    def _current(self) -> ReplicaRunner:
        """The runner. Whoever has waited for a turn asks for it then: another thread may have called close()."""
        self._check_open()
        if self._workers is not None and self._workers.are_gone():
            self._workers = self._runner = None
        return self._make_runner() if self._runner is None else self._runner

    def _updated_runner(self) -> ReplicaRunner:
        """The runner, after its replicas were updated from the module."""
        runner = self._current()
        if not runner.replicas.update_from_module(broadcast_buffers=self.broadcast_buffers):
            if runner.sums.steps_in_flight():
                raise FusedReduceError(
                    "the module's parameters have changed (replaced, frozen, converted) while steps are in flight: "
                    "call flush() before such a change"
                )
            runner.release()
            runner = self._make_runner()
            if not runner.replicas.update_from_module(broadcast_buffers=self.broadcast_buffers):
                raise FusedReduceError("the module changed while it was being replicated: another thread modifies it")
        return runner

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        runner = self._updated_runner()
        inputs = scattered(args, kwargs, len(self._devices), self.dim)
        run = ForwardRun(runner, inputs)
        outputs = [flatten(one) for one in run.outputs]
        found = pieces(outputs, self.dim)
        warn_of_scalars(found)
        leaves: list[Any] = []
        graph: list[tuple[int, Output]] = []
        every = range(len(self._devices))
        for at, piece in enumerate(found):
            if not piece.is_tensor:
                leaves.append(same_on_all(piece))
            elif run.records_graph and any(one.requires_grad for one in piece.leaves):
                graph.append((at, Output(every, piece.leaves, self._devices[0])))
                leaves.append(None)
            else:
                leaves.append(joined(piece.leaves, self.dim, self._devices[0]))
        run.connect(graph, leaves, self.dim, None, reduce=self._sync)
        return outputs[0].rebuild(leaves)

    def _forward_parallel(self, inputs: Sequence[Any]) -> list[Any]:
        runner = self._updated_runner()
        if len(inputs) != len(self._devices):
            raise ValueError(f"got {len(inputs)} inputs, expected one for each of {len(self._devices)} devices")
        given, samples = one_each(inputs, self.dim)
        run = ForwardRun(runner, given)
        outputs = [flatten(one) for one in run.outputs]
        leaves = [leaf for one in outputs for leaf in one.leaves]
        graph: list[tuple[int, Output]] = []
        at = 0
        for replica, one in enumerate(outputs):
            for leaf in one.leaves:
                if run.records_graph and isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    graph.append((at, Output([replica], [leaf], leaf.device)))
                at += 1
        run.connect(graph, leaves, self.dim, [one / sum(samples) for one in samples], reduce=self._sync)
        results = []
        for one in outputs:
            results.append(one.rebuild(leaves[: len(one.leaves)]))
            del leaves[: len(one.leaves)]
        return results


def _checked_devices(devices: Sequence[torch.device | str | int]) -> tuple[torch.device, ...]:
    """The devices as torch.device, CUDA devices with an index."""
    found = [torch.device(one) for one in devices]
    if not found:
        raise ValueError("DataParallel needs at least one device")
    kinds = dict.fromkeys(one.type for one in found)
    if len(kinds) > 1:
        raise ValueError(f"devices must be of one type, got {', '.join(kinds)}")
    if found[0].type not in _TYPES:
        raise ValueError(f"devices must be CPUs or CUDA devices, got {found[0].type}")
    if found[0].type == "cpu":
        return tuple(torch.device("cpu") for _ in found)
    current = torch.cuda.current_device() if any(one.index is None for one in found) else 0
    return tuple(torch.device("cuda", current if one.index is None else one.index) for one in found)
