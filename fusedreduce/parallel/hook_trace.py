"""HookTrace: a trace of torch's own DDP with `fused_hook`, as the hook sees it.

A comm hook is shown buckets, not backward: time 0 is here when the first gradient came, and backward ends when the last
bucket is handed over. Parameters have no names, and are numbered from the last bucket's last one on: against the order
of readiness, as registration usually is. They are hooked while a trace is recorded, from the
second step in it on; the first one shows which there are.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..comm.protocol import Communicator
from ..config import ReduceConfig
from ..planning.bucketing import BucketCaps
from ..planning.plan import Plan
from ..planning.readiness import Readiness
from ..planning.timeline import MISSING_NS
from ..reducer.parameter_hooks import ParameterHooks
from ..trace.device_clock import Watched
from ..trace.recorder import Parameter, Recorder, group_text, header
from ..trace.step_clock import StepClock

_logger = logging.getLogger(__name__)


class HookTrace:
    """Records what one state's buckets do.

    Args:
        folder: where the file goes.
        config: of the state.
        rank: of this process in the state's group.
        ranks: in it.
        limit: steps to keep.
    """

    def __init__(self, folder: Path, config: ReduceConfig, rank: int, ranks: int, limit: int) -> None:
        self._folder, self._config, self._rank, self._ranks, self._limit = folder, config, rank, ranks, limit
        self._seen: list[tuple[torch.Tensor, ...]] = []
        self._shown: list[tuple[torch.Tensor, ...]] = []
        self._sparse: set[int] = set()
        self._plan: Plan = ()
        self._clock: StepClock | None = None
        self._begun = False
        self._ended = False
        self._backward = -1  # the one that ended
        self._hooks: ParameterHooks | None = None
        self._readiness: Readiness | None = None
        self._recorder: Recorder | None = None
        self._step = 0
        self._recorded = 0

    def shown(self, bucket: int, parameters: Sequence[torch.Tensor], *, sparse: bool) -> None:
        """DDP hands a bucket over; of one that is sparse, or has no elements, only that is recorded."""
        if self._ended:
            self._next_step()
        if bucket == 0:
            self._shown = []
        self._shown.append(tuple(parameters))
        if sparse:
            self._sparse.update(map(id, parameters))
        if self._clock is not None and bucket < len(self._plan):
            self._begin()
            self._clock.enter()
            self._clock.bucket_ready(bucket)
            self._clock.pack(bucket)

    def launched(self, bucket: int, watched: Watched, issued_ns: int, communicator: Communicator) -> None:
        """Its collective has been issued."""
        if self._clock is not None and bucket < len(self._plan):
            self._clock.launched(bucket, watched, issued_ns, communicator)
            self._clock.leave()

    def unpack(self, bucket: int) -> None:
        """Its collective has ended; unpacking begins, on whatever thread that is."""
        if self._clock is not None and bucket < len(self._plan):
            self._clock.unpack(bucket)

    def unpacked(self, bucket: int) -> None:
        """Unpacked."""
        if self._clock is not None and bucket < len(self._plan):
            self._clock.unpacked(bucket)

    def last_shown(self) -> None:
        """That was the last bucket: backward is done, but for what DDP does at its end."""
        self._ended = True
        self._backward = torch._C._current_graph_task_id()
        if self._clock is not None:
            self._clock.backward_ended()

    def close(self) -> None:
        """Removes the hooks, and writes the file if any step was seen whole."""
        if self._ended:
            self._next_step()
        if self._hooks is not None:
            self._hooks.remove()
        if self._recorder is None or self._readiness is None or not self._recorded:
            _logger.warning(
                "no step was recorded: a trace needs three steps in which the state serves one DDP module, whose "
                "buckets stay as they are"
            )
        if self._recorder is not None and self._readiness is not None:
            self._recorder.write(None, self._readiness.best().tolist())

    def on_gradient(self, index: int) -> None:
        """A parameter's gradient is there. DDP is told first: the last bucket may have been handed over already."""
        if self._clock is not None:
            if self._ended and self._backward != torch._C._current_graph_task_id():
                self._next_step()
            elif not self._ended and self._clock.has_arrived(index):
                self._arm()  # what came before was a backward under no_sync
            self._begin()
            self._clock.enter()
            self._clock.arrive(index)

    def _next_step(self) -> None:
        """DDP has finished a step, for another begins: keeps it."""
        self._ended = False
        self._step += 1
        if self._same(self._shown, self._seen):
            looked = self._clock.taken() if self._clock is not None else None
            if looked is not None and self._readiness is not None and self._recorder is not None:
                whole = MISSING_NS not in looked.ready_ns
                if whole:
                    self._readiness.add(looked.ready_ns, looked.device_ready_ns())
                self._recorded += 1
                self._recorder.add(self._step, self._plan, looked.finest(), looked.ready_ns if whole else None)
        else:
            self._learn()
        self._arm()

    def _arm(self) -> None:
        """The next gradient is a backward's first."""
        self._begun = False
        if self._clock is not None:
            self._clock.arm(len(self._plan), closely=True, forward_ns=MISSING_NS)

    def _begin(self) -> None:
        if not self._begun and self._clock is not None:
            self._begun = True
            self._clock.begin()

    def _learn(self) -> None:
        """DDP's buckets are new, or are seen for the first time."""
        if self._recorded:
            _logger.warning("DDP's buckets are new: %d steps recorded so far are dropped", self._recorded)
            self._recorded = 0
        if self._hooks is not None:
            self._hooks.remove()
        self._seen = list(self._shown)
        parameters = [one for members in self._seen for one in members][::-1]
        number = {id(one): index for index, one in enumerate(parameters)}
        self._plan = tuple(tuple(number[id(one)] for one in members) for members in self._seen)
        devices = {one.device for one in parameters}
        self._clock = StepClock(len(parameters), devices.pop() if len(devices) == 1 else None)
        self._readiness = Readiness(len(parameters))
        self._hooks = ParameterHooks(self, parameters, HookTrace.on_gradient)
        self._recorder = Recorder(self._folder, self._header(parameters), self._limit)

    def _header(self, parameters: Sequence[torch.Tensor]) -> dict[str, Any]:
        return header(
            source="hook",
            rank=self._rank,
            ranks=self._ranks,
            device=parameters[0].device.type,
            config=self._config,
            caps=BucketCaps(),  # DDP does not tell a hook its own
            parameters=[
                Parameter(
                    name=f"parameter {index} {tuple(one.shape)}",
                    numel=one.numel(),
                    size_bytes=one.numel() * one.element_size(),
                    wire_bytes=self._config.wire_bytes(one),
                    group=group_text(one.dtype, one.device),
                    alone=id(one) in self._sparse,
                )
                for index, one in enumerate(parameters)
            ],
        )

    @staticmethod
    def _same(one: Sequence[Sequence[torch.Tensor]], other: Sequence[Sequence[torch.Tensor]]) -> bool:
        return len(one) == len(other) and all(
            len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True)) for a, b in zip(one, other, strict=True)
        )
