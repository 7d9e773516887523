"""Namespaces for ranks on one machine, each with a network interface of its own behind a link of a given rate.

    the command             waits; when it ends, however it ends, the kernel ends everything below
      unshare               a user, a PID and a network namespace; what runs in there ends with it
        the room            process 1 of that PID namespace: makes the bridge, starts the ranks, sets rates
          rank 0, 1, ...    each in a network namespace of its own: eth0, a veth whose other end is in the bridge

No namespace has a name: one lives as long as a process is in it, and process 1 takes all of them along. So nothing is
left behind even where the command is killed: `setpriv --pdeathsig` ends unshare with its parent, `--kill-child` the
room with unshare.

tbf shapes what leaves either end of each veth: what a rank sends, and what it is sent. It counts Ethernet frames, as
the nominal rate of a real link does, of which 95.6 % is payload. TCP's congestion control is cubic, Linux's default,
where the kernel has it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import link_bound

TOOLS = ("unshare", "setpriv", "nsenter", "ip", "tc")
INTERFACE = "eth0"
PORT = 29500  # in rank 0's namespace, where nobody else listens
QUEUE_BYTES = 16 * 2**20  # of tbf; TCP itself keeps what waits there small
CONGESTION_CONTROL = "cubic"
_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_SUBNET = "10.77.0.0/16"
_NAMESPACES = ("--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
_HOW = (
    "this needs user namespaces. As root, or with: sysctl -w user.max_user_namespaces=10000 "
    "kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0 (those that exist); in a "
    "container: --privileged, or --cap-add SYS_ADMIN --cap-add NET_ADMIN --security-opt seccomp=unconfined "
    "--security-opt systempaths=unconfined. Without them, start one rank per machine with torchrun and --here"
)


class LinkError(Exception):
    """There can be no network here; the message is the one line that says why. (Of this file's own: no torch here.)"""


def tool(name: str) -> str:
    """Where a program is; ip and tc lie where an ordinary user's PATH may not lead.

    Raises:
        LinkError: it is not there.
    """
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))
    if found is None:
        package = "iproute2" if name in ("ip", "tc") else "util-linux"
        raise LinkError(f"{name} is not installed: it is in the package {package}")
    return found


def check_allowed() -> None:
    """Whether namespaces can be made here.

    Raises:
        LinkError: a tool is missing, or they cannot; it says how to get them.
    """
    for name in TOOLS:
        tool(name)
    tried = subprocess.run([tool("unshare"), *_NAMESPACES, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        raise LinkError(f"{tried.stderr.strip() or 'unshare failed'}: {_HOW}")


def room_command(script: Path, *arguments: str) -> list[str]:
    """What starts `script` as process 1 of new namespaces, which end with the process that starts it."""
    ends_with_parent = [tool("setpriv"), "--pdeathsig", "KILL"]
    return [*ends_with_parent, tool("unshare"), *_NAMESPACES, sys.executable, str(script), *arguments]


def rank_command(script: Path) -> list[str]:
    """What starts `script` in a network namespace of its own; the process keeps its PID."""
    return [tool("unshare"), "--net", sys.executable, str(script)]


def address(rank: int) -> str:
    """A rank's address on the bridge."""
    return f"10.77.{(rank + 1) // 256}.{(rank + 1) % 256}"


def rank_environment(rank: int, ranks: int) -> dict[str, str]:
    """As torchrun would set it, and by which interface Gloo goes."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # or c10d warns that addresses have no names
    }


class Network:
    """A bridge and a veth per rank, in the namespace of this process.

    Args:
        pids: of the ranks, each in a namespace of its own by now.

    Raises:
        LinkError: the kernel or iproute2 refuses something.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = list(pids)
        _run("ip", "link", "add", "name", "bridge0", "type", "bridge")
        _run("ip", "link", "set", "dev", "bridge0", "up")
        for rank, pid in enumerate(self._pids):
            ours, theirs = f"veth{rank}", f"rank{rank}"
            _run("ip", "link", "add", "name", ours, "type", "veth", "peer", "name", theirs)
            _run("ip", "link", "set", "dev", theirs, "netns", str(pid))
            _run("ip", "link", "set", "dev", ours, "master", "bridge0", "up")
            _run("ip", "link", "set", "dev", theirs, "name", INTERFACE, within=pid)
            _run("ip", "address", "add", f"{address(rank)}/16", "dev", INTERFACE, within=pid)
            _run("ip", "link", "set", "dev", INTERFACE, "up", within=pid)
            _run("ip", "link", "set", "dev", "lo", "up", within=pid)
            if CONGESTION_CONTROL in _AVAILABLE.read_text().split():  # by route: a namespace may not choose its default
                route = (_SUBNET, "dev", INTERFACE, "src", address(rank), "congctl", "lock", CONGESTION_CONTROL)
                _run("ip", "route", "replace", *route, within=pid)

    def shape(self, rate_mbit: float | None) -> None:
        """Every link gets this rate, both ways; None: none is shaped."""
        for rank, pid in enumerate(self._pids):
            for device, within in ((f"veth{rank}", None), (INTERFACE, pid)):
                if rate_mbit is not None:
                    _run("tc", "qdisc", "replace", "dev", device, "root", *tbf(rate_mbit), within=within)
                elif "tbf" in _run("tc", "qdisc", "show", "dev", device, within=within):
                    _run("tc", "qdisc", "delete", "dev", device, "root", within=within)


def tbf(rate_mbit: float) -> list[str]:
    """The token bucket of a link, as tc takes it."""
    burst = link_bound.burst_bytes(rate_mbit)
    return ["tbf", "rate", f"{round(rate_mbit * 1e6)}bit", "burst", str(burst), "limit", str(QUEUE_BYTES)]


def sent_bytes(interface: str = INTERFACE) -> int:
    """What has left through an interface of this process's namespace.

    Raises:
        LinkError: there is no such interface.
    """
    for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise LinkError(f"no network interface {interface!r} here")


def _run(name: str, *arguments: str, within: int | None = None) -> str:
    command = [tool(name), *arguments]
    if within is not None:
        command = [tool("nsenter"), "--target", str(within), "--net", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LinkError(f"{name} {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
