"""Training on several ranks over the group that there is, NCCL's or Gloo's, beside the definition of each wire.

A model's leaves get gradients that are given, so that every rank can compute what all of them must have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from support.wires import EXCHANGED, encoding_of, reduced, reduced_in_two_levels, settings
from torch import nn

import fusedreduce
from fusedreduce.comm.process_group import ProcessGroupCommunicator
from fusedreduce.planning.bucketing import BucketCaps

SHAPES = ((7, 41), (3,), (2, 300), (300,), (5, 7), (1, 1031), (64, 512))
CAP_BYTES = 4096
# Relative to the largest contribution: NCCL adds up in an order of its own, in the wire's dtype.
BOUNDS = {"native": 1e-5, "fp16": 2e-3, "bf16": 2e-2}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to reduce: `wire`, as tables of tests name it, and what else is asked for."""

    wire: Any
    door: str = "wrapper"
    wrapper: dict[str, Any] = field(default_factory=dict)
    reduce: dict[str, Any] = field(default_factory=dict)
    steps: int = 4
    late: int = 0  # steps by which gradients are older
    exact: bool = True  # an encoded wire's gradients are those of the definition
    unused: bool = False

    def config(self) -> fusedreduce.ReduceConfig:
        """For the wrapper and the reducer."""
        mode = {"sync_mode": fusedreduce.BoundedStaleness(self.late)} if self.late else {}
        return fusedreduce.ReduceConfig(**{"policy": "ready", **settings(self.wire), **mode, **self.reduce})


CASES = {
    "native": Case(wire="native"),
    "native views": Case(wire="native", wrapper={"gradient_as_bucket_view": True}),
    "bf16": Case(wire="bf16"),
    "fp16": Case(wire="fp16"),
    "int8": Case(wire="int8"),
    "int4": Case(wire="int4"),
    "int8 observed": Case(wire="int8", reduce={"grad_stats": True, "check_finite": "count"}),
    "int8 lazy": Case(wire="int8", door="reducer"),
    "int4 feedback stochastic": Case(
        wire="int4", reduce={"error_feedback": True, "stochastic_rounding": True}, exact=False
    ),
    "bf16+fp32": Case(wire="bf16+fp32"),
    "int8 two levels": Case(wire="int8", reduce={"ranks_per_node": 2}),
    "unused": Case(wire="bf16", wrapper={"find_unused_parameters": True}, unused=True),
    "one step late": Case(wire="bf16", late=1),
    "planned": Case(wire="bf16", reduce={"policy": "planned"}, steps=16),
    "hook native": Case(wire="native", door="hook"),
    "hook bf16": Case(wire="bf16", door="hook"),
    "hook int8": Case(wire="int8", door="hook"),
}
TWO_LEVELS = "int8 two levels"


class Leaves(nn.Module):
    """Parameters whose gradients are what is given; one of them may be left out of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.leaves = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])

    def forward(self, given: Sequence[torch.Tensor], left_out: int = -1) -> torch.Tensor:
        """The loss."""
        return torch.stack(
            [(leaf * one).sum() for i, (leaf, one) in enumerate(zip(self.leaves, given, strict=True)) if i != left_out]
        ).sum()


def given_to(rank: int, step: int) -> list[torch.Tensor]:
    """Gradients of a rank in a step, of magnitudes that differ."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator) * 10.0 ** (i % 3 - 1) for i, shape in enumerate(SHAPES)]


