"""Cases for `make integrations`: trainings under Lightning's "ddp" and under ours, on the same two ranks.

    torchrun --standalone --nproc-per-node=2 lightning_cases.py lightning        (or pytorch_lightning)

Each case trains twice from the same seed and demands the same losses, weights and state-dict keys, bit for bit. Where
clipping is folded into the optimizer, or a loss is scaled, the last bits may differ: the bound stands at the case.
"""

import importlib
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import cases
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional

import fusedreduce
from fusedreduce import ReduceConfig
from fusedreduce.optim.folded_step import PendingClip

PACKAGE = sys.argv[1]
if PACKAGE == "lightning":
    import lightning.fabric as fabric
    import lightning.pytorch as pl
else:
    import lightning_fabric as fabric
    import pytorch_lightning as pl
ours = importlib.import_module(f"fusedreduce.integrations.{PACKAGE}")
TorchStrategy = pl.strategies.DDPStrategy

# torch's norm is a norm of fp32 norms and multiplies by a reciprocal, ours is made in fp64 and divides: some units in
# the last place of each weight, per step.
CLIPPING_BOUND = 1e-5
# With forward and backward in fp16 such a difference moves activations by a unit of fp16 now and then.
FP16_BOUND = 5e-3


class Model(pl.LightningModule):
    """A small network; `unused` leaves one of its layers out of every other step."""

    def __init__(self, *, fused: bool = False, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 32), nn.ReLU())
        self.head, self.aside = nn.Linear(32, 4), nn.Linear(32, 4)
        self.fused, self.unused = fused, unused
        self.losses: list[float] = []
        self.steps_seen: set[str] = set()

    def loss_of(self, batch: Any, number: int) -> torch.Tensor:
        """Cross-entropy of the batch."""
        data, labels = batch
        hidden = self.body(data)
        scores = self.head(hidden)
        if not (self.unused and number % 2):
            scores = scores + self.aside(hidden)
        return functional.cross_entropy(scores, labels)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        """Called by Lightning."""
        self.steps_seen.add(type(self.trainer.strategy.model).__module__)
        loss = self.loss_of(batch, number)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        """Called by Lightning."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=self.fused)


class Manual(Model):
    """Manual optimization with two optimizers and two backwards per step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, number: int) -> None:  # type: ignore[override]
        """Called by Lightning."""
        self.steps_seen.add(type(self.trainer.strategy.model).__module__)
        for optimizer in self.optimizers():
            self.zero_grad()
            loss = self.loss_of(batch, number)
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            self.losses.append(loss.item())

    def configure_optimizers(self) -> Any:
        """Called by Lightning."""
        body = [*self.body.parameters()]
        rest = [*self.head.parameters(), *self.aside.parameters()]
        return torch.optim.SGD(body, lr=0.05, momentum=0.9), torch.optim.AdamW(rest, lr=1e-2)


class Result:
    """What a training has left."""

    def __init__(self, model: Model, trainer: Any) -> None:
        self.losses = model.losses
        self.weights = {name: one.detach().clone() for name, one in model.state_dict().items()}
        self.steps_seen = model.steps_seen
        self.trainer = trainer


def data() -> torch.utils.data.DataLoader[Any]:
    """96 samples in batches of 8 per rank: 6 steps an epoch on 2 ranks."""
    made = torch.Generator().manual_seed(3)
    inputs = torch.randn(96, 16, generator=made)
    labels = (inputs[:, :4] @ torch.randn(4, 4, generator=made)).argmax(1)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=8, shuffle=True)


def train(model: Model, strategy: Any, *, epochs: int = 2, resume: str | None = None, **kwargs: Any) -> Result:
    """Trains with a Trainer."""
    pl.seed_everything(1, verbose=False)
    settings = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(strategy=strategy, max_epochs=epochs, **{**settings, **quiet, **kwargs})
    trainer.fit(model, data(), ckpt_path=resume, weights_only=True if resume else None)
    return Result(model, trainer)


