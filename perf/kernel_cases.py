"""The cases of the kernel benchmarks: what is timed against what, each with the check that allows it a time.

Each function takes an allocated Workload and returns Cases: callables per set, checks, and what one call launches.
Their order matters: `pack` needs gradients as they were made, `unpack` and `after` begin with the wires of a right pack
and overwrite the gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from baselines import NORM_RTOL, Baselines, Passes, with_gradients
from records import BenchError
from timing import Call, Check, Limits
from workload import BLOCK_NUMEL, SCALE, Bucket, BufferSet, Workload, moved, packed, same

from fusedreduce.kernels import counting, dispatch
from fusedreduce.kernels.table import SourceTotals, Totals

OURS, AGAIN, PARTIALS, NORMS = "ours", "ours again", "ours, partials", "ours, norms"
COPY, COPY_KERNEL, CAST = "limit: copy", "limit: copy by a kernel", "limit: cast"
ODD_DIVISOR = 3.0  # whose reciprocal is not exact: the kernel divides
SUMS_RTOL = 30 * 2.0**-24  # fp32 squares are added up 16 at a time before fp64
CLIP_SHARE = 0.5  # of the norm: clipping multiplies by a half


@dataclass
class Cases:
    """What `timing.measure` takes, and what one call of each case launches (kernels of ours, or torch operators)."""

    calls: dict[str, list[Call]] = field(default_factory=dict)
    checks: dict[str, Check] = field(default_factory=dict)
    launches: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, calls: Sequence[Call], poison: Call, check: Callable[[str], object]) -> None:
        """A case; `check` is told its name."""
        self.calls[name] = list(calls)
        self.checks[name] = Check(poison=poison, check=functools.partial(check, name))
        calls[0]()  # what is made once and kept does not count
        with counting.count_launches() as counted, counting.OperatorCounter() as operators:
            calls[0]()
        # Ours are hidden from the mode that counts operators, but for what stands between them.
        self.launches[name] = sum(one.launches for one in counted) + operators.calls


def prove_path(device: torch.device) -> None:
    """Raises BenchError unless a GPU runs compiled kernels, and a CPU torch operators."""
    path = dispatch.path_for(device, (torch.float32,))
    wanted = "triton" if device.type == "cuda" else "torch"
    if path != wanted:
        raise BenchError(f"on {device.type} the {wanted} path is measured, not {path}: unset TRITON_INTERPRET")


def _kernels(bucket: Bucket) -> dispatch.Kernels:
    """What a reducer calls."""
    return dispatch.unchecked(bucket.wire.device, (bucket.wire.dtype, *bucket.chunks.dtype_set))


def pack(work: Workload) -> Cases:
    """Pack against torch's ways and the limits."""
    cases = Cases()
    wires = work.packed()
    compact = [work.compact(of_set) for of_set in wires]

    def right(name: str) -> None:
        work.check_wires(name, wires)

    def ours(one: BufferSet, divisor: float) -> None:
        for bucket in one.buckets:
            _kernels(bucket).pack(bucket.gradients, bucket.chunks, bucket.pointers, bucket.wire, divisor)

    for name in (OURS, AGAIN):
        cases.add(name, [functools.partial(ours, one, work.divisor) for one in work.sets], work.spoil_wires, right)
    looks = [_Look(one, work) for one in work.sets]
    for name, complete in ((PARTIALS, False), (NORMS, True)):
        check = functools.partial(_check_sources, work, looks, right, complete)
        by_products: list[Call] = [functools.partial(look.pack, work.divisor, complete) for look in looks]
        cases.add(name, by_products, functools.partial(_spoil, work.spoil_wires, looks), check)
    if work.divisor != ODD_DIVISOR:
        check_odd = functools.partial(_check_odd, work, ODD_DIVISOR)
        odd = [functools.partial(ours, one, ODD_DIVISOR) for one in work.sets]
        cases.add(f"ours, divisor {ODD_DIVISOR:g}", odd, work.spoil_wires, check_odd)
    ways = Baselines(work, [[bucket.wire for bucket in one.buckets] for one in work.sets])

    def theirs_right(name: str) -> None:
        work.check_wires(name, compact, ways.units)

    for name, calls in ways.packs().items():
        cases.add(f"torch: {name}", calls, work.spoil_wires, theirs_right)
    _add_limits(cases, work, work.pair.gradients, work.pair.wire)
    return cases


