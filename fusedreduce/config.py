"""ReduceConfig, the options of a reduction, and the synchronisation modes; they check themselves when they are made."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from .wires import (
    NATIVE,
    WIRES,
    any_accumulated,
    any_encoded,
    cast_of,
    check_wire,
    encoding_of,
    is_own,
    wire_dtype,
    wire_for,
)

if TYPE_CHECKING:  # the command line checks settings before anything imports torch
    import torch

CapPolicy = Literal["c10d", "strict"]
CAP_POLICIES: tuple[CapPolicy, ...] = ("c10d", "strict")
Policy = Literal["planned", "ready", "static"]
POLICIES: tuple[Policy, ...] = ("planned", "ready", "static")
# An agreement takes two steps after the two that are profiled for it.
LEAST_REPLAN_EVERY = 8
_LONGEST_PATH_SHOWN = 200
_MOST_NAMED = 8
# Arguments of the wrapper that are about its reduction, and so are looked for here.
_OF_WRAPPER = ("bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view", "static_graph", "process_group")
_MOST_LATENCY_US = 1e9
_LEAST_GBIT_PER_S = 1e-6
_MOST_GBIT_PER_S = 1e6
Op = Literal["mean", "sum"]
OPS: tuple[Op, ...] = ("mean", "sum")
CheckFinite = Literal["off", "count", "raise"]
CHECKS_FINITE: tuple[CheckFinite, ...] = ("off", "count", "raise")
Wire: TypeAlias = str  # the name of one, see wires.py
WirePatterns: TypeAlias = Mapping[str, Wire] | tuple[tuple[str, Wire], ...]
WireOfParameter: TypeAlias = Callable[[str, Any], Wire]  # of its name and the parameter
AnyWire: TypeAlias = Wire | tuple[Wire, ...] | WirePatterns | WireOfParameter
# What steps choose between where the user leaves it to them.
AUTO, AUTO_WIRES = "auto", ("native", "bf16")
# What docs/wires.md has: it leaves usual gradients alone, and finds those of which a block is lost in one value.
LEAST_DB_BY_BITS: Mapping[int, float] = {8: 35.0, 4: 12.0}
Accumulation = Literal["wire", "fp32"]
ACCUMULATIONS: tuple[Accumulation, ...] = ("wire", "fp32")


@dataclass(frozen=True)
class Synchronous:
    """After each backward `.grad` holds the average of that backward's gradients over all ranks."""


@dataclass(frozen=True)
class BoundedStaleness:
    """After step t `.grad` holds the average of step t - max_staleness: the same bytes on every rank.

    The first `max_staleness` steps leave `.grad` None. A rank that is late now and then does not delay the others, as
    long as it catches up within `max_staleness` steps. Each bucket has one more wire buffer per step of staleness. With
    0 it is Synchronous.

    Buffers that forward broadcasts from rank 0 are waited for in every forward, as by torch: if rank 0 may be late,
    turn that off (broadcast_buffers=False), or it delays all ranks. So does everything else that ranks exchange in
    forward and backward (SyncBatchNorm).

    Args:
        max_staleness: steps.

    Raises:
        ValueError: it is not a whole number, or below 0.
    """

    max_staleness: int

    def __post_init__(self) -> None:
        _check_count("max_staleness", self.max_staleness, 0)


@dataclass(frozen=True)
class Asynchronous:
    """`.grad` holds this rank's own gradient plus corrections: earlier averages minus its own gradients of those steps.

    Ranks' parameters drift apart; `flush` makes them equal again.

    Args:
        max_in_flight: most contributions in flight; while there are so many, gradients are added to the next one.

    Raises:
        ValueError: it is not a whole number, or below 1.
    """

    max_in_flight: int = 2

    def __post_init__(self) -> None:
        _check_count("max_in_flight", self.max_in_flight, 1)


@dataclass(frozen=True)
class FlushReport:
    """What a `flush` has done.

    Args:
        steps: number of steps whose averages were applied.
        drift: largest absolute difference of a parameter's element from the mean over all ranks, before parameters were
            made equal; 0.0 in modes in which they never differ.
        relative_drift: the L2 norm of a rank's differences divided by that of the mean, the largest of all ranks.
    """

    steps: int = 0
    drift: float = 0.0
    relative_drift: float = 0.0


