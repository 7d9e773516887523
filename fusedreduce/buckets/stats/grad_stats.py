"""Observed: what a reducer knows of its gradients beside their mean: norms, non-finite values, what the wire lost.

Two sources. By-products of the latest reduction cost next to nothing on a GPU, and are there if they were asked for
before the step (`ReduceConfig`, or `require`). What is asked for without them, or of gradients that may have been
changed since, is measured now, by one launch that reads every gradient once.

The same numbers on every rank, bit for bit: sums are taken in a fixed order. Where ranks do not compute alike (another
architecture, another Triton), the largest of the ranks' sums is every rank's.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from ...comm.protocol import Communicator, Pending
from ...comm.waiting import collective_failed, wait_for
from ...config import ReduceConfig, Wire
from ...kernels.table import Totals
from ..grad_bucket import GradBucket
from ..gradient_table import GradientTable, index_of
from ..loss_scale import LossUnits
from ..reduction import Reduction
from ..tensors import as_real, real_dtype, real_numel, versions_of
from .non_finite import FiniteCheck, Named, Started
from .partial_stats import ByProducts

# Zeros in place of gradients, and their reduction.
Shadow = tuple[GradBucket, Pending | torch.futures.Future[torch.Tensor]]


class Observed:
    """Observations of the gradients of one reducer.

    Args:
        parameters: all of them.
        names: theirs.
        config: what is wanted in every step.
        communicator: the ranks.

    `table`: all gradients as they are now. `units`: scaled by a loss scaler or not.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        config: ReduceConfig,
        communicator: Communicator,
    ) -> None:
        self.alike = True  # every rank's sums have the same last bits
        self.alone = False  # ranks are in different steps (Asynchronous), and tell each other nothing
        self.table = GradientTable(parameters)
        self.units = LossUnits(parameters, self.table)
        self._parameters = parameters
        self._names = names
        self._config = config
        self._communicator = communicator
        self._required = False
        self._by_products = ByProducts((), parameters, result=False, source=False)
        self._collected = False  # by the latest synchronised step
        self.additions = 0  # changes whenever a backward adds to gradients, or may have, that it does not reduce
        # Which gradients were collected, and at which versions.
        self._stamp: tuple[list[weakref.ref[torch.Tensor] | None], list[int]] | None = None
        complex_ = [parameter.is_complex() for parameter in parameters]
        raises = config.check_finite == "raise"
        self._finite = FiniteCheck(Named(names, complex_), communicator, raises=raises)
        self._shadows: list[Shadow] = []
        # Where a step may be launched and not completed: completes it.
        self.before_reading: Callable[[], None] = _nothing

    # What users ask

    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """Norm over all gradients: of the latest reduction with ReduceConfig(grad_stats=True), else measured now.

        Args:
            norm_type: 2 or inf.

        Returns:
            fp64, 0-dim, on the first parameter's device. Nothing has waited for it.
        """
        totals = self._latest()
        return norm_of(totals.total[0], totals.total[1], norm_type)

    def grad_norms(self, norm_type: float = 2.0) -> dict[str, torch.Tensor]:
        """As `grad_norm`, of each gradient: by the parameter's name."""
        totals = self._latest()
        norms = norm_of(totals.parameter_sums, totals.parameter_peaks, norm_type)
        return dict(zip(self._names, norms.unbind(), strict=True))

    def measured_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """As `grad_norm`, of the gradients as they are now; one launch."""
        self.before_reading()
        totals = self.table.measure()
        return norm_of(totals.total[0], totals.total[1], norm_type)

    def grad_stats(self, *, per_parameter: bool = True) -> dict[str, float]:
        """What to log of the latest step: one transfer to the host, which waits for it.

        Args:
            per_parameter: also for each, under ".../<name>".

        Returns:
            grad_norm (L2), grad_absmax; grad_flushed: share of this rank's elements that were not zero and became zero
            on the wire, where `ReduceConfig(grad_stats=True)`. It is counted where the wire is narrower than the
            gradients, and NaN for bf16 ones on an fp16 wire.
        """
        totals = self._latest()
        wanted = self._collected and self._config.grad_stats
        flushed = self._by_products.source_totals().flushed if wanted else None
        numels = [counted_numel(real_numel(one), real_dtype(one.dtype), self._config.wire) for one in self._parameters]
        return plain_numbers(totals, flushed, numels, self._names if per_parameter else None)

    def finite_check(self) -> FiniteCheck:
        """Reports of gradients that were not finite; those known by now have been made."""
        self.before_reading()
        self._finite.make_reports(all_of_them=True)
        return self._finite

    # What clipping and loss scaling ask

    def require(self) -> None:
        """Collects by-products of what is reduced, from the next step on."""
        self._required = True

    def has_by_products(self) -> bool:
        """Whether the latest synchronised step collected them, and nobody is known to have changed a gradient since.

        Known are backwards, other tensors, and what raises a tensor's version. `.data`, fused optimizers and torch's
        `unscale_` do not.
        """
        if not self._collected or self._stamp is None:
            return False
        seen, versions = self._stamp
        now = [parameter.grad for parameter in self._parameters]
        same = all((None if one is None else one()) is gradient for one, gradient in zip(seen, now, strict=True))
        return same and versions_of(now) == versions

    def reduced_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """As `grad_norm`, from by-products; only where there are."""
        assert self._collected
        total = self._by_products.totals().total
        return norm_of(total[0], total[1], norm_type)

    def found_non_finite(self, numbers: Sequence[int] | None = None) -> torch.Tensor:
        """Whether a reduced gradient holds a NaN or Inf: fp32, 0-dim, exactly 0 or 1; the same on every rank.

        Args:
            numbers: which parameters; None: all.
        """
        assert self._collected
        totals = self._by_products.totals()
        if numbers is None or len(numbers) == len(self._parameters):
            return (totals.total[2] > 0).to(torch.float32)
        first = totals.first_non_finite
        return (first[index_of(tuple(numbers), first.device)] >= 0).any().to(torch.float32)

    def on_any_rank(self, found: torch.Tensor) -> torch.Tensor:
        """The largest `found`, fp32 and not negative, of all ranks: a collective that every rank calls."""
        if self.alone:
            return found
        shared = found.reshape(1).to(torch.float64)
        self._share(shared)
        return shared.reshape(()).to(torch.float32)

    def multiply(self, factor: torch.Tensor) -> None:
        """Multiplies all gradients, in place; one element. What was collected of them does not hold any more."""
        self._stamp = None
        self.table.multiply(factor)

    def shared_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """`norm`, fp64, as all ranks must use it where it changes weights; a collective where ranks are not alike."""
        if self.alike or self.alone:
            return norm
        shared = norm.reshape(1).clone()
        self._share(shared)
        return shared.reshape(norm.shape)

    # What the reducer tells

    def collect_from(self, reductions: Sequence[Reduction]) -> None:
        """New buckets: by-products go where there is room for theirs."""
        self._collected = False
        checks = self._config.check_finite != "off"
        self._by_products = ByProducts(
            reductions,
            self._parameters,
            result=self._config.grad_stats or checks or self._required,
            source=self._config.grad_stats or checks,
        )

    def begin_forward(self, reductions: Sequence[Reduction]) -> None:
        """A synchronised step begins."""
        self._finite.make_reports()
        if self._required and not self._by_products.result:
            self.collect_from(reductions)

    def begin_reduction(self) -> None:
        """The first bucket is about to be launched."""
        self.units.reduced_next()
        self._by_products.begin_step()
        self._collected = False

    def start_exchange(self) -> int:
        """The last bucket has been launched; returns how many collectives this issued."""
        if self._config.check_finite == "off":
            return 0
        self._finite.start_exchange(self._by_products.source_totals().first)
        return 1

    def complete(self, told: Started | None = None) -> None:
        """With the buckets: waits for what `start_exchange` has started, or what was detached from an earlier step."""
        self._finite.complete(told)

    def detach_exchange(self) -> Started | None:
        """The step that is launched ends later: what `start_exchange` has started for it."""
        return self._finite.detach_exchange()

    def begin_stale_write(self) -> None:
        """An earlier step's gradients are about to be written."""
        self._by_products.begin_stale_write()
        self._collected = False

    def end_without_gradients(self) -> None:
        """The step is done, and there are no gradients."""
        self.units.reduced()
        self._stamp = None

    def end_measured_step(self, step: int) -> None:
        """As `end_step`, where by-products of the gradients were not collected: in buckets of another plan."""
        self.end_without_gradients()
        if self._config.check_finite != "off":
            self._finite.end_step(step, self.table.measure(), excused=self.units.attached)

    def end_step(self, step: int, left: Collection[int]) -> int:
        """The step is done; returns how many collectives this issued.

        Args:
            step: its number.
            left: numbers of the parameters that no rank used, whose gradients, if any, are as they were.
        """
        self.units.reduced()
        self._collected = self._by_products.result
        self._stamp = self._seen() if self._collected and (self._required or self._config.grad_stats) else None
        self._by_products.end_step(left)
        issued = 0
        if self._shares():
            totals = self._by_products.totals()
            numbers = torch.cat([totals.parameter_sums, totals.total[:1]])
            self._share(numbers)
            totals.parameter_sums.copy_(numbers[:-1])
            totals.total[:1].copy_(numbers[-1:])
            issued = 1
        if self._config.check_finite != "off":
            self._finite.end_step(step, self._by_products.totals(), excused=self.units.attached)
        return issued

    def check(self) -> None:
        """After `end_step` or `end_shadow_step`.

        Raises:
            NonFiniteGradientError: see ReduceConfig.check_finite.
        """
        self._finite.check()

    def added_here(self) -> None:
        """A backward has added to the gradients on this rank only."""
        self.additions += 1
        self._stamp = None
        self.units.added_here()

    def begin_shadow_step(self) -> None:
        """This rank has no inputs any more, and takes part with zeros."""
        self._shadows = []

    def add_shadow(self, bucket: GradBucket, under_way: Pending | torch.futures.Future[torch.Tensor]) -> None:
        """It does so in this bucket's reduction, which has been started."""
        self._shadows.append((bucket, under_way))

    def start_shadow_exchange(self) -> int:
        """As `start_exchange`, of a rank that has no gradients."""
        if self._config.check_finite == "off":
            return 0
        self._finite.start_exchange(torch.full((2,), -1, dtype=torch.int64, device=self._parameters[0].device))
        return 1

    def end_shadow_step(self, step: int) -> int:
        """The others' step is done; returns how many collectives this issued."""
        shadows, self._shadows = self._shadows, []
        issued = 0
        device = self._parameters[0].device
        self._finite.complete()
        if self._shares():
            self._share(torch.zeros(len(self._parameters) + 1, dtype=torch.float64, device=device))
            issued += 1
        if self._config.check_finite != "off":
            self._finite.end_step(step, self._of_sums(shadows, device), excused=self.units.attached)
        return issued

    def set_communicator(self, communicator: Communicator) -> None:
        """Goes on with other ranks."""
        self._communicator = communicator
        self._finite.set_communicator(communicator)

    def drop_step(self) -> None:
        """A step was given up: whatever it left is in no unit that could be added to."""
        self.additions += 1
        self.units.reduced()
        self._finite.drop_step()
        self._collected = False

    def _of_sums(self, shadows: Sequence[Shadow], device: torch.device) -> Totals:
        """What a rank without gradients can say of the reduced ones: which of them, as others store it, is finite."""
        first = torch.full((len(self._parameters),), -1, dtype=torch.int64, device=device)
        number = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        for bucket, under_way in shadows:
            numbers, largest = [], []
            for parameter, values in _reduced(bucket, under_way):
                if values.numel():
                    numbers.append(number[id(parameter)])
                    largest.append(values)
            if numbers:
                peaks = torch.stack([one.to(device) for one in torch._foreach_norm(largest, math.inf)])
                first[index_of(tuple(numbers), device)] = torch.where(peaks.isfinite(), -1, 0)
        nothing = torch.zeros(len(self._parameters), dtype=torch.float64, device=device)
        count = (first >= 0).sum().to(torch.float64)
        return Totals(nothing, nothing, first, torch.stack([count, count, count]))

    def _latest(self) -> Totals:
        self.before_reading()
        collected = self._collected and self._config.grad_stats
        return self._by_products.totals() if collected else self.table.measure()

    def _seen(self) -> tuple[list[weakref.ref[torch.Tensor] | None], list[int]]:
        gradients = [parameter.grad for parameter in self._parameters]
        return [None if one is None else weakref.ref(one) for one in gradients], versions_of(gradients)

    def _shares(self) -> bool:
        return self._config.grad_stats and not self.alike and not self.alone

    def _share(self, numbers: torch.Tensor) -> None:
        """The largest of all ranks' numbers, none of which is negative: their bits are ordered as they are."""
        bits = numbers.abs().view(torch.int64)
        try:
            pending = self._communicator.all_reduce(bits, "max")
        except RuntimeError as error:
            raise collective_failed("agreeing on a norm failed", self._communicator, error) from error
        wait_for(pending, "agreeing on a norm", self._communicator)
        numbers.copy_(bits.view(torch.float64))


