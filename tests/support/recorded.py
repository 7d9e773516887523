"""What recorded_cases.py's cells do, as text: a line per step and rank. recorded.txt holds how it was.

A line has, of one rank and one step:

- its collectives, in the order in which the rank issued them: kind, dtype, elements. `on n:` those on the n-th
  communicator that this rank has made beside the group's own, whose order among themselves is all that is defined.
  `as before`: those of this rank's line before;
- `new`: buffers that have travelled in no step before; `made`: what the package, but for its kernels, has allocated
  by torch.empty and its like, of `LEAST_BYTES` and more: how many, and bytes in all;
- `grads`: a digest of every `.grad`: `-` none, `s` sparse, `v` a view of something larger, `=` in the memory of
  before;
- the state, and what was raised.

Ranks are threads of a LocalGroup, which adds in rank order: the bytes are the same on every machine. Gradients are
given, to the bit, and drawn by Python.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedreduce.comm.local.group import LocalCommunicator, LocalGroup
from fusedreduce.comm.local.rendezvous import LocalPending
from fusedreduce.kernels import dispatch
from support.inside import take_torch_path
from support.timeouts import PATIENT_S

RANKS = 3
# Smaller allocations are numbers that a step passes on, and not wires.
LEAST_BYTES = 128
_INDENT, _ALIKE = "    ", "  as "
RECORD = Path(__file__).parents[1] / "reducer" / "recorded.txt"
_SHORT = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.uint8: "u8", torch.int64: "i64"}
_FACTORIES = ("empty", "empty_like", "empty_strided", "zeros", "zeros_like", "full", "full_like")
_KERNELS = str(Path(dispatch.__file__).parent)
_PACKAGE = str(Path(dispatch.__file__).parents[1])


class Tape:
    """What one rank does.

    Attributes:
        lines: of each event, its name and what happened.
    """

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self._calls: dict[int, list[str]] = {0: []}
        self._channels: list[Any] = []
        self._travelled: dict[int, Any] = {}  # kept: no later one has the address
        self._new: list[int] = []
        self._made: list[int] = []
        self._before: dict[int, torch.Tensor] = {}  # kept: no later gradient has the address
        self._last = ""

    def communicator(self, channel: Any) -> None:
        """One was made."""
        if not any(one is channel for one in self._channels):
            self._channels.append(channel)

    def call(self, channel: Any, kind: str, tensors: Sequence[torch.Tensor], op: str | None) -> None:
        """A collective was issued."""
        self.communicator(channel)
        number = next(index for index, one in enumerate(self._channels) if one is channel)
        words = [kind if op in (None, "sum") else f"{kind}({op})"]
        if tensors:
            first = tensors[0]
            words += [_SHORT.get(first.dtype, str(first.dtype).removeprefix("torch.")), str(first.numel())]
        self._calls.setdefault(number, []).append(" ".join(words))
        for tensor in tensors:
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage.data_ptr() not in self._travelled:
                    self._travelled[storage.data_ptr()] = storage
                    self._new.append(storage.nbytes())

    def allocated(self, nbytes: int) -> None:
        """The package has made a tensor."""
        if nbytes >= LEAST_BYTES:
            self._made.append(nbytes)

    def note(self, event: str, *texts: str, parameters: Sequence[torch.Tensor] = ()) -> None:
        """Ends an event: what was issued since the last one, and `texts`."""
        issued = "; ".join(
            (f"on {number}: " if number else "") + ", ".join(_runs(calls))
            for number, calls in sorted(self._calls.items())
            if calls or not number
        )
        parts = ["as before" if issued == self._last != "none" else issued]
        self._last = issued
        parts += [f"{name} {_amount(found)}" for name, found in (("new", self._new), ("made", self._made)) if found]
        if parameters:
            parts.append("grads " + " ".join(self._shown(index, one) for index, one in enumerate(parameters)))
        self._calls, self._new, self._made = {0: []}, [], []
        self.lines.append((event, " | ".join([*parts, *filter(None, texts)])))

    def _shown(self, index: int, parameter: torch.Tensor) -> str:
        gradient = parameter.grad
        if gradient is None:
            self._before.pop(index, None)
            return "-"
        if gradient.layout is not torch.strided:
            whole = gradient.coalesce()
            return f"s{digest(whole.indices())}{digest(whole.values())}"
        marks = "v" if gradient.untyped_storage().nbytes() > gradient.numel() * gradient.element_size() else ""
        before = self._before.get(index)
        marks += "=" if before is not None and before.data_ptr() == gradient.data_ptr() else ""
        self._before[index] = gradient.detach()
        return digest(gradient) + marks


class Ranks:
    """The tapes of all ranks, and what they need to wait for each other.

    Attributes:
        others: a group that ranks go on with once they have given up the first one.
    """

    def __init__(self, count: int = RANKS) -> None:
        self.count = count
        self.tapes = [Tape() for _ in range(count)]
        self.thread = threading.local()
        self.group = LocalGroup(count, timeout_s=PATIENT_S)
        self.others = LocalGroup(count, timeout_s=PATIENT_S)
        self._barrier = threading.Barrier(count, timeout=PATIENT_S)
        self._turn = 0
        self._turns = threading.Condition()
        self.blocked: dict[int, Any] = {}  # by rank, the collective that it waits for

    def meet(self) -> None:
        """Until all ranks have come here."""
        self._barrier.wait()

    @contextlib.contextmanager
    def in_turn(self, rank: int) -> Iterator[None]:
        """One rank after the other, where what lands would depend on the clock."""
        self.meet()
        with self._turns:
            assert self._turns.wait_for(lambda: self._turn % self.count == rank, PATIENT_S)
        try:
            yield
        finally:
            with self._turns:
                self._turn += 1
                self._turns.notify_all()
            self.meet()

    def until_blocked(self, rank: int) -> None:
        """Until every other rank waits for a collective that `rank` will not issue."""
        end_s = time.monotonic() + PATIENT_S
        others = [one for one in range(self.count) if one != rank]
        while not all(self._stuck(self.blocked.get(one), rank) for one in others):
            assert time.monotonic() < end_s, "a rank does not wait for the one that has failed"
            time.sleep(0.001)

    def _tape(self, rank: int) -> Tape:
        """Of this thread's rank, which has another number in another group; of `rank` before there are threads."""
        return self.tapes[getattr(self.thread, "rank", rank)]

    @staticmethod
    def _stuck(collective: Any, rank: int) -> bool:
        return collective is not None and not collective.ended and rank not in collective.arrivals

    def run(self, case: Callable[[LocalCommunicator], None]) -> list[str]:
        """`case(communicator)` on every rank; the lines."""

        def rank(communicator: LocalCommunicator) -> None:
            self.thread.rank = communicator.rank
            case(communicator)

        with self._watched():
            try:
                self.group.run(rank)
            finally:
                self._barrier.abort()
                self.group.close()
                self.others.close()
        return list(merged([one.lines for one in self.tapes]))

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        ours = (self.group, self.others)
        with pytest.MonkeyPatch.context() as patch:
            made, issue, wait = LocalCommunicator.__init__, LocalCommunicator._issue, LocalPending._wait_for_outcome
            compare = LocalCommunicator.compare_aside

            def init(this: LocalCommunicator, group: LocalGroup, channel: Any, rank: int) -> None:
                made(this, group, channel, rank)
                if group in ours:
                    self._tape(rank).communicator(channel)

            def issued(this: LocalCommunicator, kind: str, *tensors: torch.Tensor, **options: Any) -> LocalPending:
                if this.group in ours:
                    self._tape(this._rank).call(this._channel, kind, tensors, options.get("op"))
                return issue(this, kind, *tensors, **options)

            def compared(this: LocalCommunicator, key: str, text: str, device: torch.device) -> list[str]:
                if this.group in ours:
                    self._tape(this._rank).call(this._channel, "compare_aside", (), None)
                return compare(this, key, text, device)

            def waited(this: LocalPending) -> Any:
                rank = getattr(self.thread, "rank", -1)
                self.blocked[rank] = this._rendezvous
                try:
                    return wait(this)
                finally:
                    self.blocked.pop(rank, None)

            patch.setattr(LocalCommunicator, "__init__", init)
            patch.setattr(LocalCommunicator, "_issue", issued)
            patch.setattr(LocalCommunicator, "compare_aside", compared)
            patch.setattr(LocalPending, "_wait_for_outcome", waited)
            take_torch_path(patch)
            for name in _FACTORIES:
                patch.setattr(torch, name, self._counted(getattr(torch, name)))
            yield

    def _counted(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def factory(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            rank = getattr(self.thread, "rank", None)
            file = sys._getframe(1).f_code.co_filename
            # What kernels work in is kept by thread, and made by whatever comes first.
            if rank is not None and file.startswith(_PACKAGE) and not file.startswith(_KERNELS):
                self.tapes[rank].allocated(tensor.numel() * tensor.element_size())
            return tensor

        return factory


def digest(tensor: torch.Tensor) -> str:
    """Four hexadecimal digits of all bytes, where a NaN is a NaN: its bits are the processor's."""
    flat = tensor.detach().contiguous()
    flat = torch.view_as_real(flat) if flat.is_complex() else flat
    flat = flat.masked_fill(flat.isnan(), math.nan) if flat.is_floating_point() else flat
    return hashlib.blake2b(flat.reshape(-1).view(torch.uint8).numpy().tobytes(), digest_size=2).hexdigest()


def drawn(shape: Sequence[int], dtype: torch.dtype, *seed: int) -> torch.Tensor:
    """A gradient of numbers with all bits of an fp32 in use, by Python's generator: the same on every machine."""
    return _drawn(tuple(shape), dtype, seed).clone()


@functools.cache  # cells draw the same ones
def _drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: tuple[int, ...]) -> torch.Tensor:
    numbers = random.Random(repr(seed))
    drawn = [numbers.uniform(-1, 1) * 2.0 ** numbers.randint(-6, 1) for _ in range(math.prod(shape))]
    return torch.tensor(drawn).to(dtype).view(shape)


def merged(lines: Sequence[Sequence[tuple[str, str]]]) -> Iterator[str]:
    """The lines of all ranks, in the order of their events; what several ranks have alike only once."""
    events: dict[tuple[str, int], dict[str, list[int]]] = {}
    for rank, of_rank in enumerate(lines):
        seen: Counter[str] = Counter()
        for event, text in of_rank:
            events.setdefault((event, seen[event]), {}).setdefault(text, []).append(rank)
            seen[event] += 1
    for (event, _), texts in sorted(events.items(), key=lambda one: _place(one[0], lines)):
        for text, ranks in texts.items():
            yield f"{event}, {_named(ranks, len(lines))}: {text}"


def _place(key: tuple[str, int], lines: Sequence[Sequence[tuple[str, str]]]) -> int:
    """The latest that an event comes at on any rank: steps of ranks with inputs come ahead of the end of a join."""
    places = [[index for index, one in enumerate(of_rank) if one[0] == key[0]] for of_rank in lines]
    return max(found[key[1]] for found in places if len(found) > key[1])


def _named(ranks: Sequence[int], count: int) -> str:
    if len(ranks) == count:
        return "all ranks"
    return f"rank{'s' if len(ranks) > 1 else ''} {' and '.join(map(str, ranks))}"


def _runs(texts: Sequence[str]) -> list[str]:
    """The texts, those in a row that are alike as one."""
    runs = [(text, len(list(group))) for text, group in itertools.groupby(texts)]
    return [f"{count}x {text}" if count > 1 else text for text, count in runs] or ["none"]


def _amount(sizes: Sequence[int]) -> str:
    return f"{len(sizes)} of {sum(sizes)} bytes"


def read(path: Path = RECORD) -> dict[str, list[str]]:
    """By cell, the recorded lines."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in path.read_text().splitlines():
        if line.startswith(_ALIKE):
            found[name] = found[line.removeprefix(_ALIKE)]
        elif line.startswith(_INDENT):
            found[name].append(line.removeprefix(_INDENT))
        elif line and not line.startswith("#"):
            name = line
            found[name] = []
    return found


def text(record: Mapping[str, Sequence[str]]) -> str:
    """The file; a cell with the lines of an earlier one names that."""
    parts = [f"# Written by `python tests/record.py`. How to read it: tests/support/{Path(__file__).name}\n"]
    first: dict[tuple[str, ...], str] = {}
    for name, lines in record.items():
        earlier = first.setdefault(tuple(lines), name)
        shown = [f"{_INDENT}{line}\n" for line in lines] if earlier == name else [f"{_ALIKE}{earlier}\n"]
        parts += ["\n", f"{name}\n", *shown]
    return "".join(parts)


def difference(name: str, was: Sequence[str] | None, now: Sequence[str]) -> str:
    """A sentence on the first step and rank that differ; empty: none does."""
    if was is None:
        return f"{name}: is not in {RECORD.name}. Write it anew: python tests/record.py"
    for before, after in itertools.zip_longest(was, now):
        if before == after:
            continue
        place, _, what = (after or before or "").partition(": ")
        if before is None or after is None:
            return f"{name}: in {place} there is {'more than was recorded' if before is None else 'no more'}: {what}"
        recorded_place, _, recorded = before.partition(": ")
        if place != recorded_place:
            return f"{name}: {place} comes in place of {recorded_place}: {what}; recorded: {recorded}"
        parts = itertools.zip_longest(recorded.split(" | "), what.split(" | "), fillvalue="nothing")
        old, new = next(pair for pair in parts if pair[0] != pair[1])
        return f"{name}: {place} differs first in: {new}; recorded: {old}"
    return ""