SyncMode: TypeAlias = Synchronous | BoundedStaleness | Asynchronous


def staleness(mode: SyncMode) -> int:
    """By how many steps averages come after the step that they are of."""
    return mode.max_staleness if isinstance(mode, BoundedStaleness) else 0


def is_synchronous(mode: SyncMode) -> bool:
    """Whether a step ends with the averages of its own gradients."""
    return isinstance(mode, Synchronous) or mode == BoundedStaleness(0)


Feature = Literal[
    "a comm hook",
    "accumulation='fp32'",
    "an optimizer in backward",
    "check_finite='count' or 'raise'",
    "delay_all_reduce_named_params",
    "divisor=",
    "error_feedback=True",
    "fused_hook",
    "fused_hook on a reducer of fusedreduce",
    "fusedreduce run",
    "grad_stats=True",
    "gradient_as_bucket_view",
    "join",
    "least_sqnr_db=",
    "manual backward finalization",
    "mixed_precision",
    "op='sum'",
    "parameters of two wrappers",
    "plan=",
    "ranks_per_node= above 1",
    "record_trace()",
    "set_bucket_size()",
    "set_fsdp_comms",
    "skip_unused_buckets or skip_all_reduce_unused_params",
    "sparse gradients",
    "stochastic_rounding=True",
    "sync_mode= other than Synchronous()",
    "sync_mode=Asynchronous()",
    "DataParallel",
    "SyncServer",
    "threads=False",
    "wire= by parameter",
    "wire= of several",
    "wire= other than 'native'",
    "wire= with a rounding of its own",
    "wire= without 'bf16' and 'fp16'",
    "wire= without 'int8' and 'int4'",
    "wire='fp16'",
    "wire='int8' or 'int4'",
    "wire_after=",
]


@dataclass(frozen=True)
class Exclusion:
    """Two features that do not go together.

    Args:
        one, other: their names. In a message an option is written with its value.
        reason: why.
        instead: what to write.
    """

    one: Feature
    other: Feature
    reason: str
    instead: str