def _nothing() -> None:
    """Nothing is to be completed."""


def plain_numbers(
    totals: Totals, flushed: torch.Tensor | None, numels: Sequence[int | None], names: Sequence[str] | None
) -> dict[str, float]:
    """Totals as `Observed.grad_stats` gives them; one transfer to the host.

    Args:
        totals: of reduced gradients.
        flushed: int64 [P], elements that the wire made 0; None: not known.
        numels: elements of each, real ones; see `counted_numel`.
        names: theirs; None: no parameter is listed.
    """
    columns = {
        "grad_norm": torch.cat([totals.parameter_sums, totals.total[:1]]).sqrt(),
        "grad_absmax": torch.cat([totals.parameter_peaks, totals.total[1:2]]),
    }
    if flushed is not None:
        lost = flushed.to(torch.float64)
        each = [math.nan if numel is None else max(1, numel) for numel in numels]
        whole = max(1, sum(numel or 0 for numel in numels))
        sizes = torch.tensor([*each, whole], dtype=torch.float64, device=lost.device)
        columns["grad_flushed"] = torch.cat([lost, lost.sum().reshape(1)]) / sizes
    host = torch.stack(list(columns.values())).tolist()
    found: dict[str, float] = {key: values[-1] for key, values in zip(columns, host, strict=True)}
    if names is not None:
        for key, values in zip(columns, host, strict=True):
            found.update({f"{key}/{name}": value for name, value in zip(names, values[:-1], strict=True)})
    return found


