"""`fusedreduce doctor` on ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import Program, RankPool

from fusedreduce.cli import doctor_ranks
from fusedreduce.comm.process_group import ProcessGroupCommunicator
from fusedreduce.wires import PLAIN_WIRES

untyped: Any = dist  # TCPStore, which torch does not say that it exports

DOCTOR = "import sys; from fusedreduce.cli import main; sys.exit(main(sys.argv[1:]))"


def test_two_ranks_under_torchrun(tmp_path: Path) -> None:
    """As it starts them, with a store of its own: they find each other, one prints, nothing is left to warn of but
    cores."""
    store = untyped.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    place |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    options = ("doctor", "--model", "20M", "--backward-ms", "50", "--json")
    ranks = [
        Program(DOCTOR, *options, environment={**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}, folder=tmp_path)
        for rank in range(2)
    ]
    text, nothing = [rank.printed() for rank in ranks]
    assert not nothing
    found = json.loads(text)
    assert found["ranks"] == len(found["machines"]) == 2
    assert [one["text"] for one in found["findings"] if one["about"] == "ranks"] == [
        "2 of 2 connected, with the same versions"
    ]
    rows = found["link"]["rows"]
    assert [row["bytes"] for row in rows] == [*doctor_ranks.SIZES_BYTES] * 4
    assert [row["wire"] for row in rows[::3]] == [*PLAIN_WIRES, "encoded"]
    for row in rows:  # of two ranks each sends as many bytes as there are
        assert row["gbit_per_s"] == pytest.approx(row["bytes"] * 8 / row["ms"] / 1e6)
    assert found["link"]["latency_us"] > 0
    assert [row["size_mib"] for row in found["forecast"]["rows"]] == pytest.approx(
        [76.29, 38.15, 38.15, 19.43, 10.14], abs=0.05
    )
    assert found["forecast"]["wire"] is None and not found["forecast"]["write"], "loopback is no network"
    assert found["forecast"]["of"] == "20,000,000 fp32 parameters, backward of 50.0 ms"


def exchanged(rank: int, world: int) -> list[tuple[str, int]]:
    """The collectives of 600 bytes on each wire, with the bytes that each is given."""
    seen: list[tuple[str, int]] = []

    class Seen(ProcessGroupCommunicator):
        def all_reduce(self, tensor: torch.Tensor, *arguments: Any) -> Any:
            seen.append(("all-reduce", tensor.nbytes))
            return super().all_reduce(tensor, *arguments)

        def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Any:
            seen.append(("all-to-all", input.nbytes))
            return super().all_to_all(output, input)

        def all_gather(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> Any:
            seen.append(("all-gather", tensor.nbytes))
            return super().all_gather(tensor, into)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor_ranks, "ProcessGroupCommunicator", Seen)
        for wire in ("native", "bf16", "encoded"):
            doctor_ranks.exchange_of(wire, 600, torch.device("cpu"))()
    return seen


def test_two_ranks_gather_what_is_encoded(two: RankPool) -> None:
    assert two.run(exchanged) == [[("all-reduce", 600), ("all-reduce", 600), ("all-gather", 600)]] * 2


def test_three_ranks_exchange_shards_of_what_is_encoded(three: RankPool) -> None:
    expected = [("all-reduce", 600), ("all-reduce", 600), ("all-to-all", 600), ("all-gather", 200)]
    assert three.run(exchanged) == [expected] * 3