_LATE: Feature = "sync_mode= other than Synchronous()"
_ASYNCHRONOUS: Feature = "sync_mode=Asynchronous()"
_EXCHANGED = "contributions are exchanged within their own step"
_PROMPT = "Use sync_mode=Synchronous(), or leave the other out"
_BY_COMMAND = "Call fusedreduce.install() in the script"
_OF_AVERAGES: tuple[Feature, ...] = (
    "gradient_as_bucket_view",
    "skip_unused_buckets or skip_all_reduce_unused_params",
    "mixed_precision",
    "delay_all_reduce_named_params",
    "an optimizer in backward",
    "a comm hook",
    "parameters of two wrappers",
)
_OF_CODES: tuple[Feature, ...] = ("wire_after=", "least_sqnr_db=", "stochastic_rounding=True", "error_feedback=True")
_OF_CONTRIBUTIONS: tuple[Feature, ...] = ("stochastic_rounding=True", "error_feedback=True")
_OF_ONE_WIRE: tuple[tuple[Feature, str], ...] = (
    ("fused_hook", "a hook sees buckets, and no step that could be measured"),
    ("set_fsdp_comms", "a module's shard is reduced by itself, and no step is measured"),
    ("SyncServer", "an epoch has no forward, and is not measured"),
    ("DataParallel", "its replicas are in one process"),
    ("plan=", "a plan is of one wire"),
    ("error_feedback=True", "what a wire has lost is added on that wire"),
)
# All of them: `ReduceConfig.check_beside` refuses by these, and docs/exclusions.md shows them.
EXCLUSIONS: tuple[Exclusion, ...] = (
    Exclusion(
        "accumulation='fp32'",
        "wire= without 'bf16' and 'fp16'",
        "this option is for the wires 'bf16' and 'fp16': a native wire is added up in the gradients' own dtype, and "
        "'int8' and 'int4' always in fp32",
        "Leave it out",
    ),
    Exclusion(
        "accumulation='fp32'",
        "wire= with a rounding of its own",
        "sums would be rounded to nearest",
        "Use accumulation='wire', or give the wire no rounding",
    ),
    *(
        Exclusion(
            one, "wire= without 'int8' and 'int4'", "this option is for the wires 'int8' and 'int4'", "Leave it out"
        )
        for one in _OF_CODES
    ),
    *(
        Exclusion(
            one,
            "ranks_per_node= above 1",
            "what is encoded across nodes is no rank's own contribution",
            "Use ranks_per_node=1",
        )
        for one in _OF_CONTRIBUTIONS
    ),
    Exclusion("wire='int8' or 'int4'", _LATE, _EXCHANGED, "Use Synchronous(), or wire='bf16'"),
    Exclusion("accumulation='fp32'", _LATE, _EXCHANGED, "Use Synchronous(), or accumulation='wire'"),
    *(
        Exclusion(_LATE, other, "gradients would be read or written before their averages have come", _PROMPT)
        for other in _OF_AVERAGES
    ),
    Exclusion(_LATE, "join", "a rank without inputs cannot know which steps the others have under way", _PROMPT),
    Exclusion(_LATE, "manual backward finalization", "averages do not come at the end of their own backward", _PROMPT),
    Exclusion(_LATE, "record_trace()", "a step does not end with its own backward", _PROMPT),
    Exclusion(_LATE, "SyncServer", "an epoch ends with its own averages", "Use sync_mode=Synchronous()"),
    Exclusion(
        "wire='fp16'",
        _ASYNCHRONOUS,
        "a rank that is ahead sends the sum of several steps, which overflows in fp16",
        "Use wire='bf16'",
    ),
    Exclusion(
        "check_finite='count' or 'raise'",
        _ASYNCHRONOUS,
        "ranks would compare their gradients in every step, but are in different ones",
        "Use check_finite='off'",
    ),
    Exclusion(
        "sparse gradients",
        _ASYNCHRONOUS,
        "contributions are dense",
        "Use sparse=False there, or another sync_mode",
    ),
    Exclusion("divisor=", _ASYNCHRONOUS, "a contribution holds several steps", "Leave it out"),
    Exclusion(
        _ASYNCHRONOUS,
        "threads=False",
        "one thread that drives all replicas cannot let one be ahead of another",
        "Use a thread per replica, which threads=True is on CPU, or another sync_mode",
    ),
    Exclusion(
        "wire= other than 'native'",
        "a comm hook",
        "the hook decides what travels",
        "Use wire='native', or no hook",
    ),
    Exclusion("op='sum'", "a comm hook", "the hook divides or does not", "Use op='mean', or no hook"),
    Exclusion("divisor=", "a comm hook", "the hook divides", "Leave it out"),
    Exclusion(
        "set_bucket_size()",
        "a comm hook",
        "the hook may keep state per bucket",
        "Call it before the hook is registered",
    ),
    Exclusion("set_bucket_size()", "plan=", "the plan has its buckets already", "Leave the plan out"),
    *(
        Exclusion(
            one,
            "fused_hook on a reducer of fusedreduce",
            "later phases of a bucket would be issued within backward",
            "Register no hook, and give the wrapper's own ReduceConfig this wire and accumulation",
        )
        for one in ("wire='int8' or 'int4'", "accumulation='fp32'")
    ),
    Exclusion(
        "wire= by parameter",
        "fused_hook",
        "fused_hook has one wire for all parameters",
        "Use DistributedDataParallel(reduce=ReduceConfig(wire=...)) of fusedreduce",
    ),
    Exclusion(
        "wire= by parameter",
        "set_fsdp_comms",
        "a module's shard has one wire for all parameters",
        "Call set_fsdp_comms once for each part of the model, with the wire that it is to have",
    ),
    *(Exclusion("wire= of several", one, reason, "Give it one wire") for one, reason in _OF_ONE_WIRE),
    Exclusion(
        "op='sum'", "fusedreduce run", "a script that was written for torch's class expects averages", _BY_COMMAND
    ),
    Exclusion(
        "grad_stats=True",
        "fusedreduce run",
        "the script would have to read them with fusedreduce.reducer_of(model).grad_stats()",
        _BY_COMMAND,
    ),
    Exclusion(
        _LATE, "fusedreduce run", "the script would have to call flush() before it evaluates and saves", _BY_COMMAND
    ),
)


