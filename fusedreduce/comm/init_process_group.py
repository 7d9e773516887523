"""init_process_group: starts torch.distributed from torchrun's environment, whose values are checked first.

torchrun --nproc-per-node 2 train.py      # sets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK, ...

fusedreduce.init_process_group()          # in train.py: NCCL for CUDA tensors, Gloo for the others

Who starts processes otherwise gives rank and world_size, and sets MASTER_ADDR and MASTER_PORT alone.

Also warns of environment variables for torch's reducer that ours does not follow.
"""

from __future__ import annotations

import datetime
import functools
import logging
import os
import re
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..errors import FusedReduceError

_logger = logging.getLogger(__name__)
_CUDA_BACKEND = "nccl"
_RANKS = ("RANK", "WORLD_SIZE")
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
_LARGEST_PORT = 65535
# More digits than any of these values has; Python refuses to parse thousands of them.
_NUMBER = re.compile(r"-?[0-9]{1,18}", re.ASCII)
_HINT_ADDRESS = (
    "Set the address at which all ranks meet; on one machine MASTER_ADDR=127.0.0.1 and as MASTER_PORT any free port"
)
_HINT = "Start the processes with torchrun, which sets it: torchrun --nproc-per-node 2 SCRIPT"
# By variable: whether its value changes what torch's reducer does, and what ours does instead. (torch 2.13's reducer
# reads one more, TORCH_DISTRIBUTED_DEBUG, which ours follows. Those of process groups apply here too.)
_SWITCHES: dict[str, tuple[Callable[[str], bool], str]] = {
    "DDP_SET_LAST_BUCKET_CAP": (
        lambda value: value == "1",
        "the small first bucket stays the first one; policy='planned', the default, has the last bucket end early too",
    ),
    "DDP_DISABLE_COMM_MEM": (
        lambda value: value != "1",
        "buckets come from torch's caching allocator, not from a memory pool of the backend's",
    ),
}


def warn_of_switches() -> None:
    """Logs, once each, which environment variables change what torch's reducer does and are not followed by ours."""
    for name, (acts, instead) in _SWITCHES.items():
        value = os.environ.get(name)
        if value is not None and acts(value):
            _warn_of_switch(f"{name}={value} is not followed by fusedreduce: {instead}")


@functools.cache
def _warn_of_switch(text: str) -> None:
    _logger.warning(text)


def init_process_group(
    backend: str = "auto",
    *,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: datetime.timedelta | None = None,
) -> None:
    """Initialises torch.distributed's default group from the environment that torchrun sets.

    Where the backend is one for CUDA, LOCAL_RANK becomes the current CUDA device first; without LOCAL_RANK `rank` does,
    where one machine has a device for every rank.

    Args:
        backend: "auto": "cpu:gloo,cuda:nccl" where there is CUDA, else "gloo"; or what
            `torch.distributed.init_process_group` takes, such as "gloo" or "cuda:nccl".
        rank: of this process, in place of RANK; together with `world_size`. Ranks meet at MASTER_ADDR and MASTER_PORT.
        world_size: number of processes, in place of WORLD_SIZE.
        timeout: of the group's collectives; None: torch's default of the backend.

    Raises:
        ValueError: a variable or an argument is missing, not a number or out of range, or there is no such backend;
            nothing has been started.
        FusedReduceError: torch.distributed is initialised already.
    """
    if dist.is_initialized():
        raise FusedReduceError(
            "torch.distributed is initialised already: call init_process_group once per process, or call "
            "torch.distributed.destroy_process_group() first"
        )
    if timeout is not None and not (isinstance(timeout, datetime.timedelta) and timeout > datetime.timedelta()):
        raise ValueError(f"timeout must be a positive datetime.timedelta or None, got {timeout!r}")
    chosen = backend_named(backend)
    given, (rank, size, _) = rank, rank_size_address(rank, world_size)
    choose_device(chosen, size, given)
    # NCCL then connects here, and its barrier need not guess. Where ranks share a device it would refuse, even for CPU
    # tensors alone.
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    own = _CUDA_BACKEND in chosen and local_size <= torch.cuda.device_count()
    device = torch.device("cuda", torch.cuda.current_device()) if own else None
    dist.init_process_group(chosen, timeout=timeout, rank=rank, world_size=size, device_id=device)


