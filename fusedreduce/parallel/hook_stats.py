"""HookObserved: what the comm hook finds out about gradients on the way: norms, NaN and Inf, what the wire lost.

A hook is shown buckets, not modules. A step is the buckets from DDP's number 0 to its last one, and its parameters are
counted as those show them: the same on every rank, which share one order of collectives. Buckets of several modules
that come interleaved have no norm of a step, but what is not finite is found in them too.

Adding rows up, bucket by bucket, takes two small launches per step, and only if somebody asks.
"""

from __future__ import annotations

import bisect
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..buckets.bucket import Bucket
from ..buckets.gradient_table import Gathered
from ..buckets.stats.bucket_partials import BucketRows, RowsTogether
from ..buckets.stats.grad_stats import counted_numel, norm_of, plain_numbers
from ..buckets.stats.non_finite import FiniteCheck, NonFiniteReport, Started
from ..buckets.stats.partial_stats import one_source
from ..comm.protocol import Communicator
from ..config import ReduceConfig
from ..errors import FusedReduceError
from ..kernels import dispatch
from ..kernels.table import SourceTotals, Totals


class HookObserved:
    """Observations of one FusedHookState.

    Args:
        config: what is wanted.
    """

    def __init__(self, config: ReduceConfig) -> None:
        self.checks = config.check_finite != "off"
        self.wanted = config.grad_stats or self.checks
        self._config = config
        self._rows: MutableMapping[Bucket, BucketRows] = WeakKeyDictionary()
        self._others: dict[tuple[object, ...], BucketRows] = {}  # those of what has no Bucket
        self._names: MutableMapping[torch.Tensor, str] = WeakIdKeyDictionary()
        self._finite: FiniteCheck | None = None
        self._step = ShownStep()
        self._opened = 0  # modules whose first bucket was shown, but not yet the last
        self._latest: ShownStep | None = None

    # What users ask

    def grad_norm(self, norm_type: float) -> torch.Tensor:
        """Of all gradients of the latest step: fp64, 0-dim."""
        totals = _totals(self._asked())
        return norm_of(totals.total[0], totals.total[1], norm_type)

    def grad_norms(self, module: nn.Module, norm_type: float) -> dict[str, torch.Tensor]:
        """Of each, by the module's names, in the module's order."""
        step = self._asked()
        names = _names_in(step, module)
        totals = _totals(step)
        norms = norm_of(totals.parameter_sums, totals.parameter_peaks, norm_type)
        found = dict(zip(names, norms.unbind(), strict=True))
        return {name: found[name] for name, _ in module.named_parameters() if name in found}

    def grad_stats(self, module: nn.Module | None) -> dict[str, float]:
        """What to log, as `Observed.grad_stats`; one transfer to the host."""
        step = self._asked()
        names = None if module is None else _names_in(step, module)
        numels = [
            counted_numel(numel, dtype, self._config.wire)
            for rows in step.shown
            for numel, dtype in zip(rows.numels, rows.dtypes, strict=True)
        ]
        return plain_numbers(_totals(step), _source(step).flushed, numels, names)

    def non_finite(self) -> list[NonFiniteReport]:
        """The latest reports; waits for those that are not known yet."""
        if self._finite is None:
            return []
        self._finite.settle(all_of_them=True)
        return list(self._finite.reports)

    def name(self, module: nn.Module) -> None:
        """From now on reports have the names of the module's parameters."""
        for name, parameter in module.named_parameters():
            self._names[parameter] = name

    # What the hook tells

    def use(self, communicator: Communicator) -> None:
        """These ranks from now on."""
        self._step, self._opened, self._latest = ShownStep(), 0, None
        if self._finite is not None:
            self._finite.use(communicator)
        elif self.checks:
            self._finite = FiniteCheck(None, communicator, raises=self._config.check_finite == "raise")

    def show(
        self, index: int, parameters: Sequence[torch.Tensor], buffer: torch.Tensor, ours: Bucket | None
    ) -> BucketRows:
        """DDP hands a bucket over; where its by-products go.

        Args:
            index: DDP's number of it.
            parameters: its.
            buffer: flat and real, or sparse.
            ours: the Bucket for it; None where it is sparse or has no elements.
        """
        rows = self._rows_for(index, parameters, buffer, ours)
        if any(one is rows for one in self._step.shown):
            self._step, self._opened = ShownStep(), 0  # the backward before this one was given up on its way
        if index == 0:
            self._opened += 1
            self._latest = None
            if self._finite is not None:
                self._finite.settle()
        step = self._step
        step.whole = step.whole and self._opened == 1 and index == len(step.shown)
        number = step.firsts[-1]
        step.shown.append(rows)
        step.firsts.append(number + len(rows))
        if ours is not None and any(rows.complex_):
            for slot, (begin, numel) in enumerate(zip(rows.begins, rows.numels, strict=True)):
                pairs = buffer[begin : begin + numel].view(-1, 2)
                step.complex_.append((number + slot, torch.view_as_complex(pairs)))
        return rows

    def _rows_for(
        self, index: int, parameters: Sequence[torch.Tensor], buffer: torch.Tensor, ours: Bucket | None
    ) -> BucketRows:
        """The same for a bucket in every step: other rows would have to be brought together anew."""
        sparse = buffer.layout is not torch.strided
        if ours is not None:
            rows = self._rows.get(ours)
            if rows is None or not rows.holds(parameters):
                rows = self._rows[ours] = BucketRows(index, parameters, buffer.device, sparse=sparse)
            return rows
        key = (index, buffer.device, sparse, *map(id, parameters))
        rows = self._others.get(key)
        if rows is None or not rows.holds(parameters):
            self._others = {known: held for known, held in self._others.items() if not held.gone()}
            rows = self._others[key] = BucketRows(index, parameters, buffer.device, sparse=sparse)
        return rows

    def tell(self) -> ShownStep:
        """The last bucket has been started: tells the ranks, if that is wanted, what this one's gradients held."""
        step = self._closed()
        step.together = _bring_together(step)
        if self._finite is not None:
            step.started = self._finite.tell(_source(step).first)
        return step

    def give_up(self) -> None:
        """The last bucket was shown in a step that has failed."""
        self._closed()

    def close(self, step: ShownStep, number: int) -> None:
        """A step's buckets are reduced.

        Args:
            step: as `tell` returned it.
            number: its.

        Raises:
            NonFiniteGradientError: see ReduceConfig.check_finite; on every rank.
            CollectiveError: the ranks could not be told.
        """
        for one in step.together:
            one.place()
        if step.complex_:
            step.totals = _totals(step)  # reads DDP's buffers, which are the user's from now on
            step.complex_ = []
        self._latest = step
        if self._finite is not None:
            assert step.started is not None
            self._finite.complete(step.started)
            self._finite.close(number, _totals(step), places=_Places(step, self._names))
            self._finite.check()

    def _closed(self) -> ShownStep:
        step, self._step = self._step, ShownStep()
        self._opened = max(0, self._opened - 1)
        return step

    def _asked(self) -> ShownStep:
        if not self._config.grad_stats:
            raise FusedReduceError("norms are not collected: build the state with FusedHookState(grad_stats=True)")
        if self._latest is None:
            raise FusedReduceError("there are no norms: no synchronised backward has ended, or the latest one failed")
        if not self._latest.whole:
            raise FusedReduceError(
                "the latest step has no norm: buckets of several DDP modules came interleaved, or a backward was given "
                "up on its way. Give each module a FusedHookState of its own"
            )
        return self._latest


