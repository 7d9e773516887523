"""Which memory a launch may touch, and who has touched it."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.emulator.ptx import RAW, WARP, Array


class _Whole:
    """The address space of the process as an array that begins at `base`."""

    def __init__(self, base: int, nbytes: int) -> None:
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (base, False)}


def views_of(whole: Array) -> dict[int, Array]:
    """Bytes as numbers of 1, 2, 4 and 8 bytes."""
    return {bits // 8: whole.view(raw) for bits, raw in RAW.items()}


class Memory:
    """Ranges of host memory that a kernel may read or write."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, bool, str]] = []
        self._ready = False

    def allow(self, tensor: Any, name: str, *, write: bool) -> None:
        """Lets kernels read, and perhaps write, the bytes of a torch tensor (dense) or numpy array."""
        if hasattr(tensor, "data_ptr"):
            begin, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        else:
            begin, nbytes = tensor.ctypes.data, tensor.nbytes
        if nbytes:
            self._ranges.append((begin, begin + nbytes, write, name))
            self._ready = False

    def prepare(self) -> None:
        """Makes what accesses need of the ranges that were allowed; a launch asks for it."""
        if self._ready:
            return
        merged: list[list[Any]] = []
        for begin, end, write, name in sorted(self._ranges):
            if merged and begin < merged[-1][1]:
                last = merged[-1]
                last[1], last[2] = max(last[1], end), last[2] or write
                last[3] = f"{last[3]}, {name}" if name not in last[3] else last[3]
            else:
                merged.append([begin, end, write, name])
        self.begins = np.array([one[0] for one in merged], dtype=np.uint64)
        self.ends = np.array([one[1] for one in merged], dtype=np.uint64)
        self.write = np.array([one[2] for one in merged], dtype=bool)
        self.names = [one[3] for one in merged]
        self.base = int(self.begins[0]) & ~15 if merged else 0
        span = (int(self.ends[-1]) - self.base + 31) & ~15 if merged else 16
        whole = np.asarray(_Whole(self.base, span)) if merged else np.zeros(span, np.uint8)
        self.views = views_of(whole)
        # Bytes that may be written have a place in the shadow, where races are looked for.
        sizes = np.where(self.write, self.ends - self.begins, 0).astype(np.int64)
        self.shadow_begin = np.concatenate([[0], np.cumsum(sizes)])
        self._ready = True

    def shadow_bytes(self) -> int:
        self.prepare()
        return int(self.shadow_begin[-1])

    def find(self, addresses: Array, nbytes: int, *, write: bool) -> tuple[Array, int, str]:
        """Each access' range; and the first access that is wrong (-1: none) with the reason."""
        if not len(self.begins):
            return np.zeros(len(addresses), dtype=np.int64), 0, "no memory at all may be accessed"
        nth = np.searchsorted(self.begins, addresses, side="right").astype(np.int64) - 1
        nearest = np.maximum(nth, 0)
        bad = (nth < 0) | (addresses + np.uint64(nbytes) > self.ends[nearest])
        if bad.any():
            first = int(bad.argmax())
            near = int(nearest[first])
            off, address = int(addresses[first]) - int(self.ends[near]), int(addresses[first])
            return nth, first, f"address {address:#x} is {off:+d} bytes from the end of {self.names[near]}"
        bad = addresses % np.uint64(nbytes) != 0
        if bad.any():
            return nth, int(bad.argmax()), f"address {int(addresses[bad.argmax()]):#x} is no multiple of {nbytes}"
        if write and not self.write[nth].all():
            first = int((~self.write[nth]).argmax())
            return nth, first, f"{self.names[int(nth[first])]} must not be written"
        return nth, -1, ""


class Shadow:
    """Who last wrote and read each byte, by number of the thread in the whole launch, and when."""

    def __init__(self, nbytes: int, threads: int) -> None:
        self.threads = threads
        self.writer, self.reader = (np.full(nbytes, -1, dtype=np.int64) for _ in range(2))
        self.many = np.zeros(nbytes, dtype=np.int8)  # readers: 0 one, 1 several of a program, 2 of several programs
        self.wrote = np.zeros((2, nbytes), dtype=np.int32)
        self.was_read = np.zeros((2, nbytes), dtype=np.int32)

    def _unordered(self, before: Array, then: Array, thread: Array, now: Array) -> Array:
        same_program = before // self.threads == thread // self.threads
        same_warp = before // WARP == thread // WARP
        ordered = same_program & (then[0] < now[0]) | same_warp & (then[1] < now[1])
        unordered: Array = (before >= 0) & (before != thread) & ~ordered
        return unordered

    def read(self, places: Array, thread: Array, now: Array) -> int:
        bad = self._unordered(self.writer[places], self.wrote[:, places], thread, now)
        if bad.any():
            return int(bad.argmax())
        before = self.reader[places]
        unordered = self._unordered(before, self.was_read[:, places], thread, now)
        other_program = (before >= 0) & (before // self.threads != thread // self.threads)
        # Of several readers the latest alone is known. A barrier has all of its program behind it, and none of others.
        many = self.many[places]
        kept = np.where((many == 2) | (self.was_read[0, places] >= now[0]), many, 0)
        many = np.maximum(kept, np.where(other_program, 2, np.where(unordered, 1, 0))).astype(np.int8)
        self.many[places] = 0
        if many.any():
            np.maximum.at(self.many, places, many)  # a place may be there many times
        self.reader[places] = thread
        self.was_read[:, places] = now
        last = self.reader[places]
        double = last != thread
        if double.any():
            apart = last // self.threads != thread // self.threads
            np.maximum.at(self.many, places[double], np.where(apart, 2, 1)[double].astype(np.int8))
        return -1

    def write(self, places: Array, thread: Array, now: Array) -> tuple[int, Array]:
        """The first access that is wrong (-1: none), and which other threads write the same byte now."""
        bad = self._unordered(self.writer[places], self.wrote[:, places], thread, now)
        reader, many, then = self.reader[places], self.many[places], self.was_read[:, places]
        apart = (reader >= 0) & (reader // self.threads != thread // self.threads)
        bad |= (many == 2) | apart | (many == 1) & (then[0] >= now[0])
        bad |= (many == 0) & self._unordered(reader, then, thread, now)
        if bad.any():
            return int(bad.argmax()), places[:0]
        self.writer[places] = thread
        self.wrote[:, places] = now
        last = self.writer[places]
        apart = last // self.threads != thread // self.threads  # programs that write one byte by one instruction
        return (int(apart.argmax()) if apart.any() else -1), last != thread
