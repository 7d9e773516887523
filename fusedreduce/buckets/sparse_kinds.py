"""SparseKinds: the kinds (layout, sparse dimensions, dtype) of a reducer's sparse gradients, as its ranks have agreed.

A sum of sparse tensors needs the same number of sparse dimensions on every rank, and a rank without a gradient (unused,
joined) cannot know it. So after the last bucket of every step one small all-gather exchanges the kind of each rank's
gradients:

    until any rank has had one   the sum of such a parameter waits for the end of the step, when all know its kind
    from then on                 a rank without one takes part with an empty tensor of that kind, in the bucket's place;
                                 a gradient of another kind is an AgreementError on every rank, at the end of the step
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ..comm.agreement import ranks_text
from ..comm.group import Group
from ..comm.numbers import on_device
from ..comm.protocol import Pending
from ..comm.waiting import naming_failure, wait_for
from ..errors import AgreementError
from .parameters import Parameters
from .step_feature import LateSums, StepFeature

_LAYOUTS = (torch.sparse_coo, torch.strided, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.complex32,
)
_ABSENT = (-1, -1, -1)
_EXPECTED_SPARSE = "Expected variable to have sparse gradient. "  # torch's own words
_EXCHANGE = "the exchange of the kinds of sparse gradients between the ranks"


class SparseKind(NamedTuple):
    """What must be the same on every rank for sparse gradients to be summed.

    Args:
        layout: sparse_coo, or one that cannot be summed.
        sparse_dim: number of sparse dimensions; 0 unless sparse_coo.
        dtype: of the values.
    """

    layout: torch.layout
    sparse_dim: int
    dtype: torch.dtype

    def __str__(self) -> str:
        if self.layout is torch.sparse_coo:
            return f"sparse of {self.sparse_dim} sparse dimensions and {self.dtype}"
        return f"{'dense' if self.layout is torch.strided else self.layout} and {self.dtype}"

    def empty(self, parameter: torch.Tensor) -> torch.Tensor:
        """A gradient of this kind for `parameter`, without elements."""
        dense = parameter.shape[self.sparse_dim :]
        return torch.sparse_coo_tensor(
            torch.empty((self.sparse_dim, 0), dtype=torch.int64, device=parameter.device),
            torch.empty((0, *dense), dtype=self.dtype, device=parameter.device),
            parameter.shape,
            device=parameter.device,
            is_coalesced=True,
            check_invariants=False,
        )


def kind_of(gradient: torch.Tensor) -> SparseKind:
    """The kind of a gradient."""
    sparse_dim = gradient.sparse_dim() if gradient.layout is torch.sparse_coo else 0
    return SparseKind(gradient.layout, sparse_dim, gradient.dtype)


class KindsOfStep:
    """The kinds of every rank's sparse gradients in one step.

    Args:
        kinds: of the reducer.
        pending: the all-gather.
        gathered: int64 [W, 3 S], which it fills: three numbers for each of S sparse parameters.
    """

    def __init__(self, kinds: SparseKinds, pending: Pending, gathered: torch.Tensor) -> None:
        # No reference cycle: the garbage collector, maybe on a thread of Gloo's, would free the group (see
        # parallel/hook_reduction.py).
        self._kinds: SparseKinds = weakref.proxy(kinds)
        self._pending = pending
        self._gathered = gathered
        self._found: list[tuple[SparseKind | None, bool]] = []  # by place, and whether it is the same on all ranks

    def agreed_kind(self, number: int) -> SparseKind | None:
        """The kind of a parameter's gradient on every rank that has one; None: no rank has. Waits for the ranks.

        Args:
            number: of the parameter.

        Raises:
            AgreementError: the kinds differ, are not that of the steps before, or cannot be summed; on every rank.
            CollectiveError: a peer did not answer.
        """
        if not self._found:
            wait_for(self._pending, _EXCHANGE, self._kinds.group.communicator)
            most = self._gathered.amax(dim=0)
            same = ((self._gathered == most) | (self._gathered < 0)).all(dim=0)
            rows = torch.stack([most, same.to(most.dtype)]).view(2, -1, 3).tolist()  # once: on CUDA the host waits
            self._found = [(_decoded(kind), all(agreed)) for kind, agreed in zip(*rows, strict=True)]
        kind, same_everywhere = self._found[self._kinds.place[number]]
        known = self._kinds.known.get(number)
        if kind is not None and not (same_everywhere and kind.layout is torch.sparse_coo and known in (None, kind)):
            raise self._disagreement(number, known)
        return kind

    def _disagreement(self, number: int, known: SparseKind | None) -> AgreementError:
        begin = 3 * self._kinds.place[number]
        by_kind: dict[SparseKind, list[int]] = {}
        for rank, row in enumerate(self._gathered.tolist()):
            kind = _decoded(row[begin : begin + 3])
            if kind is not None:
                by_kind.setdefault(kind, []).append(rank)
        found = "; ".join(f"{kind} on {ranks_text(ranks)}" for kind, ranks in by_kind.items())
        before = "" if known is None else f" In the steps before it was {known}."
        torchs = "" if all(kind.layout is torch.sparse_coo for kind in by_kind) else _EXPECTED_SPARSE
        return AgreementError(
            f"{torchs}The gradient of {self._kinds.parameters.names[number]} has not been reduced: it must be sparse "
            f"(torch.sparse_coo), and of one kind on all ranks and in all steps, but it was {found}.{before} Make it "
            "dense everywhere (sparse=False), or sparse everywhere"
        )


class SparseKinds(StepFeature):
    """The sparse parameters of a reducer, and the kinds of their gradients.

    Args:
        parameters: all parameters of the reducer.
        group: the ranks.

    Attributes:
        place: by parameter its index among the sparse ones.
        known: by parameter the kind that all ranks have agreed on; the same on every rank.
    """

    in_use = True

    def __init__(self, parameters: Parameters, group: Group) -> None:
        numbers = (number for number, sparse in enumerate(parameters.sparse) if sparse)
        self.place = {number: place for place, number in enumerate(numbers)}
        self.parameters = parameters
        self.group = group
        self.known: dict[int, SparseKind] = {}
        self._mine: dict[int, tuple[int, ...]] = {}
        self._step: KindsOfStep | None = None

    def dropped(self) -> None:
        """Forgets what was agreed on."""
        self.known, self._mine, self._step = {}, {}, None

    def note(self, number: int, gradient: torch.Tensor | None) -> None:
        """Notes the kind of a parameter's gradient in this step, on this rank."""
        self._mine[number] = _ABSENT if gradient is None else _encoded(kind_of(gradient))

    def behind(self) -> int:
        """Starts the exchange of this step's kinds."""
        mine, self._mine = self._mine, {}
        numbers = [value for number in self.place for value in mine.get(number, _ABSENT)]
        with naming_failure(f"{_EXCHANGE} could not be started", self.group.communicator):
            pending, gathered = self.group.communicator.all_gather(
                on_device(numbers, torch.int64, self.parameters.device)
            )
        self._step = KindsOfStep(self, pending, gathered)
        return 1

    @property
    def of_step(self) -> KindsOfStep:
        """The result of the latest exchange."""
        assert self._step is not None
        return self._step

    def late(self, buckets: LateSums) -> Iterable[object]:
        """Starts the sums of gradients whose kind no rank knew before: it waits for the exchange, and keeps them.

        Raises:
            AgreementError, CollectiveError: as `KindsOfStep.agreed_kind`.
        """
        unknown = [number for number in self.place if number not in self.known]
        found = {number: kind for number in unknown if (kind := self.of_step.agreed_kind(number)) is not None}
        self.known |= found
        return buckets.launch_late(found)


def _encoded(kind: SparseKind) -> tuple[int, ...]:
    return (_LAYOUTS.index(kind.layout), kind.sparse_dim, _DTYPES.index(kind.dtype))


def _decoded(numbers: Sequence[int]) -> SparseKind | None:
    layout, sparse_dim, dtype = numbers
    return None if layout < 0 else SparseKind(_LAYOUTS[layout], sparse_dim, _DTYPES[dtype])