def demand_same(theirs: Result, mine: Result, bound: float = 0.0) -> str:
    """Raises unless both trainings ended alike; what to report."""
    for one, module in ((theirs, "torch."), (mine, "fusedreduce.")):
        assert all(name.startswith(module) for name in one.steps_seen), (module, one.steps_seen)
    assert list(theirs.weights) == list(mine.weights), "other state-dict keys"
    assert len(theirs.losses) == len(mine.losses) > 0
    worst = max(abs(a - b) for a, b in zip(theirs.losses, mine.losses, strict=True))
    assert worst <= bound, f"losses differ by {worst}: {theirs.losses} {mine.losses}"
    for name, tensor in theirs.weights.items():
        apart = (tensor.double() - mine.weights[name].double()).abs().max().item()
        assert apart <= bound, f"{name} differs by {apart}"
        worst = max(worst, apart)
    return f"{len(mine.losses)} losses and the weights equal" + (f" to {worst:.1e}" if bound else ", bit for bit")


@contextmanager
def folds() -> Iterator[list[object]]:
    """One element for each coefficient that is left to an optimizer's step meanwhile."""
    seen: list[object] = []
    fold = PendingClip.fold

    def counted(self: PendingClip, *args: Any) -> None:
        seen.append(args)
        fold(self, *args)

    with mock.patch.object(PendingClip, "fold", counted):
        yield seen


def plain() -> str:
    """By name."""
    return demand_same(train(Model(), "ddp"), train(Model(), "fused_ddp"))


def views() -> str:
    """DDP's own arguments reach it."""
    kwargs: dict[str, Any] = {"gradient_as_bucket_view": True, "static_graph": True, "bucket_cap_mb": 1}
    return demand_same(train(Model(), TorchStrategy(**kwargs)), train(Model(), ours.FusedDDPStrategy(**kwargs)))


def accumulate() -> str:
    """All but the last of three micro-batches under no_sync."""
    kwargs: dict[str, Any] = {"accumulate_grad_batches": 3}
    return demand_same(train(Model(), "ddp", **kwargs), train(Model(), "fused_ddp", **kwargs))


def unused() -> str:
    """A layer that every other step leaves out."""
    suffix = "_find_unused_parameters_true"
    theirs = train(Model(unused=True), f"ddp{suffix}")
    return demand_same(theirs, train(Model(unused=True), f"fused_ddp{suffix}"))


def unused_not_expected() -> str:
    """The same without the suffix: torch's error, and ours."""
    found = []
    for strategy in ("ddp", "fused_ddp"):
        try:
            train(Model(unused=True), strategy)
        except RuntimeError as error:
            found.append(f"{type(error).__name__}: {error}")
    assert len(found) == 2, found
    assert "find_unused_parameters" in found[1], found[1]
    return found[1].splitlines()[0][:150]


def manual() -> str:
    """Manual optimization: two optimizers, two forwards and backwards a step, each clipped."""
    return demand_same(
        train(Manual(), "ddp_find_unused_parameters_true"), train(Manual(), "fused_ddp_find_unused_parameters_true")
    )


def manual_plain() -> str:
    """Manual optimization without a search for unused parameters."""
    return demand_same(train(Manual(), "ddp"), train(Manual(), "fused_ddp"))


