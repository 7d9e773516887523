"""Strategies and precision plugins for `lightning`: see docs/frameworks/lightning.md.

    from fusedreduce.integrations.lightning import FusedDDPStrategy

    trainer = Trainer(strategy=FusedDDPStrategy(reduce=ReduceConfig(wire="bf16")))

On import, Trainer and Fabric learn the names of `lightning_parts.register`, as in `Trainer(strategy="fused_ddp_bf16")`.
"""

from __future__ import annotations

from . import lightning_parts as parts

try:
    from lightning.fabric.strategies import STRATEGY_REGISTRY as FabricRegistry
    from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
    from lightning.pytorch.plugins import MixedPrecision, Precision
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
except ImportError as error:
    raise ImportError(parts.missing("lightning", error)) from error

__all__ = ["FusedDDPStrategy", "FusedFabricStrategy", "FusedMixedPrecision", "FusedPrecision"]


class FusedDDPStrategy(parts.TrainerStrategy, DDPStrategy):
    """The Trainer's DDP strategy with `fusedreduce.DistributedDataParallel`; see `TrainerStrategy`."""


class FusedFabricStrategy(parts.FabricStrategy, FabricDDPStrategy):
    """Fabric's DDP strategy with `fusedreduce.DistributedDataParallel`; see `FabricStrategy`."""


class FusedPrecision(parts.FoldedClipping, Precision):
    """The Trainer's full precision ("32-true"), with folded clipping; see `FoldedClipping`."""


class FusedMixedPrecision(parts.FoldedClipping, MixedPrecision):
    """The Trainer's "16-mixed" and "bf16-mixed", with folded clipping and loss scaling; see `FoldedClipping`."""


parts.register(StrategyRegistry, FusedDDPStrategy)
parts.register(FabricRegistry, FusedFabricStrategy)
