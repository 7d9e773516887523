"""HookStats: gradient statistics of the comm hook: norms, NaN and Inf, elements that the wire flushed to zero.

A comm hook receives buckets, not modules. A step consists of the buckets from DDP's index 0 to its last one, and
parameters are numbered in the order of those buckets, which is the same on every rank. If buckets of several modules
come interleaved, the step has no norm, but its NaN and Inf are found nevertheless.

Adding up the partial results takes two small launches per step, and only if a statistic is read.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..buckets.bucket import Bucket
from ..buckets.exchanged import ExchangedBucket
from ..buckets.gradient_table import all_totals
from ..buckets.stats.bucket_partials import BucketPartials, JoinedPartials
from ..buckets.stats.grad_stats import counted_numel, norm_of, plain_numbers
from ..buckets.stats.non_finite import FiniteCheck, NonFiniteReport, Started
from ..buckets.stats.partial_stats import result_totals, source_totals
from ..buckets.tensors import no_autograd
from ..comm.group import Group
from ..comm.protocol import Communicator
from ..config import ReduceConfig
from ..errors import FusedReduceError
from ..kernels.table import SourceTotals, Totals


class HookStats:
    """Gradient statistics of one FusedHookState.

    Args:
        config: which are collected.
    """

    def __init__(self, config: ReduceConfig) -> None:
        self.checks = config.check_finite != "off"
        self.wanted = config.grad_stats or self.checks
        self._config = config
        # By Bucket, and of sparse and empty buckets, which have none, by their first parameter.
        self._rows: MutableMapping[Bucket | torch.Tensor, BucketPartials] = WeakIdKeyDictionary()
        self._names: MutableMapping[torch.Tensor, str] = WeakIdKeyDictionary()
        self._finite: FiniteCheck | None = None
        self._step = ShownStep()
        self._opened = 0  # modules of which the first bucket came, but not the last one yet
        self._latest: ShownStep | None = None

    # Called by users, through FusedHookState

    def grad_norm(self, norm_type: float) -> torch.Tensor:
        """Norm over all gradients of the latest step: fp64, 0-dim."""
        totals = self._latest_step().totals
        return norm_of(totals.total[0], totals.total[1], norm_type)

    def grad_norms(self, module: nn.Module, norm_type: float) -> dict[str, torch.Tensor]:
        """Norm of each gradient, by parameter name, in the module's order."""
        step = self._latest_step()
        names = _names_in(step, module)
        norms = norm_of(step.totals.parameter_sums, step.totals.parameter_peaks, norm_type)
        found = dict(zip(names, norms.unbind(), strict=True))
        return {name: found[name] for name, _ in module.named_parameters() if name in found}

    def grad_stats(self, module: nn.Module | None) -> dict[str, float]:
        """Statistics as plain numbers: one transfer to the host."""
        step = self._latest_step()
        names = None if module is None else _names_in(step, module)
        numels = [
            counted_numel(numel, dtype, self._config.one_wire)
            for rows in step.shown
            for numel, dtype in zip(rows.numels, rows.dtypes, strict=True)
        ]
        return plain_numbers(step.totals, step.source.flushed, numels, names)

    def non_finite(self) -> list[NonFiniteReport]:
        """The latest reports; waits for checks in flight."""
        if self._finite is None:
            return []
        self._finite.make_reports(all_of_them=True)
        return list(self._finite.reports)

    def name_parameters(self, module: nn.Module) -> None:
        """Gives reports the names of the module's parameters."""
        for name, parameter in module.named_parameters():
            self._names[parameter] = name

    # Called by the hook

    def new_group(self, communicator: Communicator) -> None:
        """Forgets the step under way, and checks over `communicator` from now on."""
        self._step, self._opened, self._latest = ShownStep(), 0, None
        if self._finite is not None:
            self._finite.group.communicator = communicator
            self._finite.drop_step()
        elif self.checks:
            self._finite = FiniteCheck(None, Group(communicator), raises=self._config.check_finite == "raise")

    def show(
        self, index: int, parameters: Sequence[torch.Tensor], buffer: torch.Tensor, ours: Bucket | None
    ) -> BucketPartials:
        """Adds a bucket to the step.

        Args:
            index: DDP's index of it.
            parameters: those in it.
            buffer: its gradients, flat and real, or sparse.
            ours: its Bucket; None if it is sparse or has no elements.

        Returns:
            The rows that the bucket's partial statistics go into: the same object in every step, so that
            `_bring_together` finds its result of last time.
        """
        sparse = buffer.layout is not torch.strided
        owner = parameters[0] if ours is None else ours
        rows = self._rows.get(owner)
        if rows is None or not rows.are_of(index, parameters, buffer.device, sparse=sparse):
            spans = ours.spans() if isinstance(ours, ExchangedBucket) else None
            rows = self._rows[owner] = BucketPartials(
                index,
                parameters,
                buffer.device,
                sparse=sparse,
                spans=spans,
                cast=None if ours is None else ours.chunks.cast,
            )
        if any(one is rows for one in self._step.shown):
            self._step, self._opened = ShownStep(), 0  # the backward before this one raised midway
        if index == 0:
            self._opened += 1
            self._latest = None
            if self._finite is not None:
                self._finite.make_reports()
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

    def end_backward(self) -> ShownStep:
        """Called when the last bucket has been started: issues the finite check's collective, if that is enabled."""
        step = self.take_step()
        step.together = _bring_together(step)
        if self._finite is not None:
            step.started = self._finite.start_exchange(step.source.first)
        return step

    def take_step(self) -> ShownStep:
        """Ends the step under way, whole or failed: what is shown from now on is of the next one."""
        step, self._step = self._step, ShownStep()
        self._opened = max(0, self._opened - 1)
        return step

    def end_step(self, step: ShownStep, number: int) -> None:
        """Called when all buckets of a step are reduced.

        Args:
            step: returned by `end_backward`.
            number: the step's, counted from 1.

        Raises:
            NonFiniteGradientError: check_finite="raise" found a NaN or Inf; raised on every rank.
            CollectiveError: the finite check's collective failed.
        """
        with no_autograd():
            for one in step.together:
                one.place()
            if step.complex_:
                _ = step.totals  # now: it reads DDP's buffers, which the user may write from here on
                step.complex_ = []
            self._latest = step
            if self._finite is not None:
                assert step.started is not None
                self._finite.complete(step.started)
                self._finite.end_step(number, step.totals, locate=functools.partial(_locate, step, self._names))
                self._finite.check()

    def _latest_step(self) -> ShownStep:
        if not self._config.grad_stats:
            raise FusedReduceError("norms are not collected: build the state with FusedHookState(grad_stats=True)")
        if self._latest is None:
            raise FusedReduceError("there are no norms: no synchronised backward has ended, or the latest one failed")
        if not self._latest.whole:
            raise FusedReduceError(
                "the latest step has no norm: buckets of several DDP modules came interleaved, or a backward raised "
                "midway. Give each module its own FusedHookState"
            )
        return self._latest