def checkpoint() -> str:
    """Saved by one and resumed by the other, both ways; the keys of the file are equal."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    files = {}
    for name in ("ddp", "fused_ddp"):
        result = train(Model(), name, epochs=1)
        files[name] = str(Path(folder[0], f"{name}.ckpt"))
        result.trainer.save_checkpoint(files[name])
    contents = [torch.load(one, weights_only=True) for one in files.values()]
    assert list(contents[0]["state_dict"]) == list(contents[1]["state_dict"])
    assert list(contents[0]) == list(contents[1])
    resumed = [train(Model(), "ddp", resume=files["ddp"]), train(Model(), "fused_ddp", resume=files["ddp"])]
    demand_same(resumed[0], resumed[1])
    return demand_same(resumed[0], train(Model(), "fused_ddp", resume=files["fused_ddp"]))


def fit_again() -> str:
    """The same model in a second Trainer."""
    results = []
    for strategy in ("ddp", "fused_ddp"):
        model = Model()
        train(model, strategy)
        results.append(train(model, strategy))
    return demand_same(results[0], results[1])


def comm_hook() -> str:
    """A comm hook, which Lightning leaves out on CPU: ours with it is a DDP with that hook, not Lightning's ddp."""
    seen = []

    def counted(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(bucket.index())
        return default_hooks.allreduce_hook(state, bucket)

    theirs = train(Model(), TorchStrategy(ddp_comm_hook=counted))
    assert not seen, "Lightning registers comm hooks on CPU now: say so in docs/frameworks/lightning.md"
    mine = train(Model(), ours.FusedDDPStrategy(ddp_comm_hook=counted))
    assert seen
    return demand_same(theirs, mine) + f"; the hook ran {len(seen)} times, under Lightning's ddp never"


def hook_and_wire() -> str:
    """A hook takes the place of the wire: both are refused."""
    hook = default_hooks.allreduce_hook
    try:
        train(Model(), ours.FusedDDPStrategy(ddp_comm_hook=hook, reduce=ReduceConfig(wire="bf16")))
    except ValueError as error:
        return f"refused: {error}"[:150]
    raise AssertionError("accepted")


def bf16_wire() -> str:
    """Each loss within 5 % of the native wire's."""
    theirs, mine = train(Model(), "ddp"), train(Model(), "fused_ddp_bf16")
    apart = max(abs(a - b) / a for a, b in zip(theirs.losses, mine.losses, strict=True))
    assert 0 < apart < 0.05, apart
    return f"losses within {apart:.1e} of native's"


def clipping() -> str:
    """Clipping as Lightning does it, of gradients that we have reduced."""
    kwargs: dict[str, Any] = {"gradient_clip_val": 0.5}
    return demand_same(train(Model(fused=True), "ddp", **kwargs), train(Model(fused=True), "fused_ddp", **kwargs))


def folded() -> str:
    """Clipping folded into a fused AdamW: full precision."""
    theirs = train(Model(fused=True), "ddp", gradient_clip_val=0.5)
    with folds() as folded:
        mine = train(Model(fused=True), "fused_ddp", gradient_clip_val=0.5, plugins=[ours.FusedPrecision()])
    assert len(folded) == 11, "of 12 steps the first clips in place, as it does not know the optimizer"
    return demand_same(theirs, mine, CLIPPING_BOUND)


def demand_refusal(precision: str, **kwargs: Any) -> None:
    """Raises unless Lightning's own plugin still refuses to clip for a fused optimizer."""
    scaler = torch.amp.GradScaler("cpu") if precision == "16-mixed" else None
    refusal = ""
    try:
        train(Model(fused=True), "ddp", plugins=[pl.plugins.MixedPrecision(precision, "cpu", scaler)], **kwargs)
    except RuntimeError as error:
        refusal = str(error)
    assert "does not allow for gradient clipping" in refusal, f"docs/frameworks/lightning.md says so: {refusal!r}"


def folded_bf16() -> str:
    """Under bf16 autocast, with accumulation."""
    kwargs: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    theirs = train(Model(), "ddp", precision="bf16-mixed", **kwargs)
    demand_refusal("bf16-mixed", **kwargs)
    plugin = ours.FusedMixedPrecision("bf16-mixed", "cpu")
    with folds() as folded:
        mine = train(Model(fused=True), "fused_ddp", plugins=[plugin], **kwargs)
    assert len(folded) == 5, folded
    return demand_same(theirs, mine, CLIPPING_BOUND)


def fp16(cls: Any) -> Any:
    """A precision plugin for fp16 with a loss scaler of torch's."""
    return cls("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))


def folded_fp16() -> str:
    """Under fp16 autocast with a loss scaler. Lightning refuses fused optimizers here, so the other side has none."""
    kwargs: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    demand_refusal("16-mixed", **kwargs)
    theirs = train(Model(), "ddp", plugins=[fp16(pl.plugins.MixedPrecision)], **kwargs)
    with folds() as folded:
        mine = train(Model(fused=True), "fused_ddp", plugins=[fp16(ours.FusedMixedPrecision)], **kwargs)
    assert len(folded) == 5, folded
    states = [one.trainer.precision_plugin.state_dict() for one in (theirs, mine)]
    assert isinstance(mine.trainer.precision_plugin.scaler, fusedreduce.FusedGradScaler)
    assert states[0] == states[1], states
    return demand_same(theirs, mine, FP16_BOUND)


def fp16_fit_again() -> str:
    """The same plugin and model in a second Trainer: the scaler takes the new wrapper.

    Clipped it is compared with a new plugin, not with torch: in as many steps of AdamW in fp16 torch's own weights
    move by 1e-2 when its threshold moves by 1e-7 of itself.
    """

    def twice(strategy: str, cls: Any, keep: bool = True, **kwargs: Any) -> Result:
        model, plugin = Model(fused=True), fp16(cls)
        train(model, strategy, plugins=[plugin], **kwargs)
        return train(model, strategy, plugins=[plugin if keep else fp16(cls)], **kwargs)

    with folds() as folded:
        kept = twice("fused_ddp", ours.FusedMixedPrecision, gradient_clip_val=0.5)
    assert len(folded) == 22, "of 12 steps the first clips in place, in both trainings"
    renewed = twice("fused_ddp", ours.FusedMixedPrecision, keep=False, gradient_clip_val=0.5)
    assert kept.losses == renewed.losses, (kept.losses, renewed.losses)
    assert all(torch.equal(one, renewed.weights[name]) for name, one in kept.weights.items()), "other weights"
    return demand_same(twice("ddp", pl.plugins.MixedPrecision), twice("fused_ddp", ours.FusedMixedPrecision))


def plugin_without_strategy() -> str:
    """The plugin over torch's class says what to do."""
    try:
        train(Model(fused=True), "ddp", plugins=[ours.FusedPrecision()])
    except TypeError as error:
        return f"refused: {error}"[:120]
    raise AssertionError("accepted")


def train_fabric(strategy: Any, *, clip: bool = False, every: int = 1, fused: bool = False) -> Result:
    """A loop of its own, under Fabric."""
    torch.manual_seed(1)
    run = fabric.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    run.launch()
    model = Model(fused=fused)
    wrapped, optimizer = run.setup(model, model.configure_optimizers())
    wrapped.mark_forward_method("loss_of")
    loader = run.setup_dataloaders(data())
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            accumulating = (number + 1) % every != 0
            with run.no_backward_sync(wrapped, enabled=accumulating):
                loss = wrapped.loss_of(batch, number)
                run.backward(loss / every)
            model.losses.append(loss.item())
            if not accumulating:
                if clip:
                    run.clip_gradients(wrapped, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
    model.steps_seen = {type(wrapped._forward_module).__module__}
    result = Result(model, run)
    state = run.strategy.get_module_state_dict(wrapped._forward_module)
    assert list(state) == list(model.state_dict())
    return result


def fabric_plain() -> str:
    """Fabric, by name, with no_backward_sync."""
    return demand_same(train_fabric("ddp", every=2), train_fabric("fused_ddp", every=2))


def fabric_clip() -> str:
    """Fabric's clip_gradients, as it is."""
    return demand_same(train_fabric("ddp", clip=True), train_fabric("fused_ddp", clip=True))


def fabric_folded() -> str:
    """Fabric's clip_gradients, folded."""
    theirs = train_fabric("ddp", clip=True, fused=True)
    with folds() as folded:
        mine = train_fabric(ours.FusedFabricStrategy(fold_clipping=True), clip=True, fused=True)
    assert len(folded) == 11, folded
    return demand_same(theirs, mine, CLIPPING_BOUND)


CASES: tuple[Callable[[], str], ...] = (
    plain,
    views,
    accumulate,
    unused,
    manual,
    manual_plain,
    checkpoint,
    fit_again,
    comm_hook,
    hook_and_wire,
    bf16_wire,
    clipping,
    folded,
    folded_bf16,
    folded_fp16,
    fp16_fit_again,
    plugin_without_strategy,
    fabric_plain,
    fabric_clip,
    fabric_folded,
    unused_not_expected,  # last: it leaves a broken backward behind
)


def main() -> None:
    """Runs the cases, or those named on the command line."""
    warnings.filterwarnings("ignore")
    cases.run(CASES, sys.argv[2:])


if __name__ == "__main__":
    main()
