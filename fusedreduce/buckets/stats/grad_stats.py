"""GradStats: statistics of a reducer's gradients: norms, non-finite values, what the wire has flushed to zero.

They have two sources. Statistics that the kernels write during the latest reduction cost next to nothing on a GPU, and
exist if they were requested before the step (`ReduceConfig`, or `require`). Without them, or for gradients that may
have been changed since, statistics are measured on request, by one launch that reads every gradient once.

The same numbers on every rank, bit for bit: sums are taken in a fixed order. Where ranks do not compute alike (another
architecture, another Triton), the largest of the ranks' sums is every rank's.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from ...comm.group import Group
from ...comm.waiting import naming_failure, wait_for
from ...config import ReduceConfig, Wire
from ...kernels.table import Totals
from ...trace.step_profile import StepProfile
from ...wires import wire_dtype
from ..gradient_table import GradientTable, index_of
from ..loss_scale import LossScaleState
from ..parameters import Parameters
from ..reduction import Reduction
from ..step_feature import Ended, StepFeature
from ..tensors import real_dtype, real_numel, taken_over, versions_of
from .non_finite import FiniteCheck, Started
from .partial_stats import PartialStats


class GradStats(StepFeature):
    """Statistics of the gradients of one reducer.

    Args:
        parameters: all parameters of the reducer.
        wires: what each travels on.
        config: which statistics are collected in every step.
        group: the ranks.

    Attributes:
        units: the loss-scale state of the gradients.
        alike: every rank's sums have the same last bits.
        alone: ranks are in different steps (Asynchronous), so that no collective can compare them.
        additions: a number that changes whenever a backward adds to gradients, or may have, without reducing them.
        before_reading: completes a step that may be launched and not finished.
        wanted: statistics are collected, from the next step on.
    """

    def __init__(self, parameters: Parameters, wires: Sequence[Wire], config: ReduceConfig, group: Group) -> None:
        self.alike = True
        self.alone = False
        self.units = LossScaleState(parameters)
        self._parameters = parameters
        self.wires = wires
        self._config = config
        self._group = group
        self._by_products: PartialStats | None = None  # of the buckets in use; None: no step collects any
        self._collected: PartialStats | None = None  # of the latest synchronised step; None: it has collected none
        self.additions = 0
        # The gradients that they are of, and their versions.
        self._stamp: tuple[list[weakref.ref[torch.Tensor] | None], list[int]] | None = None
        self._started: Started | None = None  # the exchange of non-finite gradients, until it is waited for
        self._finite: FiniteCheck | None = None
        if config.check_finite != "off":
            self._finite = FiniteCheck(parameters.locate, group, raises=config.check_finite == "raise")
        self._required = config.error_feedback  # which asks whether a step's gradients are finite
        self._of_sources = config.grad_stats or self._finite is not None
        self.wanted = self._required or self._of_sources
        self._without_inputs = False
        self.before_reading: Callable[[], None] = _nothing

    @property
    def table(self) -> GradientTable:
        """Measures or multiplies all gradients as they are now."""
        return self.units.table

    # What users ask

    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """Norm of all gradients: of the latest reduction with ReduceConfig(grad_stats=True), else measured now.

        Args:
            norm_type: 2 or inf.

        Returns:
            fp64, 0-dim, on the first parameter's device; the host has not waited for it.

        Raises:
            ValueError: another `norm_type`.
        """
        totals = self._latest()
        return norm_of(totals.total[0], totals.total[1], norm_type)

    def grad_norms(self, norm_type: float = 2.0) -> dict[str, torch.Tensor]:
        """The norm of each gradient, as `grad_norm`.

        Args:
            norm_type: 2 or inf.

        Returns:
            fp64, 0-dim, by the parameter's name.

        Raises:
            ValueError: another `norm_type`.
        """
        totals = self._latest()
        norms = norm_of(totals.parameter_sums, totals.parameter_peaks, norm_type)
        return dict(zip(self._parameters.names, norms.unbind(), strict=True))

    def measured_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of the gradients as they are now, by one launch; arguments, result and errors as `grad_norm`."""
        self.before_reading()
        totals = self.table.measure()
        return norm_of(totals.total[0], totals.total[1], norm_type)

    def grad_stats(self, *, per_parameter: bool = True) -> dict[str, float]:
        """Statistics of the latest step as plain numbers: one transfer to the host, which waits for it.

        Args:
            per_parameter: also of each parameter, as "<key>/<name>".

        Returns:
            grad_norm (L2) and grad_absmax. With `ReduceConfig(grad_stats=True)` also grad_flushed: the share of this
            rank's elements that were not zero and became zero on the wire. It is counted where the wire is narrower
            than the gradients, and NaN for bf16 gradients on an fp16 wire.
        """
        totals = self._latest()
        collected = self._collected if self._config.grad_stats else None
        flushed = None if collected is None else collected.source_totals().flushed
        rows = zip(self._parameters.tensors, self.wires, strict=True)
        numels = [counted_numel(real_numel(one), real_dtype(one.dtype), wire) for one, wire in rows]
        return plain_numbers(totals, flushed, numels, self._parameters.names if per_parameter else None)

    def finite_check(self) -> FiniteCheck:
        """The check for non-finite gradients, with all its reports made; the host waits for them."""
        self.before_reading()
        if self._finite is None:
            return FiniteCheck(self._parameters.locate, self._group, raises=False)
        self._finite.make_reports(all_of_them=True)
        return self._finite

    # What clipping and loss scaling ask

    def require(self) -> None:
        """Collects statistics of the reduced gradients, from the next step on."""
        self._required = self.wanted = True

    def has_by_products(self) -> bool:
        """Whether the latest synchronised step collected statistics, and no gradient is known to have changed since.

        Backwards, replaced tensors and writes that raise a tensor's version are known. Writes to `.data`, by fused
        optimizers and by torch's `unscale_` raise none.
        """
        if self._collected is None or self._stamp is None:
            return False
        seen, versions = self._stamp
        now = [parameter.grad for parameter in self._parameters.tensors]
        same = all((None if one is None else one()) is gradient for one, gradient in zip(seen, now, strict=True))
        return same and versions_of(now) == versions

    def reduced_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of the reduced gradients, from collected statistics; only if `has_by_products`."""
        assert self._collected is not None
        total = self._collected.totals().total
        return norm_of(total[0], total[1], norm_type)

    def found_non_finite(self, numbers: Sequence[int] | None = None) -> torch.Tensor:
        """Whether a reduced gradient holds a NaN or Inf; the same on every rank.

        Args:
            numbers: of the parameters in question; None: all.

        Returns:
            fp32, 0-dim, exactly 0 or 1.
        """
        assert self._collected is not None
        totals = self._collected.totals()
        if numbers is None or len(numbers) == len(self._parameters.tensors):
            return (totals.total[2] > 0).to(torch.float32)
        first = totals.first_non_finite
        return (first[index_of(tuple(numbers), first.device)] >= 0).any().to(torch.float32)

    def on_any_rank(self, found: torch.Tensor) -> torch.Tensor:
        """The largest `found`, fp32 and not negative, of all ranks, by a collective (not with Asynchronous)."""
        return found if self.alone else self._largest(found.reshape(1).to(torch.float64)).reshape(()).to(torch.float32)

    def multiply(self, factor: torch.Tensor) -> None:
        """Multiplies all gradients in place by `factor`, one element; statistics collected before hold no more."""
        self._stamp = None
        self.table.multiply(factor)

    def shared_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """The largest `norm`, fp64, of all ranks, by a collective where their last bits may differ."""
        return norm if self.alike or self.alone else self._largest(norm.reshape(1)).reshape(norm.shape)

    # Called by the reducer

    def collect_from(self, reductions: Sequence[Reduction]) -> None:
        """Collects the statistics of new buckets."""
        self._by_products = self._collected = None
        if self.wanted:
            self._by_products = PartialStats(reductions, self._parameters, source=self._of_sources)

    def begin_forward(self, reductions: Sequence[Reduction]) -> None:
        """Called when a synchronised step is armed whose statistics are wanted."""
        if self._finite is not None:
            self._finite.make_reports()
        if self._by_products is None:  # wanted since the last step
            self.collect_from(reductions)

    @property
    def in_use(self) -> bool:
        """Whether statistics are collected."""
        return self.wanted

    def opened(self, profile: StepProfile | None) -> int:
        """Collects those of a new step."""
        self.begin_stale_write()
        return 0

    def behind(self) -> int:
        """Starts the exchange of non-finite gradients, where gradients are checked."""
        if self._finite is None:
            return 0
        assert self._by_products is not None
        self._started = self._finite.start_exchange(self._by_products.source_totals().first)
        return 1

    def waited(self) -> None:
        """Waits for the exchange of this step, if it has not been handed over."""
        started = self.detach_exchange()
        if started is not None:
            self.complete_exchange(started)

    def complete_exchange(self, exchange: Started) -> None:
        """Waits for the exchange of an earlier step."""
        assert self._finite is not None
        self._finite.complete(exchange)

    def detach_exchange(self) -> Started | None:
        """Hands over the exchange of a step that ends later; None: there is none."""
        started, self._started = self._started, None
        return started

    def begin_stale_write(self) -> None:
        """Called before the averages of an earlier step are written."""
        self._collected = None
        if self._by_products is not None:
            self._by_products.begin_step()

    def landed(self, ended: Ended) -> int:
        """Completes the statistics of what a step has left."""
        self._stamp = None
        if ended.number is None or not ended.measured:
            return 0
        excused = bool(self.units.attached)
        if ended.elsewhere:  # statistics of another plan's buckets were not collected
            if self._finite is not None:
                self._finite.end_step(ended.number, self.table.measure(), excused=excused)
            return 0
        self._collected = collected = self._by_products
        if collected is None:
            return 0
        if self._required or self._config.grad_stats:
            self._stamp = self._seen()
        collected.end_step(ended.left)
        shares = self._config.grad_stats and not self.alike and not self.alone
        if shares:
            totals = collected.totals()
            numbers = torch.cat([totals.parameter_sums, totals.total[:1]])
            if self._without_inputs:
                numbers.zero_()  # where losses are scaled, here alone the sums still are
            numbers = self._largest(numbers)
            totals.parameter_sums.copy_(numbers[:-1])
            totals.total[:1].copy_(numbers[-1:])
        if self._finite is not None:
            self._finite.end_step(ended.number, collected.totals(), excused=excused)
        return int(shares)

    def raises(self) -> None:
        """Raises for the step that has landed.

        Raises:
            NonFiniteGradientError: see ReduceConfig.check_finite.
        """
        if self._finite is not None:
            self._finite.check()

    def added_here(self) -> None:
        """Called when a backward has added to the gradients on this rank only."""
        self.additions += 1
        self._stamp = None
        self.units.added_here()

    @contextlib.contextmanager
    def own_set_aside(self, reductions: Sequence[Reduction]) -> Iterator[None]:
        """Context of a step on a rank without inputs (join), whose statistics are no gradients' of it.

        Args:
            reductions: of the buckets in use.
        """
        own = self._by_products, self._collected, self._stamp
        places = [(one.source, one.result) for one in reductions]
        try:
            self.collect_from(reductions)
            self._without_inputs = True
            yield
        finally:
            self._without_inputs = False
            self._by_products, self._collected, self._stamp = own
            for one, (source, result) in zip(reductions, places, strict=True):
                one.source, one.result = source, result

    def dropped(self) -> None:
        """Drops the statistics of a step: its gradients may be scaled or not, so nothing may be added to them."""
        self.additions += 1
        self.units.reduced()
        if self._finite is not None:
            self._finite.drop_step()
        self._started = self._collected = None

    def _latest(self) -> Totals:
        self.before_reading()
        collected = self._collected if self._config.grad_stats else None
        return self.table.measure() if collected is None else collected.totals()

    def _seen(self) -> tuple[list[weakref.ref[torch.Tensor] | None], list[int]]:
        gradients = taken_over(self._parameters.tensors)
        return [None if one is None else weakref.ref(one) for one in gradients], versions_of(gradients)

    def _largest(self, numbers: torch.Tensor) -> torch.Tensor:
        """All ranks' largest `numbers`, fp64 and not negative; compared as bits, which have the same order."""
        bits = numbers.abs().view(torch.int64)
        with naming_failure("agreeing on a norm failed", self._group.communicator):
            pending = self._group.communicator.all_reduce(bits, "max")
        wait_for(pending, "agreeing on a norm", self._group.communicator)
        return bits.view(torch.float64)


def _nothing() -> None: ...


def plain_numbers(
    totals: Totals, flushed: torch.Tensor | None, numels: Sequence[int | None], names: Sequence[str] | None
) -> dict[str, float]:
    """Totals in the form of `GradStats.grad_stats`, by one transfer to the host.

    Args:
        totals: of reduced gradients.
        flushed: int64 [P], elements that the wire has flushed to zero; None: not known.
        numels: real elements of each gradient, from `counted_numel`.
        names: of the parameters; None: no parameter is listed.
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
    """Elements of which flushed ones are counted; None: they are not counted for this dtype and wire."""
    return None if gradient is torch.bfloat16 and wire_dtype(wire) is torch.float16 else numel


def norm_of(sums: torch.Tensor, peaks: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The norm from sums of squares (norm_type 2) or from largest values (inf).

    Raises:
        ValueError: another `norm_type`.
    """
    if norm_type == 2.0:
        return sums.sqrt()
    if norm_type == math.inf:
        return peaks.clone()
    raise ValueError(f"norm_type must be 2 or inf, got {norm_type!r}")
