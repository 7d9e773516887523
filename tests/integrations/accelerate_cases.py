"""Cases for `make integrations`: Accelerate and the Hugging Face Trainer, with torch's wrapper and with `install()`.

    torchrun --standalone --nproc-per-node=2 accelerate_cases.py

Each case trains twice from the same seed, on the same two ranks, and demands the same losses, weights and state-dict
keys, bit for bit; where clipping is folded into the optimizer, within CLIPPING_BOUND.
"""

import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import cases
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

import fusedreduce
from fusedreduce import ReduceConfig

# torch's norm is a norm of fp32 norms and multiplies by a reciprocal, ours is made in fp64 and divides: some units in
# the last place of each weight, per step.
CLIPPING_BOUND = 1e-5


class Result(NamedTuple):
    """What a training has left."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    reducer: str


def demand_same(theirs: Result, mine: Result, bound: float = 0.0) -> str:
    """Raises unless both trainings ended alike; what to report."""
    assert theirs.reducer.startswith("torch.") and mine.reducer.startswith("fusedreduce."), (theirs, mine)
    assert list(theirs.weights) == list(mine.weights), "other state-dict keys"
    assert len(theirs.losses) == len(mine.losses) > 0
    worst = max(abs(a - b) for a, b in zip(theirs.losses, mine.losses, strict=True))
    for name, tensor in theirs.weights.items():
        worst = max(worst, (tensor.double() - mine.weights[name].double()).abs().max().item())
    assert worst <= bound, f"they differ by {worst}: {theirs.losses} {mine.losses}"
    return f"{len(mine.losses)} losses and the weights equal" + (f" to {worst:.1e}" if bound else ", bit for bit")


def both(train: Callable[[], Result], bound: float = 0.0, config: ReduceConfig | None = None) -> str:
    """Trains with torch's wrapper and with ours."""
    theirs = train()
    fusedreduce.install(config)
    try:
        mine = train()
    finally:
        fusedreduce.uninstall()
    return demand_same(theirs, mine, bound)


def shared_folder() -> str:
    """One folder for all ranks."""
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    return name[0]


def accelerator(**kwargs: Any) -> Accelerator:
    """A new one. They share state within a process."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    return Accelerator(cpu=True, **kwargs)


def net() -> nn.Sequential:
    """A small network, the same on every call."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4)
    )


def data(samples: int = 96) -> torch.utils.data.DataLoader[Any]:
    """Samples in batches of 8."""
    made = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 16, generator=made)
    labels = (inputs[:, :4] @ torch.randn(4, 4, generator=made)).argmax(1)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=8)


def loop(
    *, every: int = 1, clip: str = "", handlers: list[Any] | None = None, folder: str = "", fused: bool = False
) -> Result:
    """The loop of Accelerate's own documentation.

    Args:
        every: steps of accumulation.
        clip: "accelerate" or "folded".
        handlers: keyword handlers.
        folder: save the state there in the middle, go on, load it, and do the second half again.
        fused: a fused optimizer.
    """
    run = accelerator(gradient_accumulation_steps=every, kwargs_handlers=handlers or [])
    model, loader = net(), data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    model, optimizer, loader, scheduler = run.prepare(model, optimizer, loader, scheduler)
    losses = []

    def epoch() -> None:
        for inputs, labels in loader:
            with run.accumulate(model):
                loss = functional.cross_entropy(model(inputs), labels)
                run.backward(loss)
                if run.sync_gradients and clip == "accelerate":
                    run.clip_grad_norm_(model.parameters(), 0.5)
                elif run.sync_gradients and clip == "folded" and isinstance(model, fusedreduce.DistributedDataParallel):
                    fusedreduce.clip_grad_norm_(model, 0.5, optimizer.optimizer)
                elif run.sync_gradients and clip == "folded":
                    run.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())

    epoch()
    if folder:
        run.save_state(folder)
        epoch()
        run.load_state(folder)
    epoch()
    if folder:
        half = len(losses) // 3
        assert losses[half : 2 * half] == losses[2 * half :], "the second half again"
    unwrapped = run.unwrap_model(model)
    assert type(unwrapped) is nn.Sequential
    weights = {name: one.detach().clone() for name, one in run.get_state_dict(model).items()}
    assert list(weights) == list(unwrapped.state_dict())
    return Result(losses, weights, type(model.reducer).__module__)


def plain() -> str:
    """prepare, backward, step, a scheduler."""
    return both(loop)


def accumulate() -> str:
    """Three micro-batches."""
    return both(lambda: loop(every=3))


def clipping() -> str:
    """accelerator.clip_grad_norm_."""
    return both(lambda: loop(clip="accelerate", every=2))


def folded() -> str:
    """fusedreduce.clip_grad_norm_ with the optimizer within AcceleratedOptimizer."""
    return both(lambda: loop(clip="folded", every=2, fused=True), CLIPPING_BOUND)


def arguments() -> str:
    """DistributedDataParallelKwargs."""
    handler = DistributedDataParallelKwargs(gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=1)
    return both(lambda: loop(handlers=[handler]))


def comm_hook() -> str:
    """The handler's own hook takes the place of the installed wire."""
    handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    return both(lambda: loop(handlers=[handler]), config=ReduceConfig(wire="bf16"))


