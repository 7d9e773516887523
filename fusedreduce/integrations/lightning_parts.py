"""What the strategies and plugins for `lightning` and `pytorch_lightning` have in common.

The two are separate packages with the same classes, so these are mixins: each stands before a class of one of them.
Nothing of Lightning is imported here.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import SGD, Adam, AdamW, Optimizer

from fusedreduce import DistributedDataParallel, FusedGradScaler, ReduceConfig, clip_grad_norm_

_WIRES = ("native", "bf16", "fp16")


def missing(package: str, error: ImportError) -> str:
    """What to say where the package cannot be imported."""
    return (
        f"fusedreduce.integrations.{package} needs the package {package}, 2.6 or later, which cannot be imported: "
        f"{error}. (lightning and pytorch_lightning are two packages, each with its own module in this folder)"
    )


def register(registry: Any, strategy: type) -> None:
    """Makes strategies known by name: fused_ddp, fused_ddp_bf16, fused_ddp_fp16, and each with Lightning's suffix for
    parameters that a step may leave unused."""
    for wire in _WIRES:
        name = "fused_ddp" if wire == "native" else f"fused_ddp_{wire}"
        config = ReduceConfig(wire=wire)  # type: ignore[arg-type]
        what = f"DDP with fusedreduce's buckets, gradients travel as {wire}"
        registry.register(name, strategy, description=what, override=True, reduce=config)
        registry.register(
            f"{name}_find_unused_parameters_true",
            strategy,
            description=f"{what}; finds parameters that were not used",
            override=True,
            reduce=config,
            find_unused_parameters=True,
        )


def wrapped(module: nn.Module, device_ids: list[int] | None, **kwargs: Any) -> DistributedDataParallel:
    """The module in our wrapper, made on a stream of its own where it is on a GPU, as Lightning does it."""
    stream: AbstractContextManager[Any] = nullcontext()
    if device_ids is not None:
        stream = torch.cuda.stream(torch.cuda.Stream())
    with stream:
        return DistributedDataParallel(module, device_ids=device_ids, **kwargs)


class TrainerStrategy:
    """Stands before the Trainer's DDPStrategy.

    Args:
        args: of DDPStrategy.
        reduce: how gradients travel; None: as ReduceConfig() says.
        kwargs: of DDPStrategy, and through it of DistributedDataParallel.
    """

    def __init__(self, *args: Any, reduce: ReduceConfig | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reduce = reduce

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        this: Any = self
        return wrapped(model, this.determine_ddp_device_ids(), reduce=self._reduce, **this._ddp_kwargs)

    def _register_ddp_hooks(self) -> None:
        """Lightning's own leaves `ddp_comm_hook` out, in silence, where the model is not on CUDA."""
        this: Any = self
        hook, around = this._ddp_comm_hook, this._ddp_comm_wrapper
        if hook is not None:
            this.model.register_comm_hook(this._ddp_comm_state, hook if around is None else around(hook))