def started_device(
    backend: str, rank: int | None, world_size: int | None, group: dist.ProcessGroup | None = None
) -> torch.device:
    """Calls `init_process_group` unless torch.distributed is initialised.

    Args:
        backend: see `init_process_group`; without effect where torch.distributed is initialised.
        rank: see `init_process_group`.
        world_size: see `init_process_group`.
        group: whose backend counts; None: the default group.

    Returns:
        The current CUDA device where the group has NCCL, else the CPU.

    Raises:
        ValueError: as `init_process_group`; or torch.distributed has been initialised with other values.
    """
    if not dist.is_initialized():
        init_process_group(backend, rank=rank, world_size=world_size)
    for name, asked, known in (("rank", rank, dist.get_rank()), ("world_size", world_size, dist.get_world_size())):
        if asked is not None and asked != known:
            raise ValueError(f"{name}={asked!r}, but torch.distributed has been initialised with {name}={known}")
    if _CUDA_BACKEND in dist.get_backend_config(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def rank_size_address(rank: int | None = None, world_size: int | None = None) -> tuple[int, int, tuple[str, int]]:
    """Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Args:
        rank: in place of RANK, together with `world_size`.
        world_size: in place of WORLD_SIZE.

    Returns:
        This process's rank, the number of processes, and the (host, port) of the rendezvous.

    Raises:
        ValueError: a variable or an argument is missing, not a number or out of range.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(
            f"rank={rank!r} and world_size={world_size!r}: give both, or neither to take RANK and WORLD_SIZE from the "
            "environment"
        )
    missing = [name for name in (*(_RANKS if rank is None else ()), *_ADDRESS) if name not in os.environ]
    if missing:
        hint = _HINT if rank is None else _HINT_ADDRESS
        raise ValueError(f"not set in the environment: {', '.join(missing)}. {hint}")
    if rank is None or world_size is None:
        size = _number("WORLD_SIZE", least=1)
        rank = _number("RANK", most=size - 1, why="WORLD_SIZE - 1")
    else:
        size = world_size
        if type(size) is not int or size < 1:
            raise ValueError(f"world_size must be an integer of at least 1, got {size!r}")
        if type(rank) is not int or not 0 <= rank < size:
            raise ValueError(f"rank must be an integer from 0 to {size - 1} (world_size - 1), got {rank!r}")
    if not os.environ["MASTER_ADDR"].strip():
        raise _wrong("MASTER_ADDR", "must be the name or address of rank 0's machine")
    return rank, size, (os.environ["MASTER_ADDR"], _number("MASTER_PORT", least=1, most=_LARGEST_PORT))


def choose_device(backend: str, size: int, rank: int | None = None) -> None:
    """Makes LOCAL_RANK the current CUDA device, where the backend is one for CUDA.

    Args:
        backend: as torch takes it.
        size: number of all processes.
        rank: taken where LOCAL_RANK is missing and this machine has `size` devices or more.

    Raises:
        ValueError: LOCAL_RANK is missing and needed, or is not the number of a CUDA device.
    """
    on_cuda = _CUDA_BACKEND in backend
    if on_cuda and rank is not None and "LOCAL_RANK" not in os.environ and size <= torch.cuda.device_count():
        torch.cuda.set_device(rank)
        return
    number = _local_rank(size, needed=on_cuda and torch.cuda.device_count() > 1)
    if on_cuda:
        _set_device(number)


def local_rank() -> int | None:
    """Reads LOCAL_RANK, this process's number on its machine; None: not set. torch.distributed must be initialised.

    Raises:
        ValueError: it is not a number, or out of range.
    """
    return _local_rank(dist.get_world_size(), needed=False)


def backend_named(asked: str) -> str:
    """A backend's name as torch takes it.

    Args:
        asked: a backend's name, or "auto": Gloo, with NCCL for CUDA tensors where there is CUDA.

    Raises:
        ValueError: torch has no such backend here.
    """
    if asked == "auto":
        return f"cpu:gloo,cuda:{_CUDA_BACKEND}" if torch.cuda.is_available() else "gloo"
    known = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
    names = [part.rpartition(":")[2] for part in asked.lower().split(",")] if isinstance(asked, str) else [""]
    if any(name not in known for name in names):
        raise ValueError(f"unknown backend {asked!r}: use 'auto' or one of {', '.join(map(repr, known))}")
    if _CUDA_BACKEND in names and not torch.cuda.is_available():
        raise ValueError(f"backend {asked!r} needs CUDA, and there is none here: use 'gloo' or 'auto'")
    return asked.lower()


def _local_rank(world_size: int, *, needed: bool) -> int | None:
    """LOCAL_RANK, checked; None where it is not set and nothing depends on it.

    Args:
        world_size: number of all processes.
        needed: whether this process cannot know its CUDA device without it.
    """
    if not needed and "LOCAL_RANK" not in os.environ and "LOCAL_WORLD_SIZE" not in os.environ:
        return None
    if "LOCAL_RANK" not in os.environ:
        raise ValueError(f"not set in the environment: LOCAL_RANK. {_HINT}")
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return _number("LOCAL_RANK", most=world_size - 1, why="WORLD_SIZE - 1")
    local_size = _number("LOCAL_WORLD_SIZE", least=1, most=world_size, why="WORLD_SIZE")
    return _number("LOCAL_RANK", most=local_size - 1, why="LOCAL_WORLD_SIZE - 1")


def _set_device(local_rank: int | None) -> None:
    devices = torch.cuda.device_count()
    if local_rank is not None and local_rank >= devices:
        raise _wrong("LOCAL_RANK", f"is the number of this process's CUDA device, and there are {devices} here")
    torch.cuda.set_device(local_rank or 0)  # None: there is one device only


def _number(name: str, *, least: int = 0, most: int | None = None, why: str = "") -> int:
    """Reads an environment variable that must be a whole number.

    Args:
        name: of the variable, which must be set.
        least: the smallest value that is accepted.
        most: the largest; None: any.
        why: where `most` comes from, for the message.

    Raises:
        ValueError: it is not a whole number, or out of range.
    """
    text = os.environ[name]
    if not _NUMBER.fullmatch(text):
        raise _wrong(name, "is not a whole number")
    value = int(text)
    if value < least:
        raise _wrong(name, f"must be at least {least}")
    if most is not None and value > most:
        raise _wrong(name, f"must be at most {most}{f' ({why})' if why else ''}")
    return value


def _wrong(name: str, what: str) -> ValueError:
    return ValueError(f"{name}={os.environ[name]!r}: {what}. {_HINT}")
