"""DataParallel: one process drives several devices; each has a replica of the module and a part of the batch.

    dp = fusedreduce.DataParallel(model, ["cuda:0", "cuda:1"])
    for inputs, targets in data:
        loss(dp(inputs), targets).backward()     # gradients of the real parameters: the sum over replicas
        optimizer.step()
        optimizer.zero_grad()

What torch.nn.DataParallel does, with the reducer and kernels of this package in place of its copies, and on CPU too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..config import FlushReport, ReduceConfig, SyncMode
from ..errors import FusedReduceError
from ..reducer.optimizer_hooks import flush_step
from ..reducer.reducer import Reducer
from .replicas.autograd_bridge import Call, Joined, Output
from .replicas.engine import Team
from .replicas.module_gradients import RealGradients, Scaling
from .replicas.replicate import check_module
from .replicas.scatter_gather import (
    Nested,
    flatten,
    is_batched,
    joined,
    pieces,
    refuse_packed,
    same_on_all,
    samples_of,
    scattered,
    warn_of_scalars,
)
from .replicas.thread_pool import Turns, Workers

_TYPES = ("cpu", "cuda")


class DataParallel(nn.Module):
    """Replicas of `module` on `devices`, trained as one.

    Args:
        module: it is moved to the first device; its parameters are those of this module, and get all gradients.
        devices: of one type; one may be listed several times. On CPU each has its share of the intra-op threads.
        reduce: how gradients travel; `op` is "sum" whatever is given.
        dim: of inputs and outputs, along which samples lie.
        broadcast_buffers: replicas begin each forward with the module's buffers. What replica 0 does to its own is
            kept, what others do is lost; as torch.nn.DataParallel.
        timeout_s: how long replicas wait for each other in a reduction.
        threads: one thread per replica, else they run one after another in the caller's. None: where devices are CPUs,
            whose operators are not asynchronous. Dropout on CPU draws from one generator, which threads share: its
            numbers are reproducible without threads only.

    Raises:
        ValueError: no devices, of several types, or a kind that is neither CPU nor CUDA; threads on CUDA; the mode
            Asynchronous without threads; a module that is not
            initialised, on "meta", sharded, or parallel already.
        TypeError: something that is no module; TorchScript.
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
        if reduce is not None and not isinstance(reduce, ReduceConfig):
            raise TypeError(f"reduce must be a fusedreduce.ReduceConfig, got {reduce!r}")
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise TypeError(f"dim must be an integer, got {dim!r}")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0, got {timeout_s!r}")
        self._devices = _checked_devices(devices)
        self._config = dataclasses.replace(reduce or ReduceConfig(), op="sum")
        self.dim = dim
        self.broadcast_buffers = broadcast_buffers
        self._timeout_s = timeout_s
        self._threads = self._devices[0].type == "cpu" if threads is None else bool(threads)
        if self._threads and self._devices[0].type == "cuda":
            raise ValueError(
                "threads=True is for CPUs: all backwards of a CUDA device run on one thread of autograd's, which would "
                "wait for itself"
            )
        self._sync = True
        self._closed = False
        self._turns = Turns()
        self._scaling = Scaling()
        self._workers: Workers | None = None
        self._team: Team | None = None
        for name, one in module.named_modules():
            if isinstance(one, DataParallel | nn.DataParallel | DistributedDataParallel):
                raise ValueError(f"{name or 'the module'} is a {type(one).__name__}, which cannot be replicated")
        named = [*module.named_parameters(), *module.named_buffers()]
        if all(one.device.type != "meta" for _, one in named):
            # What is not initialised may be moved; what is on "meta" has nothing to move, and is refused next.
            module.to(self._devices[0])
        check_module(module, self._devices[0])
        self.module = module
        self._make_team()

    # What it is

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where the replicas are."""
        return self._devices

    @property
    def reduce_config(self) -> ReduceConfig:
        """How gradients travel."""
        return self._config

    @property
    def sync_mode(self) -> SyncMode:
        """When gradients are synchronised; see ReduceConfig."""
        return self._config.sync_mode

    @property
    def reducers(self) -> tuple[Reducer, ...]:
        """One per replica, of that replica's parameters; none where there are none to reduce, or no need for them.

        With all replicas on one device, wire "native", the synchronous mode and nothing to observe, gradients are added
        up where they lie.
        """
        peers = self._current().peers
        return () if peers.adds_up else tuple(peers.reducers)

    @property
    def gradients(self) -> RealGradients:
        """What `clip_grad_norm_` and `FusedGradScaler` ask.

        Raises:
            ValueError: nothing is to be trained, or after close().
        """
        self._check_open()
        real = self._current().real
        if real is None:
            raise ValueError("no parameter of this DataParallel requires a gradient")
        return real

    def extra_repr(self) -> str:
        """Shown by `print`."""
        return f"devices={[str(one) for one in self._devices]}, dim={self.dim}"

    # Forward

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Scatters the arguments, runs the replicas, and concatenates what they return, on the first device.

        Tensors with dimensions are divided along `dim`, evenly, the first parts being the larger ones; anything else
        goes to every replica as it is. Outputs may be nested. Of 0-dim outputs, losses say, a vector is made, as
        torch.nn.DataParallel does; what is no tensor must be the same on all replicas.

        Raises:
            ValueError: after close(); fewer samples than devices; inputs with different numbers of samples; no tensor
                to scatter; outputs that cannot be gathered.
            Exception: what a replica has raised, with a note that says which.
        """
        with self._turn(again=True):
            return self._forward(args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward_parallel(self, inputs: Sequence[Any]) -> list[Any]:
        """One input and one output per device: what each replica returns, where it is.

        Each output's loss is to be the mean over its replica's samples. Its gradient is weighted with that replica's
        share of all samples when it enters the replica, so that parameters, and whatever the inputs were made of, get
        the gradient of the mean over all of them: whether the losses are summed or run backward one by one.

        Args:
            inputs: per device one argument, or a tuple or list of them.

        Raises:
            ValueError: not as many inputs as devices, or an input without samples; after close().
            Exception: what a replica has raised, with a note that says which.
        """
        with self._turn(again=True):
            return self._forward_parallel(inputs)

    # Training

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards within it are no step of the reducers.

        In synchronous mode the sum over replicas is in `.grad` after their backwards all the same, without having been
        rounded to the wire. In other modes replicas keep their gradients, until the next backward of a forward outside
        of it reduces them; `zero_grad` of this module drops them.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `Module.zero_grad`; also drops what replicas keep under `no_sync`."""
        super().zero_grad(set_to_none)
        if self._team is not None:
            self._team.drop_gradients()

    def set_sync_mode(self, mode: SyncMode) -> None:
        """Goes on in another mode, from the next backward on; after `flush`.

        Raises:
            ValueError: something excludes it, or it is no mode.
            FusedReduceError: steps are under way.
        """
        config = dataclasses.replace(self._config, sync_mode=mode)
        with self._turn():
            self._current().set_sync_mode(config)
            self._config = config

    def flush(self, *optimizers: Optimizer, step: Callable[[], None] | None = None) -> FlushReport:
        """Lands what is under way in the modes whose averages come late; see `Reducer.flush`.

        Args:
            optimizers: to step after each landing; their gradients are None then.
            step: in their place: called after each landing. With neither, `.grad` holds the sum of them all.

        Raises:
            ValueError: optimizers beside `step`, or with a loss scaler, which must decide on each of their steps.
            TypeError: an optimizer that is none.
            FusedReduceError: gradients of backwards under no_sync() wait.
            Exception: what `step` has raised; what had not landed is given up then.
        """
        with self._turn():
            team = self._current()
            scaled = team.real is not None and team.real.observed.units.attached
            return team.flush(flush_step(optimizers, step, scaled=scaled))

    def reduce_state_dict(self) -> dict[str, Any]:
        """What is under way, to keep in a checkpoint beside the module's and the optimizer's state. Waits for it.

        Plain tensors, numbers and names; empty in the synchronous mode.

        Raises:
            FusedReduceError: gradients of backwards under no_sync() wait.
        """
        with self._turn():
            return self._current().state()

    def load_reduce_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with what `reduce_state_dict` has given.

        Raises:
            ValueError: it is damaged, or of another model, number of devices or mode.
            FusedReduceError: steps are under way here, or gradients of backwards under no_sync() wait.
        """
        with self._turn():
            self._current().load_state(dict(state))

    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """Norm over the gradients as they are now: fp64, 0-dim, on the first device; one launch, and nothing waits.

        Args:
            norm_type: 2 or inf.
        """
        return self.gradients.observed.grad_norm(norm_type)

    def verify_replicas(self) -> None:
        """Compares all replicas' parameters with the module's, byte for byte.

        Raises:
            FusedReduceError: some differ, with their names and replicas.
        """
        with self._turn():
            self._current().replicas.verify()

    # Lifecycle

    def close(self) -> None:
        """Ends the threads and gives the replicas up; the module stays as it is. May be called twice."""
        self._closed = True
        team, self._team = self._team, None
        if team is not None:
            team.close()
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()

    def __enter__(self) -> DataParallel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_team": None, "_workers": None, "_turns": None, "_scaling": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._turns, self._scaling = Turns(), Scaling()

    # Within

    def _turn(self, *, again: bool = False) -> AbstractContextManager[bool]:
        """To be entered by whoever uses the replicas; see Turns. A checkpoint runs a forward again in a backward."""
        self._check_open()
        return self._turns.take(self._workers, again=again)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this DataParallel is closed")

    def _make_team(self) -> Team:
        if self._workers is None:
            self._workers = Workers(len(self._devices) if self._threads else 1, "replica")
        with torch.inference_mode(False):  # its parameters outlive this forward
            self._team = Team(
                self.module,
                self._devices,
                self._workers,
                self._config,
                self._timeout_s,
                threads=self._threads,
                turns=self._turns,
                scaling=self._scaling,
            )
        return self._team

    def _current(self) -> Team:
        if self._workers is not None and not self._workers.are_here():
            self._workers = self._team = None  # this process was forked: its threads are elsewhere
        return self._make_team() if self._team is None else self._team

    def _followed(self) -> Team:
        """The team, in line with the module as it is now."""
        team = self._current()
        if not team.replicas.follow(broadcast_buffers=self.broadcast_buffers):
            if team.peers.under_way():
                raise FusedReduceError(
                    "the module's parameters have changed (replaced, frozen, converted) while steps are under way: "
                    "flush() before such a change"
                )
            team.close()
            team = self._make_team()
            if not team.replicas.follow(broadcast_buffers=self.broadcast_buffers):
                raise FusedReduceError("the module changes while it is being replicated")
        return team

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        team = self._followed()
        inputs = scattered(args, kwargs, len(self._devices), self.dim)
        runs = _Runs(team, inputs)
        outputs = [flatten(one) for one in runs.outputs]
        found = pieces(outputs, self.dim)
        warn_of_scalars(found)
        leaves: list[Any] = []
        graph: list[tuple[int, Output]] = []
        every = range(len(self._devices))
        for at, piece in enumerate(found):
            if not piece.is_tensor:
                leaves.append(same_on_all(piece))
            elif runs.graph and any(one.requires_grad for one in piece.leaves):
                graph.append((at, Output(every, piece.leaves, self._devices[0])))
                leaves.append(None)
            else:
                leaves.append(joined(piece.leaves, self.dim, self._devices[0]))
        self._connect(team, runs, graph, leaves, None)
        return outputs[0].rebuild(leaves)

    def _forward_parallel(self, inputs: Sequence[Any]) -> list[Any]:
        team = self._followed()
        if len(inputs) != len(self._devices):
            raise ValueError(f"got {len(inputs)} inputs for {len(self._devices)} devices: there must be one for each")
        refuse_packed(list(inputs))
        given: list[tuple[Nested, list[Any]]] = []
        samples: list[int] = []
        for number, one in enumerate(inputs):
            nested = flatten((tuple(one) if isinstance(one, tuple | list) else (one,), {}))
            names = [f"tensor {at} of input {number}" for at in range(len(nested.leaves))]
            batched = [at for at, leaf in enumerate(nested.leaves) if is_batched(leaf)]
            samples.append(samples_of(nested.leaves, names, self.dim) if batched else 1)
            if samples[-1] == 0:
                raise ValueError(f"input {number} has no samples")
            given.append((nested, list(nested.leaves)))
        runs = _Runs(team, given)
        outputs = [flatten(one) for one in runs.outputs]
        leaves = [leaf for one in outputs for leaf in one.leaves]
        graph: list[tuple[int, Output]] = []
        at = 0
        for replica, one in enumerate(outputs):
            for leaf in one.leaves:
                if runs.graph and isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    graph.append((at, Output([replica], [leaf], leaf.device)))
                at += 1
        self._connect(team, runs, graph, leaves, [one / sum(samples) for one in samples])
        results = []
        for one in outputs:
            results.append(one.rebuild(leaves[: len(one.leaves)]))
            del leaves[: len(one.leaves)]
        return results

    def _connect(
        self,
        team: Team,
        runs: _Runs,
        graph: Sequence[tuple[int, Output]],
        leaves: list[Any],
        weights: Sequence[float] | None,
    ) -> None:
        """Puts into `leaves` what the graph outside sees of `graph`, by place."""
        team.replicas.keep_buffers()
        if graph:
            outputs = [one for _, one in graph]
            call = Call(team, outputs, runs.leaves, self.dim, weights, reduce=self._sync, together=runs.together)
            made = Joined.apply(call, *team.replicas.trained, *runs.sources)
            for (at, _), tensor in zip(graph, made, strict=True):
                leaves[at] = tensor


class _Runs:
    """A forward of all replicas.

    Args:
        team: the replicas.
        inputs: see `Team.forward`.

    Attributes:
        graph: whether a graph is wanted.
        together: see `Team.backward`.
        outputs: by replica.
        sources: inputs that require a gradient, as the graph outside knows them.
        leaves: per replica, what it was given in their place.
    """

    def __init__(self, team: Team, inputs: Sequence[tuple[Nested, list[Any]]]) -> None:
        enabled = torch.is_grad_enabled()
        self.sources: list[torch.Tensor] = []
        self.leaves: list[list[torch.Tensor]] = []
        for _, leaves in inputs:
            mine = []
            for at, leaf in enumerate(leaves):
                if enabled and isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    self.sources.append(leaf)
                    leaves[at] = leaf.detach().requires_grad_()
                    mine.append(leaves[at])
            self.leaves.append(mine)
        self.graph = enabled and bool(team.replicas.trained or self.sources)
        self.together = not team.runs_in_threads
        self.outputs = team.forward(inputs)


def _checked_devices(devices: Sequence[torch.device | str | int]) -> tuple[torch.device, ...]:
    """As torch.device, with numbers.

    Raises:
        ValueError: none, of several types, or a kind that is neither CPU nor CUDA.
    """
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