@dataclass(eq=False)
class ShownStep:
    """The buckets of one step.

    Attributes:
        shown: rows of each bucket, in order.
        firsts: number of each bucket's first parameter, then the number of all.
        whole: the step consists of all buckets of one module.
        complex_: number of each complex parameter, and its gradient in DDP's buffer.
        together: rows per device, as one table.
        started: the finite check in flight.
    """

    shown: list[BucketPartials] = field(default_factory=list)
    firsts: list[int] = field(default_factory=lambda: [0])
    whole: bool = True
    complex_: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    together: list[JoinedPartials] = field(default_factory=list)
    started: Started | None = None

    @functools.cached_property
    def totals(self) -> Totals:
        """Totals of the reduced gradients, on the first bucket's device."""
        parts = result_totals(self.together)
        return all_totals(parts, self.firsts[-1], self.shown[0].device, peaks=self.complex_)

    @functools.cached_property
    def source(self) -> SourceTotals:
        """Totals of this rank's own gradients, before the reduction."""
        return source_totals(self.together, self.firsts[-1], self.shown[0].device)


def _locate(step: ShownStep, names: MutableMapping[torch.Tensor, str], number: int, index: int) -> tuple[str, int]:
    """The name that the user gave, or the position in DDP's buckets; the index counts from the bucket (`Locate`)."""
    if number >= step.firsts[-1]:
        return f"parameter {number}", index  # of a module that the state serves on another rank only
    bucket = bisect.bisect_right(step.firsts, number) - 1
    rows, slot = step.shown[bucket], number - step.firsts[bucket]
    parameter = rows.parameter(slot)
    given = None if parameter is None else names.get(parameter)
    within = index - rows.origins[slot]
    element = within // 2 if rows.complex_[slot] else within
    return given or f"bucket {rows.index}, parameter {slot} of shape {rows.shapes[slot]}", element


def _bring_together(step: ShownStep) -> list[JoinedPartials]:
    devices: dict[torch.device, list[tuple[int, BucketPartials]]] = {}
    for number, rows in zip(step.firsts, step.shown, strict=False):
        devices.setdefault(rows.device, []).append((number, rows))
    found = []
    for buckets in devices.values():
        known = buckets[0][1].together
        found.append(known if known is not None and known.serves(buckets) else JoinedPartials(buckets))
    return found


def _names_in(step: ShownStep, module: nn.Module) -> list[str]:
    """The module's names for a step's parameters, in the step's order."""
    known = {id(parameter): name for name, parameter in module.named_parameters()}
    names = []
    for rows in step.shown:
        for slot in range(len(rows)):
            parameter = rows.parameter(slot)
            if parameter is None or id(parameter) not in known:
                raise ValueError(
                    f"bucket {rows.index}, parameter {slot} of shape {rows.shapes[slot]} was reduced in the latest "
                    f"step, but is no parameter of this {type(module).__name__}: pass the module that DDP trains"
                )
            names.append(known[id(parameter)])
    return names