def unpack(work: Workload) -> Cases:
    """Unpack against torch's ways and the limits."""
    cases = Cases()
    compact = _fill_wires(work)
    expected = work.unpacked()

    def right(name: str) -> None:
        work.check_gradients(name, expected)

    def ours(one: BufferSet) -> None:
        for bucket in one.buckets:
            _kernels(bucket).unpack(bucket.gradients, bucket.chunks, bucket.pointers, bucket.wire, work.one)

    for name in (OURS, AGAIN):
        cases.add(name, [functools.partial(ours, one) for one in work.sets], work.spoil_gradients, right)
    wanted = _Expected(work, expected)
    for name, complete in ((PARTIALS, False), (NORMS, True)):
        _add_norms(cases, name, work, work.one, wanted, right, complete=complete)
    for name, calls in Baselines(work, compact).unpacks().items():
        cases.add(f"torch: {name}", calls, work.spoil_gradients, right)
    _add_limits(cases, work, work.pair.wire, work.pair.gradients)
    return cases


def after(work: Workload) -> Cases:
    """Unpack and what comes after it: the norm, clipping by it, or taking a loss scale back."""
    cases = Cases()
    compact = _fill_wires(work)
    expected, unscaled = work.unpacked(), work.unpacked(SCALE)
    wanted = _Expected(work, expected)
    limits = [CLIP_SHARE * norm for norm in wanted.norms]
    clip_rtol = NORM_RTOL[work.pair.gradients]

    def right(name: str) -> None:
        work.check_gradients(name, expected)

    def right_unscaled(name: str) -> None:
        work.check_gradients(name, unscaled)

    def right_clipped(name: str) -> None:
        work.check_scaled(name, expected, [CLIP_SHARE] * len(expected), clip_rtol)

    for name in (NORMS, AGAIN):
        _add_norms(cases, name, work, work.one, wanted, right)
    _add_norms(cases, "ours, unscale and norms", work, work.half, _Expected(work, unscaled), right_unscaled)
    with_limits = zip(work.sets, limits, strict=True)
    clips = [functools.partial(_Look(one, work).clip, work.one, limit) for one, limit in with_limits]
    cases.add("ours, norms and clip", clips, work.spoil_gradients, right_clipped)
    parameters = [with_gradients(one) for one in work.sets]
    for name, ways in Baselines(work, compact).unpacks().items():
        checked = {"norm": right, "clip": right_clipped, "unscale": right_unscaled}
        if work.device.type == "cuda" and work.pair.gradients is torch.bfloat16:
            del checked["unscale"]  # torch has no such kernel, because bf16 needs no loss scale
        for label, check in checked.items():
            # Each case has its own: a graph's results lie where its capture put them.
            passes = [Passes(of_set, limit, SCALE) for of_set, limit in zip(parameters, limits, strict=True)]
            both = [_both(way, getattr(one, label)) for way, one in zip(ways, passes, strict=True)]
            poison = functools.partial(_spoil, work.spoil_gradients, passes)
            theirs = functools.partial(_check_passes, work, passes, wanted, label, check)
            cases.add(f"torch: {name}, {label}", both, poison, theirs)
    return cases


def _check_passes(
    work: Workload,
    passes: Sequence[Passes],
    wanted: _Expected,
    label: str,
    right: Callable[[str], None],
    name: str,
) -> None:
    right(name)
    for one, norm in zip(passes, wanted.norms, strict=True):
        if label == "unscale":
            _near(name, float(one.found_inf), 0.0, 0.0)
        else:
            _near(name, float(one.total), norm, NORM_RTOL[work.pair.gradients])


class _Expected:
    """By-products of memory as it must be: per set the norm and the largest value, of the first set each norm."""

    def __init__(self, work: Workload, memories: Sequence[torch.Tensor]) -> None:
        self.norms = [_norm(memory) for memory in memories]
        self.peaks = [
            float(torch.stack([p.abs().nan_to_num().max() for p in m.split(BLOCK_NUMEL)]).max()) for m in memories
        ]
        self.of_first = [_norm(moved(gradient, memories[0]).view(-1)) for gradient in work.sets[0].gradients]


def _add_norms(
    cases: Cases,
    name: str,
    work: Workload,
    scale: torch.Tensor,
    wanted: _Expected,
    right: Callable[[str], None],
    *,
    complete: bool = True,
) -> None:
    looks = [_Look(one, work) for one in work.sets]
    calls = [functools.partial(look.unpack, scale, complete) for look in looks]
    check = functools.partial(_check_totals, work, looks, wanted, right, complete)
    cases.add(name, calls, functools.partial(_spoil, work.spoil_gradients, looks), check)


def _both(first: Call, second: Call) -> Call:
    def call() -> None:
        first()
        second()

    return call


