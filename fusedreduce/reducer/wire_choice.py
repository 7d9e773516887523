"""WireChoice: which of the wires that a user allows ends a step first, as steps show; the same on every rank.

    measuring    on the first allowed wire, until ranks have settled on a plan from measurements
    preparing    each rank's kernels are timed, and ranks share the slowest times; a model leaves at most three wires
    trying       those in turns, a block of steps at a time; a step lasts from where its last rank begins
    checking     the steps behind the choice, which is undone if they disagree
    chosen       until steps take much longer or shorter, or a new look at the plan gives another wire

What is to be tried when is pure (wire_trial.py). Everything that decides is a number that all ranks share, or
a count of steps that all have taken part in. What is shared goes by one all-reduce behind a step's last bucket, and is
read before the next step; wires and plans change between two steps.
"""

from __future__ import annotations

import enum
import logging
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch

from ..buckets.parameters import Parameters
from ..buckets.reduction import Reduction
from ..buckets.step_feature import StepFeature
from ..buckets.tensors import real_dtype
from ..buckets.wire_table import WireTable
from ..comm.group import Group
from ..comm.numbers import on_device
from ..comm.protocol import Pending
from ..comm.waiting import naming_failure, wait_for
from ..config import ReduceConfig, Wire, is_synchronous
from ..planning.plan import Plan
from ..planning.schedule import NO_SAMPLE, REPORTS
from ..trace import wire_costs
from ..trace.step_profile import StepProfile
from ..wires import WIRES, like, wire_bytes
from . import wire_trial
from .plans import Plans

_logger = logging.getLogger(__name__)
_SETTLING = REPORTS[0] + 1  # steps that are not typical, where no plan is measured
_PER_NS = 1000  # what kernels take is shared as whole numbers, of ps
_STAGES = ("pack", "unpack", "combine")
_TOLD = 0.005  # a share of a step that is told of
_MODEL_OFF = 1.2  # by how much the model may be off for one wire more than for another, where it is told of
_NUMEL, _ROUNDS = 2**20, 5  # of which kernels are timed: tenths of a second


class Stage(enum.Enum):
    """Where a choice is; its order is that of the text at the top."""

    OFF = "not chosen by steps"
    MEASURING = "measuring"
    PREPARING = "preparing"
    TRYING = "trying"
    CHECKING = "checking"
    CHOSEN = "chosen"


@dataclass(frozen=True)
class WireTimes:
    """What was found of the wires of a reducer.

    Args:
        wire: in use where none is being tried.
        stage: one of "measuring", "preparing", "trying", "checking", "chosen", "not chosen by steps".
        why: why steps do not choose; "": they do.
        since: the synchronised step behind which it was chosen last; None: steps have not chosen yet.
        measured_ms: by wire the median of its steps, from the last rank's begin of forward to the end of backward.
        expected_ms: by wire, also ones that are not allowed, what the model expects of such a step.
    """

    wire: Wire
    stage: str
    why: str = ""
    since: int | None = None
    measured_ms: Mapping[Wire, float] = field(default_factory=dict)
    expected_ms: Mapping[Wire, float] = field(default_factory=dict)