class FabricStrategy:
    """Stands before Fabric's DDPStrategy.

    Args:
        args: of DDPStrategy.
        reduce: how gradients travel; None: as ReduceConfig() says.
        fold_clipping: `Fabric.clip_gradients(max_norm=...)` goes through `fusedreduce.clip_grad_norm_`, and with a
            fused optimizer gradients are clipped by its step, not before.
        kwargs: of DDPStrategy, and through it of DistributedDataParallel.
    """

    def __init__(
        self, *args: Any, reduce: ReduceConfig | None = None, fold_clipping: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._reduce = reduce
        self._fold_clipping = fold_clipping

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wraps the module."""
        this: Any = self
        return wrapped(module, this._determine_ddp_device_ids(), reduce=self._reduce, **this._ddp_kwargs)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clips by the norm of the gradients. Lightning's own refuses fused optimizers beside a loss scaler."""
        this: Any = self
        if not (self._fold_clipping and float(norm_type) in (2.0, math.inf) and owns_exactly(optimizer, module)):
            norm: torch.Tensor = super().clip_gradients_norm(  # type: ignore[misc]
                module, optimizer, max_norm, norm_type, error_if_nonfinite
            )
            return norm
        scaler = getattr(this.precision, "scaler", None)
        if scaler is not None:
            scaler.unscale_(optimizer)
        assert isinstance(module, DistributedDataParallel)
        return clip_grad_norm_(
            module,
            max_norm,
            optimizer if can_fold(optimizer) else None,
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )


class FoldedClipping:
    """Stands before a precision plugin of the Trainer's: the Trainer's clipping by norm, folded into fused optimizers.

    Lightning runs backward and clipping inside `optimizer.step(closure)`, where nothing can be folded any more, and
    refuses to clip for fused optimizers under MixedPrecision. Here they come first, and the step without a closure
    after them. A loss scaler becomes a FusedGradScaler with the same settings.

    What differs for a training script: hooks on the optimizer's step run after backward, not around it; between
    clipping and step `.grad` is not clipped yet. Optimizers that fold nothing (see `can_fold`) go Lightning's way.
    """

    _wrapper: weakref.ref[DistributedDataParallel] | None = None

    def connect(self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        """Called by the strategy, after it has wrapped the model."""
        if isinstance(model, DistributedDataParallel):
            self._wrapper = weakref.ref(model)
            self._take_scaler(model)
        elif isinstance(model, TorchDDP):
            raise TypeError(
                f"{type(self).__name__} clips gradients that fusedreduce has reduced, but the strategy has wrapped the "
                'model in torch\'s DistributedDataParallel. Use Trainer(strategy="fused_ddp") or FusedDDPStrategy'
            )
        return super().connect(model, optimizers, lr_schedulers)  # type: ignore[misc]

    def _take_scaler(self, ddp: DistributedDataParallel) -> None:
        this: Any = self
        scaler = getattr(this, "scaler", None)
        if isinstance(scaler, FusedGradScaler):
            scaler.attach(ddp)
        elif scaler is not None:
            this.scaler = FusedGradScaler(
                ddp,
                init_scale=scaler.get_scale(),
                growth_factor=scaler.get_growth_factor(),
                backoff_factor=scaler.get_backoff_factor(),
                growth_interval=scaler.get_growth_interval(),
                enabled=scaler.is_enabled(),
            )

    def teardown(self) -> None:
        """Called by the strategy, after it has unwrapped the model. The scaler's state stays, for checkpoints."""
        this: Any = self
        self._wrapper = None
        if isinstance(getattr(this, "scaler", None), FusedGradScaler):
            this.scaler = copy.copy(this.scaler)  # a copy has no wrapper, and keeps none alive
        super().teardown()  # type: ignore[misc]

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Forward, backward and clipping, then the step."""
        this: Any = self
        if self._wrapper is None or not can_fold(optimizer):
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)  # type: ignore[misc]
        result = closure()
        scaler = getattr(this, "scaler", None)
        skipped = result is None and model.automatic_optimization  # training_step has returned None
        if scaler is not None and not skipped:
            scaler.unscale_(optimizer)
        this._after_closure(model, optimizer)
        if scaler is None:
            optimizer.step(**kwargs)
        elif not skipped:
            scaler.step(optimizer, **kwargs)
            scaler.update()
        return result

    def clip_gradients(
        self, optimizer: Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        """As Lightning's, of the optimizer's gradients, which our reducer has unscaled already."""
        this: Any = self
        ddp = None if self._wrapper is None else self._wrapper()
        if ddp is None or clip_val <= 0:
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)  # type: ignore[misc]
        elif gradient_clip_algorithm != "norm":
            this.clip_grad_by_value(optimizer, clip_val)
        elif not owns_exactly(optimizer, ddp):
            this.clip_grad_by_norm(optimizer, clip_val)
        elif any(one.grad is not None for group in optimizer.param_groups for one in group["params"]):
            clip_grad_norm_(ddp, clip_val, optimizer if can_fold(optimizer) else None)


def can_fold(optimizer: Optimizer) -> bool:
    """Whether `fusedreduce.clip_grad_norm_` can leave the division to this optimizer's step, if it owns the gradients.

    Adam, AdamW and SGD of torch.optim (derived classes may read gradients themselves), fused and not capturable.
    """
    groups = optimizer.param_groups
    return type(optimizer) in (Adam, AdamW, SGD) and all(
        one.get("fused") and not one.get("capturable") for one in groups
    )


def owns_exactly(optimizer: Optimizer, module: nn.Module) -> bool:
    """Whether the optimizer's gradients are those that our wrapper `module` reduces, and all of them."""
    if not isinstance(module, DistributedDataParallel):
        return False
    owned = {id(one) for group in optimizer.param_groups for one in group["params"] if one.requires_grad}
    ignored = module.parameters_to_ignore
    reduced = {id(one) for name, one in module.module.named_parameters() if one.requires_grad and name not in ignored}
    return owned == reduced
