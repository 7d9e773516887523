"""BucketSet: the buckets of one plan, each with the reduction that serves it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from ..comm.group import Group
from ..config import ReduceConfig, Wire
from ..kernels import dispatch
from ..planning.plan import ParameterKind, Plan
from .bucket import Bucket
from .comm_hook import CommHook, CommHookReduction
from .dense import DenseReduction
from .draws import Draws
from .exchanged import EncodedBucket
from .feedback import Feedback
from .parameters import Parameters
from .phases import Phases
from .reduction import Members, Reduction
from .sparse import SparseReduction
from .sparse_kinds import SparseKinds
from .streams import streams_of
from .tensors import dense_shape, real_dtype, real_numel
from .wire_bucket import wire_bucket
from .wire_table import WireTable


@dataclass(frozen=True, kw_only=True)
class BucketMaker:
    """What all buckets of a reducer have in common; builds the reduction of each.

    Args:
        parameters: all parameters of the reducer.
        wires: what each travels on.
        config: the reduction and the sync mode.
        views: gradients become views of their bucket, where that has their own dtype.
        group: the ranks.
        sparse_kinds: the agreed kinds of the sparse gradients; None: there are none.
        hook: state and comm hook, in place of our own wire; None: our own.
        keeps_gradients: the hook writes `.grad` itself.
        phases: issues the collectives of buckets that are exchanged in several phases; None: no wire is.
        draws: what stochastic rounding draws by; None: codes are rounded to nearest.
        feedback: residuals of encoded gradients; None: what encoding loses is lost.
        lazy: wires, and the comm hook's buffers, are allocated in each step and released at its end, unless `as_views`.
    """

    parameters: Parameters
    wires: WireTable
    config: ReduceConfig
    views: bool
    group: Group
    sparse_kinds: SparseKinds | None
    phases: Phases | None
    draws: Draws | None = None
    feedback: Feedback | None = None
    hook: tuple[object, CommHook] | None = None
    keeps_gradients: bool = False
    lazy: bool = False

    def reduction(self, members: Members) -> Reduction:
        """Builds the reduction for a bucket: sparse, by the comm hook, or dense on our own wire."""
        state, hook = self.hook or (None, None)
        if self.parameters.sparse[members.numbers[0]]:
            assert self.sparse_kinds is not None
            return SparseReduction(members, self.group, self.sparse_kinds, state, hook)
        if hook is None:
            return DenseReduction(members, self.group, self._bucket(members), as_views=self.as_views)
        return CommHookReduction(
            members,
            state,
            hook,
            self.group,
            as_views=self.as_views,
            keeps_gradients=self.keeps_gradients,
            lazy=self._releases,
        )

    @property
    def as_views(self) -> bool:
        """Whether gradients become views of their bucket."""
        return self.views and self.wires.is_native

    @property
    def _releases(self) -> bool:
        """Whether a bucket releases its memory behind each step: what gradients are views of lasts as they do."""
        return self.lazy and not self.as_views

    def _bucket(self, members: Members) -> Bucket:
        """What travels for dense parameters of one wire."""
        parameters, numbers, communicator = members.parameters, members.numbers, self.group.communicator
        bucket = wire_bucket(
            self.wires[numbers[0]],
            self.config,
            list(map(real_numel, parameters)),
            [real_dtype(one.dtype) for one in parameters],
            members.device,
            members.label,
            list(map(dense_shape, parameters)),
            ranks=communicator.size,
            phases=self.phases,
            lazy=self._releases,
            keys=numbers,
            draws=None if self.draws is None else self.draws.of_bucket(members.index, members.device),
        )
        if isinstance(bucket, EncodedBucket):
            bucket.measured = self.config.least_db(self.wires[numbers[0]]) is not None
            if self.feedback is not None:
                bucket.feed_back(self.feedback.of_bucket(numbers, bucket.chunks, communicator.rank))
        return bucket


def kind_of(parameter: torch.Tensor, sparse: bool, wire: Wire) -> ParameterKind:
    """What a plan must know of a parameter.

    On a 16-bit wire fp32, bf16, fp16 and complex of these can share a bucket, on an encoded one too; fp64 cannot.

    Args:
        parameter: the parameter.
        sparse: whether its gradient is.
        wire: what its gradient travels on.
    """
    real = real_dtype(parameter.dtype)
    size_bytes = parameter.numel() * parameter.element_size()
    own = (wire, parameter.dtype, parameter.device)
    wide = (wire, real if real is torch.float64 else None, parameter.device)
    return ParameterKind(size_bytes, own, own if wire == "native" else wide, sparse)


class BucketSet:
    """The buckets of `plan`, in launch order.

    Args:
        plan: parameter numbers by bucket.
        maker: how to build them.
        before: the buckets that they replace, whose counts they go on with.
    """

    def __init__(self, plan: Plan, maker: BucketMaker, before: BucketSet | None = None) -> None:
        self.plan = plan
        self.bucket_of = [0] * len(maker.parameters.tensors)
        self.sizes = [len(numbers) for numbers in plan]
        self.reductions: list[Reduction] = []
        for index, numbers in enumerate(plan):
            for number in numbers:
                self.bucket_of[number] = index
            parameters = tuple(maker.parameters.tensors[number] for number in numbers)
            names = tuple(maker.parameters.names[number] for number in numbers)
            self.reductions.append(maker.reduction(Members(index, numbers, parameters, names, index == len(plan) - 1)))
        self._before = (0, 0) if before is None else before.counts()
        self.streams = streams_of(self.bucket_of, maker.parameters.device)

    def __len__(self) -> int:
        """The number of buckets."""
        return len(self.reductions)

    def packed(self) -> list[DenseReduction]:
        """The dense reductions on our own wire."""
        return [reduction for reduction in self.reductions if isinstance(reduction, DenseReduction)]

    def launch_late(self, numbers: Collection[int]) -> Iterator[None]:
        """Starts the sums of the sparse gradients of parameters `numbers`; yields behind each."""
        for number in sorted(numbers):
            reduction = self.reductions[self.bucket_of[number]]
            assert isinstance(reduction, SparseReduction)
            with nullcontext() if self.streams is None else torch.cuda.device(reduction.members.device):
                reduction.launch_late()
            yield

    def counts(self) -> tuple[int, int]:
        """Wire buffers allocated so far, and gradients that were copied because of their strides."""
        packed, (allocations, restrided) = self.packed(), self._before
        return allocations + sum(one.allocations for one in packed), restrided + sum(one.restrided for one in packed)

    def detachable(self) -> list[DenseReduction | SparseReduction]:
        """All reductions, none of which is a comm hook's: their collectives can outlive a step."""
        detachable = [one for one in self.reductions if isinstance(one, DenseReduction | SparseReduction)]
        assert len(detachable) == len(self.reductions), "comm hooks are excluded in this mode"
        return detachable

    def stats(self) -> dict[str, int | str]:
        """The buckets' part of `Reducer.stats`."""
        allocations, restrided = self.counts()
        buckets = [reduction.bucket for reduction in self.packed()]
        paths = [dispatch.path_for(one.device, (one.wire_dtype,)) for one in buckets[:1]]
        return {
            "wire_allocations": allocations,
            "buckets": len(self),
            "wire_bytes": sum(one.wire_bytes for one in buckets),
            "padding_bytes": sum(one.padding_bytes for one in buckets),
            "restrided": restrided,
            "path": paths[0] if paths else "none",
        }