class WireChoice(StepFeature):
    """The choice of one reducer over one group of ranks. Called under the reducer's lock.

    Args:
        config: of the reducer.
        tables: by allowed wire what parameters travel on, in order of preference.
        table_of: gives that of any wire.
        plans: of the reducer; left alone while wires are tried.
        parameters: all of the reducer.
        group: the ranks.
        waits: whether no other wire is to be tried yet.
        searches: find_unused_parameters, without a static graph.

    Attributes:
        stage: see `Stage`.
        held: the wire that is used where none is being tried.
        now: the wire in use.
        plan: of its buckets; None: as plans cut it.
        due: `advance` is to be called before the next step.
        why: why steps do not choose; "": they do.
        told: called on rank 0 with a line about each choice.
        steps_on: by wire how many steps were taken on it, while steps choose.
        smaller: of the last choice what the next smaller wire should save, as the end of a sentence; "": nothing.
    """

    def __init__(
        self,
        config: ReduceConfig,
        tables: Mapping[Wire, WireTable],
        table_of: Callable[[Wire], WireTable],
        plans: Plans,
        parameters: Parameters,
        group: Group,
        *,
        waits: Callable[[], bool],
        searches: bool,
    ) -> None:
        self._config = config
        self._waits = waits
        # Of wires on which a model sends the same bytes the first is enough: none is sooner.
        self._tables: dict[Wire, WireTable] = {}
        known = set()
        for wire, table in tables.items():
            sizes = tuple(map(wire_bytes, parameters.tensors, table.wires))
            if sizes not in known:
                known.add(sizes)
                self._tables[wire] = table
        self._table_of = table_of
        self._plans = plans
        self._parameters = parameters
        self._group = group
        self._searches = searches
        self._by_hand = False
        self._clock = _Clock(parameters.device)
        self._first = next(iter(tables))
        self.told: Callable[[str], None] = _logger.info
        self._said = ""
        self.smaller = ""
        self._kernels: dict[Wire, wire_costs.Kernels] = {}
        self.steps_on: Counter[Wire] = Counter()
        self.new_group()

    def new_group(self, held: Wire | None = None) -> None:
        """Begins anew, with other ranks, or with a wire that a checkpoint holds.

        Args:
            held: the wire to begin with; None: the first one.
        """
        self.held = held if held in self._tables else self._first
        self._since: int | None = None
        self.measured_ns: dict[Wire, Sequence[float]] = {}
        self.expected_ns: dict[Wire, float] = {}
        self.dropped()
        if held == self.held and not self.why:
            self._say(f"wire {held} is used first, as in the checkpoint")

    def follow(self, config: ReduceConfig) -> None:
        """Follows another sync mode: where steps cannot be measured, the first allowed wire is used."""
        self._config = config
        self.new_group()

    def set_static_graph(self) -> None:
        """Follows `Reducer.set_static_graph`: plans are measured after all."""
        self._searches = False
        self.new_group()

    def end_by_hand(self, required: bool) -> None:
        """Follows `Reducer.require_manual_finalization`, as `follow`."""
        self._by_hand = required
        self.new_group()

    def dropped(self) -> None:
        """Gives up what is being tried; the wire that was held before stays."""
        # What a rank that has raised alone may not know would let it decide otherwise than its peers later.
        self._patience = 0  # no trial has come to nothing
        self._scales: dict[Wire, float] = {}
        self.now = self.held
        self.plan: Plan | None = None
        self._candidates: list[Wire] = []
        self._replaced: Wire | None = None
        self._usual_ns: float | None = None
        self._reports = 0
        self._numbers: list[int] | None = None
        self._found: torch.Tensor | None = None
        self._pending: Pending | None = None
        self._waited: torch.cuda.Event | None = None
        self._plans.hold(False)
        self.why = self._refusal()
        if self.why:
            self.held = self.now = self._first
        self._enter(Stage.OFF if self.why else Stage.MEASURING)
        self.due = True

    def state(self) -> str:
        """What ranks must have in common to go on after a failed step, as text."""
        return f"{self.held} {self.now}"

    def times(self) -> WireTimes:
        """What was found so far."""
        measured = {wire: statistics.median(took_ns) / 1e6 for wire, took_ns in self.measured_ns.items()}
        expected = {wire: took_ns / 1e6 for wire, took_ns in self.expected_ns.items()}
        return WireTimes(self.held, self.stage.value, self.why, self._since, measured, expected)

    @property
    def table(self) -> WireTable:
        """What parameters travel on now."""
        return self._tables[self.now]

    @property
    def tables(self) -> Mapping[Wire, WireTable]:
        """By wire what parameters may travel on."""
        return self._tables

    # Between two steps

    def advance(self) -> None:
        """Decides what the next step travels on."""
        self.due = False
        found = self._read()
        if self.stage is Stage.MEASURING:
            if self._plans.judged() and self._in_stage >= _SETTLING and not self._waits():
                frozen = torch.are_deterministic_algorithms_enabled()
                self._numbers = [int(frozen), self._clock.median(), *self._kernel_times()]
                self._plans.hold(True)
                self._enter(Stage.PREPARING)
        elif self.stage is Stage.PREPARING and found is not None:
            self._begin_trial(found)
        elif self.stage is Stage.TRYING:
            if found is not None:
                self._choose(found)
            else:
                self._try_next()
        elif self.stage is Stage.CHECKING:
            if found is not None:
                self._check(-statistics.median(found))
            elif self._in_stage > wire_trial.CHECKED:
                self._numbers = self._clock.steps()
        elif self.stage is Stage.CHOSEN:
            if found is not None:
                self._watch(-found[0])
            elif self._in_stage >= wire_trial.WINDOW:
                self._numbers = [self._clock.median()]

    def _begin_trial(self, found: Sequence[int]) -> None:
        """Has the wires tried that the model leaves, or none if a rank may not follow a clock."""
        frozen, took_ns, *kernel_times = found
        if frozen:
            self._leave("a rank uses deterministic algorithms")
            return
        self._usual_ns, self._kernels = -took_ns, _kernels_of(kernel_times)
        self._expect()
        self._candidates = wire_trial.candidates(self._allowed(), self.held) if self.expected_ns else [*self._tables]
        self._enter(Stage.TRYING)
        self._try_next()

    def _try_next(self) -> None:
        """Gives the next block of steps its wire; shares what all have taken behind the last one."""
        place = wire_trial.tried_in(self._in_stage, len(self._candidates))
        if place is None:
            self._numbers = self._clock.steps()
        else:
            self._use(self._candidates[place])

    def _choose(self, found: Sequence[int]) -> None:
        """Takes the wire that the trial shows."""
        medians = wire_trial.medians([-one for one in found], len(self._candidates))
        self.measured_ns = dict(zip(self._candidates, medians, strict=True))
        for wire, took_ns in self.measured_ns.items():
            if wire in self.expected_ns:
                self._scales[wire] = statistics.median(took_ns) / self.expected_ns[wire]
        chosen = wire_trial.pick(self.measured_ns)
        before = self._candidates[: self._candidates.index(chosen)]
        self._replaced = wire_trial.pick({wire: self.measured_ns[wire] for wire in before}) if before else None
        self._patience = max(1, 2 * self._patience) if chosen == self.held else 1
        self._hold(chosen)
        took_ms = self.times().measured_ms
        took = ", ".join(f"{wire} {ms:.2f} ms" for wire, ms in took_ms.items())
        soonest = min(took_ms, key=took_ms.__getitem__)
        lost = f"; {soonest} was not {wire_trial.least_gain(soonest):.0%} shorter in both its blocks"
        self._say(
            f"wire {chosen} from step {self.steps_on.total() + 1} on: from the begin of forward to the end of backward "
            f"{took}{'' if soonest == chosen else lost}{self.smaller}"
        )

    def _check(self, took_ns: float) -> None:
        """Undoes the choice if the steps behind it are not as much shorter as the trial has said."""
        replaced, self._replaced = self._replaced, None
        if replaced is not None:
            before_ns = statistics.median(self.measured_ns[replaced])
            if not wire_trial.shortens([took_ns], self.held, [before_ns], share=0.5):
                if self.held in self.expected_ns:  # or a new look at the plan would have it tried again
                    self._scales[self.held] = took_ns / self.expected_ns[self.held]
                self._say(
                    f"wire {replaced} is used again: steps on {self.held} took {took_ns / 1e6:.2f} ms, "
                    f"on {replaced} {before_ns / 1e6:.2f} ms"
                )
                self._hold(replaced)
                return
        self._usual_ns, self._windows = took_ns, 0
        self._reports, self._changes = self._plans.scheduler.schedule.reports, self._plans.scheduler.changes
        self._plans.hold(False)
        self._enter(Stage.CHOSEN)

    def _watch(self, took_ns: int) -> None:
        """Has the wires tried again where steps have changed, or a new look at the plan gives another wire."""
        scheduler, before_ns = self._plans.scheduler, self._usual_ns
        assert before_ns is not None
        self._windows += 1
        replanned, self._changes = scheduler.changes != self._changes, scheduler.changes
        if not wire_trial.has_changed(took_ns, before_ns):
            self._usual_ns = took_ns if replanned else before_ns
        elif not replanned and self._windows >= self._patience:  # behind another plan the next window tells
            self._say(f"steps took {took_ns / 1e6:.2f} ms, {before_ns / 1e6:.2f} ms before: wires are tried again")
            self._plans.measure_anew()
            self._scales = {}
            self._enter(Stage.MEASURING)
            return
        self._enter(Stage.CHOSEN)
        if scheduler.schedule.reports != self._reports and self._plans.judged():
            self._reports = scheduler.schedule.reports
            self._expect()
            is_time = 0 < self._config.replan_every <= self._windows * wire_trial.WINDOW
            if is_time and self.expected_ns and self._pick_expected() != self.held:
                self._enter(Stage.MEASURING, settled=True)

    def _pick_expected(self) -> Wire:
        """The wire that the rule would take by the model, whose times are scaled to those of the last trial."""
        scales = self._scales
        return wire_trial.pick({wire: [ns * scales.get(wire, 1.0)] for wire, ns in self._allowed().items()})

    def _hold(self, wire: Wire) -> None:
        """Uses a wire from the next step on, whose steps are checked."""
        self.held, self._since = wire, self.steps_on.total()
        self.smaller = self._smaller()
        self._use(wire)
        self._enter(Stage.CHECKING)

    def _use(self, wire: Wire) -> None:
        self.now, self.plan = wire, self._best_plans.get(wire)

    def _leave(self, why: str) -> None:
        """Uses the first allowed wire from the next step on."""
        self.why, self.held = why, self._first
        self.now, self.plan = self._first, None
        self._plans.hold(False)
        self._enter(Stage.OFF)

    def _enter(self, stage: Stage, *, settled: bool = False) -> None:
        self.stage, self._in_stage = stage, _SETTLING if settled else 0
        self._clock.clear()
        if stage is Stage.MEASURING:
            self._best_plans: dict[Wire, Plan] = {}
        if self.why and self.why != self._said and self._group.communicator.size > 1:
            self._said = self.why
            if self._group.communicator.rank == 0:
                _logger.warning("wire %s is used, and no other is tried: %s", self._first, self.why)

    # As a StepFeature

    @property
    def in_use(self) -> bool:
        """Whether steps choose."""
        return self.stage is not Stage.OFF

    def forward(self) -> None:
        """A forward begins."""
        self._clock.begin()

    def begin(self, rounds: int) -> None:
        """The step is armed: without a forward that was seen it begins here."""
        self._clock.begin_late()

    def behind(self) -> int:
        """Shares this rank's numbers, where there are any."""
        if self._numbers is None:
            return 0
        numbers, self._numbers = self._numbers, None
        self._found = on_device(numbers, torch.int64, self._parameters.device)
        with naming_failure("agreeing on a wire failed", self._group.communicator):
            self._pending = self._group.communicator.all_reduce(self._found, "max")
        return 1

    def waited(self) -> None:
        """Waits for what is shared; on CUDA only the current stream waits."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        wait_for(pending, "agreeing on a wire", self._group.communicator)
        if self._parameters.device.type == "cuda":
            self._waited = torch.cuda.Event()
            self._waited.record(torch.cuda.current_stream(self._parameters.device))

    def counted(self, profile: StepProfile | None) -> bool:
        """Counts a step, and notes its time."""
        self.steps_on[self.now] += 1
        if self._found is None:  # else its time is no part of what is being shared
            if self._is_timed():
                self._clock.end()
            self._in_stage += 1
        self._clock.drop()
        most = {Stage.CHECKING: wire_trial.CHECKED + 1, Stage.CHOSEN: wire_trial.WINDOW}
        self.due = self._found is not None or self.stage is Stage.MEASURING
        self.due |= self.stage is Stage.TRYING and self._in_stage % wire_trial.block(len(self._candidates)) == 0
        self.due |= self._in_stage >= most.get(self.stage, self._in_stage + 1)
        return False

    @contextmanager
    def own_set_aside(self, reductions: Sequence[Reduction]) -> Iterator[None]:
        """Context of a step on a rank without inputs, whose time says nothing."""
        self._clock.counts = False
        try:
            yield
        finally:
            self._clock.counts = True

    # Within

    def _is_timed(self) -> bool:
        if self.stage is Stage.TRYING:
            return wire_trial.is_timed(self._in_stage, len(self._candidates))
        return self._in_stage > 0 or self.stage is Stage.CHOSEN

    def _read(self) -> list[int] | None:
        """What all ranks have shared behind the last step."""
        if self._found is None:
            return None
        if self._waited is not None:
            torch.cuda.current_stream(self._parameters.device).wait_event(self._waited)
        found, self._found, self._waited = self._found, None, None
        numbers: list[int] = found.tolist()
        return numbers

    def _refusal(self) -> str:
        """Why steps cannot choose, as far as settings say."""
        config = self._config
        if self._group.communicator.size == 1:
            return "there is one rank, and nothing is sent"
        if len(self._tables) == 1:
            return "as many bytes travel on each of them"
        if self._plans.is_small:
            return "gradients of less than 1 MiB are too few for a choice; with link= wires are tried all the same"
        if config.policy == "static":
            return "policy='static' measures nothing"
        if not config.overlap:
            return "overlap=False has no plan that could be measured"
        if not is_synchronous(config.sync_mode):
            return f"with sync_mode={config.sync_mode!r} a step does not end with its own averages"
        if not self._group.communicator.waits_in_backward(self._parameters.device):
            return "the ranks share a thread, on which no step ends by itself"
        if self._by_hand:
            return "with manual finalization a step ends when the program says so"
        if self._searches:
            return "with find_unused_parameters=True no plan is measured, but with static_graph=True beside it"
        return ""

    def _kernel_times(self) -> list[int]:
        """What the kernels of each built-in wire take on this rank, in ps per element; elsewhere than on CPU bytes."""
        device, ranks = self._parameters.device, self._group.communicator.size
        numels: Counter[torch.dtype] = Counter()
        for one in self._parameters.tensors:
            numels[real_dtype(one.dtype)] += one.numel()
        dtype = numels.most_common(1)[0][0]
        found = wire_costs.paced(wire_costs.counted(dtype, ranks))
        if device.type == "cpu":
            with suppress(Exception):  # of other dtypes, or without the memory, bytes count, as elsewhere than on CPU
                found = wire_costs.measured(device, dtype, [_NUMEL], ranks, rounds=_ROUNDS, alone=False)
        return [round(getattr(found[wire], stage) * _PER_NS) for wire in WIRES for stage in _STAGES]

    def _expect(self) -> None:
        """Computes what a step takes on each wire, with the best plan for it, from what ranks have agreed on."""
        schedule, size = self._plans.scheduler.schedule, self._group.communicator.size
        costs, self.expected_ns = schedule.costs, {}
        if costs is None or not schedule.ready_ns:
            return
        before = self._sizes(self._tables[self.held])
        for wire in dict.fromkeys([*self._tables, *WIRES]):
            table = self._tables.get(wire) or self._table_of(wire)
            phases = 2 if table.has_two_phases(size) else 1
            other = wire_costs.on_other_wire(costs, before, self._sizes(table), phases=phases, combined=True)
            plan, self.expected_ns[wire] = self._plans.best_on(table, other)
            if wire in self._tables:
                self._best_plans[wire] = plan
        usual_ns = self._usual_ns
        if usual_ns is not None:  # the model knows backward and what follows; forward is what is left of a step
            forward_ns = max(usual_ns - self.expected_ns[self.held], 0.0)
            self.expected_ns = {wire: forward_ns + ns for wire, ns in self.expected_ns.items()}

    def _allowed(self) -> dict[Wire, float]:
        """What is expected of the wires that may be used, in order of preference."""
        return {wire: self.expected_ns[wire] for wire in self._tables}

    def _sizes(self, table: WireTable) -> tuple[int, wire_costs.Kernels]:
        """Bytes on the wires of a table, and what an average element's kernels take."""
        rows = [
            (one.numel(), wire_bytes(one, wire), self._kernels[like(wire)])
            for one, alone, wire in zip(self._parameters.tensors, self._parameters.sparse, table.wires, strict=True)
            if not alone
        ]
        numel = max(sum(count for count, _, _ in rows), 1)
        kernels = wire_costs.Kernels(
            *(sum(count * getattr(took, stage) for count, _, took in rows) / numel for stage in _STAGES)
        )
        return sum(size for _, size, _ in rows), kernels

    def _smaller(self) -> str:
        """What the next smaller wire than those that are allowed should save, as the end of a sentence; "": nothing."""
        order = [wire for wire in WIRES if wire != "fp16"]
        places = [order.index("bf16" if like(wire) == "fp16" else like(wire)) for wire in self._tables]
        smaller = order[max(places) + 1 :]
        if not smaller or not self.expected_ns:
            return ""
        scales = [self._scales[wire] for wire in self.measured_ns]
        if max(scales) > _MODEL_OFF * min(scales):
            return f"; {smaller[0]} was not tried, and the model that would tell of it is off by more than 20% here"
        saves = 1 - self.expected_ns[smaller[0]] / self.expected_ns[self.held]
        how = "as long" if abs(saves) < _TOLD else f"{abs(saves):.0%} {'less' if saves > 0 else 'more'}"
        return f"; {smaller[0]}, which was not tried, is expected to take {how}"

    def _say(self, text: str) -> None:
        if self._group.communicator.rank == 0:
            self.told(text)