def save_and_load() -> str:
    """save_state, one epoch, load_state, the epoch again; and what torch's run has saved is loaded by ours."""
    folders = [shared_folder(), shared_folder()]
    theirs = loop(folder=folders[0])
    fusedreduce.install()
    try:
        mine = loop(folder=folders[1])
        files = [sorted(one.name for one in Path(folder).iterdir()) for folder in folders]
        assert files[0] == files[1], files
        loaded = []
        for folder in folders:
            run, model = accelerator(), net()
            model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
            run.register_for_checkpointing()
            run.load_state(folder)
            loaded.append(run.get_state_dict(model))
        assert all(torch.equal(loaded[0][name], loaded[1][name]) for name in loaded[0])
    finally:
        fusedreduce.uninstall()
    return demand_same(theirs, mine)


def trigger_sync() -> str:
    """Two forwards under no_sync, the synchronisation triggered in the last backward."""

    def train() -> Result:
        run = accelerator()
        model = net()
        model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), data())
        losses = []
        for inputs, labels in loader:
            with run.no_sync(model):
                first = functional.cross_entropy(model(inputs), labels)
                second = functional.cross_entropy(model(inputs + 1), labels)
            run.backward(first)
            with run.trigger_sync_in_backward(model):
                run.backward(second)
            optimizer.step()
            optimizer.zero_grad()
            losses += [first.item(), second.item()]
        return Result(losses, dict(run.unwrap_model(model).state_dict()), type(model.reducer).__module__)

    return both(train)


def uneven() -> str:
    """What join_uneven_inputs enters on GPUs; on CPU it does nothing, and ranks would wait for each other."""

    def train() -> Result:
        run = accelerator()
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        torch.manual_seed(5)
        for one in model.parameters():
            nn.init.normal_(one, std=0.1)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        losses = []
        with Join([model], enable=True, throw_on_early_termination=False):
            for inputs, labels in list(data(48 + 16 * run.process_index)):
                loss = functional.cross_entropy(model(inputs), labels)
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        return Result(losses, dict(run.unwrap_model(model).state_dict()), type(model.reducer).__module__)

    return both(train)


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences in which each token follows from the one before."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) * (index % 7 + 1) + index) % 50
        return {"input_ids": tokens, "labels": tokens}


def trainer(**kwargs: Any) -> Result:
    """The Hugging Face Trainer on a GPT-2 of two layers."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    torch.manual_seed(7)
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    settings: dict[str, Any] = {"per_device_train_batch_size": 4, "num_train_epochs": 2, "learning_rate": 1e-3}
    settings |= {"use_cpu": True, "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    with tempfile.TemporaryDirectory() as folder:
        kept = {"output_dir": folder, "ddp_find_unused_parameters": False, **settings, **kwargs}
        resume = kept.pop("resume", None)
        hf = Trainer(model=model, args=TrainingArguments(**kept), train_dataset=Tokens())
        hf.remove_callback(PrinterCallback)
        hf.train(resume_from_checkpoint=resume)
        losses = [one["loss"] for one in hf.state.log_history if "loss" in one]
        norms = [one["grad_norm"] for one in hf.state.log_history if "grad_norm" in one]
        reducer = type(hf.model_wrapped.reducer).__module__
        weights = {name: one.detach().clone() for name, one in model.state_dict().items()}
    return Result([*losses, *norms], weights, reducer)


def trainer_plain() -> str:
    """With clipping, which is on by default."""
    return both(trainer)


def trainer_accumulate() -> str:
    """gradient_accumulation_steps, bf16 autocast, a fused optimizer."""
    return both(lambda: trainer(gradient_accumulation_steps=3, bf16=True, optim="adamw_torch_fused"))


def trainer_unused() -> str:
    """The Trainer's default: find_unused_parameters=True."""
    return both(lambda: trainer(ddp_find_unused_parameters=None))


def trainer_checkpointed() -> str:
    """Activation checkpointing, reentrant and not."""
    found = ""
    for reentrant in (False, True):
        kwargs = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": reentrant}}
        found = both(lambda kwargs=kwargs: trainer(**kwargs))  # type: ignore[misc]
    return found


def trainer_resumed() -> str:
    """Saved in the middle by one, resumed by the other, both ways."""
    folders = [shared_folder(), shared_folder()]
    saving: dict[str, Any] = {"save_strategy": "epoch"}
    theirs = trainer(output_dir=folders[0], **saving)
    fusedreduce.install()
    try:
        demand_same(theirs, trainer(output_dir=folders[1], **saving))
        (first,) = (str(one) for one in Path(folders[0]).glob("checkpoint-8"))
        mine = trainer(resume=first, output_dir=shared_folder())
        (second,) = (str(one) for one in Path(folders[1]).glob("checkpoint-8"))
    finally:
        fusedreduce.uninstall()
    again = trainer(resume=second, output_dir=shared_folder())
    demand_same(again, mine)
    return demand_same(theirs, mine)


CASES: tuple[Callable[[], str], ...] = (
    plain,
    accumulate,
    clipping,
    folded,
    arguments,
    comm_hook,
    save_and_load,
    trigger_sync,
    uneven,
    trainer_plain,
    trainer_accumulate,
    trainer_unused,
    trainer_checkpointed,
    trainer_resumed,
)


def main() -> None:
    """Runs the cases, or those named on the command line."""
    warnings.filterwarnings("ignore")
    cases.run(CASES, sys.argv[1:])


if __name__ == "__main__":
    main()
