"""Logger: torch DDP's logging data, under torch's names, as far as they have the same meaning for this reducer.

Times are in ns on the host's clock, for CPU modules only: on CUDA the host only enqueues. Averages are over the sampled
iterations (the first 10, then every `sample_rate`-th), as torch's. With TORCH_DISTRIBUTED_DEBUG=INFO the data are
logged when a wrapper is made, with DETAIL also for each sampled iteration, at level INFO.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping, Sequence

import torch

from ..reducer.reducer import Reducer
from ..reducer.step import StepTimes

_logger = logging.getLogger(__name__)

_ENVIRONMENT = {
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
    "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
    "gloo_socket_ifname": "GLOO_SOCKET_IFNAME",
    "gloo_device_transport": "GLOO_DEVICE_TRANSPORT",
    "nccl_socket_ifname": "NCCL_SOCKET_IFNAME",
    "nccl_blocking_wait": "TORCH_NCCL_BLOCKING_WAIT",
    "nccl_async_error_handling": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "nccl_debug": "NCCL_DEBUG",
    "nccl_nthreads": "NCCL_NTHREADS",
    "nccl_ib_timeout": "NCCL_IB_TIMEOUT",
}
_DTYPE_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
    torch.complex32: "c10::complex<c10::Half>",
}
_ALWAYS_SAMPLED = 10
_DEFAULT_SAMPLE_RATE = 100


class LoggingData:
    """The object that torch's `DistributedDataParallel._get_ddp_logging_data` reads."""

    def __init__(self, strings: Mapping[str, str], integers: Mapping[str, int]) -> None:
        self.strs_map = dict(strings)
        self.ints_map = dict(integers)


