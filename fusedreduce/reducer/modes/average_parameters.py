"""Parameter averaging: makes parameters, optimizer states and buffers equal on all ranks, and measures their drift.

    parameters, states of floats   mean over ranks, in fp32 (fp64 for fp64), rounded once
    0-dim states, counts           the largest (numbers of steps)
    buffers                        rank 0's

The mean is taken as `reference + mean(value - reference)`, where the reference is rank 0's value: what is equal on all
ranks stays as it is to the last bit, and differences of numbers that are nearly equal are exact. All ranks compute the
same numbers from the same bytes, so they end with the same bytes.

Example: 1.0 on rank 0 and 1.5 on rank 1: reference 1.0, differences 0 and 0.5, mean difference 0.25: both get 1.25.

Optimizer states are compared first: their entries must be of the same kind on every rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch.optim import Optimizer

from ...buckets.tensors import memory_as_real, real_dtype
from ...comm.agreement import CAPACITY_BYTES
from ...comm.protocol import Communicator
from ...comm.waiting import naming_failure, wait_for
from ...errors import AgreementError, FusedReduceError

# Elements that are averaged at a time: 16 MiB in fp32, of which five buffers are alive.
_PIECE_NUMEL = 1 << 22
_TEXT_BYTES = 512
_HASH_BYTES = 16
_COUNTS = frozenset((torch.int16, torch.int32, torch.int64, torch.bool))
_FLOATS = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))


@dataclass(frozen=True)
class Drift:
    """How far the ranks' parameters were apart.

    Args:
        largest: |own - mean|, the largest over parameters and ranks.
        relative: root of the sum of squares of own - mean, over that of the mean; of the rank where it is largest.
    """

    largest: float = 0.0
    relative: float = 0.0


def equalize(
    parameters: Sequence[torch.Tensor],
    names: Sequence[str],
    optimizers: Sequence[Optimizer],
    buffers: Sequence[torch.Tensor],
    communicator: Communicator,
    problem: str = "",
) -> Drift:
    """Makes parameters, the states that `optimizers` keep of them, and buffers the same on all ranks. Collectives.

    Args:
        parameters: of this rank, in the same order on every rank; written in place.
        names: their names.
        optimizers: in the same order on every rank; states of other parameters stay as they are.
        buffers: become rank 0's.
        communicator: the ranks, each of which calls this.
        problem: why this rank cannot take part; then nothing is changed on any rank. Empty: it can.

    Returns:
        How far parameters were apart.

    Raises:
        AgreementError: states differ in kind (an optimizer has not stepped on every rank), or have an entry without a
            mean; on every rank, and nothing has been changed.
        CollectiveError: a collective failed.
    """
    device = parameters[0].device
    states = list(_states(parameters, names, optimizers))
    what = "parameters and optimizer states could not be made equal on all ranks"
    with naming_failure(what, communicator, but=FusedReduceError):
        _compare(states, communicator, device, problem)
        with torch.no_grad():
            drift = _average([parameter.detach() for parameter in parameters], communicator)
            _average([one.value for one in states if one.is_averaged], communicator)
            _largest([one for one in states if not one.is_averaged], communicator, device)
            broadcast(buffers, communicator)
    return drift


def broadcast(tensors: Sequence[torch.Tensor], communicator: Communicator) -> None:
    """Overwrites `tensors` with rank 0's, whatever their dtypes; one collective per device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor.detach())
    for group in by_device.values():
        plain = [one.contiguous() for one in group]
        flat = torch.cat([_bytes(one) for one in plain])
        communicator.broadcast(flat, 0)
        for tensor, copy, part in zip(group, plain, flat.split([_bytes(one).numel() for one in plain]), strict=True):
            _bytes(copy).copy_(part)
            if copy is not tensor:
                tensor.copy_(copy)


@dataclass(frozen=True, eq=False)
class _State:
    """One entry of an optimizer's state of one parameter: `holder[key]`."""

    holder: dict[Any, Any]
    key: Any
    text: str

    @property
    def value(self) -> Any:
        return self.holder[self.key]

    @property
    def is_averaged(self) -> bool:
        value = self.value
        return isinstance(value, torch.Tensor) and value.dim() > 0 and real_dtype(value.dtype) in _FLOATS

    @property
    def is_counted(self) -> bool:
        value = self.value
        if isinstance(value, torch.Tensor):
            return value.dtype in _COUNTS or (value.dim() == 0 and value.dtype in _FLOATS)
        return isinstance(value, bool | int | float)


def _states(
    parameters: Sequence[torch.Tensor], names: Sequence[str], optimizers: Sequence[Optimizer]
) -> Iterator[_State]:
    for number, optimizer in enumerate(optimizers):
        for parameter, name in zip(parameters, names, strict=True):
            held = optimizer.state.get(parameter, {})
            for key in sorted(held, key=str):
                if held[key] is not None:
                    yield _State(held, key, f"{key} of {name} in optimizer {number} ({type(optimizer).__name__})")


