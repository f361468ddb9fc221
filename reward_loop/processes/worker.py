"""The main loop of a worker process. Calls run one at a time in the main thread, where signals and alarms work."""

from __future__ import annotations

import faulthandler
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

from reward_loop._util.framing import frame, receive_frame
from reward_loop.errors import RewardFunctionError
from reward_loop.processes.invocation import CallOutcome, Invocation, RemoteError, describe_exception

__all__ = [
    "DIED",
    "ENDED",
    "ENDED_LAST",
    "EXIT_BROKEN",
    "STACK_SIGNAL",
    "STARTED",
    "Setup",
    "serve",
    "unpack",
]

STARTED, ENDED, ENDED_LAST, DIED = b"S", b"E", b"L", b"D"
"""The kinds of messages from a worker. The kind is the first byte of the frame:

- `STARTED`: the function starts.
- `ENDED`: the outcome; the worker is idle.
- `ENDED_LAST`: the outcome; the worker exits.
- `DIED`: a `Report` on how the worker died; sent by the fork server.
"""

EXIT_BROKEN = 70
"""The exit status of a worker that failed outside of a call, for instance because it could not send the outcome."""
STACK_SIGNAL = 41
"""A real-time signal, otherwise unused, that makes a worker write its stack."""

processes = 1
"""The maximum number of processes of this function's pool."""

is_worker = False
"""Whether this process is a worker process of a reward function."""

context: Any = None
"""The context that the caller sent with the current call, in addition to its arguments."""

_MAX_ANSWER_MB = 64
_MAX_GROWTH_MB = 1024
"""A worker whose memory has grown by more than this is replaced after its call. Half of ``max_memory_mb`` applies
instead if that is less."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The data that a worker receives before its first call."""

    files: Mapping[str, str]
    """Modules loaded from files, which cannot be imported by name alone: name -> path."""
    function: bytes
    """The pickled function."""
    processes: int
    """The maximum number of processes of the pool."""


def serve(channel: socket.socket, stack_fd: int, max_memory_mb: int | None) -> NoReturn:
    """Run calls until the pool closes its end of the socket, then exit.

    Args:
        channel: the worker's end of the socket pair.
        stack_fd: the file that `faulthandler` writes stacks to.
        max_memory_mb: the memory limit of the worker in 2^20 bytes, enforced by the fork server.
    """
    faulthandler.enable(stack_fd, all_threads=False)
    faulthandler.register(STACK_SIGNAL, stack_fd, all_threads=False)
    max_growth_mb = _MAX_GROWTH_MB if max_memory_mb is None else min(_MAX_GROWTH_MB, max_memory_mb / 2)
    # Opened once: opening this file takes longer than all other work between two calls.
    memory_fd = os.open("/proc/self/statm", os.O_RDONLY)
    pid, folder, had_streams, first_mb = os.getpid(), os.open(".", os.O_PATH), _settle_streams(), None
    fchdir = os.fchdir  # graders that run generated code set it, and other functions of `os`, to None
    function, failure = _load(_receive(channel))
    while True:
        arguments = _receive(channel)
        if failure is None:
            channel.sendall(frame(STARTED))
        outcome = failure or _call(function, arguments)
        if os.getpid() != pid:
            os._exit(0)  # The function forked, and this is the child process.
        # Reset the state that the function may have changed: alarms, working directory, streams.
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        fchdir(folder)
        memory_mb = _memory_mb(memory_fd)
        first_mb = first_mb or memory_mb
        spoiled = _settle_streams() < had_streams or memory_mb - first_mb > max_growth_mb
        channel.sendall(frame(ENDED_LAST if failure or spoiled else ENDED, _pack(outcome)))
        if failure or spoiled:
            os._exit(0)


def unpack(answer: bytes | memoryview) -> CallOutcome:
    """Return the outcome that a worker serialised with `_pack`. Called in the pool's process."""
    content, seconds, error, remote = pickle.loads(answer)
    found = None
    try:
        if content is not None:
            found = pickle.loads(content)
    except Exception as failure:
        error = RewardFunctionError(f"returned a value that cannot be unpickled ({type(failure).__name__}: {failure})")
    if remote is None:
        return CallOutcome(found, None, seconds, error)
    if not isinstance(found, BaseException):
        return CallOutcome(None, remote, seconds)
    try:
        found.__cause__ = remote
    except Exception:  # a frozen dataclass
        return CallOutcome(None, remote, seconds)
    return CallOutcome(None, found, seconds)


def _pack(outcome: CallOutcome) -> bytes:
    """Pickle an outcome. For an exception, always send its `RemoteError`; also send the original if it unpickles."""
    content, error, remote = None, outcome.error, None
    if outcome.exception is not None:
        remote = RemoteError.of(outcome.exception)
        try:
            content = _dumps(outcome.exception)
            pickle.loads(content)  # many exceptions can be pickled but not unpickled
        except Exception:
            content = None
    elif error is None:
        try:
            content = _dumps(outcome.value)
        except Exception as failure:
            kind, why = type(outcome.value).__name__, f"{type(failure).__name__}: {failure}"
            error = RewardFunctionError(f"returned a {kind}, which cannot be sent back from a worker process ({why})")
    if content is not None and len(content) > _MAX_ANSWER_MB << 20:
        if remote is None:
            error = RewardFunctionError(
                f"returned {len(content) >> 20} MB, more than the maximum of {_MAX_ANSWER_MB} MB for a worker process"
            )
        content = None
    return pickle.dumps((content, outcome.seconds, error, remote))


def _dumps(value: Any) -> bytes:
    """Pickle with `pickle`, or by value with `cloudpickle` if that fails, such as for a lambda.

    Raises:
        Exception: the value cannot be pickled.
    """
    try:
        return pickle.dumps(value)
    except Exception:
        import cloudpickle

        return cloudpickle.dumps(value)


def _load(setup: bytes) -> tuple[Callable[..., Any], CallOutcome | None]:
    try:
        made: Setup = pickle.loads(setup)
        global processes, is_worker
        is_worker = True
        processes = made.processes
        sys.meta_path.append(_Files(made.files))
        return pickle.loads(made.function), None
    except BaseException as error:
        problem = f"cannot be loaded in a worker process: {describe_exception(error)}"
        return _load, CallOutcome(None, None, 0.0, RewardFunctionError(problem))


def _call(function: Callable[..., Any], arguments: bytes) -> CallOutcome:
    try:
        global context
        context, kwargs = pickle.loads(arguments)
    except Exception as error:
        problem = f"received arguments that cannot be unpickled in a worker process: {type(error).__name__}: {error}"
        return CallOutcome(None, None, 0.0, RewardFunctionError(problem))
    return Invocation(function, (), kwargs)()


class _Files(importlib.abc.MetaPathFinder):
    """Imports modules from files under the names that `load_function` gave them."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        file = self._files.get(fullname)
        return importlib.util.spec_from_file_location(fullname, file) if file else None


def _settle_streams() -> bool:
    """Restore and flush stdout and stderr; return whether all three standard streams are still open."""
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    try:
        for fd, stream in enumerate((None, sys.stdout, sys.stderr)):
            if stream is not None:
                stream.flush()
            os.fstat(fd)
    except (OSError, ValueError):
        return False
    return True


def _memory_mb(statm_fd: int) -> float:
    """Return the resident memory (in 2^20 bytes) from the open ``/proc/self/statm``."""
    return int(os.pread(statm_fd, 256, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _receive(channel: socket.socket) -> bytes:
    try:
        return receive_frame(channel)
    except EOFError:
        os._exit(0)  # The pool has closed its end.