class PlanOfFile(str):
    """The text of a plan that was read from a file, whose name messages give.

    Args:
        text: the file's contents.
        file: its path.
    """

    file: str

    def __new__(cls, text: str, file: str) -> PlanOfFile:
        made = super().__new__(cls, text)
        made.file = file
        return made

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]  # of a str, without the file
        return str(self), self.file


@dataclass(frozen=True, kw_only=True)
class ReduceConfig:
    """How gradients are reduced. Every rank must use the same values.

    Args:
        wire: dtype on the wire. "native": the gradients' own (fp32 for a bucket of mixed dtypes); "bf16" or "fp16":
            divided by the world size in fp32, then rounded once. On fp16 the division is split: a power of two of
            about the root of the world size is divided out after the sum, so that small values survive. "int8" or
            "int4": blocks of 256 or 64 elements as integers of so many bits with a scale each; gradients with fewer
            elements than a block, those of one dimension (norms, biases) and complex ones stay "native". By parameter:
            a mapping of glob patterns of names (fnmatch) to wires, of which the first that matches counts and none
            means "native", kept as a tuple of pairs; or a function of name and parameter, called when a reducer is
            built. These may encode gradients of one dimension too, and are of reducer and wrapper only. See
            docs/wires.md; and docs/own_wire.md for one of your own, named "module:NAME", a CastWire or an Encoding.
            Several, in order of preference, as a tuple: steps show which ends first, and one takes the place of those
            before it where it shortens the step by 2 % (16 bits), 5 % (8) or 10 % (4). "auto" is ("native", "bf16").
            Of reducer and wrapper only. See docs/wire_choice.md.
        wire_after: number of synchronised steps, counted since the ranks were set, in which gradients that are to be
            encoded travel as "bf16"; a checkpoint (`Reducer.state_dict`) keeps count. Reducer and wrapper only.
        least_sqnr_db: every 50 encoded steps measure what encoding loses of each gradient, as a signal-to-noise ratio
            in dB, and return a parameter to "bf16" that is below this in three measurements in a row; None: nothing is
            measured, but where steps choose the wire the limit is 35 dB at 8 bits, 12 at 4. What is usual:
            docs/wires.md. Reducer and wrapper only.
        accumulation: "wire": the backend adds 16-bit elements up, and rounds at every hop. "fp32": ranks exchange their
            contributions, each is rounded once, and the sum in fp32 once more; only for the wires "bf16" and "fp16".
            ("int8" and "int4" are always added up in fp32.)
        stochastic_rounding: codes of the wires "int8" and "int4" are rounded up or down at random, so that a mean over
            steps comes to the gradients' own, at about 1.4 times a step's error; False: to nearest. The same random
            bits in every run: see docs/wires.md. Reducer and wrapper only.
        error_feedback: what the wires "int8" and "int4" lose of a gradient is added to the next step's, for 8 more
            bytes of memory per element. See docs/wires.md, also for whether it helps. Reducer and wrapper only.
        seed: of stochastic rounding, in [0, 2**32). Reducer and wrapper only.
        op: "mean": the average over all ranks; "sum": their sum. (On an fp16 wire gradients are divided by a power of
            two of at least the world size before that sum, which then cannot overflow on the wire, and multiplied by it
            afterwards.) Reducer and wrapper only.
        stall_report_s: log a bucket whose reduction has not finished after this many seconds; None: after 80 % of
            the process group's timeout. CUDA only, because on CPU the timeout itself raises.
        overlap: start each bucket's reduction as soon as it is ready; False starts all of them when backward is done
            (to measure what overlap gains). Reducer and wrapper only.
        policy: how parameters are divided into buckets, and in which order buckets are launched. "static": torch's
            rule; "ready": the same limits, in the order in which gradients become ready, and with a 16-bit wire fp32,
            bf16 and fp16 gradients share buckets; "planned": the plan that ends first in a model of the measured costs.
            "static" never depends on measured times, nor does any policy under `torch.use_deterministic_algorithms`.
            Reducer and wrapper only. See docs/scheduling.md.
        replan_every: number of synchronised steps after which the plan is reconsidered; 0: only within the first 30.
        plan: a plan to use throughout: the text that `plan_json()` returns, or the path of a file with it, such as
            `fusedreduce plan` writes, which is read here, once. A plan for another number of ranks is not used.
            Reducer and wrapper only.
        link: latency in us and bandwidth in Gbit/s of one all-reduce, for the cost model; None: measured.
        grad_stats: compute norms, largest values and shares flushed to zero of every gradient in every synchronised
            step, as by-products of the reduction.
        check_finite: "off"; "count": find out in every step which rank had a NaN or Inf in which gradient before it was
            reduced, log it, and go on; "raise": NonFiniteGradientError on every rank at the end of backward, which on
            CUDA waits for the GPU. (With FusedGradScaler, which finds its scale by overflows, nothing is raised.)
        cap_policy: "c10d": a bucket is closed once it has reached its limit; "strict": before it would exceed it.
            Reducer and wrapper only.
        ranks_per_node: with the wires "int8" and "int4": gradients are added up among so many consecutive ranks first,
            in fp32, and their sums encoded across nodes. None: as many as torchrun says that each node has
            (LOCAL_WORLD_SIZE), or 1 with stochastic rounding or error feedback; 1: encoded among all ranks. See
            docs/wires.md.
        sync_mode: which step's averages `.grad` holds after a backward: Synchronous(), BoundedStaleness(k) or
            Asynchronous(). See docs/modes.md. Reducer and wrapper only.

    Raises:
        ValueError: a value is not accepted; the message lists those that are. Or the file of `plan` cannot be read.
    """

    wire: AnyWire = "native"
    wire_after: int = 0
    least_sqnr_db: float | None = None
    accumulation: Accumulation = "wire"
    stochastic_rounding: bool = False
    seed: int = 0
    error_feedback: bool = False
    op: Op = "mean"
    stall_report_s: float | None = None
    overlap: bool = True
    policy: Policy = "planned"
    cap_policy: CapPolicy = "c10d"
    replan_every: int = 1000
    link: tuple[float, float] | None = None
    plan: str | os.PathLike[str] | None = None
    grad_stats: bool = False
    check_finite: CheckFinite = "off"
    sync_mode: SyncMode = Synchronous()
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.wire, Mapping):
            object.__setattr__(self, "wire", tuple(self.wire.items()))
        elif self.wire == AUTO:
            object.__setattr__(self, "wire", AUTO_WIRES)
        elif isinstance(self.wire, list):
            object.__setattr__(self, "wire", tuple(self.wire))
        wires = self.named_wires()
        for name in ("overlap", "grad_stats", "stochastic_rounding", "error_feedback"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        choices: Mapping[str, tuple[str, ...]] = {
            "accumulation": ACCUMULATIONS,
            "op": OPS,
            "policy": POLICIES,
            "cap_policy": CAP_POLICIES,
            "check_finite": CHECKS_FINITE,
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"unknown {name} {value!r}: use one of {', '.join(map(repr, allowed))}")
        _check_count("wire_after", self.wire_after, 0)
        least = self.least_sqnr_db
        if least is not None and not (type(least) in (int, float) and math.isfinite(least)):
            raise ValueError(f"least_sqnr_db must be a finite number of dB or None, got {_came(least)}")
        if type(self.seed) is not int or not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be a whole number in [0, 2**32), got {_came(self.seed)}")
        stall = self.stall_report_s
        if stall is not None and not (isinstance(stall, int | float) and math.isfinite(stall) and stall > 0):
            raise ValueError(f"stall_report_s must be a positive number of seconds or None, got {_came(stall)}")

        every = self.replan_every
        if type(every) is not int or not (every == 0 or every >= LEAST_REPLAN_EVERY):
            raise ValueError(
                f"replan_every must be a whole number of steps, 0 or at least {LEAST_REPLAN_EVERY}; got {_came(every)}"
            )
        _check_link(self.link)
        if self.ranks_per_node is not None:
            _check_count("ranks_per_node", self.ranks_per_node, 1)
        if not isinstance(self.sync_mode, SyncMode):
            raise ValueError(
                "sync_mode must be Synchronous(), BoundedStaleness(max_staleness) or Asynchronous(), got "
                f"{self.sync_mode!r}"
            )
        # Not yet what Asynchronous excludes: that is a reducer's, in whose place install(fallback=True) takes torch's.
        first = self.allowed[:1] or wires  # the one that is used where steps are not measured
        self._refuse({*self._features(first) - {_ASYNCHRONOUS}, bool(self.allowed and self.plan) and "plan="})
        if self.plan is not None:
            object.__setattr__(self, "plan", _plan_text(self.plan))

    def __repr__(self) -> str:
        """As it is written: without what is a default, and without the text of a plan."""
        given = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return _written({name: value for name, value in given.items() if value != getattr(ReduceConfig, name)})

    @property
    def allowed(self) -> tuple[Wire, ...]:
        """The wires of which steps show the one to use, in order of preference; (): it is not left to them."""
        several = isinstance(self.wire, tuple) and all(isinstance(one, str) for one in self.wire)
        return cast("tuple[Wire, ...]", self.wire) if several else ()

    def has_views(self, asked: bool) -> bool:
        """Returns whether gradients may be views of the wire buffer: if `asked`, on the native wire only."""
        return asked and (self.wire == NATIVE or NATIVE in self.allowed)

    def least_db(self, wire: Wire) -> float | None:
        """Below which signal-to-noise ratio, in dB, a parameter returns from `wire` to "bf16"; None: it does not.

        Where steps choose the wire, nobody has compared losses on it: there every encoding has a limit.
        """
        encoding = encoding_of(wire)
        if encoding is None:
            return None
        return LEAST_DB_BY_BITS[encoding.bits] if self.least_sqnr_db is None and self.allowed else self.least_sqnr_db

    def divisor(self, ranks: int) -> float:
        """Returns what every rank divides its gradients by, unless a step has a divisor of its own."""
        return float(ranks) if self.op == "mean" else 1.0

    def check_beside(
        self,
        *features: Feature | Literal[False],
        wires: Collection[Wire] | None = None,
        sparse: Sequence[str] = (),
    ) -> None:
        """Refuses what does not go together, of these options and of what is in use beside them; see `EXCLUSIONS`.

        Args:
            features: that are in use; False is none.
            wires: of the parameters, where they are known.
            sparse: names of parameters with sparse gradients.

        Raises:
            ValueError: says why, and what to write instead.
        """
        self._refuse({*self._features(wires), *features, bool(sparse) and "sparse gradients"}, sparse)

    @property
    def one_wire(self) -> Wire:
        """The wire where it is one for all parameters, as that of a hook is."""
        assert isinstance(self.wire, str)
        return self.wire

    @property
    def plan_text(self) -> str | None:
        """The text of the given plan, a PlanOfFile if it came from a file; None: there is none."""
        assert isinstance(self.plan, str | None)
        return self.plan

    @property
    def wire_text(self) -> str:
        """The wire's name, or those of several; "mixed" where it is chosen by parameter."""
        return self.wire if isinstance(self.wire, str) else ",".join(self.allowed) or "mixed"

    def wire_of(self, gradient: torch.Tensor) -> Wire:
        """Returns what a gradient like `gradient` travels on by `one_wire`: "native" where it is not to be encoded."""
        return wire_for(gradient, self.one_wire)

    def wire_dtype(self, gradient: torch.dtype) -> torch.dtype:
        """Returns the dtype of `one_wire` for gradients of dtype `gradient` that are not encoded."""
        return wire_dtype(self.one_wire) or gradient

    def to_dict(self) -> dict[str, object]:
        """Returns the options as plain values, as ranks compare and log them; a plan as its digest."""
        text = self.plan_text
        digest = None if text is None else hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return {**values, "wire": self.wire_text, "plan": digest, "sync_mode": repr(self.sync_mode)}

    def _features(self, wires: Collection[Wire] | None) -> set[Feature]:
        """The features that these options are, with parameters on `wires`, where these are known."""
        named = self.named_wires()
        casts = [cast for wire in wires or () if (cast := cast_of(wire)) is not None]
        rounded = [cast for wire in self.allowed or wires or () if (cast := cast_of(wire)) is not None]
        used: dict[Feature, bool] = {
            _LATE: not is_synchronous(self.sync_mode),
            _ASYNCHRONOUS: isinstance(self.sync_mode, Asynchronous),
            "accumulation='fp32'": wires is not None and self.accumulation == "fp32",
            "check_finite='count' or 'raise'": self.check_finite != "off",
            "error_feedback=True": self.error_feedback,
            "grad_stats=True": self.grad_stats,
            "least_sqnr_db=": self.least_sqnr_db is not None,
            "op='sum'": self.op == "sum",
            "ranks_per_node= above 1": self.ranks_per_node not in (None, 1),
            "stochastic_rounding=True": self.stochastic_rounding,
            "wire= by parameter": not (isinstance(self.wire, str) or self.allowed),
            "wire= of several": bool(self.allowed),
            "wire= other than 'native'": self.wire != NATIVE,
            "wire= without 'bf16' and 'fp16'": named is not None and not any_accumulated(named),
            "wire= without 'int8' and 'int4'": named is not None and not any_encoded(named),
            "wire= with a rounding of its own": any(cast.rounding is not None for cast in rounded),
            "wire='fp16'": any(cast.dtype_name == "float16" for cast in casts),
            "wire='int8' or 'int4'": wires is not None and any_encoded(wires),
            "wire_after=": self.wire_after > 0,
        }
        return {name for name, in_use in used.items() if in_use}

    def _refuse(self, features: Collection[Feature | Literal[False]], sparse: Sequence[str] = ()) -> None:
        refusals = [
            f"{self._named(pair.one, sparse)} and {self._named(pair.other, sparse)} exclude each other: {pair.reason}. "
            f"{pair.instead}"
            for pair in EXCLUSIONS
            if pair.one in features and pair.other in features
        ]
        if refusals:
            raise ValueError("; ".join(refusals))

    def _named(self, feature: Feature, sparse: Sequence[str]) -> str:
        """A feature in a message: an option with its value."""
        option = feature.partition("=")[0]
        if feature == "sparse gradients":
            return f"the sparse gradients of {', '.join(sparse[:_MOST_NAMED])}"
        return f"{option}={_shown(option, getattr(self, option))}" if option in OPTIONS else feature

    def named_wires(self) -> Collection[Wire] | None:
        """The wires that `wire` names; None: a function decides.

        Raises:
            ValueError: one is unknown.
        """
        if isinstance(self.wire, str):
            named: Collection[Wire] = (self.wire,)
        elif self.allowed:
            named = self.allowed
            if AUTO in named:
                raise ValueError(f"{AUTO!r} stands for {AUTO_WIRES!r}: write these out in a list, got {self.wire!r}")
            if len(set(named)) < max(len(named), 2):
                raise ValueError(f"several wires must be different ones, at least two, got {self.wire!r}")
        elif isinstance(self.wire, tuple):
            if any(isinstance(one, str) for one in self.wire):
                raise ValueError(
                    "wire must be a tuple of wires, of which steps choose one, as ('native', 'bf16'), or a mapping "
                    f"of patterns of names to wires, such as {{'*.bias': 'native', '*': 'int8'}}; got {self.wire!r}"
                )
            if not all(isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str) for one in self.wire):
                raise ValueError(f"patterns of wire must be strings, each with a wire, got {self.wire!r}")
            named = [wire for _, wire in cast("tuple[tuple[str, Wire], ...]", self.wire)]
        elif callable(self.wire):
            return None
        else:
            named = (cast("Wire", self.wire),)
        for one in named:
            check_wire(one)
        return named


