"""Memory of this process as CUDA's: which of it says that it is on a device, and which bytes of it are used when.

A tensor is on a device if it was made there (`making`), or by an operator that was given one that is. Memory belongs to
the stream that was current when it was allocated. Pinned memory is followed too; other memory of the host's is not, for
a copy that uses it makes the host wait.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fusedreduce.kernels.variants import Variant
from support.cuda.order_check import END, HOST, Access, Stream
from support.cuda.order_trace import Awaited, Recorder, tensors_of

_CPU = torch.device("cpu")


class _Uses(NamedTuple):
    """What a kernel does.

    Args:
        through: "r" and "w": with the tensors whose addresses its first pointer holds; the second has the rows.
        writes: numbers of the pointers that it writes. The others it reads.
        copies: numbers of the pointers to addresses of residuals, of which it reads one copy and writes the other.
    """

    through: str
    writes: tuple[int, ...]
    copies: tuple[int, ...] = ()


_KERNELS: Mapping[str, _Uses] = {
    "pack": _Uses("r", (2, 4, 5)),
    "unpack": _Uses("w", (4, 5, 6)),
    "measure": _Uses("r", (2, 3, 4)),
    "scale": _Uses("rw", (3, 4, 5)),
    "encode": _Uses("r", (3, 10, 11), (5, 6)),
    "combine_encoded": _Uses("", (1,), (3, 4)),
    "decode": _Uses("w", (6, 7, 8)),
    "combine": _Uses("", (4,)),
    "parameter_totals": _Uses("", (4, 5, 6)),
    "total": _Uses("", (4,)),
    "parameter_sources": _Uses("", (3, 4)),
    "first_source": _Uses("", (2,)),
}
_ITEMSIZES = (4, 2, 2, 8)  # by dtype code


class _Memory(NamedTuple):
    """A storage: where it says that it is, whose it is, and its addresses."""

    number: int
    device: torch.device
    pinned: bool
    stream: Stream
    begin: int
    end: int


class FakeMemory(Recorder):
    """A recorder that knows what is used.

    `dangles`: the latest launch has got an address of memory that has been freed.
    """

    def __init__(self, patch: Any) -> None:
        super().__init__(patch)
        self.dangles = False
        self._memories: dict[int, _Memory] = {}
        self._gone: list[_Memory] = []
        self._making: tuple[torch.device, bool] | None = None
        self._plain = False
        self._backends: dict[torch.device, Stream] = {}

    @contextlib.contextmanager
    def making(self, device: torch.device | None, *, pinned: bool = False) -> Iterator[None]:
        """Within: what is made is on this device; None: where what it is made of is."""
        before, self._making = self._making, None if device is None else (device, pinned)
        try:
            yield
        finally:
            self._making = before

    @contextlib.contextmanager
    def on_cpu(self) -> Iterator[None]:
        """Within: nothing is recorded, and tensors say that they are where they are."""
        before = self._open, self._plain
        self._open, self._plain = False, True
        try:
            with _disable_current_modes():
                yield
        finally:
            self._open, self._plain = before

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """Where a tensor says that it is."""
        memory = self._memory(tensor)
        return _CPU if memory is None or self._plain else memory.device

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether it is in pinned memory."""
        memory = self._memory(tensor)
        return memory is not None and memory.pinned

    def add(self, tensor: torch.Tensor, device: torch.device, *, pinned: bool = False) -> None:
        """A tensor has been made, if nobody has heard of it."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._memories:
            return
        on = self.current(device) if device.type == "cuda" else HOST
        begin = storage.data_ptr()
        memory = _Memory(self.number(), device, pinned, on, begin, begin + storage.nbytes())
        self._memories[storage._cdata] = memory
        weakref.finalize(storage, self._freed, storage._cdata, memory).atexit = False
        if pinned or device.type == "cuda":
            what = f"memory {memory.number} ({storage.nbytes()} bytes)"
            self.emit("allocate", on, what, number=memory.number)

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """As Tensor.record_stream."""
        memory = self._memory(tensor)
        if memory is not None and memory.stream != self.stream(stream):
            self.emit("keep", self.stream(stream), number=memory.number)

    # As a recorder

    def place(self, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        known = [memory.device for one in given if (memory := self._memory(one)) is not None]
        device = next((one for one in known if one.type == "cuda"), known[0] if known else None)
        if device is not None and device.type == "cuda":
            for one in given:
                self.add(one, device)  # made by torch's C++ code
        where = self._making or (None if device is None else (device, False))
        if where is not None:
            for one in made:
                self.add(one, where[0], pinned=where[1])

    def uses(self, tensor: torch.Tensor, *, write: bool) -> Sequence[Access]:
        memory = self._memory(tensor)
        if memory is None or tensor.numel() == 0 or not (memory.pinned or memory.device.type == "cuda"):
            return ()
        begin = int(tensor.storage_offset()) * tensor.itemsize
        last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        return (Access(memory.number, begin, begin + (last + 1) * tensor.itemsize, write),)

    def kernel(self, variant: Variant, arguments: Sequence[torch.Tensor | float | None]) -> Sequence[Access]:
        name = variant.label.partition("[")[0]
        does = _KERNELS[name]
        given = [(index in does.writes, one) for index, one in enumerate(arguments) if isinstance(one, torch.Tensor)]
        uses = [use for write, one in given for use in self.uses(one, write=write)]
        if name == "combine":
            uses += self._combined(*(one for one in arguments[:5] if isinstance(one, torch.Tensor)))
        for index in does.copies:
            table = arguments[index]
            if isinstance(table, torch.Tensor):
                with self.on_cpu():
                    residuals = [self._at(address) for address in table.tolist() if address != 0]
                uses += [Access(one.number, 0, END, write) for one in residuals for write in (False, True)]
        if not does.through:
            return uses
        with self.on_cpu():
            addresses, rows = given[0][1].tolist(), given[1][1].numpy()
        for number, address in enumerate(addresses):
            mine = rows[rows[:, 0] == number]
            if address == 0 or not len(mine):
                continue
            itemsize = _ITEMSIZES[int(mine[0, 4])]
            begin, end = (address + int(place) * itemsize for place in (mine[:, 1].min(), mine[:, 2].max()))
            memory = self._at(begin)
            self.dangles |= memory in self._gone
            begin, end = begin - memory.begin, end - memory.begin
            uses += [Access(memory.number, begin, end, write=mode == "w") for mode in does.through]
        return uses

    def backend(self, device: torch.device) -> Stream:
        if device not in self._backends:
            self._backends[device] = self.stream(torch.cuda.Stream(device))
        return self._backends[device]

    def released(self, awaited: Awaited) -> None:
        for one in awaited.tensors:
            memory = self._memory(one)
            assert memory is not None
            self.emit("keep", self.backend(awaited.device), number=memory.number)

    # Within

    def _combined(
        self, rows: torch.Tensor, steps: torch.Tensor, outputs: torch.Tensor, first: torch.Tensor, into: torch.Tensor
    ) -> Sequence[Access]:
        """What a launch of `combine` adds up, and where it writes the sum: by the addresses in its tables."""
        used = list[Access]()
        with self.on_cpu():
            read, written = steps.view(-1, 2).tolist(), outputs.tolist()
            for begin, end, step, number, at in rows.tolist():
                places = [(address, first, False) for _, address in read[step : step + number] if address]
                places += [(address, into, True) for address in written[at + 2 : at + 2 + written[at]]]
                for address, like, write in places:
                    low, high = (address + place * like.itemsize for place in (begin, end))
                    memory = self._at(low)
                    used.append(Access(memory.number, low - memory.begin, high - memory.begin, write))
        return used

    def _at(self, address: int) -> _Memory:
        """What lies there, or has lain there latest."""
        return next(one for one in (*self._memories.values(), *self._gone[::-1]) if one.begin <= address < one.end)

    def _memory(self, tensor: torch.Tensor) -> _Memory | None:
        return self._memories.get(tensors_of(tensor)[-1].untyped_storage()._cdata)

    def _freed(self, key: int, memory: _Memory) -> None:
        if self._memories.get(key) is memory:
            del self._memories[key]
        if memory.device.type == "cuda":  # pinned memory is given out again once its copies have run
            self._gone.append(memory)
            self.emit("free", memory.stream, f"memory {memory.number}", number=memory.number)
