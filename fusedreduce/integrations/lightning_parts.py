"""Mixins of the strategies and plugins for `lightning` and `pytorch_lightning`.

The two are separate packages with the same classes; each mixin precedes a class of one of them. Lightning is not
imported here.
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

from fusedreduce import WIRES, DistributedDataParallel, FusedGradScaler, ReduceConfig, clip_grad_norm_, reducer_of


def missing(package: str, error: ImportError) -> str:
    """The message of an ImportError, if a package cannot be imported."""
    return (
        f"fusedreduce.integrations.{package} needs the package {package}, 2.6 or later, which cannot be imported: "
        f"{error}. (lightning and pytorch_lightning are different packages, each with its own module in "
        "fusedreduce.integrations)"
    )


def register(registry: Any, strategy: type) -> None:
    """Registers strategies by name: fused_ddp, and fused_ddp_bf16 and so on for each other wire; each of them also with
    Lightning's suffix "_find_unused_parameters_true".

    Args:
        registry: of the Trainer or of Fabric.
        strategy: the class to register.
    """
    for wire in WIRES:
        name = "fused_ddp" if wire == "native" else f"fused_ddp_{wire}"
        config = ReduceConfig(wire=wire)
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
    """Wraps a module, on a CUDA stream of its own if it is on a GPU, as Lightning does.

    Args:
        module: the model.
        device_ids: as torch's DistributedDataParallel takes them; None: on CPU.
        kwargs: further arguments of fusedreduce's DistributedDataParallel.

    Returns:
        The wrapper.
    """
    stream: AbstractContextManager[Any] = nullcontext()
    if device_ids is not None:
        stream = torch.cuda.stream(torch.cuda.Stream())
    with stream:
        return DistributedDataParallel(module, device_ids=device_ids, **kwargs)


class TrainerStrategy:
    """Mixin of the Trainer's DDPStrategy.

    Args:
        args: of DDPStrategy.
        reduce: how gradients are reduced; None: ReduceConfig().
        kwargs: of DDPStrategy, which passes some to DistributedDataParallel.
    """

    def __init__(self, *args: Any, reduce: ReduceConfig | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reduce = reduce

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        this: Any = self
        return wrapped(model, this.determine_ddp_device_ids(), reduce=self._reduce, **this._ddp_kwargs)

    def _register_ddp_hooks(self) -> None:
        # Lightning's own method silently ignores `ddp_comm_hook` if the model is not on CUDA.
        this: Any = self
        hook, around = this._ddp_comm_hook, this._ddp_comm_wrapper
        if hook is not None:
            this.model.register_comm_hook(this._ddp_comm_state, hook if around is None else around(hook))


class FabricStrategy:
    """Mixin of Fabric's DDPStrategy.

    Args:
        args: of DDPStrategy.
        reduce: how gradients are reduced; None: ReduceConfig().
        fold_clipping: `Fabric.clip_gradients(max_norm=...)` uses `fusedreduce.clip_grad_norm_`; a fused optimizer clips
            gradients within its step, not before.
        kwargs: of DDPStrategy, which passes some to DistributedDataParallel.
    """

    def __init__(
        self, *args: Any, reduce: ReduceConfig | None = None, fold_clipping: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._reduce = reduce
        self._fold_clipping = fold_clipping

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wraps the module in fusedreduce's DistributedDataParallel; called by Fabric."""
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
        """Clips gradients by their norm; called by Fabric. Lightning's own refuses fused optimizers with a loss scaler.

        Args:
            module: the wrapped module.
            optimizer: of its parameters.
            max_norm: the largest norm.
            norm_type: 2 or inf to clip within the optimizer's step; others go to Lightning.
            error_if_nonfinite: raise if the norm is not finite.

        Returns:
            0-dim tensor: the norm before clipping.

        Raises:
            RuntimeError: the norm is not finite, and error_if_nonfinite.
        """
        this: Any = self
        if not (self._fold_clipping and float(norm_type) in (2.0, math.inf) and owns_exactly(optimizer, module)):
            norm: torch.Tensor = super().clip_gradients_norm(  # type: ignore[misc]
                module, optimizer, max_norm, norm_type, error_if_nonfinite
            )
            return norm
        scaler = getattr(this.precision, "scaler", None)
        if scaler is not None:
            scaler.unscale_(optimizer)
        assert isinstance(module, TorchDDP)
        return clip_grad_norm_(
            module,
            max_norm,
            optimizer if can_fold(optimizer) else None,
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )


class FoldedClipping:
    """Mixin of the Trainer's precision plugins: folds the Trainer's clipping by norm into the step of fused optimizers.

    Lightning runs backward and clipping inside `optimizer.step(closure)`, where it is too late to fold, and refuses to
    clip for fused optimizers under MixedPrecision. Here backward and clipping come first, then the step without a
    closure. A loss scaler becomes a FusedGradScaler with the same settings.

    Differences for a training script: hooks on the optimizer's step run after backward, not around it; between clipping
    and step `.grad` is not clipped yet. Other optimizers (see `can_fold`) use Lightning's own methods.
    """

    _wrapper: weakref.ref[TorchDDP] | None = None

    def connect(self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        """Called by the strategy, after it has wrapped the model.

        Raises:
            TypeError: the strategy has wrapped it in torch's DistributedDataParallel, without `fusedreduce.install`.
        """
        if isinstance(model, TorchDDP):
            if not is_reduced(model):
                raise TypeError(
                    f"{type(self).__name__} clips gradients that fusedreduce has reduced, but torch reduces those of "
                    'this DistributedDataParallel. Use Trainer(strategy="fused_ddp"), FusedDDPStrategy or '
                    "fusedreduce.install()"
                )
            self._wrapper = weakref.ref(model)
            self._replace_scaler(model)
        return super().connect(model, optimizers, lr_schedulers)  # type: ignore[misc]

    def _replace_scaler(self, ddp: TorchDDP) -> None:
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
        """Called by the strategy, after it has unwrapped the model. The scaler's state is kept for checkpoints."""
        this: Any = self
        self._wrapper = None
        if isinstance(getattr(this, "scaler", None), FusedGradScaler):
            this.scaler = copy.copy(this.scaler)  # a copy references no wrapper
        super().teardown()  # type: ignore[misc]

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Runs forward and backward, clips, then steps. Returns the closure's result."""
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
        """Clips the optimizer's gradients as Lightning does; fusedreduce has unscaled them already."""
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
    """Whether `fusedreduce.clip_grad_norm_` can fold clipping into this optimizer's step, if it owns the gradients.

    That holds for Adam, AdamW and SGD of torch.optim, fused and not capturable. (Derived classes may read gradients.)
    """
    groups = optimizer.param_groups
    return type(optimizer) in (Adam, AdamW, SGD) and all(
        one.get("fused") and not one.get("capturable") for one in groups
    )


def owns_exactly(optimizer: Optimizer, module: nn.Module) -> bool:
    """Whether the optimizer's parameters are exactly those whose gradients fusedreduce reduces in `module`."""
    if not isinstance(module, TorchDDP) or not is_reduced(module):
        return False
    owned = {id(one) for group in optimizer.param_groups for one in group["params"] if one.requires_grad}
    ignored = module.parameters_to_ignore
    reduced = {id(one) for name, one in module.module.named_parameters() if one.requires_grad and name not in ignored}
    return owned == reduced


def is_reduced(module: TorchDDP) -> bool:
    """Whether fusedreduce reduces the wrapper's gradients."""
    try:
        reducer_of(module)
    except TypeError:
        return False
    return True
