"""HookTrace: a trace of torch's own DDP with `fused_hook`, as the hook sees it.

A comm hook sees buckets, not the begin of backward: time 0 is when the first gradient is ready, and backward ends when
the last bucket comes. Parameters have no names; they are numbered from the last bucket's last one on, the reverse of
the order of readiness, which is usually the order of registration. The first step of a trace shows which parameters
there are; they have autograd hooks from the second step on, until the trace ends.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..buckets.parameters import Parameters
from ..comm.protocol import Communicator
from ..comm.waiting import wait_for
from ..config import ReduceConfig, wire_bytes
from ..planning.bucketing import BucketCaps
from ..planning.plan import Plan
from ..planning.readiness import Readiness
from ..planning.timeline import MISSING_NS
from ..reducer.parameter_hooks import ParameterHooks
from ..trace.device_clock import Watched
from ..trace.recorder import Parameter, Recorder, group_text, header
from ..trace.step_profile import StepProfile

_logger = logging.getLogger(__name__)


class HookTrace:
    """Records the steps of one FusedHookState.

    Args:
        folder: where the file is written.
        config: the state's options.
        rank: of this process in the state's group.
        ranks: size of that group.
        limit: number of steps to keep.
    """

    def __init__(self, folder: Path, config: ReduceConfig, rank: int, ranks: int, limit: int) -> None:
        self._folder, self._config, self._rank, self._ranks, self._limit = folder, config, rank, ranks, limit
        self._seen: list[tuple[torch.Tensor, ...]] = []
        self._shown: list[tuple[torch.Tensor, ...]] = []
        self._sparse: set[int] = set()
        self._plan: Plan = ()
        self._profile: StepProfile | None = None
        self._communicator: Communicator | None = None
        self._begun = False
        self._ended = False
        self._backward = -1  # the one that ended
        self._hooks: ParameterHooks | None = None
        self._readiness: Readiness | None = None
        self._recorder: Recorder | None = None
        self._step = 0
        self._recorded = 0

    def shown(self, bucket: int, parameters: Sequence[torch.Tensor], *, sparse: bool) -> None:
        """Called when the hook receives a bucket. For a sparse or empty one nothing else is recorded."""
        if self._ended:
            self._next_step()
        if bucket == 0:
            self._shown = []
        self._shown.append(tuple(parameters))
        if sparse:
            self._sparse.update(map(id, parameters))
        if self._profile is not None and bucket < len(self._plan):
            self._begin(self._profile)
            self._profile.enter()
            self._profile.bucket_ready(bucket)
            self._profile.pack(bucket)

    def launched(self, bucket: int, watched: Watched, issued_ns: int, communicator: Communicator) -> None:
        """Called when the bucket's collective has been issued."""
        self._communicator = communicator
        if self._profile is not None and bucket < len(self._plan):
            self._profile.launched(bucket, watched, issued_ns)
            self._profile.leave()

    def unpack(self, bucket: int) -> None:
        """Called when the bucket's collective has ended and unpacking begins, on any thread."""
        if self._profile is not None and bucket < len(self._plan):
            self._profile.unpack(bucket)

    def unpacked(self, bucket: int) -> None:
        """Called when the bucket has been unpacked."""
        if self._profile is not None and bucket < len(self._plan):
            self._profile.unpacked(bucket)

    def last_shown(self) -> None:
        """Called with the last bucket: backward is complete but for DDP's final callback."""
        self._ended = True
        self._backward = torch._C._current_graph_task_id()
        if self._profile is not None:
            self._profile.backward_ended()

    def write(self) -> None:
        """Removes the hooks, and writes the file if a whole step was recorded."""
        if self._ended:
            self._next_step()
        if self._hooks is not None:
            self._hooks.remove()
        if self._recorder is None or self._readiness is None or not self._recorded:
            _logger.warning(
                "no step was recorded: a trace needs three steps in which the FusedHookState serves one DDP module, "
                "whose buckets do not change"
            )
        if self._recorder is not None and self._readiness is not None:
            self._recorder.write(None, self._readiness.best().tolist())

    def on_gradient(self, index: int) -> None:
        """Called when a gradient is ready; after DDP's own hook, so the last bucket may have come already."""
        if self._ended and self._backward != torch._C._current_graph_task_id():
            self._next_step()
        elif self._profile is not None and not self._ended and self._profile.ready_ns[index] != MISSING_NS:
            self._arm()  # the gradients before this one came from a backward under no_sync
        if self._profile is not None:
            self._begin(self._profile)
            self._profile.enter()
            self._profile.gradient_ready(index)

    def _next_step(self) -> None:
        """Keeps the step that has ended, now that another begins."""
        self._ended = False
        self._step += 1
        if self._same(self._shown, self._seen):
            looked = self._profile
            if looked is not None and self._readiness is not None and self._recorder is not None:
                whole = MISSING_NS not in looked.ready_ns
                if whole:
                    self._readiness.add(looked.ready_ns, looked.device_ready_times_ns())
                self._recorded += 1
                self._recorder.add(self._step, self._plan, looked.best_marks(), looked.ready_ns if whole else None)
        else:
            self._learn()
        self._arm()

    def _arm(self) -> None:
        """Prepares for the first gradient of a backward."""
        self._begun = False
        if self._seen:
            parameters = [one for members in self._seen for one in members]
            devices = {one.device for one in parameters}
            device = devices.pop() if len(devices) == 1 else None
            self._profile = StepProfile(len(parameters), len(self._plan), device, self._wait)

    def _begin(self, profile: StepProfile) -> None:
        if not self._begun:
            self._begun = True
            profile.backward_began()

    def _wait(self, watched: Any) -> None:
        assert self._communicator is not None, "a collective has been launched"
        wait_for(watched, "the collective whose end is timed", self._communicator)

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
        self._readiness = Readiness(len(parameters))
        self._hooks = ParameterHooks(self, Parameters(tuple(parameters)), _gradient_hook)
        self._recorder = Recorder(self._folder, self._header(parameters), self._limit)

    def _header(self, parameters: Sequence[torch.Tensor]) -> dict[str, Any]:
        return header(
            source="hook",
            rank=self._rank,
            ranks=self._ranks,
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

    @staticmethod
    def _same(one: Sequence[Sequence[torch.Tensor]], other: Sequence[Sequence[torch.Tensor]]) -> bool:
        return len(one) == len(other) and all(
            len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True)) for a, b in zip(one, other, strict=True)
        )


def _gradient_hook(trace: weakref.ref[HookTrace], index: int) -> Callable[[object, object], None]:
    def hook(_inputs: object, _outputs: object) -> None:
        alive = trace()
        if alive is not None:
            alive.on_gradient(index)

    return hook
