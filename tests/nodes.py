"""Nodes on this machine: Linux namespaces with their own network address, processes, ``/tmp/ray`` and ``/dev/shm``."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "eth0"
"""The name of the network interface, on both nodes."""

_UNSHARE = ("unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")

_FIRST_PROCESS = """
set -e
mount --bind "$1" /tmp/ray
mount -t tmpfs -o size=512m tmpfs /dev/shm
hostname "$2"
ip link set lo up
echo ready
read -r _ || true
"""
"""The first process of a node. It ends when its standard input is closed, and all others of the node end with it."""


def why_no_nodes() -> str | None:
    """Returns why this machine cannot have nodes, or ``None`` if it can."""
    if missing := [name for name in ("unshare", "nsenter", "ip", "mount") if shutil.which(name) is None]:
        return f"two nodes on one machine need {', '.join(missing)} (packages util-linux and iproute2)"
    if os.geteuid() != 0:
        return "two nodes on one machine need root, to make network namespaces"
    command = [*_UNSHARE, "sh", "-c", "mount -t tmpfs tmpfs /dev/shm && ip link add left type veth peer name right"]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if tried.returncode:
        return f"two nodes on one machine need namespaces and veth devices: {tried.stderr.strip()}"
    return None


@dataclass(frozen=True, slots=True)
class Node:
    """One node."""

    address: str
    pid: int
    """The id of its first process."""

    def command(self, *command: str, directory: Path) -> list[str]:
        """Returns the command line that runs ``command`` on this node, in ``directory``."""
        namespaces = ("--net", "--mount", "--uts", "--pid")
        return ["nsenter", f"--target={self.pid}", *namespaces, f"--wdns={directory}", *command]

    def run(self, *command: str, directory: Path) -> str:
        """Runs a command on this node, waits for its end, and returns its output."""
        done = subprocess.run(
            self.command(*command, directory=directory),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def lose(self) -> None:
        """Ends the node like a loss of power: its connections stay open on the other node, and nothing answers."""
        ip = ("nsenter", f"--target={self.pid}", "--net", "ip", "link", "set", INTERFACE, "down")
        subprocess.run(ip, check=True)
        os.kill(self.pid, signal.SIGKILL)


@contextmanager
def two_nodes(directory: Path) -> Iterator[tuple[Node, Node]]:
    """Makes two nodes that are connected by a network of their own.

    The kernel removes their processes, mounts and network when the context ends, or when this process dies.

    Args:
        directory: gets a folder for each node, with what is in its ``/tmp/ray``.
    """
    Path("/tmp/ray").mkdir(exist_ok=True)
    with ExitStack() as open_nodes:
        first, second = (
            open_nodes.enter_context(_node(directory / f"node{number}", f"node{number}", address))
            for number, address in enumerate(ADDRESSES, 1)
        )
        ends = (str(first.pid), "type", "veth", "peer", "name", INTERFACE, "netns", str(second.pid))
        subprocess.run(["ip", "link", "add", INTERFACE, "netns", *ends], check=True)
        for node in (first, second):
            ip = ("nsenter", f"--target={node.pid}", "--net", "ip")
            subprocess.run([*ip, "addr", "add", f"{node.address}/24", "dev", INTERFACE], check=True)
            subprocess.run([*ip, "link", "set", INTERFACE, "up"], check=True)
        yield first, second


@contextmanager
def _node(folder: Path, name: str, address: str) -> Iterator[Node]:
    folder.mkdir(parents=True)
    command = [*_UNSHARE, "bash", "-c", _FIRST_PROCESS, name, str(folder), name]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n", "a node did not start"
        (child,) = psutil.Process(process.pid).children()
        # While this file is open, the network of a lost node stays, and with it the interface of the other node.
        with Path(f"/proc/{child.pid}/ns/net").open():
            yield Node(address, child.pid)
    finally:
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.wait(60)
