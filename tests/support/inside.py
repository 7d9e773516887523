"""The only way for tests to look into a reducer, a wrapper or the comm hook, and to replace a part of them; and one to
look into groups of threads, servers, sessions and replicas.

Each name says what a test asks, not where the answer is kept: a new shape of the reducer changes this file and no test.
test_inside.py finds a test that goes another way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from fusedreduce import DataParallel, FusedHookState, LocalGroup, ReduceConfig, Reducer, SyncServer, reducer_of
from fusedreduce.buckets import bucket_set, reduction
from fusedreduce.buckets.bucket import Bucket
from fusedreduce.buckets.deferred_errors import DeferredErrors
from fusedreduce.buckets.dense import DenseReduction
from fusedreduce.buckets.draws import Draws
from fusedreduce.buckets.exchanged import EncodedBucket
from fusedreduce.buckets.feedback import BucketFeedback, Feedback
from fusedreduce.buckets.loss_scale import LossScaleState
from fusedreduce.buckets.phases import Exchange, Phases
from fusedreduce.buckets.reduction import Reduction
from fusedreduce.buckets.stats import partial_stats
from fusedreduce.buckets.stats.grad_stats import GradStats
from fusedreduce.buckets.stats.non_finite import FiniteCheck, NonFiniteReport
from fusedreduce.buckets.streams import AsideStreams, Streams
from fusedreduce.buckets.wire_table import WireTable
from fusedreduce.collective import Session, registration
from fusedreduce.collective.peer_group import PeerGroup
from fusedreduce.comm.local.group import LocalCommunicator
from fusedreduce.comm.process_group import ProcessGroupCommunicator
from fusedreduce.comm.protocol import Communicator
from fusedreduce.kernels import dispatch
from fusedreduce.parallel import hook_reduction, hook_stats
from fusedreduce.parallel.replicas.runner import ReplicaRunner
from fusedreduce.parallel.sync_device import SyncDevice
from fusedreduce.parallel.sync_epochs import Epochs
from fusedreduce.planning.plan import ParameterKind, Plan
from fusedreduce.reducer import optimizer_hooks, parameter_hooks, plans, step, wire_choice, wire_schedule, wire_trial
from fusedreduce.reducer.engine import Engine
from fusedreduce.reducer.modes import asynchronous_bucket, average_parameters
from fusedreduce.reducer.modes.asynchronous import AsynchronousMode
from fusedreduce.reducer.modes.mode import DelayedAverages, Mode
from fusedreduce.reducer.scheduler import Scheduler


def inside(of: Reducer | nn.Module) -> Inside:
    """What a reducer has inside, or that of a wrapper."""
    return Inside(reducer_of(of) if isinstance(of, nn.Module) else of)


def inside_hook(state: FusedHookState) -> InsideHook:
    """What a comm hook's state has inside."""
    return InsideHook(state)


