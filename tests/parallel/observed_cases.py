"""What ranks run in test_ddp_observed.py: norms, statistics and attribution through the wrapper and the hook, and
loss units through the wrapper."""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from parallel.ddp_hook_cases import HOOKS
from support.ddp_models import (
    SMALL_CAP_MB,
    Branches,
    Checkpointed,
    Collectives,
    ComplexNet,
    Zoo,
    assert_same_on_all_ranks,
    batch,
    images,
    loss_of,
    mlp,
)
from support.inside import inside
from support.leaf_steps import SCALER, assert_close, bits, exact_norms, loss_scale
from support.wires import settings
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fusedreduce
from fusedreduce import reducer_of
from fusedreduce.buckets.loss_scale import LossScale
from fusedreduce.buckets.stats.non_finite import Culprit, NonFiniteReport
from fusedreduce.errors import NonFiniteGradientError

STEPS = 7


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


def _embedding() -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(nn.Embedding(50, 24, sparse=True), nn.Linear(24, 6))


def _tokens(rank: int, number: int) -> torch.Tensor:
    return torch.randint(0, 50, (10,), generator=torch.Generator().manual_seed(13 * number + rank))


def _branch(rank: int, number: int) -> tuple[torch.Tensor, int]:
    return batch(rank, number), (rank + number) % 2 if number < 4 else 0


def _same_branch(rank: int, number: int) -> tuple[torch.Tensor, int]:
    return batch(rank, number), number % 2


Make = tuple[Callable[[], nn.Module], Callable[[int, int], Any], dict[str, Any]]


UNUSED: dict[str, Any] = {"find_unused_parameters": True, "bucket_cap_mb": 0.001}
MODELS: dict[str, Make] = {
    "plain": (mlp, batch, {}),
    "everything": (Several, several_inputs, {}),
    "sparse": (_embedding, _tokens, {}),
    "unused": (Branches, _branch, UNUSED),
    "static graph": (Branches, lambda rank, _: (batch(rank, _), rank % 2), {"static_graph": True}),
    "reentrant, shared": (lambda: Checkpointed(reentrant=True, times=2), batch, {"static_graph": True}),
    # The wrapper's alone:
    "overlap off": (mlp, batch, {"overlap": False}),
    "static policy": (mlp, batch, {"policy": "static"}),
    "skipped": (Branches, _same_branch, {**UNUSED, "skip_all_reduce_unused_params": True}),
}


def norms(rank: int, world: int, surface: str, kind: str, wire: str, views: bool) -> None:
    """Every step's, through re-plans; with zero_grad left out at times, and two micro-batches."""
    make, make_input, options = MODELS[kind]
    one = Observed(surface, make(), wire, gradient_as_bucket_view=views, check="count", **options)
    optimizer = torch.optim.SGD(one.ddp.parameters(), lr=0.01)
    # The wrapper first learns of which kind a sparse gradient is: its hook is shown that bucket behind the last one.
    late = surface == "hook in wrapper" and kind == "everything"
    for number in range(STEPS):
        if number != 3:
            one.ddp.zero_grad(set_to_none=number % 2 == 0)
        if number == 5 and kind not in ("static graph", "skipped"):
            with one.ddp.no_sync():
                loss_of(one.ddp(make_input(rank, 100))).backward()
                assert one.hooked or not inside(one.ddp).statistics.has_by_products()
        loss_of(one.ddp(make_input(rank, number))).backward()
        if late and number < 2:
            with pytest.raises(fusedreduce.FusedReduceError, match="the latest step has no norm"):
                one.grad_norm()
        else:
            one.check()
        optimizer.step()
    assert one.non_finite() == []


def same_bits_from_run_to_run(rank: int, world: int, wire: str, views: bool) -> None:
    """For a plan that no clock decides."""

    def run() -> list[list[int]]:
        one = Observed("wrapper", mlp(), wire, policy="static", gradient_as_bucket_view=views)
        found = []
        for number in range(STEPS):
            one.ddp.zero_grad()
            loss_of(one.ddp(batch(rank, number))).backward()
            found.append(one.check())
        return found

    assert run() == run()


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