def counted_numel(numel: int, gradient: torch.dtype, wire: Wire) -> int | None:
    """Elements of which those that the wire makes 0 are counted; None: none are, though there may be some."""
    return None if (gradient, wire) == (torch.bfloat16, "fp16") else numel


def norm_of(sums: torch.Tensor, peaks: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The norm that sums of squares (2) or largest values (inf) are of.

    Raises:
        ValueError: another one.
    """
    if norm_type == 2.0:
        return sums.sqrt()
    if norm_type == math.inf:
        return peaks.clone()
    raise ValueError(f"norm_type must be 2 or inf, got {norm_type!r}")


def _reduced(
    bucket: GradBucket, under_way: Pending | torch.futures.Future[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each parameter of a reduced bucket and its real values, in its own dtype where that holds less."""
    buffer, reduced = bucket.buffer(), bucket.buffer()
    if isinstance(under_way, torch._C.Future) or buffer.layout is not torch.strided:
        future = under_way if isinstance(under_way, torch._C.Future) else under_way.future()
        value: Any = future.value()  # by a comm hook, or by what sums sparse gradients
        reduced = value[0] if isinstance(value, list | tuple) else value
    for parameter, slot in zip(bucket.parameters(), bucket.gradients(), strict=True):
        values = reduced
        if buffer.layout is torch.strided:
            begin = slot.storage_offset() - buffer.storage_offset()
            values = reduced.reshape(-1)[begin : begin + slot.numel()]
        else:
            values = reduced.coalesce().values()
        values = as_real(values)
        own = real_dtype(parameter.dtype)
        yield parameter, values.to(own) if torch.finfo(own).max < torch.finfo(values.dtype).max else values