def checked(config: object, name: str) -> ReduceConfig:
    """Returns the options that a user gave; the defaults for None.

    Args:
        config: what was given.
        name: of the argument.

    Raises:
        TypeError: it is no ReduceConfig; with what to write.
    """
    if config is None:
        return ReduceConfig()
    if isinstance(config, ReduceConfig):
        return config
    raise TypeError(f"{name} must be a fusedreduce.ReduceConfig, got {config!r}: write {name}={_meant(config)}")


def _meant(given: object) -> str:
    """How the ReduceConfig is written in place of which `given` came."""
    own = getattr(given, "config", None)  # a FusedHookState's
    if isinstance(own, ReduceConfig):
        return repr(own)
    if isinstance(given, SyncMode):
        return _written({"sync_mode": given})
    if isinstance(given, Mapping) and given and given.keys() <= OPTIONS:
        return _written(given)
    named = isinstance(given, str) and (given in WIRES or is_own(given))
    return _written({"wire": given if named else "bf16"})


def unexpected_options(given: Mapping[str, object]) -> str:
    """What to write in place of keyword arguments that are options of a reduction, or are ReduceConfigs; "": none is.

    Args:
        given: keyword arguments that a wrapper was given.
    """
    configs = [value for value in given.values() if isinstance(value, ReduceConfig)]
    options = {name: value for name, value in given.items() if name in OPTIONS}
    if not options and not configs:
        return ""
    meant = _written(options) if options else repr(configs[0])
    return f". fusedreduce.DistributedDataParallel takes options of the reduction as one argument: write reduce={meant}"


