"""Ray workers that fork from one process that has imported torch and the like, instead of each importing it all.

verl on a CPU has some eight actors, each in a process of its own, and each spends 5 to 13 s of a processor on imports.
That is most of a short run. With `preloaded`, one process imports what they share, and Ray starts its workers by this
file as their ``py_executable``: it hands on what Ray wants to be run, and the process that has imported forks a worker.

The file is also the program of both processes, and imports nothing but a few modules of Python's own at its top.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterable, Iterator

__all__ = ["preloaded"]

MODULES = (
    "aiohttp",
    "datasets",
    "fastapi",
    "peft",
    "tensordict",
    "torch._inductor.lowering",
    "torchdata.stateful_dataloader",
    "transformers.modeling_utils",
    "transformers.processing_utils",
    "vllm.distributed",
)
"""What is dear in what verl imports. None may import Ray: it reads a worker's environment while it is imported."""

_FDS = 3
"""Standard input, output and error are the worker's own."""


Request = tuple[list[str], dict[str, str], str]
"""What Ray wants to be run: arguments for Python, environment, directory."""


@contextlib.contextmanager
def preloaded(modules: Iterable[str] = MODULES) -> Iterator[str]:
    """Start to import, without waiting for it, and yield what Ray's ``py_executable`` must be.

    Environment variables that count while one of ``modules`` is imported are those of now. The process ends with the
    context, or with this process, however that ends; the workers are Ray's to end. A worker that does not reach the
    process (on another machine, say) starts as it would have without it.
    """
    import secrets
    import shlex
    import subprocess

    name = f"reward-loop-preload-{os.getpid()}-{secrets.token_hex(8)}"
    followed, held = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        # A name without a file: nothing is left behind. Who may connect is checked below.
        listener.bind(f"\0{name}")
        listener.listen(128)
        fds = (listener.fileno(), followed)
        process = subprocess.Popen(
            # -P: this file's directory, or the current one, must not come before the standard library.
            [sys.executable, "-P", "-m", __name__, "serve", *map(str, fds), *modules],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is for the trainer, which ends the workers in order
        )
    os.close(followed)
    try:
        yield shlex.join([sys.executable, "-I", "-S", __file__, "ask", name])
    finally:
        os.close(held)
        process.wait()


def _serve(listener: socket.socket, lifeline_fd: int) -> Request | None:
    """Fork a worker for each request, until the lifeline is cut. In a worker, return its request."""
    import gc
    import select
    import signal

    # What was imported stays: a collection in a worker need not go over it, which would also copy the memory.
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    poll = select.poll()
    poll.register(lifeline_fd, 0)
    poll.register(listener, select.POLLIN)
    while True:
        if any(fd == lifeline_fd for fd, _ in poll.poll()):
            return None
        client, _ = listener.accept()
        request, fds = _receive(client)
        if request is not None and os.fork() == 0:
            # Where a worker dies, Ray kills its process group: that must not be the other workers'.
            os.setpgid(0, 0)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(lifeline_fd)
            listener.close()
            for target, fd in enumerate(fds):
                os.dup2(fd, target)
                os.close(fd)
            client.detach()  # stays open as long as the worker lives: that is how the asker knows
            return request
        client.close()
        for fd in fds:
            os.close(fd)


def _receive(client: socket.socket) -> tuple[Request | None, list[int]]:
    import struct

    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    if struct.unpack("3i", credentials)[1] != os.getuid():
        return None, []
    data, fds, _, _ = socket.recv_fds(client, 65536, _FDS)
    parts = [data]
    while part := client.recv(65536):
        parts.append(part)
    try:
        return json.loads(b"".join(parts)), fds
    except ValueError:  # the asker died before it had said all
        return None, fds


def _become(request: Request) -> None:
    """Run what Ray wanted to be run, as if this were a new interpreter."""
    import random
    import runpy

    import numpy as np

    arguments, environment, directory = request
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    while arguments[0].startswith("-"):  # Python's own flags
        arguments = arguments[1:]
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(arguments[0]))
    # Workers must not draw the same numbers.
    random.seed()
    np.random.seed()
    runpy.run_path(arguments[0], run_name="__main__")


def _ask(name: str, arguments: list[str]) -> None:
    """Have a worker forked, and stay as long as it lives."""
    request: Request = (arguments, dict(os.environ), os.getcwd())
    message = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(f"\0{name}")
            sent = socket.send_fds(server, [message], list(range(_FDS)))
            server.sendall(message[sent:])
            server.shutdown(socket.SHUT_WR)
            server.recv(1)
        except OSError:
            os.execv(sys.executable, [sys.executable, *arguments])


def _main() -> None:
    if sys.argv[1] == "ask":
        _ask(sys.argv[2], sys.argv[3:])
        return
    import importlib

    for module in sys.argv[4:]:
        with contextlib.suppress(ImportError):  # the worker says it, if it matters
            importlib.import_module(module)
    request = _serve(socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]))
    if request is not None:
        _become(request)


if __name__ == "__main__":
    _main()
