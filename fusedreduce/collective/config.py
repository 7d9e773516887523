"""CollectiveConfig: the options of a session, checked when it is made."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from ..comm.local.strategies import Centralized, Ring, Strategy, Tree
from .errors import InvalidConfig
from .node_collectives import is_group

_ADDRESS_OPTIONS = ("global_address", "global_rank", "global_world_size")
# Different on each node.
_NOT_AGREED = ("global_rank",)


@dataclass(frozen=True, kw_only=True)
class CollectiveConfig:
    """The options of a session. Every peer must register with equal values (except `global_rank`).

    Args:
        world_size: number of peers in the LocalGroup or torch.distributed group that they register with; with a global
            group or address besides, the number of local peers on each node.
        strategy: the order of additions of `all_reduce` among local peers.
        reduce_strategy: the order of additions of `reduce`, and of the local part of an `all_reduce` over nodes.
        broadcast_strategy: along which tree a result is copied between local devices.
        timeout_s: seconds for which a peer waits for the others, in registering and in each operation.
        global_group: a torch.distributed group with one member per node, which joins the nodes' local groups.
        global_address: "host:port" at which node 0 listens, instead of a `global_group`: the session then makes its own
            Gloo group. Give all of `global_address`, `global_rank` and `global_world_size`, or none.
        global_rank: this node's number, from 0.
        global_world_size: number of nodes.

    Raises:
        InvalidConfig: with the option, its value, and what is accepted or missing.
    """

    world_size: int = 1
    strategy: Strategy = Tree(2)
    reduce_strategy: Strategy = Tree(2)
    broadcast_strategy: Strategy = Tree(2)
    timeout_s: float = 300.0
    global_group: Any | None = None
    global_address: str | None = None
    global_rank: int | None = None
    global_world_size: int | None = None

    def __post_init__(self) -> None:
        if type(self.world_size) is not int or self.world_size < 1:
            raise InvalidConfig(f"world_size must be an integer of at least 1, got {self.world_size!r}")
        for name in ("strategy", "reduce_strategy", "broadcast_strategy"):
            value = getattr(self, name)
            if not isinstance(value, Centralized | Tree | Ring):
                raise InvalidConfig(f"{name} must be Centralized(), Tree(arity) or Ring(), got {value!r}")
        timeout_s = self.timeout_s
        if type(timeout_s) not in (int, float) or not (math.isfinite(timeout_s) and timeout_s > 0):
            raise InvalidConfig(f"timeout_s must be a positive number of seconds, got {timeout_s!r}")
        self._check_global()

    @property
    def is_global(self) -> bool:
        """Whether a global group or address is given, which joins several nodes."""
        return self.global_group is not None or self.global_address is not None

    def host_and_port(self) -> tuple[str, int]:
        """The host and port at which node 0 listens; only with a `global_address`."""
        assert self.global_address is not None
        host, _, port = self.global_address.rpartition(":")
        return host.removeprefix("[").removesuffix("]"), int(port)

    def to_dict(self) -> dict[str, object]:
        """Returns the options as plain values, for logs and comparison; `global_group` as whether there is one."""
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        strategies = {name: repr(value) for name, value in values.items() if name.endswith("strategy")}
        return {**values, **strategies, "global_group": self.global_group is not None}

    def agreed(self) -> dict[str, object]:
        """Returns the options that must be equal on all peers."""
        return {name: value for name, value in self.to_dict().items() if name not in _NOT_AGREED}

    def _check_global(self) -> None:
        missing = [name for name in _ADDRESS_OPTIONS if getattr(self, name) is None]
        given = [name for name in _ADDRESS_OPTIONS if name not in missing]
        if self.global_group is not None:
            if given:
                raise InvalidConfig(f"global_group and {', '.join(given)} exclude each other: give one or the other")
            if not is_group(self.global_group):
                raise InvalidConfig(f"global_group must be a torch.distributed group, got {self.global_group!r}")
            return
        if given and missing:
            raise InvalidConfig(f"{', '.join(given)} given without {', '.join(missing)}: give all three, or none")
        if not given:
            return
        host, _, port = str(self.global_address).rpartition(":")
        if not isinstance(self.global_address, str) or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise InvalidConfig(f"global_address must be 'host:port', got {self.global_address!r}")
        size, rank = self.global_world_size, self.global_rank
        if type(size) is not int or size < 1:
            raise InvalidConfig(f"global_world_size must be an integer of at least 1, got {size!r}")
        if type(rank) is not int or not 0 <= rank < size:
            raise InvalidConfig(f"global_rank must be an integer from 0 to {size - 1}, got {rank!r}")