class Inside:
    """A view of a reducer's inside; keeps nothing but the reducer.

    Args:
        reducer: whose.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    # Gradients

    @property
    def statistics(self) -> GradStats:
        """Norms, non-finite values and the other statistics of the gradients; `Reducer.observed` to a user."""
        return self._reducer.observed

    @property
    def loss_scale(self) -> LossScaleState:
        """Which gradients are scaled, and the scalers that are attached."""
        return self._reducer.observed.units

    @property
    def delayed(self) -> DelayedAverages:
        """Which averages the gradients are, where a mode delays them."""
        return self._reducer.late

    def gradient_is_ready(self, number: int) -> None:
        """What the hook of parameter `number` calls."""
        self._reducer.engine.on_gradient(number)

    # Buckets, wires and the plan

    def tell_step_times(self, took_ns: Callable[[str], int]) -> None:
        """Has steps take what a test says, by the wire that they are on."""
        choice = self._reducer.choice
        assert choice is not None
        choice._clock = _ToldClock(lambda: took_ns(choice.now))

    def fail_to_decide(self, error: BaseException) -> None:
        """Has the next decision on wires raise."""
        choice = self._reducer.choice
        assert choice is not None

        def raises() -> None:
            del choice.advance
            raise error

        choice.advance = raises  # type: ignore[method-assign]

    @property
    def tried_wire(self) -> str:
        """The wire in use, of several."""
        assert self._reducer.choice is not None
        return self._reducer.choice.now

    @property
    def steps_by_wire(self) -> Mapping[str, int]:
        """How many steps were taken on each of several wires."""
        assert self._reducer.choice is not None
        return self._reducer.choice.steps_on

    @property
    def has_views(self) -> bool:
        """Whether the gradients of the plan in use are views of their buckets."""
        return self._reducer.engine.maker.as_views

    @property
    def plan_rounds(self) -> int:
        """How many rounds the schedule of plans has counted."""
        return self._reducer._plans.scheduler.schedule.round

    @property
    def reductions(self) -> list[Reduction]:
        """Of every bucket of the plan in use, in launch order."""
        return self._reducer.engine.buckets.reductions

    @property
    def dense_reductions(self) -> list[DenseReduction]:
        """Those of dense gradients on our own wire."""
        return self._reducer.engine.buckets.packed()

    @property
    def buckets(self) -> list[Bucket]:
        """What travels for dense gradients on our own wire."""
        return [one.bucket for one in self.dense_reductions]

    @property
    def buckets_as_built(self) -> object:
        """Another object whenever the buckets have been built anew."""
        return self._reducer.engine.buckets

    @property
    def wire_allocations(self) -> int:
        """Wires that the present buckets have allocated."""
        return sum(one.allocations for one in self.dense_reductions)

    def buffers(self) -> list[torch.Tensor]:
        """The buffers that the buckets hold now."""
        return [buffer for bucket in self.buckets for buffer in buffers_of(bucket)]

    def build_buckets(self, plan: Plan) -> None:
        """Builds the buckets of `plan`, whatever the ranks have agreed on."""
        self._reducer._build_buckets(plan)

    @property
    def kinds(self) -> Sequence[ParameterKind]:
        """What a plan must know of each parameter."""
        return self._reducer._plans.kinds

    @property
    def scheduler(self) -> Scheduler:
        """The planner's measurements and decisions."""
        return self._reducer._plans.scheduler

    @property
    def steps_recorded(self) -> list[int]:
        """Numbers of the steps that the trace being recorded holds."""
        recording = self._reducer.engine.recording
        return [] if recording is None else [number for number, _, _ in recording._recorded]

    @property
    def wires_in_use(self) -> WireTable:
        """What each parameter travels on in the present buckets."""
        return self._reducer.wires.table

    @property
    def wires_agreed(self) -> WireTable:
        """What each will travel on once encoding has begun."""
        return self._reducer.wires.agreed

    @property
    def measures_wires(self) -> bool:
        """Whether this step measures what encoding loses."""
        return self._reducer.wires.measuring

    @property
    def may_change_wires(self) -> bool:
        """Whether steps may still change what parameters travel on."""
        return self._reducer.wires._measures and bool(self._reducer.wires.table.encoded)

    @property
    def phases(self) -> Phases:
        """The collectives of buckets that are exchanged in several phases, of a reducer that has such."""
        phases = self._reducer.engine.maker.phases
        assert phases is not None
        return phases

    @property
    def communicators_of_phases(self) -> set[Communicator]:
        """Those that later phases use."""
        phases = self._reducer.engine.maker.phases
        return set() if phases is None else {*phases._made.values()}

    @property
    def draws(self) -> Draws | None:
        """What stochastic rounding draws by."""
        return self._reducer.engine.maker.draws

    @property
    def sparse_kinds(self) -> dict[int, Any]:
        """By parameter the kind of its sparse gradients, as the ranks have agreed."""
        kinds = self._reducer.engine.maker.sparse_kinds
        return {} if kinds is None else dict(kinds.known)

    # Error feedback

    @property
    def feedback(self) -> Feedback:
        """The residuals, of a reducer that has them."""
        feedback = self._reducer.engine.maker.feedback
        assert feedback is not None
        return feedback

    @property
    def residuals_factor(self) -> float:
        """What residuals are multiplied by in the next step."""
        return float(self.feedback._coefficient)

    def residuals_of(self, number: int) -> Sequence[torch.Tensor]:
        """The buffers of parameter `number`'s; none, where there is no error feedback."""
        feedback = self._reducer.engine.maker.feedback
        return () if feedback is None else feedback._copies[number]

    def residuals_held(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The buffers of residuals: of the parameters, and of this rank's shards of sums."""
        shards = [bucket.of_sum for bucket in self.feedback._buckets if bucket.of_sum is not None]
        of_parameters = [copy for copies in self.feedback._copies.values() for copy in copies]
        return of_parameters, [one for each in shards for (one,) in each.copies]

    def residuals_owed(self) -> list[torch.Tensor]:
        """What this rank's residuals add to the next step, of parameters and shard, fp64 in the parameters' shapes."""
        feedback, parameters = self.feedback, self._reducer.parameters
        found = [torch.zeros(one.numel(), dtype=torch.float64) for one in parameters]
        for number, copies in feedback._copies.items():
            found[number] += copies[int(feedback._on[copies[0].device].live)]
        for one in self.dense_reductions:
            if isinstance(one.bucket, EncodedBucket) and one.bucket._feedback is not None:
                of_bucket = one.bucket._feedback
                for slot, begin, end, of_parameter in of_bucket._parts:
                    assert of_bucket.of_sum is not None
                    of_sum = of_bucket.of_sum.copies[int(of_bucket.of_sum.live)][0]
                    number = one.members.numbers[slot]
                    found[number][of_parameter : of_parameter + end - begin] += of_sum[begin:end]
        return [self.residuals_factor * one.view(like.shape) for one, like in zip(found, parameters, strict=True)]

    # Steps

    @property
    def lock(self) -> threading.RLock:
        """Held while a step changes."""
        return self._reducer.engine.lock

    @property
    def rounds(self) -> int:
        """Synchronised steps of all ranks since the group was set."""
        return self._reducer.engine.rounds

    def begin_round(self) -> None:
        """Counts a step, without one."""
        for begin in self._reducer.engine.moments.begin:
            begin(self.rounds)

    def begin_forward(self) -> None:
        """What every way into a step has in common."""
        self._reducer.engine.begin_forward()

    @property
    def forwards(self) -> Sequence[int]:
        """When the forwards of the latest steps ended, ns."""
        return self._reducer.engine.forwards

    @property
    def step_has_begun(self) -> bool:
        """Whether the current step has seen a gradient."""
        return self._reducer.engine.step.begun

    @property
    def ends_asked_for(self) -> int:
        """How often the current step has asked autograd to call it back at the end of backward."""
        return self._reducer.engine.step.callbacks

    @property
    def buckets_launched(self) -> int:
        """Buckets of the current step that have been launched."""
        return self._reducer.engine.step.launched

    @property
    def is_profiled(self) -> bool:
        """Whether times of the current step are recorded."""
        return self._reducer.engine.armed.profile is not None

    def times(self) -> dict[str, Any]:
        """When what happened in the latest step, on the host."""
        return vars(self._reducer.times).copy()

    @property
    def outputs_watched(self) -> int:
        """Outputs at which the beginning of a backward is awaited."""
        return len(self._reducer.engine._backward_hooks._watched)

    @property
    def work_watched(self) -> object:
        """Collectives that the stall monitor looks at; false if there are none. It changes with them."""
        monitor = self._reducer.engine._monitor
        return monitor and monitor._watched

    @property
    def used_marks(self) -> list[bool]:
        """By parameter whether it got a gradient since the last reduction."""
        return [self._reducer.engine.used.here(number) for number in range(len(self._reducer.parameters))]

    @property
    def gradients_counted(self) -> list[int] | None:
        """Of a static graph, by parameter how many gradients a step gives it; None: that is to be counted."""
        return self._reducer.engine.used.fires

    @property
    def ended_by_hand(self) -> bool:
        """Whether `finalize_backward` alone ends a step."""
        return self._reducer.engine.manual

    @property
    def unused_now(self) -> tuple[int, ...]:
        """What the search has found unused in the step that is armed."""
        return self._reducer.engine.armed.unused

    @property
    def unused_are_always_the_same(self) -> bool:
        """Whether the search has found the same in every step."""
        return self._reducer.engine.unused_always_same

    @property
    def shares_parameters(self) -> bool:
        """Whether another reducer, of a nested wrapper, writes the same gradients."""
        return self._reducer.engine.shares_parameters

    def end_first_static_step(self) -> None:
        """What a wrapper calls behind the first step of a static graph."""
        self._reducer.engine.end_first_static_step()

    def divide_by_ranks_counted(self, work: Any) -> None:
        """What a wrapper calls to divide the next step by the result of `work`, an all-reduce of ones."""
        self._reducer.engine.ranks_counted = work

    def wait_at_end(self, futures: Iterable[torch.futures.Future[Any]]) -> None:
        """What a wrapper calls to have the next step wait for `futures` at its end."""
        self._reducer.engine.installed.extend(futures)

    # Modes

    @property
    def mode(self) -> Mode:
        """The sync mode in use."""
        return self._reducer.engine.mode

    @property
    def delays(self) -> bool:
        """Whether averages come later than their own step."""
        return self._reducer.engine.mode.stash is not None

    @property
    def stash(self) -> list[torch.Tensor | None]:
        """Averages that are kept apart from `.grad` while backwards add to that; empty: none are."""
        stash = self._reducer.engine.mode.stash
        return [] if stash is None else stash._stashed or []

    def has_averaged(self, count: int) -> bool:
        """Asynchronous: whether the first `count` contributions of all ranks have been added up."""
        assert isinstance(self.mode, AsynchronousMode) and self.mode._contributions is not None
        under_way = self.mode._contributions._under_way
        first = count - (self.mode._contributions.issued - len(under_way))
        return first <= len(under_way) and all(one.is_complete() for one in [*under_way][: max(first, 0)])

    @property
    def communicator_of_contributions(self) -> ProcessGroupCommunicator:
        """Asynchronous: the one apart that contributions travel on."""
        assert isinstance(self.mode, AsynchronousMode)
        assert isinstance(self.mode._communicator, ProcessGroupCommunicator)
        return self.mode._communicator

    # Make-believe

    def tell_of_errors(self, told: Callable[[str], None]) -> None:
        """Has a step that fails call `told` with the text of its error."""
        self._reducer.engine.on_error = told

    def pretend_threads_of_autograd(self, several: bool) -> None:
        """Gradients come on several threads, as those of several devices do."""
        self._reducer.engine._several_devices = several

    def pretend_timed_on(self, device: torch.device) -> None:
        """Steps are profiled as on `device`."""
        self._reducer.engine._profiled_on = device

    def pretend_captured_on(self, patch: pytest.MonkeyPatch, device: torch.device) -> None:
        """Whether a graph is captured is asked of `device`."""
        patch.setattr(self._reducer.engine, "_device", device)

    def fail_at_the_end(self, bucket: int, fails: Callable[[], None]) -> None:
        """The end of a step calls `fails` where it asks whether the bucket's gradients were written to."""
        self.reductions[bucket].check_unchanged = fails  # type: ignore[method-assign]

    def pretend_alike(self, alike: bool) -> None:
        """Whether the ranks' statistics have the same bits without being exchanged."""
        self.statistics.alike = alike

    def pretend_steps(self, count: int) -> None:
        """So many steps have been counted."""
        self._reducer.engine.steps = count

    def replace_lock(self, lock: AbstractContextManager[None]) -> None:
        """Another lock."""
        self._reducer.engine.lock = lock  # type: ignore[assignment]


class _ToldClock(wire_choice._Clock):
    """Steps take what it is told, on this rank, from the begin of their forward.

    Args:
        took_ns: gives the time of the step that ends.
    """

    def __init__(self, took_ns: Callable[[], int]) -> None:
        super().__init__(torch.device("cpu"))
        self._took_ns = took_ns

    def begin(self) -> None:
        self._began = 0

    def _now(self) -> int:
        return 0 if self._began is None else self._took_ns()


class InsideHook:
    """A view of a hook's inside; keeps nothing but the state.

    Args:
        state: whose.
    """

    def __init__(self, state: FusedHookState) -> None:
        self._state = state

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets that are kept."""
        return self._state._reduction.buckets.buckets()

    @property
    def errors(self) -> DeferredErrors:
        """Those that wait for the end of backward."""
        return self._state._reduction.errors

    @property
    def statistics(self) -> hook_stats.HookStats:
        """Of the gradients."""
        return self._state._reduction.observed

    def latest_step(self) -> hook_stats.ShownStep:
        """What the latest step has shown to the statistics."""
        latest = self.statistics._latest
        assert latest is not None
        return latest

    @property
    def rows_without_bucket(self) -> int:
        """Sparse and empty buckets whose rows are kept."""
        return sum(isinstance(owner, torch.Tensor) for owner in self.statistics._rows)

    def connect(self) -> None:
        """Makes the communicator, ahead of the first bucket."""
        self._state._reduction.communicator(self._state.process_group)

    def pretend_config(self, config: ReduceConfig) -> None:
        """Other settings, which were not agreed on."""
        self._state._reduction.config = config


def before_buckets_are_built(monkeypatch: pytest.MonkeyPatch, called: Callable[[], None]) -> None:
    """`called`, which may raise, is called wherever a reducer builds the buckets of a plan."""
    build = bucket_set.BucketSet.__init__

    def built(self: bucket_set.BucketSet, plan: Plan, *others: Any) -> None:
        if plan:
            called()
        build(self, plan, *others)

    monkeypatch.setattr(bucket_set.BucketSet, "__init__", built)


def owe_an_error(check: FiniteCheck, report: NonFiniteReport) -> None:
    """As if a step had found `report` and its end, which raises, had been skipped."""
    check._latest = report


def buffers_of(bucket: Bucket) -> list[torch.Tensor]:
    """The buffers that it holds now."""
    return list(bucket._buffers.values())


# Kernels


def take_torch_path(patch: pytest.MonkeyPatch) -> None:
    """As where triton cannot be imported: torch operators on every device."""
    patch.setattr(dispatch, "_triton", lambda: None)


def devices_known() -> Mapping[torch.device, str]:
    """Devices on which a kernel's launch was tried, and why it failed; "": it did not."""
    return dispatch._without


def forget_devices() -> None:
    """The next use of each device tries anew."""
    dispatch._without.clear()


# Groups of threads, servers, sessions and replicas


def incomplete(communicator: LocalCommunicator) -> Mapping[Any, Any]:
    """Collectives of its ranks to which some have not come, by their numbers."""
    return communicator._channel._incomplete


def members(communicator: LocalCommunicator) -> tuple[int, ...]:
    """Its ranks, by their numbers in the group."""
    return communicator._channel.ranks


def channels_of(group: LocalGroup) -> int:
    """How many sets of ranks have communicators."""
    return len(group._epoch.channels)


def group_of(server: SyncServer) -> LocalGroup:
    """Over which its devices reduce."""
    return server._group


def epochs_of(server: SyncServer) -> Epochs[SyncDevice]:
    """What its devices have announced and given up."""
    return server._epochs


def peers_of(session: Session) -> PeerGroup:
    """What it shares with its peers."""
    return session._peer_group


def kept_by(session: Session) -> tuple[Sized, Sized]:
    """Operations that its peers keep, and those in flight that nobody has waited for."""
    return session._peer_group._operations, session._waited


def keys_of(session: Session) -> list[str]:
    """Keys in the store of a session with several nodes."""
    return session._peer_group._exchange._store.list_keys()  # type: ignore[attr-defined, no-any-return]


def set_timeout_of_nodes(session: Session, timeout_s: float) -> None:
    """Of the collectives among nodes, from the next one on."""
    nodes: Any = session._peer_group._transport._node_collectives
    nodes._timeout_s = timeout_s
    nodes._backend._set_default_timeout(timedelta(seconds=timeout_s))


def registry_of(group: LocalGroup) -> registration.Registry:
    """Where the peers of a group register."""
    return registration._registry(group)


def registering() -> tuple[int, int]:
    """Of all registries: peers that wait for others of their node, and nodes that wait for other nodes."""
    registries = {*registration._registries.values(), *registration._alone.values()}
    current = [one._current for one in registries if one._current and not one._current.verdict]
    return sum(len(one.calls) for one in current), sum(one._nodes._agreeing is not None for one in registries)


def is_decided(address: object, node: int) -> bool:
    """Whether a peer of a node of one decides on its registration."""
    attempt = getattr(registration._alone.get((str(address), node)), "_current", None)
    return attempt is not None and attempt.decider is not None


def lock_of(one: PeerGroup | registration.Registry) -> threading.Condition:
    """Held while it changes."""
    return one._changed


def runner_of(parallel: DataParallel) -> ReplicaRunner:
    """What holds the replicas."""
    assert parallel._runner is not None
    return parallel._runner


def turns_lock(parallel: DataParallel) -> Any:
    """Held while threads take turns."""
    return parallel._turns._lock


def is_dropped(parallel: DataParallel) -> bool:
    """Whether it holds neither replicas nor threads."""
    return parallel._runner is None and parallel._workers is None


@dataclass(frozen=True)
class Part:
    """A function or a setting of the product that a test replaces.

    Args:
        owner: the class or module that has it.
        name: its name there.
    """

    owner: Any
    name: str

    @property
    def present(self) -> Any:
        """It, or what stands in its place now."""
        return getattr(self.owner, self.name)

    def replace(self, patch: pytest.MonkeyPatch, by: object) -> None:
        """Puts `by` in its place until `patch` is undone."""
        patch.setattr(self.owner, self.name, by)

    def set(self, value: object) -> None:
        """The same for the rest of this process."""
        setattr(self.owner, self.name, value)


# What ranks compare
TEXTS_ARE_COMPARED = Part(ProcessGroupCommunicator, "_compare")  # (communicator, prefix, key, text, device)
STORES_PREFIX = Part(ProcessGroupCommunicator, "_next_prefix")  # (communicator, key)
# Registrations with a session
REGISTRATION_WAITS = Part(registration.Registry, "_wait_for_verdict")  # (registry, attempt, call, local)
REGISTRATION_IS_DECIDED = Part(registration.Registry, "_decide")  # (registry, attempt, caller, group)
# What happens in a step
GRADIENT_IS_READY = Part(Engine, "on_accumulated")  # (weak reference to the engine, number of the parameter, ...)
BACKWARD_BEGINS = Part(Engine, "_backward_begins")  # (engine)
BUCKET_IS_LAUNCHED = Part(DenseReduction, "launch")  # (reduction, divisor)
BUCKET_IS_UNPACKED = Part(Bucket, "unpacked")  # (bucket)
BUCKETS_LABEL = Part(reduction, "bucket_label")
EXCHANGE_IS_MADE = Part(Exchange, "__init__")
EXCHANGE_GOES_ON = Part(Exchange, "begin_next")  # (exchange, communicator)
FINITE_CHECK_ENDS = Part(FiniteCheck, "complete")  # (check, what was started)
PHASES_ARE_ISSUED = Part(Phases, "issue_all")  # (phases)
ENCODED_IS_PACKED = Part(EncodedBucket, "pack")
ENCODED_IS_ADDED_UP = Part(EncodedBucket, "add_up")  # between its phases
RESIDUALS_ARE_DROPPED = Part(BucketFeedback, "_drop")
# Streams
STREAMS_OF_BUCKETS = Part(bucket_set, "streams_of")  # (bucket of each parameter, device)
WAITS_FOR_GRADIENTS = Part(Streams, "wait_for_gradients")  # (streams, bucket, device)
WAITS_FOR_PACKS = Part(Streams, "wait_for_packs")  # (streams)
UNPACKS_BESIDE = Part(Streams, "beside")  # (streams, device)
LATER_PHASES_JOIN = Part(AsideStreams, "join")  # (streams)
# Statistics
BY_PRODUCTS_ALLOCATED = (Part(partial_stats, "new_partials"), Part(partial_stats, "new_source_partials"))
CLOCK_OF_STEPS = Part(step, "time")  # the module
# Hooks
ACCUMULATOR_OF = Part(parameter_hooks, "_accumulator")  # (parameter)
OPTIMIZERS_LISTENERS = Part(optimizer_hooks, "_listeners")
OPTIMIZERS_HOOK = Part(optimizer_hooks, "_hook")
HOOK_AGREES = Part(hook_reduction, "agree")  # (communicator, what, settings, device)
HOOKS_ROWS = (Part(hook_stats, "BucketPartials"), Part(hook_stats, "JoinedPartials"))
# Settings
LEAST_PLANNED_BYTES = Part(plans, "_LEAST_PLANNED_BYTES")
MEASURE_EVERY = Part(wire_schedule, "MEASURE_EVERY")
TRIAL_WINDOW = Part(wire_trial, "WINDOW")
CONTRIBUTIONS_BLOCK_NUMEL = Part(asynchronous_bucket, "_BLOCK_NUMEL")
RESYNC_PIECE_NUMEL = Part(average_parameters, "_PIECE_NUMEL")

# Ways through a reducer, as object_graph.py says them
TIMES_OF_A_STEP = r"\.engine\.step\..*_ns"
# What stays with other ranks, by the ways to it: rows of docs/design.md.
KEPT = {
    r"\.engine\.(steps|buckets_reduced|last_unused.*|forwards.*)": "counters",
    r"\.engine\.buckets\._before.*": "counters",
    r"\.engine\.late\.given_up": "counters",
    r"\.wires\.steps_at_16_bits": "counters",
    r"\.observed\._finite\.reports.*": "reports",
    r"\.observed\.additions": "what is known of gradients",
    r"\.observed\._stamp": "what is known of gradients",
    r"\.observed\.units\.table.*": "what is known of gradients",
    r"\.engine\.ordered\..*": "the last step",
    TIMES_OF_A_STEP: "the last step",
    r"\.engine\._backward_hooks\._watched.*": "the last step",
    r"\.engine\.local_backward_expected": "the last step",
    r"\.observed\.units\._of_step": "the last step",
    r"\.engine\.late\.latest.*": "the last step",
    r"\.engine\.times\..*": "the last step",
    r"\.wires\.due": "the last step",
    r"\.engine\.maker\.feedback\._skipped": "the last step",
    r"\.engine\.maker\.feedback\.(_copies|_on).*": "residuals",
    r"\.engine\.maker\.feedback\._buckets\[\d+\]\.of_(parameters|sum)\.(copies|live|weights).*": "residuals",
}