class _Clock:
    """Times of the latest steps on one device: on CUDA between events, which are read when they are asked for.

    Args:
        device: where gradients are.

    Attributes:
        counts: this rank's steps count; those of one without inputs do not.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.counts = True
        self._began: int | torch.cuda.Event | None = None
        self._spans: deque[int | tuple[torch.cuda.Event, torch.cuda.Event] | None] = deque(maxlen=4 * wire_trial.WINDOW)

    def clear(self) -> None:
        """Forgets all times."""
        self._spans.clear()

    def begin(self) -> None:
        """A step begins."""
        self._began = self._now()

    def begin_late(self) -> None:
        """A step has begun, here at the latest."""
        if self._began is None:
            self._began = self._now()

    def end(self) -> None:
        """A step has ended, and is kept."""
        began, ended = self._began, self._now()
        if not self.counts or began is None:
            self._spans.append(None)
        elif isinstance(began, int) and isinstance(ended, int):
            self._spans.append(ended - began)
        elif not isinstance(began, int) and not isinstance(ended, int):
            self._spans.append((began, ended))

    def drop(self) -> None:
        """A step has ended, kept or not."""
        self._began = None

    def steps(self) -> list[int]:
        """Of the steps that were kept what ranks share: the largest number counts, which is of the rank that began last
        and so has waited for none. On CUDA the host waits for the last step."""
        return [NO_SAMPLE if span is None else -self._span_ns(span) for span in self._spans]

    def median(self) -> int:
        """The same of their median, in which only steps of this rank's own count."""
        spans = [self._span_ns(span) for span in self._spans if span is not None]
        return -round(statistics.median(spans)) if spans else NO_SAMPLE

    def _span_ns(self, span: int | tuple[torch.cuda.Event, torch.cuda.Event]) -> int:
        if isinstance(span, int):
            return span
        began, ended = span
        ended.synchronize()
        return int(began.elapsed_time(ended) * 1e6)

    def _now(self) -> int | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _kernels_of(times: Sequence[int]) -> dict[Wire, wire_costs.Kernels]:
    """By wire what `WireChoice._kernel_times` has, of the slowest rank."""
    rows = [times[at : at + len(_STAGES)] for at in range(0, len(times), len(_STAGES))]
    return {wire: wire_costs.Kernels(*(took / _PER_NS for took in row)) for wire, row in zip(WIRES, rows, strict=True)}