def plantings(rank: int, world: int, surface: str, wire: str, check: str, views: bool, count: int) -> list[str]:
    """One element on one rank, or on several one of their own: found by all, and nothing else is."""
    one = Observed(surface, mlp(), wire, check=check, stats=False, gradient_as_bucket_view=views)
    optimizer = torch.optim.SGD(one.ddp.parameters(), lr=0.01)
    named = list(one.ddp.module.named_parameters())
    draw = random.Random(5)
    texts, seen = [], 0
    for step in range(count):
        places = []
        for _ in range(world):
            name, parameter = draw.choice(named)
            places.append((name, parameter, draw.randrange(parameter.numel()), draw.choice((math.nan, math.inf))))
        bad = draw.sample(range(world), draw.randrange(world + 1))
        one.ddp.zero_grad()
        with contextlib.ExitStack() as stack:
            if rank in bad:
                stack.enter_context(planted(*places[rank][1:]))
            loss = loss_of(one.ddp(batch(rank, step)))
            if bad and check == "raise":
                raised = stack.enter_context(pytest.raises(NonFiniteGradientError))
            loss.backward()
        spoiled = {name for name, parameter in named if not parameter.grad.isfinite().all()}
        assert spoiled == {places[one][0] for one in bad}, "the step is finished all the same"
        if not bad:
            assert len(one.non_finite()) == min(seen, 100)
            optimizer.step()
            continue
        if check == "raise":
            own, text = str(raised.value).split(": ", 1)
            assert own == f"rank {rank}" and text.startswith(f"step {step + 1}: ")
            texts.append(text)
        seen += 1
        culprits = tuple(Culprit(each, places[each][0], places[each][2]) for each in sorted(bad))
        report = one.non_finite()[-1]
        assert (report.step, report.culprits, set(report.reduced)) == (step + 1, culprits, spoiled)
        if not one.hooked:
            assert inside(one.ddp).statistics.found_non_finite().item() == 1.0
    assert_same_on_all_ranks([each.detach() for each in one.ddp.parameters()])
    return texts


def raises(rank: int, world: int, surface: str, kind: str, wire: str) -> None:
    """At the end of any kind of backward; norms are right before and after."""
    make, make_input, options = MODELS[kind]
    one = Observed(surface, make(), wire, check="raise", **options)
    place = next(each for each in one.ddp.parameters() if each.numel() > 3)
    for step in range(5):
        one.ddp.zero_grad()
        if step == 3:
            with planted(place, 2, math.nan), pytest.raises(NonFiniteGradientError):
                loss_of(one.ddp(make_input(rank, step))).backward()
        else:
            loss_of(one.ddp(make_input(rank, step))).backward()
            one.check()
    (report,) = one.non_finite()
    users = [0] if kind == "static graph" else list(range(world))  # of the first branch
    assert report.step == 4 and [culprit.rank for culprit in report.culprits] == users


def _poisoned(gradient: torch.Tensor) -> torch.Tensor:
    """The fifth element as it lies in memory."""
    bad = gradient.clone()
    if bad.is_sparse:
        bad._values().view(-1)[5] = math.nan
    else:
        bad.as_strided((bad.numel(),), (1,))[5] = math.nan
    return bad


def planted_in_others(rank: int, world: int, surface: str, wire: str) -> None:
    """A sparse gradient, a complex one, of which pairs are counted, and one that is channels last."""
    one = Observed(surface, Several(), wire, check="count")
    for step in range(3):
        one.ddp.zero_grad()
        loss_of(one.ddp(several_inputs(rank, step))).backward()
    for name in ("embedding.weight", "complex.weight", "zoo.conv.weight"):
        one.ddp.zero_grad()
        handle = one.ddp.module.get_parameter(name).register_hook(_poisoned if rank == 1 else lambda gradient: gradient)
        loss_of(one.ddp(several_inputs(rank, 1))).backward()
        handle.remove()
        assert one.non_finite()[-1] == NonFiniteReport(one.non_finite()[-1].step, (Culprit(1, name, 5),), (name,))
        assert math.isnan(one.grad_norm().item()) and math.isnan(one.grad_norm(math.inf).item())
    assert [report.step for report in one.non_finite()] == [4, 5, 6]