class _Look:
    """Ours with by-products, for one set: keeps what the second stage returns, which a check reads."""

    def __init__(self, one: BufferSet, work: Workload) -> None:
        self._one, self._spans = one, work.spans()
        self.totals: Totals | None = None
        self.sources: SourceTotals | None = None

    def pack(self, divisor: float, complete: bool) -> None:
        """Packs; `complete`: with the second stage."""
        for one in self._one.buckets:
            _kernels(one).pack(one.gradients, one.chunks, one.pointers, one.wire, divisor, one.sources)
        if complete:
            self.sources = dispatch.reduce_source_partials(self._one.sources, self._spans)

    def unpack(self, scale: torch.Tensor, complete: bool) -> None:
        """Unpacks; `complete`: with the second stage."""
        for one in self._one.buckets:
            _kernels(one).unpack(one.gradients, one.chunks, one.pointers, one.wire, scale, one.results)
        if complete:
            self.totals = dispatch.reduce_partials(self._one.results, self._spans)

    def clip(self, scale: torch.Tensor, max_norm: float) -> None:
        """Unpacks, and multiplies everything so that the norm is `max_norm` at most."""
        self.unpack(scale, True)
        assert self.totals is not None
        factor = (max_norm / (self.totals.total[0].sqrt() + 1e-6)).clamp(max=1.0).float().reshape(1)
        for one in self._one.buckets:
            _kernels(one).scale(one.gradients, one.chunks, one.pointers, factor)

    def spoil(self) -> None:
        """Values that no by-product has."""
        kept = [self._one.results, self._one.sources, self.totals, self.sources]
        for tensor in (tensor for group in kept if group is not None for tensor in vars(group).values()):
            tensor.fill_(math.nan if tensor.dtype.is_floating_point else -9)


def _spoil(outputs: Call, kept: Sequence[_Look | Passes]) -> None:
    outputs()
    for one in kept:
        one.spoil()


def _check_sources(
    work: Workload, looks: Sequence[_Look], right: Callable[[str], None], complete: bool, name: str
) -> None:
    right(name)
    for one, look in zip(work.sets, looks, strict=True):
        # Nothing here is infinite, and nothing becomes 0 on the wire.
        clean = bool((one.sources.first_non_finite == -1).all()) and not bool(one.sources.flushed.any())
        if complete:
            assert look.sources is not None
            clean &= look.sources.first.tolist() == [-1, -1] and not bool(look.sources.flushed.any())
        if not clean:
            raise BenchError(f"{name} is wrong: it reports gradients that are not finite, or were flushed to zero")


def _check_totals(
    work: Workload,
    looks: Sequence[_Look],
    wanted: _Expected,
    right: Callable[[str], None],
    complete: bool,
    name: str,
) -> None:
    right(name)
    found = zip(work.sets, looks, wanted.norms, wanted.peaks, strict=True)
    for one, look, norm, largest in found:
        _near(name, math.sqrt(float(one.results.sums.sum())), norm, SUMS_RTOL)
        if complete:
            assert look.totals is not None
            square, peak, bad = look.totals.total.tolist()
            _near(name, math.sqrt(square), norm, SUMS_RTOL)
            _near(name, peak, largest, 0.0)
            if bad or not bool((look.totals.first_non_finite == -1).all()):
                raise BenchError(f"{name} is wrong: it reports gradients that are not finite")
    if complete:
        totals = looks[0].totals
        assert totals is not None
        for square, norm in zip(totals.parameter_sums.tolist(), wanted.of_first, strict=True):
            _near(name, math.sqrt(square), norm, SUMS_RTOL)


def _check_odd(work: Workload, divisor: float, name: str) -> None:
    for one in work.sets:
        for bucket in one.buckets:
            same(name, bucket.wire, packed(bucket, divisor))


def _near(name: str, actual: float, expected: float, rtol: float) -> None:
    if not abs(actual - expected) <= rtol * abs(expected):  # NaN is wrong too
        raise BenchError(f"{name} is wrong: {actual!r} instead of {expected!r}, off by more than {rtol:.1g} of it")


def _norm(memory: torch.Tensor) -> float:
    """Of what is not NaN (the gaps between gradients), in fp64."""
    parts = memory.split(BLOCK_NUMEL)
    return math.sqrt(math.fsum(float(part.double().square().nansum()) for part in parts))


def _fill_wires(work: Workload) -> list[list[torch.Tensor]]:
    """Has every wire hold what pack must leave, if that has not been done; the same without padding."""
    if not work.filled:
        for one, wires in zip(work.sets, work.packed(), strict=True):
            for bucket, wire in zip(one.buckets, wires, strict=True):
                bucket.wire.copy_(wire)
        work.filled = True
    return [work.compact([bucket.wire for bucket in one.buckets]) for one in work.sets]


def _add_limits(cases: Cases, work: Workload, source: torch.dtype, destination: torch.dtype) -> None:
    limits = [Limits(work.bucket_numels, source, destination, work.device) for _ in work.sets]

    def poison() -> None:
        for one in limits:
            one.poison()

    def copied(name: str) -> None:
        for one in limits:
            one.check_copy()

    def cast(name: str) -> None:
        for one in limits:
            one.check_cast()

    cases.add(COPY, [one.copy for one in limits], poison, copied)
    cases.add(COPY_KERNEL, [one.copy_kernel for one in limits], poison, copied)
    cases.add(CAST, [one.cast for one in limits], poison, cast)
