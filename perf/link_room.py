"""Process 1 of the namespaces: starts the ranks, joins them by a network, sets its rate, and has them measure.

What it has to do comes on stdin, a JSON object; what it finds goes out through the pipe that `--replies` names, a JSON
object a line, each as soon as it is there: a run that reaches its limit keeps what it has. It imports no torch, for
whose sake ranks would wait.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import link_bound
import link_network
from link_network import LinkError, Network

RANK = Path(__file__).with_name("link_rank.py")


class _Started:
    """One rank's process, and the pipe on which it answers."""

    def __init__(self, rank: int, ranks: int, core: int) -> None:
        self.rank = rank
        read, write = os.pipe()
        self.process = subprocess.Popen(
            link_network.rank_command(RANK),
            stdin=subprocess.PIPE,
            text=True,
            pass_fds=[write],
            env={**os.environ, **link_network.rank_environment(rank, ranks)},
        )
        os.close(write)
        self.replies = os.fdopen(read)
        self.tell({"replies": write, "core": core})

    def tell(self, command: Mapping[str, object]) -> None:
        """One line; a rank that is gone is noticed by the answer that it does not give."""
        assert self.process.stdin is not None
        try:
            print(json.dumps(command), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            return

    def answer(self) -> Any:
        """Its next.

        Raises:
            LinkError: it says so, or it is gone.
        """
        line = self.replies.readline()
        if not line:
            status = self.process.wait()
            raise LinkError(f"rank {self.rank} is gone, with status {status}; what it wrote is above")
        said = json.loads(line)
        if "error" in said:
            raise LinkError(said["error"])
        return said["ok"]


class Ranks:
    """The ranks and their network.

    Args:
        cores: one per rank; with fewer cores than ranks some stand there twice.
    """

    def __init__(self, cores: Sequence[int]) -> None:
        self._ranks = [_Started(rank, len(cores), core) for rank, core in enumerate(cores)]
        self._answers()
        self._network = Network([started.process.pid for started in self._ranks])
        for started in self._ranks:
            started.tell({"network": True})
        self._answers()

    def shape(self, rate_mbit: float | None) -> None:
        """From now on links have this rate."""
        self._network.shape(rate_mbit)

    def ask(self, command: Mapping[str, object]) -> list[Any]:
        """What all ranks answer, by rank."""
        for started in self._ranks:
            started.tell(command)
        return self._answers()

    def end(self) -> None:
        """Ends them and waits for each: only then is the time that it had of the cores this process's own.

        What is left to the kernel, which ends them with this process, would pass for other work in the record.
        """
        for started in self._ranks:
            started.process.kill()
        for started in self._ranks:
            started.process.wait()

    def _answers(self) -> list[Any]:
        """Whoever fails first is heard, though another may wait for it without end."""
        answers: dict[int, Any] = {}
        with selectors.DefaultSelector() as selector:
            for started in self._ranks:
                selector.register(started.replies, selectors.EVENT_READ, started)
            while len(answers) < len(self._ranks):
                for key, _ in selector.select():
                    answers[key.data.rank] = key.data.answer()
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in sorted(answers)]


def work(jobs: Sequence[Mapping[str, Any]], ranks: Ranks, out: TextIO) -> None:
    """Does one job after the other, each {"rate_mbit": ..., "command": a rank's}.

    At each new rate the raw stream is measured from every rank, and every command is told of the quickest.
    """
    for rate_mbit, at_this_rate in itertools.groupby(jobs, key=lambda job: job["rate_mbit"]):
        ranks.shape(rate_mbit)
        each = ranks.ask({"do": "raw"})
        _say(out, {"rate_mbit": rate_mbit, "raw": each})
        link = dataclasses.asdict(link_bound.quickest(rate_mbit, each))
        for job in at_this_rate:
            answers = ranks.ask({**job["command"], "link": link})
            _say(out, {"job": job, "answers": answers})


def _say(out: TextIO, said: Mapping[str, object]) -> None:
    print(json.dumps(said), file=out, flush=True)


def main() -> int:
    """Until all is done, or something is wrong."""
    settings = json.loads(sys.stdin.readline())
    with os.fdopen(int(sys.argv[1]), "w") as out:
        try:
            ranks = Ranks(settings["cores"])
            try:
                work(settings["jobs"], ranks, out)
            finally:
                ranks.end()
        except LinkError as error:
            _say(out, {"error": str(error)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
