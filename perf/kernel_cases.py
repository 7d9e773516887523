"""The cases of the kernel benchmarks: what is timed against what, each with the check that allows it a time.

Each function takes an allocated Workload and returns Cases: callables per set, checks, and what one call launches.
`pack` comes first: it needs gradients as they were made, and `unpack` overwrites them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from baselines import Baselines
from records import BenchError
from report_tables import NORM, NORMS, OURS
from timing import Call, Check, Limits
from torch import nn
from workload import BLOCK_NUMEL, Bucket, BufferSet, Workload, moved, packed, same

from fusedreduce.kernels import counting, dispatch
from fusedreduce.kernels.table import SourceTotals, Totals

AGAIN, PARTIALS = "ours again", "ours, partials"
COPY, COPY_KERNEL, CAST = "limit: copy", "limit: copy by a kernel", "limit: cast"
ODD_DIVISOR = 3.0  # whose reciprocal is not exact: the kernel divides
SUMS_RTOL = 30 * 2.0**-24  # fp32 squares are added up 16 at a time before fp64
NORM_RTOL = {torch.float32: 1e-4, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}  # torch's norms have that dtype


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
    """Unpack of what pack must leave, against torch's ways and the limits."""
    cases = Cases()
    wires = work.packed()
    for one, of_set in zip(work.sets, wires, strict=True):
        for bucket, wire in zip(one.buckets, of_set, strict=True):
            bucket.wire.copy_(wire)
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
        looks = [_Look(one, work) for one in work.sets]
        with_norms: list[Call] = [functools.partial(look.unpack, complete) for look in looks]
        check = functools.partial(_check_totals, work, looks, wanted, right, complete)
        cases.add(name, with_norms, functools.partial(_spoil, work.spoil_gradients, looks), check)
    for name, calls in Baselines(work, [work.compact(of_set) for of_set in wires]).unpacks().items():
        cases.add(f"torch: {name}", calls, work.spoil_gradients, right)
    _add_norm(cases, work, wanted)
    _add_limits(cases, work, work.pair.wire, work.pair.gradients)
    return cases


def _add_norm(cases: Cases, work: Workload, wanted: _Expected) -> None:
    """What the norm costs where unpack does not bring it: a pass over gradients that are there."""
    totals = [torch.zeros((), device=work.device) for _ in work.sets]

    def norm(number: int) -> None:
        totals[number] = nn.utils.get_total_norm(work.sets[number].gradients, foreach=True)

    def spoil() -> None:
        torch._foreach_mul_(totals, math.nan)

    def right(name: str) -> None:
        for total, expected in zip(totals, wanted.norms, strict=True):
            _near(name, float(total), expected, NORM_RTOL[work.pair.gradients])

    cases.add(NORM, [functools.partial(norm, number) for number in range(len(totals))], spoil, right)


class _Expected:
    """By-products of memory as it must be: per set the norm and the largest value, of the first set each norm."""

    def __init__(self, work: Workload, memories: Sequence[torch.Tensor]) -> None:
        self.norms = [_norm(memory) for memory in memories]
        self.peaks = [
            float(torch.stack([p.abs().nan_to_num().max() for p in m.split(BLOCK_NUMEL)]).max()) for m in memories
        ]
        self.of_first = [_norm(moved(gradient, memories[0]).view(-1)) for gradient in work.sets[0].gradients]


class _Look:
    """Ours with by-products, for one set: keeps what the second stage returns, which a check reads."""

    def __init__(self, one: BufferSet, work: Workload) -> None:
        self._one, self._spans, self._scale = one, work.spans(), work.one
        self.totals: Totals | None = None
        self.sources: SourceTotals | None = None

    def pack(self, divisor: float, complete: bool) -> None:
        """Packs; `complete`: with the second stage."""
        for one in self._one.buckets:
            _kernels(one).pack(one.gradients, one.chunks, one.pointers, one.wire, divisor, one.sources)
        if complete:
            self.sources = dispatch.reduce_source_partials(self._one.sources, self._spans)

    def unpack(self, complete: bool) -> None:
        """Unpacks; `complete`: with the second stage."""
        for one in self._one.buckets:
            _kernels(one).unpack(one.gradients, one.chunks, one.pointers, one.wire, self._scale, one.results)
        if complete:
            self.totals = dispatch.reduce_partials(self._one.results, self._spans)

    def spoil(self) -> None:
        """Values that no by-product has."""
        kept = [self._one.results, self._one.sources, self.totals, self.sources]
        for tensor in (tensor for group in kept if group is not None for tensor in vars(group).values()):
            tensor.fill_(math.nan if tensor.dtype.is_floating_point else -9)


def _spoil(outputs: Call, kept: Sequence[_Look]) -> None:
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
