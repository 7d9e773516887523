"""One rank of the link benchmark. Started by link_room.py, it does what it reads from stdin, a JSON object a line.

Every answer is a line on the pipe that `replies` names: {"ok": ...}, or {"error": one line}. What is no BenchError ends
the process with its traceback, and the room with it.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import link_bound
import link_network
import link_raw
import link_steps
import link_variants
import torch
import torch.distributed as dist
from records import line_of

from fusedreduce.cli import doctor_ranks

CPU = torch.device("cpu")
GROUP_TIMEOUT = datetime.timedelta(minutes=5)


class Rank:
    """What a rank can be asked for; every rank is asked alike.

    Args:
        interface: whose counters say what was sent; None: not known, and no byte is counted.
        device: of all tensors; on a GPU ranks talk over NCCL.
        store: where ranks find each other; None: at the address that the environment names.
    """

    def __init__(self, interface: str | None, device: torch.device = CPU, store: Any = None) -> None:
        torch.set_num_threads(1)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=GROUP_TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )
        self._interface, self._device = interface, device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def do(self, command: Mapping[str, Any]) -> Any:
        """One command's result, for JSON."""
        what = command["do"]
        if what == "raw":
            return self._raw() if self._device.type == "cpu" else self._alone()
        if what == "steps":
            variants = link_variants.picked(command["variants"])
            steps = link_steps.measure(
                command["model"],
                variants,
                command["rounds"],
                None if command["link"] is None else link_bound.Link(**command["link"]),
                self._sent_bytes,
                device=self._device,
                warmup_rounds=command["warmup_rounds"],
            )
            return dataclasses.asdict(steps)
        raise ValueError(f"a rank cannot {what!r}")

    def _raw(self) -> dict[str, Any]:
        """From this rank to the next; each has its turn, the others wait."""
        found: dict[str, Any] = {}
        addresses = link_raw.all_addresses()
        for sender in range(self.ranks):
            receiver = (sender + 1) % self.ranks
            own, peer = addresses[self.rank], addresses[receiver]
            seen = link_raw.stream(self.rank, sender, receiver, own, peer, link_raw.SIZES_BYTES)
            found = seen or found
        return found

    def _alone(self) -> dict[str, Any]:
        """All-reduces that nothing else runs beside. NCCL finds ways of its own: no stream of bytes is its limit."""
        link = doctor_ranks.measure_link(self._device)
        rates = {row["bytes"]: row["gbit_per_s"] * 1e9 for row in link["rows"] if row["wire"] == "native"}
        return {"rates": rates, "congestion_control": link["backend"]}

    def _sent_bytes(self) -> int:
        return 0 if self._interface is None else link_network.sent_bytes(self._interface)


def main() -> int:
    """Until stdin ends."""
    settings = json.loads(sys.stdin.readline())
    with os.fdopen(settings["replies"], "w") as replies:

        def reply(said: Mapping[str, object]) -> None:
            print(json.dumps(said), file=replies, flush=True)

        os.sched_setaffinity(0, {settings["core"]})
        reply({"ok": None})  # from now on this process has its namespace
        sys.stdin.readline()  # the network is there
        return _serve(reply, settings)


def _serve(reply: Callable[[Mapping[str, object]], None], settings: Mapping[str, Any]) -> int:
    try:
        rank = Rank(link_network.INTERFACE)
        reply({"ok": None})
        for line in sys.stdin:
            reply({"ok": rank.do(json.loads(line))})
    except BaseException as error:
        if (said := line_of(error)) is None:
            raise
        reply({"error": said})
        return 1
    return 0


if __name__ == "__main__":
    # Gloo's threads may outlive the interpreter and abort the process: it ends with nothing taken down.
    status = main()
    sys.stdout.flush()
    os._exit(status)
