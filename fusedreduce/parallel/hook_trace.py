"""HookTrace: a trace of torch's own DDP with `fused_hook`, as the hook sees it.

A comm hook sees buckets, not the begin of backward: time 0 is when the first gradient is ready, and backward ends when
the last bucket comes. Parameters have no names; they are numbered from the last bucket's last one on, the reverse of
the order of readiness, which is usually the order of registration. The first step of a trace shows which parameters
there are; they have autograd hooks from the second step on, until the trace ends.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from ..buckets.parameters import Parameters
from ..comm.protocol import Communicator
from ..comm.waiting import wait_for
from ..config import ReduceConfig
from ..planning.bucketing import BucketCaps
from ..planning.plan import Plan
from ..planning.readiness import Readiness
from ..planning.timeline import MISSING_NS
from ..reducer.parameter_hooks import ParameterHooks, TakesGradients
from ..trace.recorder import Parameter, Recorder, group_text, header
from ..trace.step_profile import StepProfile
from ..wires import wire_bytes

_logger = logging.getLogger(__name__)


class HookTrace(TakesGradients):
    """Records the steps of one FusedHookState.

    Args:
        folder: where the file is written.
        config: the state's options.
        communicator: of the state's group.
        limit: number of steps to keep.
    """

    def __init__(self, folder: Path, config: ReduceConfig, communicator: Communicator, limit: int) -> None:
        self._folder, self._config, self._communicator, self._limit = folder, config, communicator, limit
        self._shown: list[tuple[torch.Tensor, ...]] = []  # buckets of the step under way
        self._seen: list[tuple[torch.Tensor, ...]] = []  # those of the steps that are recorded
        self._sparse: set[int] = set()
        self._plan: Plan = ()
        self._new_profile: Callable[[], StepProfile] | None = None
        self._profile: StepProfile | None = None
        self._ended_in: int | None = None  # the backward of a step that has ended, until the next one begins
        self._hooks: ParameterHooks | None = None
        self._readiness = Readiness(0)
        self._recorder: Recorder | None = None
        self._step = 0
        self._recorded = 0

    def shown(self, bucket: GradBucket) -> None:
        """Called when the hook receives a bucket. For a sparse or empty one nothing else is recorded."""
        if self._ended_in is not None:
            self._next_step()
        index, buffer, parameters = bucket.index(), bucket.buffer(), bucket.parameters()
        if index == 0:
            self._shown = []
            if self._profile is not None and MISSING_NS not in map(self._profile.ready_ns.__getitem__, self._plan[0]):
                self._profile = None  # of a backward under no_sync: DDP's hook on a parameter runs before this trace's
        self._shown.append(tuple(parameters))
        if buffer.layout is not torch.strided or buffer.numel() == 0:
            self._sparse.update(map(id, parameters))
        self._entered()
        profile = self.profile_of(index)
        if profile is not None:
            profile.bucket_ready(index)
            profile.pack(index)

    def profile_of(self, bucket: int) -> StepProfile | None:
        """Takes the times of a bucket that is being reduced; None: they are not recorded."""
        return self._profile if bucket < len(self._plan) else None

    def last_shown(self) -> None:
        """Called with the last bucket: backward is complete but for DDP's final callback."""
        self._ended_in = torch._C._current_graph_task_id()
        if self._profile is not None:
            self._profile.backward_ended()

    def write(self) -> None:
        """Removes the hooks, and writes the file if a whole step was recorded."""
        if self._ended_in is not None:
            self._next_step()
        if self._hooks is not None:
            self._hooks.remove()
        if not self._recorded:
            _logger.warning(
                "no step was recorded: a trace needs three steps in which the FusedHookState serves one DDP module, "
                "whose buckets do not change"
            )
        if self._recorder is not None:
            self._recorder.write(None, self._readiness.best().tolist())

    def on_gradient(self, index: int) -> None:
        """Called when a gradient is ready; after DDP's own hook, so the last bucket may have come already."""
        ended_in = self._ended_in
        if ended_in is not None and ended_in != torch._C._current_graph_task_id():
            self._next_step()
        elif ended_in is None and self._profile is not None and self._profile.ready_ns[index] != MISSING_NS:
            self._profile = None  # the gradients before this one came from a backward under no_sync
        profile = self._entered()
        if profile is not None:
            profile.gradient_ready(index)

    def _entered(self) -> StepProfile | None:
        """Begins the times of a backward with its first gradient or bucket; None: none are taken yet."""
        if self._profile is None and self._new_profile is not None:
            self._profile = self._new_profile()
        if self._profile is not None:
            self._profile.enter()
        return self._profile

    def _next_step(self) -> None:
        """Keeps the step that has ended, now that another begins."""
        looked, self._profile, self._ended_in = self._profile, None, None
        self._step += 1
        if _ids(self._shown) != _ids(self._seen):
            self._learn()
        elif looked is not None and self._recorder is not None:
            whole = MISSING_NS not in looked.ready_ns
            if whole:
                self._readiness.add(looked.ready_ns, looked.device_ready_times_ns())
            self._recorded += 1
            self._recorder.add(self._step, self._plan, looked.best_marks(), looked.ready_ns if whole else None)

    def _learn(self) -> None:
        """Begins anew with DDP's current buckets: they are the first ones, or have changed."""
        if self._recorded:
            _logger.info("DDP has rebuilt its buckets: the %d steps recorded so far are dropped", self._recorded)
            self._recorded = 0
        if self._hooks is not None:
            self._hooks.remove()
        self._seen = list(self._shown)
        parameters = [one for members in self._seen for one in members][::-1]
        number = {id(one): index for index, one in enumerate(parameters)}
        self._plan = tuple(tuple(number[id(one)] for one in members) for members in self._seen)
        devices = {one.device for one in parameters}
        waits = functools.partial(wait_for, what="the collective whose end is timed", communicator=self._communicator)
        self._new_profile = functools.partial(
            StepProfile, len(parameters), len(self._plan), devices.pop() if len(devices) == 1 else None, waits
        )
        self._readiness = Readiness(len(parameters))
        self._hooks = ParameterHooks(self, Parameters(tuple(parameters)))
        described = header(
            source="hook",
            rank=self._communicator.rank,
            ranks=self._communicator.size,
            device=parameters[0].device.type,
            config=self._config.to_dict(),
            caps=BucketCaps(),  # DDP does not tell a hook its own
            parameters=[
                Parameter(
                    name=f"parameter {index} {tuple(one.shape)}",
                    numel=one.numel(),
                    ndim=one.ndim,
                    size_bytes=one.numel() * one.element_size(),
                    wire=self._config.wire_of(one),
                    wire_bytes=wire_bytes(one, self._config.wire_of(one)),
                    group=group_text(one.dtype, one.device),
                    alone=id(one) in self._sparse,
                )
                for index, one in enumerate(parameters)
            ],
        )
        self._recorder = Recorder(self._folder, described, self._limit)


def _ids(buckets: Sequence[Sequence[torch.Tensor]]) -> list[list[int]]:
    return [list(map(id, members)) for members in buckets]