def _written(options: Mapping[str, object]) -> str:
    return f"ReduceConfig({', '.join(f'{name}={_shown(name, value)}' for name, value in options.items())})"


def _shown(name: str, value: object) -> str:
    """An option's value in a message."""
    if name != "plan" or not isinstance(value, str):
        return repr(value)
    if isinstance(value, PlanOfFile):
        return repr(value.file)
    return "..." if _is_plan_text(value) else repr(value)


def _is_plan_text(plan: str) -> bool:
    """Whether it is the text of a plan and not the path of a file."""
    return isinstance(plan, PlanOfFile) or plan.lstrip().startswith("{")


def _plan_text(plan: object) -> str:
    """The text of a plan: as it is given, or read from the file of which the path is given.

    Raises:
        ValueError: it is neither, or the file cannot be read.
    """
    if isinstance(plan, str) and _is_plan_text(plan):
        return plan
    wanted = "the path of a file that `fusedreduce plan` has written, or the text that plan_json() returns"
    if not isinstance(plan, str | os.PathLike):
        raise ValueError(f"plan must be {wanted}, or None; got {type(plan).__name__}")
    path = os.fspath(plan)
    try:
        with open(path, encoding="utf-8") as file:
            return PlanOfFile(file.read(), path)
    except (OSError, ValueError) as error:  # not UTF-8, or no path at all
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        name = path if len(path) <= _LONGEST_PATH_SHOWN else f"{path[:_LONGEST_PATH_SHOWN]}..."
        raise ValueError(f"plan={name!r} cannot be read: {reason}. Give {wanted}") from None