def device_of(rank: int) -> torch.device:
    """A rank's GPU where the group is NCCL's, else the CPU."""
    if dist.get_backend() != "nccl":
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def _step_of(model: nn.Module, case: Case, device: torch.device) -> tuple[Any, Any]:
    """What computes a loss and has gradients reduced, and what holds them together: a wrapper or a reducer."""
    if case.door == "hook":
        kwargs: dict[str, Any] = {"device_ids": [device.index]} if device.type == "cuda" else {}
        ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=CAP_BYTES / 2**20, **kwargs)
        ddp.register_comm_hook(fusedreduce.FusedHookState(wire=case.wire), fusedreduce.fused_hook)
        return ddp, ddp
    if case.door == "wrapper":
        wrapper = fusedreduce.DistributedDataParallel(
            model, bucket_cap_mb=CAP_BYTES / 2**20, reduce=case.config(), **case.wrapper
        )
        return wrapper, wrapper
    caps = BucketCaps(first_bytes=CAP_BYTES, cap_bytes=CAP_BYTES)
    reducer = fusedreduce.Reducer(
        model.parameters(), ProcessGroupCommunicator(), case.config(), caps=caps, lazy_bucket_allocation=True
    )

    def forward(given: Sequence[torch.Tensor], left_out: int = -1) -> torch.Tensor:
        loss: torch.Tensor = model(given, left_out)
        reducer.prepare_for_backward(loss)
        return loss

    return forward, reducer


def train(rank: int, world: int, name: str) -> list[str]:
    """A digest of all gradients after each step, which were compared with what they must be."""
    case, device = CASES[name], device_of(rank)
    model = Leaves().to(device)
    forward, _kept = _step_of(model, case, device)
    digests = []
    for step in range(case.steps):
        left_out = [(step + other) % len(SHAPES) if case.unused else -1 for other in range(world)]
        model.zero_grad(set_to_none=step % 3 != 2)
        forward([one.to(device) for one in given_to(rank, step)], left_out[rank]).backward()
        found = [torch.zeros(one.shape) if one.grad is None else one.grad.cpu() for one in model.leaves]
        digests.append(hashlib.sha256(b"".join(one.numpy().tobytes() for one in found)).hexdigest())
        if step >= case.late:
            contributions = [given_to(other, step - case.late) for other in range(world)]
            for other, index in enumerate(left_out):
                if index >= 0:
                    contributions[other][index].zero_()
            for i, gradient in enumerate(found):
                _compare(gradient, [one[i] for one in contributions], case, f"step {step}, gradient {i}")
    if case.door == "reducer":
        _kept.close()
    return digests


def _compare(gradient: torch.Tensor, contributions: Sequence[torch.Tensor], case: Case, what: str) -> None:
    world = len(contributions)
    divisors = [float(world)] * world
    mean = torch.stack(list(contributions)).double().mean(0)
    largest = float(torch.stack(list(contributions)).abs().max())
    if not case.exact:
        # A wire of 15 levels, of which stochastic rounding may take either neighbour, twice.
        assert float((gradient.double() - mean).abs().max()) <= largest * 2 / 7, what
    elif case.wire in EXCHANGED and (encoding_of(contributions[0], case.wire) or "+" in case.wire):
        if "ranks_per_node" in case.reduce and case.reduce["ranks_per_node"] < world:
            # Within a node NCCL adds up in an order of its own; where that moves a value over a boundary of the
            # encoding, it moves by a quantum.
            wanted = reduced_in_two_levels(contributions, divisors, case.wire, case.reduce["ranks_per_node"])
            assert float((gradient - wanted).abs().max()) <= 1e-2 * float(wanted.abs().max()), what
        else:
            assert torch.equal(gradient, reduced(contributions, divisors, case.wire)), what
    else:
        bound = BOUNDS.get(case.wire, BOUNDS["native"])
        assert float((gradient.double() - mean).abs().max()) <= bound * largest, what


def leave_what_is_lost(rank: int, world: int, which: str) -> float:
    """Closes a communicator of its own whose all-reduce one rank has not issued; a value that the GPU computes then."""
    device = device_of(rank)
    whole = ProcessGroupCommunicator()
    apart = whole.apart([device])
    if rank == 0:
        apart.all_reduce(torch.zeros(1000, device=device))
    (apart if which == "this group" else whole).lost = "a test says so"
    apart.close()
    torch.cuda.synchronize()
    return float(torch.ones(1, device=device).add(1.0))