class Logger:
    """Collects logging data of one wrapper.

    Args:
        reducer: the wrapper's.
        backend: name of the process group's backend.
        bucket_cap_bytes: as given to the wrapper.
    """

    def __init__(self, reducer: Reducer, backend: str, bucket_cap_bytes: int) -> None:
        # A weak reference, since the reducer references this logger.
        self._weak = weakref.ref(reducer)
        self._strings: dict[str, str] = {"backend_name": backend}
        self._integers: dict[str, int] = {"bucket_cap_bytes": bucket_cap_bytes}
        self._sampled = 0
        self._sums = {"forward": 0, "backward": 0, "comm": 0, "overlap": 0}
        self._seen_steps = 0
        self.sample_rate = _DEFAULT_SAMPLE_RATE

    @property
    def _reducer(self) -> Reducer:
        reducer = self._weak()
        assert reducer is not None, "the wrapper holds both"
        return reducer

    def set_construction_data_and_log(
        self,
        module_name: str,
        device_ids: Sequence[int],
        output_device: int,
        broadcast_buffers: bool,
        has_sync_bn: bool,
        static_graph: bool,
    ) -> None:
        """Collects and logs what is known when the wrapper is built."""
        reducer = self._reducer
        parameters = reducer.parameters
        names = list(dict.fromkeys(_DTYPE_NAMES[parameter.dtype] for parameter in parameters))
        self._strings |= {name: os.environ.get(variable, "N/A") for name, variable in _environment(self._strings)}
        self._strings |= {
            "module_name": module_name,
            "device_ids": ", ".join(map(str, device_ids)),
            "dtypes": ", ".join(names),
            "bucket_sizes": _listed(reducer.bucket_bytes()),
        }
        if static_graph:
            self._integers["static_graph"] = 1
        self._integers |= {
            **self._ranks(),
            "iteration": 0,
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(one.numel() * one.element_size() for one in parameters),
            "output_device": output_device,
            "broadcast_buffers": int(broadcast_buffers),
            "has_sync_bn": int(has_sync_bn),
            "find_unused_parameters": int(reducer.find_unused_parameters),
            "gradient_as_bucket_view": int(reducer.has_views),
            "is_multi_device_module": int(len({one.device for one in parameters}) > 1),
        }
        if self._strings["backend_name"] == "gloo":
            self._integers["gloo_num_threads"] = 2
        if self._debug_level() in ("INFO", "DETAIL"):
            _logger.info(
                "[Rank %d]: DDP Initialized with: %s",
                reducer.communicator.rank,
                _described({**self._integers, **self._strings}),
            )

    def set_bucket_cap_bytes(self, bucket_cap_bytes: int) -> None:
        """Notes another limit of the buckets than the wrapper was given."""
        self._integers["bucket_cap_bytes"] = bucket_cap_bytes

    def set_runtime_stats_and_log(self) -> None:
        """Samples the previous step; called before each synchronised forward."""
        reducer = self._reducer
        steps = reducer.engine.steps
        if steps == self._seen_steps:
            return
        self._seen_steps = steps
        if steps > _ALWAYS_SAMPLED and steps % self.sample_rate:
            return
        self._sampled += 1
        times = reducer.times
        found: dict[str, int] = {
            "iteration": steps,
            "unused_parameter_size": sum(
                reducer.parameters[i].numel() * reducer.parameters[i].element_size() for i in reducer.last_unused
            ),
            "num_buckets_reduced": reducer.engine.buckets_reduced,
        }
        if reducer.last_order:
            self._strings["prev_iteration_grad_ready_order_indices"] = _listed(reducer.last_order)
        found["has_rebuilt_buckets"] = int(reducer.rebuilt)
        if reducer.rebuilt:
            self._strings["rebuilt_bucket_sizes"] = _listed(reducer.bucket_bytes())
            self._strings["rebuilt_per_bucket_param_indices"] = ", ".join(
                " ".join(map(str, members)) for members in reducer.plan
            )
        if reducer.parameters[0].device.type == "cpu":
            found |= self._timings(times)
        self._integers |= found
        if self._debug_level() == "DETAIL":
            _logger.info(
                "[Rank %d / %d] [after iteration %d] Training %s: %s, unused_parameters: %s",
                reducer.communicator.rank,
                reducer.communicator.size,
                reducer.steps,
                self._strings["module_name"],
                _described(found),
                ", ".join(reducer.names[index] for index in reducer.last_unused) or "none",
            )

    def set_error_and_log(self, error: str) -> None:
        """Records an error that is about to be raised."""
        self._integers["has_error"] = 1
        self._strings["error"] = error
        self._integers["iteration"] = self._reducer.steps

    def _get_ddp_logging_data(self) -> LoggingData:
        return LoggingData(self._strings, {**self._integers, **self._ranks()})

    def _ranks(self) -> dict[str, int]:
        """Of the process group of now, which may have replaced the first one."""
        communicator = self._reducer.communicator
        return {"world_size": communicator.size, "rank": communicator.rank}

    def _set_comm_hook_name(self, name: str) -> None:
        self._strings["comm_hook"] = name

    def _set_uneven_input_join(self) -> None:
        self._integers["join_uneven_inputs"] = 1

    def _set_static_graph(self) -> None:
        self._integers["static_graph"] = 1

    def _debug_level(self) -> str:
        return self._strings["torch_distributed_debug"].upper()

    def _timings(self, times: StepTimes) -> dict[str, int]:
        forward = times.backward_start - times.forward_start
        backward = times.backward_end - times.backward_start
        comm = times.comm_end - times.comm_start
        overlap = max(times.backward_end - times.comm_start, 0)
        found = {"forward": forward, "backward": backward, "comm": comm, "overlap": overlap}
        for name, value in found.items():
            self._sums[name] += value
        mean = {name: total // self._sampled for name, total in self._sums.items()}
        return {
            "forward_compute_time": forward,
            "forward_compute_time_start": times.forward_start,
            "backward_compute_time": backward,
            "backward_compute_time_start": times.backward_start,
            "backward_compute_time_end": times.backward_end,
            "backward_comm_time": comm,
            "backward_comm_time_start": times.comm_start,
            "backward_comm_time_end": times.comm_end,
            "backward_compute_comm_overlap_time": overlap,
            "avg_forward_compute_time": mean["forward"],
            "avg_backward_compute_time": mean["backward"],
            "avg_backward_comm_time": mean["comm"],
            "avg_backward_compute_comm_overlap_time": mean["overlap"],
        }


def _environment(strings: Mapping[str, str]) -> list[tuple[str, str]]:
    """Names and variables that torch logs for this backend."""
    skip = "nccl_" if strings["backend_name"] == "gloo" else "gloo_"
    return [(name, variable) for name, variable in _ENVIRONMENT.items() if not name.startswith(skip)]


def _described(data: Mapping[str, object]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in data.items())


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