OPTIONS = frozenset(one.name for one in dataclasses.fields(ReduceConfig))


def _saying_what_to_write(init: Callable[..., None]) -> Callable[..., None]:
    """The constructor, which says of arguments that are none of its own how they are written."""

    @functools.wraps(init)
    def checked_init(self: ReduceConfig, *given: object, **options: Any) -> None:
        if given:
            raise TypeError(f"ReduceConfig takes options by name, got {given[0]!r}: write {_meant(given[0])}")
        wrappers = {name: value for name, value in options.items() if name in _OF_WRAPPER}
        if wrappers:
            own = _written({name: value for name, value in options.items() if name in OPTIONS})
            named = ", ".join(f"{name}={value!r}" for name, value in wrappers.items())
            raise TypeError(
                f"{next(iter(wrappers))} is an argument of DistributedDataParallel itself: "
                f"write DistributedDataParallel(module, {named}, reduce={own})"
            )
        init(self, **options)

    return checked_init


ReduceConfig.__init__ = _saying_what_to_write(ReduceConfig.__init__)  # type: ignore[method-assign]


def _check_link(link: object) -> None:
    if link is None:
        return
    numbers = isinstance(link, tuple) and len(link) == 2 and all(type(one) in (int, float) for one in link)
    latency_us, gbit_per_s = link if numbers and isinstance(link, tuple) else (-1.0, 0.0)
    if not (0 <= latency_us <= _MOST_LATENCY_US and _LEAST_GBIT_PER_S <= gbit_per_s <= _MOST_GBIT_PER_S):
        raise ValueError(
            f"link must be None or (latency in us, Gbit/s), 0 to {_MOST_LATENCY_US:g} and {_LEAST_GBIT_PER_S:g} to "
            f"{_MOST_GBIT_PER_S:g}; got {link!r}"
        )


def _check_count(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {_came(value)}")


def _came(value: object) -> str:
    """What was given in place of a number, in a message."""
    return f"the string {value!r}" if isinstance(value, str) else repr(value)