@dataclass(eq=False)
class ShownStep:
    """What was shown from one last bucket to the next."""

    shown: list[BucketRows] = field(default_factory=list)
    firsts: list[int] = field(default_factory=lambda: [0])  # number of each bucket's first parameter, and the count
    whole: bool = True  # the buckets of one module, all of them
    complex_: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # parameters, in DDP's buffers
    together: list[RowsTogether] = field(default_factory=list)
    started: Started | None = None
    totals: Totals | None = None
    source: SourceTotals | None = None


@dataclass(frozen=True)
class _Places:
    """The parameters of a step, for reports."""

    step: ShownStep
    names: MutableMapping[torch.Tensor, str]

    def name(self, number: int) -> str:
        """That which the user gave, or where the parameter lies."""
        if number >= self.step.firsts[-1]:
            return f"parameter {number}"  # of a module that only the other rank's state serves as well
        rows, slot = self._place(number)
        parameter = rows.parameter(slot)
        given = None if parameter is None else self.names.get(parameter)
        return given or f"bucket {rows.index}, parameter {slot} of shape {rows.shapes[slot]}"

    def element(self, number: int, index: int) -> int:
        """Indices count from the bucket's beginning, and real numbers."""
        if number >= self.step.firsts[-1]:
            return index
        rows, slot = self._place(number)
        within = index - rows.begins[slot]
        return within // 2 if rows.complex_[slot] else within

    def _place(self, number: int) -> tuple[BucketRows, int]:
        bucket = bisect.bisect_right(self.step.firsts, number) - 1
        return self.step.shown[bucket], number - self.step.firsts[bucket]


def _bring_together(step: ShownStep) -> list[RowsTogether]:
    devices: dict[torch.device, list[tuple[int, BucketRows]]] = {}
    for number, rows in zip(step.firsts, step.shown, strict=False):
        devices.setdefault(rows.device, []).append((number, rows))
    found = []
    for buckets in devices.values():
        known = buckets[0][1].together
        found.append(known if known is not None and known.serves(buckets) else RowsTogether(buckets))
    return found


def _totals(step: ShownStep) -> Totals:
    """Of the reduced gradients, on the first bucket's device."""
    if step.totals is not None:
        return step.totals
    gathered = Gathered(step.firsts[-1], step.together[0].device)
    for one in step.together:
        assert one.result is not None
        gathered.put(one.numbers, dispatch.reduce_partials(one.result, one.spans))
    for number, gradient in step.complex_:
        gathered.put_peak(number, gradient)
    step.totals = gathered.totals(whole=len(step.together) == 1)
    return step.totals


def _source(step: ShownStep) -> SourceTotals:
    """Of what this rank gave."""
    if step.source is not None:
        return step.source
    found = [(one.numbers, dispatch.reduce_source_partials(one.source, one.spans)) for one in step.together]
    step.source = one_source(found, step.firsts[-1], step.together[0].device)
    return step.source


def _names_in(step: ShownStep, module: nn.Module) -> list[str]:
    """The module's name of each parameter of a step."""
    known = {id(parameter): name for name, parameter in module.named_parameters()}
    names = []
    for rows in step.shown:
        for slot in range(len(rows)):
            parameter = rows.parameter(slot)
            if parameter is None or id(parameter) not in known:
                raise ValueError(
                    f"bucket {rows.index}, parameter {slot} of shape {rows.shapes[slot]} was reduced in the latest "
                    f"step, but is no parameter of this {type(module).__name__}"
                )
            names.append(known[id(parameter)])
    return names
