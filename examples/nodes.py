"""Nodes on this machine: Linux namespaces with their own network address, processes, ``/tmp/ray`` and ``/dev/shm``."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import psutil

from examples.verl_cpu import ENVIRONMENT

__all__ = ["ROOT", "Node", "RayNodes", "why_no_nodes"]

ROOT = Path(__file__).parents[1]
ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "eth0"
"""The name of the network interface, on both nodes."""
PORT = 6390
"""The port of Ray on the first node."""

DETECTION = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1500",
    "RAY_health_check_failure_threshold": "10",
}
"""A node that does not answer is dead for Ray after 25 s, and one that refuses connections after 10 s. By default, it
takes 65 and 15 s."""

_RAY = {"GLOO_SOCKET_IFNAME": INTERFACE, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": "/tmp", **DETECTION}

_UNSHARE = ("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")

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
    """Return why this machine cannot have nodes, or ``None`` if it can."""
    if missing := [name for name in ("unshare", "nsenter", "ip", "mount") if shutil.which(name) is None]:
        return f"two nodes on one machine need {', '.join(missing)} (packages util-linux and iproute2)"
    if os.geteuid() != 0:
        return "two nodes on one machine need root, to make network namespaces"
    script = "mount -t tmpfs tmpfs /dev/shm && ip link add left type veth peer name right"
    tried = subprocess.run(
        [*_UNSHARE, "--net", "sh", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    if tried.returncode:
        return f"two nodes on one machine need namespaces and veth devices: {tried.stderr.strip()}"
    return None


class Node:
    """One node. A context manager.

    The kernel removes its processes, mounts and network when the context ends, or when this process dies.

    Args:
        name: the host name.
        address: the network address.
        directory: gets a folder with what is in the node's ``/tmp/ray``.
        environment: environment variables of its commands, in addition to those of this process.
    """

    def __init__(self, name: str, address: str, directory: Path, environment: dict[str, str]) -> None:
        self.address = address
        self.lost = False
        self._name = name
        self._directory = directory
        self._environment = environment
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._start()
        # The network exists while this file is open, so it outlives the processes of the node.
        self._open.enter_context(Path(f"/proc/{self._pid}/ns/net").open())
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._open.close()

    def connect(self, other: Node) -> None:
        """Connect the networks of two nodes."""
        ends = (str(self._pid), "type", "veth", "peer", "name", INTERFACE, "netns", str(other._pid))
        subprocess.run(["ip", "link", "add", INTERFACE, "netns", *ends], check=True)
        for node in (self, other):
            node._ip("addr", "add", f"{node.address}/24", "dev", INTERFACE)
            node._ip("link", "set", INTERFACE, "up")

    def command(self, *command: str) -> list[str]:
        """Return the command line that runs ``command`` on this node, in the repository's folder."""
        namespaces = ("--net", "--mount", "--uts", "--pid")
        variables = (f"{name}={value}" for name, value in self._environment.items())
        return ["nsenter", f"--target={self._pid}", *namespaces, f"--wdns={ROOT}", "env", *variables, *command]

    def run(self, *command: str) -> str:
        """Run a command on this node, wait for its end, and return its output.

        Raises:
            RuntimeError: the command failed; the message is its output.
        """
        done = subprocess.run(
            self.command(*command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stdout)
        return done.stdout

    @contextmanager
    def running(self, script: str, *arguments: str) -> Iterator[str]:
        """Run a Python script on this node while the context is open, and yield the first line of its output.

        The script must end when its standard input is closed.
        """
        command = self.command(sys.executable, "-c", script, *arguments)
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            yield process.stdout.readline().strip()

    def lose(self, *, cut: bool) -> None:
        """End all processes of the node.

        Args:
            cut: also cut its network, as a loss of power does: its connections stay open on the other node, and nothing
                answers. Otherwise, connections are closed and refused, as when a container ends.
        """
        if cut:
            self._ip("link", "set", INTERFACE, "down")
        os.kill(self._pid, signal.SIGKILL)
        self._stop()
        self.lost = True

    def _start(self) -> None:
        Path("/tmp/ray").mkdir(exist_ok=True)
        folder = self._directory / self._name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        command = [*_UNSHARE, "--net", "bash", "-c", _FIRST_PROCESS, self._name, str(folder), self._name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"{self._name} did not start")
        (child,) = psutil.Process(self._process.pid).children()
        self._pid = child.pid
        """The id of its first process."""

    def _stop(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait(60)

    def _ip(self, *command: str) -> None:
        subprocess.run(["nsenter", f"--target={self._pid}", "--net", "ip", *command], check=True)


class RayNodes:
    """A Ray cluster of two nodes, for runs of verl on a CPU. A context manager.

    Args:
        directory: gets the folders of the nodes; see `Node`.
        service: a Python script that runs on both nodes; see `Node.running`.
    """

    said = ""
    """The first line of the output of the service."""

    def __init__(self, directory: Path, service: str | None = None) -> None:
        self._service = service
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = ENVIRONMENT | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": path} | _RAY
        self.first, self.second = (
            Node(f"node{number}", address, directory, environment) for number, address in enumerate(ADDRESSES, 1)
        )
        self._open = ExitStack()

    @property
    def ray_address(self) -> str:
        """Ray's address, for programs on the nodes."""
        return f"{self.first.address}:{PORT}"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._open = stack
            for node in (self.first, self.second):
                stack.enter_context(node)
            self.first.connect(self.second)
            for node in (self.first, self.second):
                self._start_service(node)
            _start_ray(self.first, "--head", f"--port={PORT}", "--include-dashboard=false")
            _start_ray(self.second, f"--address={self.ray_address}")
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _start_service(self, node: Node) -> None:
        if self._service is not None:
            self.said = self._open.enter_context(node.running(self._service))


def _start_ray(node: Node, *role: str) -> None:
    resources = ("--num-cpus=16", "--num-gpus=1", f"--object-store-memory={2**27}", "--disable-usage-stats")
    command = (sys.executable, "-m", "ray.scripts.scripts", "start", *resources)
    node.run(*command, f"--node-ip-address={node.address}", *role)
