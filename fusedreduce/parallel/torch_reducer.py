"""TorchReducer: what torch's DistributedDataParallel calls as its C++ Reducer, on top of a Reducer of this package.

Names, arguments and the order of calls are those of torch's private interface; docs/design.md says what calls which.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo  # unlike torch.compiler.disable it imports torch._dynamo at the first call
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ..buckets.grad_bucket import GradBucket
from ..buckets.parameters import Parameters
from ..comm.local.process_group import communicator_of
from ..reducer.reducer import Reducer
from .ddp_arguments import Settings
from .logging_data import Logger


class TorchReducer:
    """The methods of torch's C++ Reducer that DDP and torch.distributed call, on top of a Reducer of this package.

    Args:
        reducer: does the work.
        ddp: the wrapper; referenced weakly.
        logger: has errors logged before they are raised.
        settings: what it was built from; with None methods of torch's class do not ask for it (see install.py).
    """

    def __init__(self, reducer: Reducer, ddp: TorchDDP, logger: Logger, settings: Settings | None) -> None:
        self.reducer = reducer
        self.settings = settings
        self.outputs: object = None
        self._ddp = weakref.ref(ddp)
        self._logger = logger
        reducer.engine.on_error = logger.set_error_and_log
        reducer.engine.stranger = partial(_stranger, self._ddp, reducer.engine.parameters)

    # A step

    @_disable_dynamo
    def prepare_for_forward(self) -> None:
        """Called by torch before a synchronised forward."""
        try:
            self.reducer.engine.begin_forward()
        except Exception as error:
            self._log(error)
            raise

    @_disable_dynamo
    def _rebuild_buckets(self) -> bool:
        # Called in every forward with gradients, and on a rank that has joined: collectives keep their order here.
        ddp = self._ddp()
        if ddp is not None and not ddp.require_backward_grad_sync:
            self.reducer.expect_local_backward()
        try:
            self.reducer.engine.check_prepared()
            return self.reducer.follow_ranks()
        except Exception as error:
            self._log(error)
            raise

    @_disable_dynamo
    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None:
        """Called by torch after a synchronised forward, with outputs for find_unused_parameters only."""
        found, self.outputs = self.outputs, None
        try:
            self.reducer.prepare_for_backward(outputs if outputs and found is None else found)
        except Exception as error:
            self._log(error)
            raise

    @_disable_dynamo
    def _delay_all_reduce(self) -> None:
        self.reducer.engine.end_first_static_step()

    def _autograd_hook(self, index: int) -> None:
        self.reducer.engine.on_gradient(index)

    def _check_reducer_finalized(self) -> None:
        try:
            self.reducer.check_finalized()
        except Exception as error:
            self._log(error)
            raise

    def get_backward_stats(self) -> list[int]:
        """Time in ns from the end of forward until each parameter's gradient was ready, on the host's clock."""
        return self.reducer.get_backward_stats()

    def _install_post_backward_futures(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        self.reducer.engine.installed.extend(futures)

    # Join

    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        if not use_static_world_size:
            self.reducer.engine.ranks_counted = work

    def _push_all_rebuilt_params(self) -> None:
        """Called by torch after a step without inputs, when `step_without_inputs` has done all."""

    def _get_local_used_map(self) -> torch.Tensor:
        """int32 per parameter: on how many ranks it was used in the latest step; before one, whether on this rank."""
        used = self.reducer.engine.used
        return used.local() if used.last is None else used.last

    # Settings

    def _set_static_graph(self) -> None:
        try:
            self.reducer.set_static_graph()
        except Exception as error:
            self._log(error)
            raise

    def _ddp_graph_static(self) -> bool:
        return self.reducer.engine.unused_always_same

    def _set_optimizer_in_backward(self) -> None:
        self.reducer.leave_gradients_to_hook()

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype) -> None:
        """Allows gradients of `dtype` in fp32 buckets: mixed precision registers a comm hook that casts those."""
        self.reducer.allow_other_dtypes()

    def _run_allreduce_hook(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        ddp = self._ddp()
        assert ddp is not None
        work = dist.all_reduce(bucket.buffer(), group=ddp.process_group, async_op=True)
        assert work is not None
        future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
        return future.then(_first)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self._logger.sample_rate = sample_rate

    def _set_sparse_metadata(self, metadata: Mapping[str, torch.Tensor]) -> None:
        raise NotImplementedError(
            "fusedreduce sums sparse gradients as torch.distributed does; a fixed set of indices is not supported"
        )

    def _remove_autograd_hooks(self) -> None:
        self.reducer.remove_hooks()

    def _reset_state(self) -> None:
        # The caller sets a new process group next. The old one may have failed, so nothing is compared over it.
        self.reducer.give_up_step()

    def _update_process_group(self, group: dist.ProcessGroup) -> None:
        communicator = communicator_of(group)
        ddp: Any = self._ddp()
        if ddp is not None:
            ddp._static_graph_delay_allreduce_enqueued = False  # the first step of a static graph ends once more
        if self.settings is not None:  # for a reducer that is made anew: these ranks have compared nothing yet
            self.settings = dataclasses.replace(self.settings, agreed=None)
        self.reducer.set_communicator(communicator)

    def _log(self, error: Exception) -> None:
        self._logger.set_error_and_log(str(error))


class LocalJoin(Join):
    """torch's Join for one wrapper over a LocalGroup, whose ranks torch.distributed does not know."""

    def _extract_dist_info(self) -> None:
        (ddp,) = self._joinables
        self._process_group, self._device = ddp.join_process_group, ddp.join_device
        self._rank = self._process_group.rank()


def _stranger(wrapper: weakref.ref[TorchDDP], parameters: Parameters, numbers: Sequence[int]) -> str:
    """Names a parameter in whose place the module trains another, if that has a gradient, which nobody has reduced."""
    ddp = wrapper()
    if ddp is None:
        return ""
    known = set(map(id, parameters.tensors))
    # (torch writes ".weight" for a parameter of the outermost module.)
    ignored = {name.removeprefix(".") for name in ddp.parameters_to_ignore}
    trained: set[str] = {name for name, _ in ddp.module.named_parameters()}.difference(ignored)
    for name in sorted({parameters.names[number] for number in numbers} or trained):
        module, _, attribute = name.rpartition(".")
        try:
            found = ddp.module.get_submodule(module)._parameters.get(attribute)
        except AttributeError:  # the submodule is gone
            continue
        if found is not None and id(found) not in known and found.is_leaf and found.grad is not None:
            return name
    return ""


def _first(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]
