"""A model under the wrapper or the hook, and the norms, statistics and attribution that it finds out."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fusedreduce
from fusedreduce import reducer_of
from fusedreduce.buckets.stats.non_finite import NonFiniteReport
from support.ddp_models import SMALL_CAP_MB, ComplexNet, Zoo, assert_same_on_all_ranks, batch, images
from support.inside import inside
from support.leaf_steps import assert_close, bits, exact_norms
from support.wires import settings


class Observed:
    """A model under a surface, and what that finds out; parameters by torch's names.

    Args:
        surface: "wrapper", "hook" for fused_hook on torch's DDP, or "hook in wrapper".
        overlap, policy: the wrapper's alone.
        options: torch's.
    """

    def __init__(
        self,
        surface: str,
        model: nn.Module,
        wire: Any = "native",
        *,
        stats: bool = True,
        check: Any = "off",
        overlap: bool = True,
        policy: Any = "planned",
        state: fusedreduce.FusedHookState | None = None,
        **options: Any,
    ) -> None:
        options.setdefault("bucket_cap_mb", SMALL_CAP_MB)
        self.hooked = surface != "wrapper"
        hooks = settings(wire if self.hooked else "native")
        self.state = state or fusedreduce.FusedHookState(grad_stats=stats, check_finite=check, **hooks)
        self.ddp: Any
        if surface == "hook":
            self.ddp = TorchDDP(model, **options)
        else:
            config = fusedreduce.ReduceConfig(
                grad_stats=stats, check_finite=check, overlap=overlap, policy=policy, **settings(wire)
            )
            given = fusedreduce.ReduceConfig() if self.hooked else config
            self.ddp = fusedreduce.DistributedDataParallel(model, reduce=given, **options)
        if self.hooked:
            self.ddp.register_comm_hook(self.state, fusedreduce.fused_hook)
            self.state.name_parameters(model)

    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        norm: torch.Tensor = (self.state if self.hooked else self.ddp).grad_norm(norm_type)
        return norm

    def grad_norms(self, norm_type: float = 2.0) -> dict[str, torch.Tensor]:
        if self.hooked:
            return self.state.grad_norms(self.ddp.module, norm_type)
        found: dict[str, torch.Tensor] = self.ddp.grad_norms(norm_type)
        return found

    def grad_stats(self) -> dict[str, float]:
        """Each parameter's too."""
        found: dict[str, float] = self.state.grad_stats(self.ddp.module) if self.hooked else self.ddp.grad_stats()
        return found

    def non_finite(self) -> list[NonFiniteReport]:
        found: list[NonFiniteReport] = (self.state if self.hooked else self.ddp).non_finite()
        return found

    def check(self) -> list[int]:
        """Norms against fp64 on `.grad`, statistics against norms, and the same bits on every rank; their bits."""
        # A tied one has several names; torch takes the last, where it is asked for all of them.
        every = self.ddp.module.named_parameters(remove_duplicate=self.hooked)
        held = {one: name for name, one in every if one.requires_grad}
        if not self.hooked:
            assert list(held) and inside(self.ddp).statistics.has_by_products()
            held = {one: held[one] for one in reducer_of(self.ddp).parameters}
        numbers, stats = [], self.grad_stats()
        for key, norm_type in (("grad_norm", 2.0), ("grad_absmax", math.inf)):
            by_name, total = self.grad_norms(norm_type), self.grad_norm(norm_type)
            assert total.dtype is torch.float64 and total.dim() == 0
            assert list(by_name) == list(held.values()), "a tied one once"
            assert_close([*by_name.values(), total], exact_norms(list(held), norm_type), norm_type)
            if not self.hooked:
                assert_close([inside(self.ddp).statistics.measured_norm(norm_type)], [float(total)], "measured now")
            assert stats[key] == float(total)
            assert {name: stats[f"{key}/{name}"] for name in by_name} == {name: float(x) for name, x in by_name.items()}
            numbers += [*by_name.values(), total]
        keys = ("grad_norm", "grad_absmax", "grad_flushed")
        assert set(stats) == {key + end for key in keys for end in ("", *(f"/{name}" for name in by_name))}
        assert set(self.state.grad_stats() if self.hooked else self.ddp.grad_stats(per_parameter=False)) == set(keys)
        stacked = torch.stack(numbers)
        assert_same_on_all_ranks([stacked])
        return bits(stacked)


class Several(nn.Module):
    """Everything at once: the zoo, a sparse embedding, a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.zoo = Zoo()
        self.embedding = nn.Embedding(20, 6, sparse=True)
        self.complex = ComplexNet()

    def forward(self, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        image, tokens, features = given
        return (*self.zoo(image), self.embedding(tokens), self.complex(features))


def several_inputs(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For `Several`."""
    tokens = torch.randint(0, 20, (7,), generator=torch.Generator().manual_seed(17 * step + rank))
    return images(rank, step), tokens, batch(rank, step)


@contextlib.contextmanager
def planted(parameter: torch.Tensor, index: int, value: float) -> Iterator[None]:
    """One element of the gradient."""

    def plant(gradient: torch.Tensor) -> torch.Tensor:
        bad = gradient.clone(memory_format=torch.preserve_format)
        bad.view(-1)[index] = value
        return bad

    handle = parameter.register_hook(plant)
    try:
        yield
    finally:
        handle.remove()