def _compare(states: Iterable[_State], communicator: Communicator, device: torch.device, problem: str) -> None:
    texts = []
    for one in states:
        value = one.value
        tensor = isinstance(value, torch.Tensor)
        kind = f"{value.dtype} {tuple(value.shape)}" if tensor else type(value).__name__
        texts.append(f"{one.text}: {kind}")
        if not problem and (not (one.is_averaged or one.is_counted) or (tensor and value.layout is not torch.strided)):
            problem = f"{one.text} is {kind}, which has no mean: call flush() without this optimizer"
    hashes = [hashlib.blake2b(text.encode(), digest_size=_HASH_BYTES).digest() for text in texts]
    digest = hashlib.blake2b(b"".join(hashes)).hexdigest()
    mine = json.dumps({"entries": len(texts), "digest": digest, "problem": problem[:_TEXT_BYTES]}).encode()
    held = [json.loads(raw) for raw in communicator.all_gather_bytes(mine, CAPACITY_BYTES, device)]
    problems = [f"rank {rank}: {one['problem']}" for rank, one in enumerate(held) if one["problem"]]
    if problems:
        raise AgreementError(f"flush() has changed nothing on any rank. {' | '.join(problems)}")
    if len({one["digest"] for one in held}) > 1:
        counts = [int(one["entries"]) for one in held]
        listed = communicator.all_gather_bytes(b"".join(hashes), _HASH_BYTES * max(counts), device)
        parts = [[raw[at : at + _HASH_BYTES] for at in range(0, len(raw), _HASH_BYTES)] for raw in listed]
        first = next(index for index, ones in enumerate(zip_longest(*parts)) if len(set(ones)) > 1)
        text = texts[first] if first < len(texts) else "nothing more"
        shown = communicator.all_gather_bytes(text.encode()[:_TEXT_BYTES], _TEXT_BYTES, device)
        by_rank = "; ".join(f"rank {rank}: {raw.decode(errors='replace')}" for rank, raw in enumerate(shown))
        raise AgreementError(
            f"flush() has changed nothing: optimizer states are not of the same kind on all ranks. Entries by rank: "
            f"{counts}; the first that differs: {by_rank}. Step each optimizer on every rank before flush()"
        )


def _average(tensors: Sequence[torch.Tensor], communicator: Communicator) -> Drift:
    """Averages `tensors` in place; returns how far they were apart."""
    if not sum(tensor.numel() for tensor in tensors):
        return Drift()
    device = tensors[0].device
    found: list[torch.Tensor] = []
    for piece, dtype in _pieces(tensors):
        flat = torch.cat([one.reshape(-1).to(dtype) for one in piece])
        reference = flat.clone()
        communicator.broadcast(reference, 0)
        # Where both are the same infinity there is no difference either.
        apart = torch.where(flat == reference, torch.zeros_like(flat), flat - reference)
        mean = apart.clone()
        wait_for(communicator.all_reduce(mean), "averaging parameters and optimizer states", communicator)
        mean.div_(communicator.size)
        apart.sub_(mean)
        reference = torch.where(mean == 0, reference, reference + mean)  # a negative zero stays one
        for tensor, part in zip(piece, reference.split([one.numel() for one in piece]), strict=True):
            tensor.copy_(part.reshape(tensor.shape))
        found.append(
            torch.stack([apart.abs().amax().double(), apart.double().square().sum(), reference.double().square().sum()])
        )
    together = torch.stack([one.to(device) for one in found])
    largest = float(together[:, 0].amax())
    squares, of_mean = (float(one) for one in together[:, 1:].sum(dim=0))
    relative = (squares / of_mean) ** 0.5 if of_mean else squares**0.5
    own = torch.tensor([largest, relative], dtype=torch.float64, device=device)
    worst = _gathered(own, communicator, device).amax(dim=0)
    return Drift(float(worst[0]), float(worst[1]))


def _largest(states: Sequence[_State], communicator: Communicator, device: torch.device) -> None:
    """Sets 0-dim numbers and counts to the largest of all ranks, in place."""
    for kinds, dtype in ((False, torch.int64), (True, torch.float64)):
        mine = [one for one in states if _is_float(one.value) is kinds]
        if not mine:
            continue
        values = [torch.as_tensor(one.value, dtype=dtype, device=device).reshape(-1) for one in mine]
        most = _gathered(torch.cat(values), communicator, device).amax(dim=0)
        for one, part in zip(mine, most.split([value.numel() for value in values]), strict=True):
            held = one.value
            if isinstance(held, torch.Tensor):
                held.copy_(part.reshape(held.shape))
            else:
                one.holder[one.key] = type(held)(part.item())


def _gathered(mine: torch.Tensor, communicator: Communicator, device: torch.device) -> torch.Tensor:
    pending, gathered = communicator.all_gather(mine.to(device))
    wait_for(pending, "comparing parameters and optimizer states", communicator)
    return gathered


def _is_float(value: torch.Tensor | float) -> bool:
    return value.is_floating_point() if isinstance(value, torch.Tensor) else isinstance(value, float)


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[list[torch.Tensor], torch.dtype]]:
    """Everything, by device and precision, at most `_PIECE_NUMEL` elements at a time; the same on every rank.

    Yields:
        Tensors to be read and written together, and their precision, fp32 or fp64.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        real = memory_as_real(tensor)
        dtype = torch.float64 if real.dtype is torch.float64 else torch.float32
        if real.numel():
            kinds.setdefault((real.device, dtype), []).append(real)
    for (_, dtype), group in kinds.items():
        held: list[torch.Tensor] = []
        room = _PIECE_NUMEL
        for tensor in group:
            if tensor.numel() > _PIECE_NUMEL and tensor.is_contiguous():
                for part in tensor.view(-1).split(_PIECE_NUMEL):
                    yield [part], dtype
                continue
            if held and tensor.numel() > room:
                yield held, dtype
                held, room = [], _PIECE_NUMEL
            held.append(tensor)
            room -= tensor.numel()
        if held:
            yield held, dtype


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
