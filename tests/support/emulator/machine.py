"""Runs a kernel: many threads of many programs side by side, each register an array of all of them.

Of threads that have parted the group that is furthest behind runs first, so that they meet again.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from support.emulator.instructions import step_of
from support.emulator.memory import Memory, Shadow, views_of
from support.emulator.ptx import RAW, WARP, Array, Instruction, Kernel, PtxError, parse

_BOOL = np.dtype(bool)
# What registers hold that nobody has written.
_POISON = {_BOOL: True, **{np.dtype(raw): 0xDEADBEEFDEADBEEF & (2**bits - 1) for bits, raw in RAW.items()}}


def load(ptx: str) -> Kernel:
    """The one kernel of a PTX module, ready to run.

    Raises:
        PtxError: an instruction, modifier or directive is not known.
    """
    kernel = parse(ptx)
    kernel.steps = [step_of(kernel, each) for each in kernel.code]
    kernel.executed = np.zeros(len(kernel.code), dtype=np.int64)
    return kernel


class _Machine:
    """Some programs of a launch, side by side."""

    def __init__(
        self,
        kernel: Kernel,
        first: int,
        programs: int,
        parameters: Array,
        memory: Memory,
        shared_bytes: int,
        shadow: Shadow | None,
    ) -> None:
        self.kernel, self.memory, self.parameters, self.first = kernel, memory, parameters, first
        self.threads, self.total = kernel.threads, programs * kernel.threads
        self.index = np.arange(self.total)
        self.special = {
            "%tid.x": (self.index % self.threads).astype(np.uint32),
            "%ctaid.x": (first + self.index // self.threads).astype(np.uint32),
            "%ntid.x": np.full(self.total, self.threads, dtype=np.uint32),
            "%laneid": (self.index % WARP).astype(np.uint32),
        }
        self._registers: dict[str, Array] = {}
        self._typed: dict[tuple[str, Any], Array] = {}
        self.alive = np.full(programs, self.threads)
        # Barriers passed: by each program, and by each warp (its own too).
        self.passed = np.zeros(programs, dtype=np.int32)
        self.warp_passed = np.zeros(self.total // WARP, dtype=np.int32)
        self.shadow = shadow
        self.shared_bytes, self._shared_room = shared_bytes, -(-shared_bytes // 16) * 16
        self.shared = views_of(np.full(programs * self._shared_room, 0xCB, dtype=np.uint8))
        self.shared_shadow = Shadow(programs * self._shared_room, self.threads)
        self.pc = 0

    def typed(self, name: str, dtype: Any) -> Array:
        key = name, dtype
        found = self._typed.get(key)
        if found is None:
            raw = self._registers.get(name)
            if raw is None:
                width = self.kernel.widths[re.fullmatch(r"%([a-z]+)\d+", name)[1]]  # type: ignore[index]
                kind = _BOOL if width == 1 else np.dtype(RAW[width])
                raw = self._registers[name] = np.full(self.total, _POISON[kind], dtype=kind)
            found = self._typed[key] = raw if dtype is _BOOL else raw.view(dtype)
        return found

    def count(self, w: Any) -> int:
        return self.total if isinstance(w, slice) else len(w)

    def error(self, each: Instruction, why: str, thread: int | None = None) -> PtxError:
        who = ""
        if thread is not None:
            who = f", program {self.first + thread // self.threads} thread {thread % self.threads}"
        return PtxError(f"{self.kernel.name}: {why}{who}; {each.text}; at {each.where}")

    def whole_warps(self, w: Any, each: Instruction) -> None:
        if not isinstance(w, slice) and (
            len(w) % WARP or not (w.reshape(-1, WARP) == w[::WARP, None] // WARP * WARP + np.arange(WARP)).all()
        ):
            raise self.error(each, "some threads of a warp are not here")

    def _now(self, threads: Array) -> Array:
        return np.stack([self.passed[threads // self.threads], self.warp_passed[threads // WARP]])

    def _expanded(self, places: Array, nbytes: int, threads: Array) -> tuple[Array, Array, Array]:
        return (
            (places[:, None] + np.arange(nbytes)).reshape(-1),
            np.repeat(threads + self.first * self.threads, nbytes),
            np.repeat(self._now(threads), nbytes, axis=1),
        )

    def _resolve(
        self, space: str, addresses: Array, nbytes: int, threads: Array, each: Instruction, write: bool
    ) -> tuple[Any, Any, Any, Any]:
        """Views, index of bytes in them, and shadow with the places there (of those that it has)."""
        if space == "global":
            self.memory.prepare()
            nth, bad, why = self.memory.find(addresses, nbytes, write=write)
            if bad >= 0:
                raise self.error(each, f"access: {why}", int(threads[bad]))
            at = (addresses - np.uint64(self.memory.base)).astype(np.int64)
            if self.shadow is None:
                return self.memory.views, at, None, None
            in_shadow = self.memory.write[nth]
            places = (addresses - self.memory.begins[nth]).astype(np.int64) + self.memory.shadow_begin[nth]
            return self.memory.views, at, self.shadow, (places, in_shadow)
        bad_ones = addresses + np.uint64(nbytes) > np.uint64(self.shared_bytes)
        bad_ones |= addresses % np.uint64(nbytes) != 0
        if bad_ones.any():
            bad = int(bad_ones.argmax())
            why = f"shared: address {int(addresses[bad])} of {self.shared_bytes} bytes"
            raise self.error(each, why, int(threads[bad]))
        at = addresses.astype(np.int64) + (threads // self.threads) * self._shared_room
        return self.shared, at, self.shared_shadow, (at, np.ones(len(at), dtype=bool))

    def load(self, space: str, addresses: Array, item: int, lanes: int, w: Any, each: Instruction) -> Array:
        threads, nbytes = self.index[w], item * lanes
        views, at, shadow, places = self._resolve(space, addresses, nbytes, threads, each, False)
        if shadow is not None and (chosen := places[1]).any():
            there, who, now = self._expanded(places[0][chosen], nbytes, threads[chosen])
            if space == "shared" and (shadow.writer[there] < 0).any():
                bad = int((shadow.writer[there] < 0).argmax())
                raise self.error(each, "shared: never written", int(who[bad]) - self.first * self.threads)
            bad = shadow.read(there, who, now)
            if bad >= 0:
                raise self.error(
                    each,
                    f"race: reads what thread {shadow.writer[there[bad]] % self.threads} of program "
                    f"{shadow.writer[there[bad]] // self.threads} wrote",
                    int(who[bad]) - self.first * self.threads,
                )
        loaded: Array = views[item][at[:, None] // item + np.arange(lanes)]
        return loaded

    def store(self, space: str, addresses: Array, value: Array, w: Any, each: Instruction) -> None:
        threads, item, lanes = self.index[w], value.dtype.itemsize, value.shape[1]
        nbytes = item * lanes
        views, at, shadow, places = self._resolve(space, addresses, nbytes, threads, each, True)
        slots = at[:, None] // item + np.arange(lanes)
        views[item][slots] = value
        if shadow is not None:
            there, who, now = self._expanded(places[0], nbytes, threads)
            bad, double = shadow.write(there, who, now)
            if bad >= 0:
                why = "race: writes what another thread has read or written"
                raise self.error(each, why, int(who[bad]) - self.first * self.threads)
            if double.any() and not (views[item][slots] == value).all():
                raise self.error(each, "stores: several threads store different values in one place")

    def run(self) -> None:
        kernel, steps = self.kernel, self.kernel.steps
        parked: dict[int, Array | None] = {0: None}  # threads by the instruction that they wait at; None: all of them
        while parked:
            pc = min(parked)
            who = parked.pop(pc)
            while True:
                if pc in parked:
                    other = parked.pop(pc)
                    who = self._merged(who, other)
                if pc >= len(steps):
                    raise PtxError(f"{kernel.name}: the end without ret")
                each = kernel.code[pc]
                where: Any = slice(None) if who is None else who
                kernel.executed[pc] += self.count(where)
                if each.guard is not None:
                    held = self.typed(each.guard[0], _BOOL)[where] ^ each.guard[1]
                    some, every = bool(held.any()), bool(held.all())
                else:
                    held, some, every = None, True, True
                name = each.operation.partition(".")[0]
                if name == "bra":
                    target = kernel.labels[each.operands[0]]
                    if some and not every:
                        everyone = self.index[where]
                        self._park(parked, target, everyone[held])
                        self._park(parked, pc + 1, everyone[~held])
                        break
                    pc = target if some else pc + 1
                elif name == "ret":
                    if each.guard is not None and not every:
                        raise self.error(each, "some threads end earlier")
                    np.subtract.at(self.alive, self.index[where] // self.threads, 1)
                    break
                elif name == "bar":
                    if each.operation == "bar.sync":
                        self._barrier(where, each)
                    else:
                        self.whole_warps(where, each)
                        self.warp_passed[np.unique(self.index[where] // WARP)] += 1
                    pc += 1
                else:
                    if every:
                        steps[pc](self, where)
                    elif some:
                        steps[pc](self, self.index[where][held])
                    pc += 1
                if parked and min(parked) < pc:
                    self._park(parked, pc, who)
                    break

    def _merged(self, one: Array | None, other: Array | None) -> Array | None:
        assert one is not None and other is not None
        both = np.sort(np.concatenate([one, other]))
        return None if len(both) == self.total else both

    def _park(self, parked: dict[int, Array | None], pc: int, who: Array | None) -> None:
        parked[pc] = self._merged(who, parked[pc]) if pc in parked else who

    def _barrier(self, where: Any, each: Instruction) -> None:
        programs, here = np.unique(self.index[where] // self.threads, return_counts=True)
        if (here != self.alive[programs]).any():
            raise self.error(each, "convergence: some threads of a program have not come to a barrier")
        self.passed[programs] += 1
        self.warp_passed[np.unique(self.index[where] // WARP)] += 1


def run(
    kernel: Kernel,
    programs: int,
    values: Sequence[int | float],
    memory: Memory,
    shared_bytes: int = 0,
    *,
    together: int = 64,
    races: bool = True,
) -> None:
    """Runs a launch of `programs` programs.

    Args:
        kernel: from `parse`.
        programs: how many.
        values: of the kernel's parameters: addresses and numbers, Triton's two scratch pointers included.
        memory: what may be accessed.
        shared_bytes: dynamic shared memory of a program.
        together: programs that run side by side.
        races: look for races between threads, in global memory too.

    Raises:
        PtxError: what `support.emulator` lists.
    """
    if len(values) != len(kernel.parameters):
        raise PtxError(f"{kernel.name} takes {len(kernel.parameters)} parameters, got {len(values)}")
    packed = np.zeros(len(values), dtype=np.uint64)
    for nth, (value, (_, kind)) in enumerate(zip(values, kernel.parameters, strict=True)):
        if kind[0] == "f":
            packed[nth] = int.from_bytes(struct.pack({"f64": "<d", "f32": "<f"}[kind], value), "little")
        else:
            packed[nth] = int(value)
    shadow = Shadow(memory.shadow_bytes(), kernel.threads) if races else None
    with np.errstate(all="ignore"):
        for first in range(0, programs, together):
            count = min(together, programs - first)
            _Machine(kernel, first, count, packed, memory, shared_bytes, shadow).run()
