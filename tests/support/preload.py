"""Forks Ray workers from one process with torch and other modules preloaded, so that each worker need not import them.

verl on a CPU has about eight actors, each in its own process, and each spends 5 to 13 s of CPU time on imports. That is
most of a short run. With `preloaded`, one process, the fork server, imports the common modules. Ray starts its workers
with this file as their ``py_executable``. The file sends Ray's command to the fork server, which forks a worker to run
the command.

This file is the program of both processes (``serve`` and ``ask``), so at the top it imports only the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping

MODULES = (
    "aiohttp",
    "datasets",
    "fastapi",
    "google.protobuf.json_format",
    "hydra",
    "jsonschema",
    "math_verify",
    "msgspec",
    "peft",
    "requests",
    "reward_loop.agent",
    "reward_loop.managers.scorer",
    "sympy.parsing.latex",
    "tensordict",
    "torch._inductor.lowering",
    "torchdata.stateful_dataloader",
    "transformers.modeling_utils",
    "transformers.processing_utils",
    "uvicorn",
    "uvloop",
    "vllm.distributed",
)
"""Modules that Ray and verl import and that take long, and the reward loop. None may import Ray: it reads the worker's
environment at import."""

_FDS = 3
"""The number of file descriptors that a request passes: the worker's standard input, output and error."""

_SENDS_WITHIN_S = 5.0
"""Seconds within which a client must go on sending its request. It starts Python normally if it comes later."""


Request = tuple[list[str], dict[str, str], str, int]
"""A command of Ray: arguments for Python, environment, working directory, niceness."""


@contextlib.contextmanager
def preloaded(modules: Iterable[str] = MODULES, *, name: str | None = None) -> Iterator[str]:
    """Start the fork server, without waiting for its imports, and yield the value for Ray's ``py_executable``.

    The modules are imported with the environment variables of this moment. The fork server stops with the context, or
    when this process ends for any reason. Ray stops the workers. A worker that cannot reach the fork server, for
    example on another machine, starts normally.

    Args:
        modules: the modules to preload. Modules that are not installed are skipped.
        name: the name of the fork server's socket. With the same name on every node of a cluster, the value is the same
            on all of them. By default a new name.
    """
    import secrets
    import shlex
    import subprocess

    name = name or f"reward-loop-preload-{os.getpid()}-{secrets.token_hex(8)}"
    followed, held = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        # An abstract socket leaves no file behind. `_receive` checks the user id of each client.
        listener.bind(f"\0{name}")
        listener.listen(128)
        fds = (listener.fileno(), followed)
        process = subprocess.Popen(
            # -P: this file's directory, or the current one, must not come before the standard library.
            [sys.executable, "-P", "-m", __name__, "serve", *map(str, fds), *modules],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C must reach only the trainer, which stops the workers in order
        )
    os.close(followed)
    try:
        # -I -S: `ask` needs only the standard library, and without site-packages it starts faster.
        yield shlex.join([sys.executable, "-I", "-S", __file__, "ask", name])
    finally:
        os.close(held)
        process.wait()


def _serve(listener: socket.socket, parent_pipe: int) -> Request | None:
    """Fork a worker for each request, until the process that started the fork server closes its end of a pipe.

    Returns:
        In a worker, its request; in the fork server, ``None``.
    """
    import gc
    import select
    import signal

    # Exclude the imported objects from collections: scanning them in a worker would also copy the shared memory.
    gc.collect()
    gc.freeze()
    # The kernel reaps the workers: `_ask` finds their end by the closed connection.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    poll = select.poll()
    # No events: the end of a pipe is always reported.
    poll.register(parent_pipe, 0)
    poll.register(listener, select.POLLIN)
    while True:
        if any(fd == parent_pipe for fd, _ in poll.poll()):
            return None
        client, _ = listener.accept()
        request, fds = _receive(client)
        if request is not None and os.fork() == 0:
            # When a worker dies, Ray kills its process group, so each worker needs its own.
            os.setpgid(0, 0)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(parent_pipe)
            # A copy in a worker would outlive the fork server: `_ask` would then wait for an answer that does not come.
            listener.close()
            for target, fd in enumerate(fds):
                os.dup2(fd, target)
                os.close(fd)
            client.detach()  # stays open until the worker ends, which `_ask` waits for
            return request
        client.close()
        for fd in fds:
            os.close(fd)


def _receive(client: socket.socket) -> tuple[Request | None, list[int]]:
    import struct

    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    if struct.unpack("3i", credentials)[1] != os.getuid():
        return None, []
    client.settimeout(_SENDS_WITHIN_S)  # a stopped client must not block the workers of the others
    fds: list[int] = []
    try:
        data, fds, _, _ = socket.recv_fds(client, 65536, _FDS)
        parts = [data]
        while part := client.recv(65536):
            parts.append(part)
        return json.loads(b"".join(parts)), fds
    except (OSError, ValueError):  # the client died, or was stopped, before it had sent the whole request
        return None, fds


def _become(request: Request) -> None:
    """Run Ray's command, as in a new interpreter."""
    import random
    import runpy

    import numpy as np

    # Those of the fork server may be for files, and fail for pipes.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    arguments, environment, directory, niceness = request
    set_environment(environment)
    os.chdir(directory)
    with contextlib.suppress(PermissionError):  # only root may be less nice than the fork server
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    while arguments[0].startswith("-"):  # flags of the interpreter
        arguments = arguments[1:]
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(arguments[0]))
    # Workers must not draw the same random numbers.
    random.seed()
    np.random.seed()
    runpy.run_path(arguments[0], run_name="__main__")


def set_environment(environment: Mapping[str, str]) -> None:
    """Replace the environment of this process, and the folders of ``PYTHONPATH`` on the path of modules."""
    before, after = (variables.get("PYTHONPATH", "").split(os.pathsep) for variables in (os.environ, environment))
    if before != after:
        sys.path[:] = [*filter(None, after), *(entry for entry in sys.path if entry not in before)]
    os.environ.clear()
    os.environ.update(environment)


def _end() -> None:
    """End this process without freeing its objects: that would take 0.6 s, since their memory is copied first."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)  # `forked_program.py` has already reported the status of a program; no other status is read


def _ask(name: str, arguments: list[str]) -> None:
    """Request a forked worker, and wait until it ends. Starts Python normally if there is no fork server."""
    request: Request = (arguments, dict(os.environ), os.getcwd(), os.nice(0))
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
    import atexit
    import importlib

    atexit.register(_end)  # the first one is called last
    for module in sys.argv[4:]:
        with contextlib.suppress(ImportError):  # a worker that needs the module raises the error
            importlib.import_module(module)
    request = _serve(socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]))
    if request is not None:
        _become(request)


if __name__ == "__main__":
    _main()
