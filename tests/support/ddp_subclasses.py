"""Subclasses of torch's DistributedDataParallel as people write them, for tests of `install` and `run`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.distributed import _find_tensors

import fusedreduce

# Methods of torch's class that install replaces; `__init__` apart, which one that does not call it cannot be made by.
DISPATCHED = (
    "__getstate__",
    "__setstate__",
    "_ddp_init_helper",
    "_post_forward",
    "will_sync_module_buffers",
    "_distributed_rank",
    "join",
    "join_hook",
    "register_comm_hook",
    "_register_builtin_comm_hook",
    "_register_fused_optim",
    "zero_grad",
)


@contextmanager
def installed_for(config: fusedreduce.ReduceConfig | None = None) -> Iterator[None]:
    """Context in which torch's class has our reducer."""
    fusedreduce.install(config)
    try:
        yield
    finally:
        fusedreduce.uninstall()


def torchs(name: str) -> Any:
    """torch's own method, as a library has it that kept it before anything was installed."""
    found = inspect.getattr_static(DDP, name)
    method: Any = found.fget if isinstance(found, property) else found
    return inspect.unwrap(method)


class Plain(DDP):
    """Nothing but another name."""


class Forwarding(DDP):
    """Asks the module for what it has not, and looks at outputs on its own."""

    outputs_seen = 0

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)

    def _post_forward(self, output: Any) -> Any:
        type(self).outputs_seen += 1
        return super()._post_forward(output)


class Trainer(DDP):
    """As mmengine's: the loop calls the wrapper's train_step and val_step."""

    def __init__(self, module: nn.Module, detect_anomalous_params: bool = False, **options: Any) -> None:
        super().__init__(module=module, **options)
        self.detect_anomalous_params = detect_anomalous_params

    def train_step(self, inputs: torch.Tensor, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """One step; forward is this wrapper's."""
        loss = self._run_forward({"inputs": inputs}).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"loss": loss.detach()}

    def val_step(self, inputs: torch.Tensor) -> Any:
        """Of the module alone."""
        return self.module(inputs)

    def _run_forward(self, data: dict[str, torch.Tensor]) -> Any:
        return self(data["inputs"])

    def _run_ddp_forward(self, *inputs: Any, **options: Any) -> Any:
        with self._inside_ddp_forward():
            return self.module(*inputs, **options)


class OldTrainer(DDP):
    """As mmcv's: train_step does by hand what torch's forward does."""

    def train_step(self, inputs: torch.Tensor, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """One step, past torch's forward."""
        reducer: Any = self.reducer
        if reducer._rebuild_buckets():
            self.rebuilt = True
        if getattr(self, "require_forward_param_sync", True) and self.will_sync_module_buffers():
            self._sync_buffers()
        output = self._run_ddp_forward(inputs)
        if torch.is_grad_enabled() and getattr(self, "require_backward_grad_sync", True):
            reducer.prepare_for_backward(list(_find_tensors(output)) if self.find_unused_parameters else [])
        else:
            self.require_forward_param_sync = False
        loss = output.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"loss": loss.detach()}


class Grand(Forwarding):
    """Two levels, a mixin's method among them, and torch's class called by its name."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        DDP.zero_grad(self, set_to_none)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        super().register_comm_hook(state, hook)

    @property
    def _distributed_rank(self) -> int:
        rank: int = super()._distributed_rank
        return rank


REDUCED: tuple[type[DDP], ...] = (DDP, Plain, Forwarding, Trainer, OldTrainer, Grand)


def replacing(name: str, *, seen: bool) -> type[DDP]:
    """A subclass whose method `name` is torch's own, called past what install has put there.

    Args:
        name: the method.
        seen: no code of the class names the method otherwise; False: its code looks as if it called super().
    """
    kept = torchs(name)

    def method(self: DDP, *arguments: Any, **options: Any) -> Any:
        return kept(self, *arguments, **options)

    if not seen:
        method.__code__ = method.__code__.replace(co_names=(*method.__code__.co_names, name))
    value = property(method) if name == "_distributed_rank" else method
    return type(f"Replaces{name}", (DDP,), {name: value, "__module__": __name__})


def is_torchs(made: DDP) -> bool:
    """Whether torch's C++ reducer reduces it."""
    return isinstance(vars(made)["reducer"], dist.Reducer)  # type: ignore[attr-defined]