def used_by_one_rank(rank: int, world: int, surface: str, wire: str) -> None:
    """A NaN in what no other rank has a gradient of; a parameter that nobody uses counts as zeros."""
    one = Observed(surface, Branches(), wire, check="count", **UNUSED)
    for step in range(4):
        one.ddp.zero_grad()
        which = (rank + step) % 2
        bias = one.ddp.module.layers[which].bias
        with planted(bias, 3, math.nan) if rank == 1 and step else contextlib.nullcontext():
            loss_of(one.ddp((batch(rank, step), which))).backward()
        assert one.grad_norms()["layers.2.weight"].item() == 0.0 and one.ddp.module.layers[2].weight.grad is None
        if step:
            assert one.non_finite()[-1].culprits == (Culprit(1, f"layers.{(1 + step) % 2}.bias", 3),)
        else:
            one.check()
    assert len(one.non_finite()) == 3


def hooks(rank: int, world: int, name: str, views: bool) -> None:
    """Comm hooks that are registered on the wrapper."""
    one = Observed("wrapper", mlp(), gradient_as_bucket_view=views, check="count")
    ddp = one.ddp
    HOOKS[name](ddp)
    for number in range(STEPS):
        ddp.zero_grad()
        loss_of(ddp(batch(rank, number))).backward()
        reducer = reducer_of(ddp)
        exact = exact_norms(reducer.parameters, 2.0)
        assert_close([*ddp.grad_norms().values(), ddp.grad_norm()], exact, name)
        if name not in ("noop", "post-localSGD"):
            one.check()
    assert ddp.non_finite() == []


def ignored(rank: int, world: int) -> None:
    """What the wrapper does not reduce has no place in a norm that every rank must agree on."""
    model: Any = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 6))
    TorchDDP._set_params_and_buffers_to_ignore_for_model(model, ["2.bias"])
    for stats in (True, False):
        model.zero_grad()
        ddp = Observed("wrapper", model, stats=stats).ddp
        assert float(ddp.grad_norm()) == 0.0
        loss_of(ddp(batch(rank, 0))).backward()
        for norm_type in (2.0, math.inf):
            with pytest.raises(ValueError, match=r"2\.bias has a gradient.*include_ignored"):
                ddp.grad_norm(norm_type)
            everything = exact_norms(list(model.parameters()), norm_type)[-1]
            assert_close([ddp.grad_norm(norm_type, include_ignored=True)], [everything])
        assert "2.bias" not in ddp.grad_norms()
        model[2].bias.grad = None
        assert_close([ddp.grad_norm()], exact_norms(list(model.parameters()), 2.0)[-1:])
        with pytest.raises(ValueError, match="norm_type"):
            ddp.grad_norm(1.0)


def join(
    rank: int, world: int, wire: str, batches: Sequence[int], check: str, alike: bool, **options: Any
) -> list[NonFiniteReport]:
    """Ranks that leave early: who stays has its norms; whoever raises, all do, and the rest of the epoch goes on."""
    views = bool(options.get("gradient_as_bucket_view"))
    model = Branches() if options.get("find_unused_parameters") else mlp()
    make_input = _branch if options.get("find_unused_parameters") else batch
    ddp = Observed("wrapper", model, wire, check=check, **options).ddp
    inside(ddp).pretend_alike(alike)
    raised = 0
    number = 0
    planted = {max(batches) - 2} if check == "raise" else {1, max(batches) - 2}
    while number < batches[rank] or raised:
        raised = 0
        with (
            pytest.raises(NonFiniteGradientError, match="rank 0") if check == "raise" else contextlib.nullcontext(),
            ddp.join(),
        ):
            while number < batches[rank]:
                ddp.zero_grad()
                features = make_input(rank, number)
                if rank == 0 and number in planted:
                    first = features[0] if isinstance(features, tuple) else features
                    first[2, 3] = math.nan
                number += 1
                loss_of(ddp(features)).backward()
                if number - 1 not in planted:
                    exact = exact_norms(reducer_of(ddp).parameters, 2.0)
                    assert_close([*ddp.grad_norms().values(), ddp.grad_norm()], exact, (number, views))
        if check == "raise":
            break
    # After it the wrapper goes on as before.
    ddp.zero_grad()
    loss_of(ddp(make_input(rank, 200))).backward()
    assert_close([ddp.grad_norm()], exact_norms(reducer_of(ddp).parameters, 2.0)[-1:])
    found: list[NonFiniteReport] = ddp.non_finite()
    return found


# Loss units


def backward(ddp: Any, loss: torch.Tensor, scale: LossScale | None) -> None:
    """Of a loss that a scaler has scaled, or a plain one."""
    if scale is not None:
        loss = loss * scale.scale
        function = loss.grad_fn
        assert function is not None
        function.register_prehook(lambda _: reducer_of(ddp).begin_scaled(scale))
    loss.backward()


def scaled(rank: int, world: int, kind: str, wire: str, views: bool) -> float:
    """Against a wrapper of the same weights without a scale; the worst difference relative to the largest gradient."""
    make, make_input, options = MODELS[kind]
    both = [Observed("wrapper", make(), wire, gradient_as_bucket_view=views, **options) for _ in range(2)]
    ours, plain = (one.ddp for one in both)
    inside(ours).loss_scale.attach(SCALER)
    first, second = loss_scale(2.0**12), loss_scale(2.0**13)
    worst = 0.0
    for number in range(STEPS):
        for one in both:
            ddp = one.ddp
            ddp.zero_grad(set_to_none=number % 3 != 0)
            if number in (4, 5) and kind != "static graph":
                with ddp.no_sync():
                    backward(ddp, loss_of(ddp(make_input(rank, 100))), first if ddp is ours else None)
                assert inside(ddp).loss_scale.unscaled_now() is (ddp is plain)
            now = second if number == 5 else first
            backward(ddp, loss_of(ddp(make_input(rank, number))), now if ddp is ours else None)
            one.check()
            assert inside(ddp).loss_scale.unscaled_now()
        for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None)
            if mine.grad is not None and mine.numel():
                dense, other_dense = mine.grad.to_dense(), other.grad.to_dense()
                worst = max(worst, float((dense - other_dense).abs().max() / other_dense.abs().max().clamp(min=1e-12)))
    return worst


def mixed_units(rank: int, world: int, wire: str) -> None:
    """Every rank finds it, before anything is sent; reset() and zero_grad() and it goes on."""
    one = Observed("wrapper", mlp(), wire)
    ddp, reducer = one.ddp, reducer_of(one.ddp)
    inside(reducer).loss_scale.attach(SCALER)
    scale = loss_scale(256.0)
    for number in range(4):
        ddp.zero_grad()
        backward(ddp, loss_of(ddp(batch(rank, number))), scale)
        local = copy.deepcopy(ddp.module)
        loss = loss_of(ddp(batch(rank, number)))
        with Collectives() as issued, pytest.raises(fusedreduce.FusedReduceError, match="zero_grad"):
            backward(ddp, loss, scale)
        assert not issued.payload_bytes
        ddp.reset()
        assert len(list(local.parameters())) == len(reducer.parameters)
    ddp.zero_grad()
    backward(ddp, loss_of(ddp(batch(rank, 9))), scale)
    one.check()


def broken_out_of_step(rank: int, world: int) -> None:
    """Ranks are the same again after an error that all of them met."""
    ddp = Observed("wrapper", mlp(), check="raise").ddp
    for number in range(6):
        ddp.zero_grad()
        features = batch(rank, number)
        if number % 2 and rank == world - 1:
            features[0, 0] = math.inf
        loss = loss_of(ddp(features))
        with pytest.raises(NonFiniteGradientError) if number % 2 else contextlib.nullcontext():
            loss.backward()
        assert_same_on_all_ranks([torch.tensor([ddp.reduce_stats()["collectives"]])])
