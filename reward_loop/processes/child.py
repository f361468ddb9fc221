"""A process that runs calls of one function, one at a time, in its main thread, where signals and alarms work.

By default it is forked from the template, which has loaded the function, for a single call: what the call changes in
its process ends with it. The random generators start from the key of the call, since all forks of the template would
otherwise draw the same numbers.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pickle
import random
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

from reward_loop._util.framing import frame, receive_frame
from reward_loop._util.portable import portable
from reward_loop.errors import RewardFunctionError
from reward_loop.processes.outcome import CallOutcome, RemoteError, describe_exception, outcome_of

STARTED, ENDED, ENDED_LAST = b"S", b"E", b"L"
"""The kinds of messages to the pool, the first byte of each:

- `STARTED`: the call has started.
- `ENDED`: it has ended, with its outcome.
- `ENDED_LAST`: the same, and the process ends.
"""

EXIT_BROKEN = 70
"""The exit status of a process that failed outside of a call, for instance because it could not send the outcome."""

_is_isolated = False

_MAX_ANSWER_MB = 64


@dataclass(frozen=True, slots=True)
class Setup:
    """What the processes of a function need."""

    name: str
    """The function's name in messages."""
    files: Mapping[str, str]
    """Modules loaded from files, which cannot be imported by name alone: name -> path."""
    function: bytes
    """The pickled function."""
    calls: int | None
    """The number of calls of a process that is forked from the template; ``None``: each process loads the function
    itself, and runs calls until it is killed."""
    max_memory_mb: int | None
    """The largest memory of a process with its descendants, in 2^20 bytes, in addition to that of the template."""


@dataclass(frozen=True, slots=True)
class Request:
    """One call."""

    arguments: bytes
    """The pickled keyword arguments."""
    timeout: float | None
    """Seconds from the start of the call to its deadline."""
    key: str
    """The seed of the random generators."""


Function = Callable[..., Any] | RewardFunctionError
"""The loaded function, or why it could not be loaded."""


def in_isolated_call() -> bool:
    """Return whether this process runs calls of an isolated function, or was forked by one."""
    return _is_isolated


def load(setup: Setup) -> Function:
    """Import the function's module, and make its object."""
    # Before the function, whose module may be one of these files.
    sys.meta_path.append(_Files(setup.files))
    try:
        function: Callable[..., Any] = pickle.loads(setup.function)
        if "numpy" in sys.modules:
            importlib.import_module("numpy.random")  # once here, so that each call can seed it
    # The module may call `sys.exit`.
    except BaseException as error:
        return RewardFunctionError(f"cannot be loaded in a worker process: {describe_exception(error)}")
    return function


def serve(connection: socket.socket, report_fd: int, function: Function, calls: int | None) -> NoReturn:
    """Run calls, then exit. The process also exits when the pool closes its end.

    Args:
        connection: the connection to the pool.
        report_fd: the file that `faulthandler` writes the stack to, in a crash or at the deadline.
        function: the function.
        calls: the number of calls; ``None`` for any number.
    """
    global _is_isolated
    _is_isolated = True
    pid = os.getpid()
    # Graders of generated code set functions of `os` to None.
    getpid, leave, cancel = os.getpid, os._exit, faulthandler.cancel_dump_traceback_later
    faulthandler.enable(report_fd, all_threads=False)
    while calls is None or calls > 0:
        try:
            request: Request = pickle.loads(receive_frame(connection))
        except (EOFError, OSError):
            leave(0)
        connection.sendall(frame(STARTED))
        if request.timeout is not None:
            # In a thread of C, which ends the process also while the function holds the interpreter's lock.
            faulthandler.dump_traceback_later(request.timeout, exit=True, file=report_fd)
        outcome = _call(function, request)
        if getpid() != pid:
            leave(0)  # the function forked, and this is the copy
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the function may have closed or replaced it
                stream.flush()
        calls = None if calls is None else calls - 1
        connection.sendall(frame(ENDED_LAST if calls == 0 else ENDED, _pack(outcome)))
        if calls != 0:
            cancel()  # this waits for the thread
    leave(0)


def _call(function: Function, request: Request) -> CallOutcome:
    if isinstance(function, RewardFunctionError):
        return CallOutcome(None, None, 0.0, function)
    try:
        arguments = pickle.loads(request.arguments)
    except Exception as error:
        problem = f"received arguments that cannot be unpickled in a worker process: {type(error).__name__}: {error}"
        return CallOutcome(None, None, 0.0, RewardFunctionError(problem))
    _seed(request.key)
    return outcome_of(function, arguments)


def _seed(key: str) -> None:
    number = int.from_bytes(hashlib.blake2b(key.encode(errors="replace"), digest_size=8).digest())
    random.seed(number)
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed(number & 0xFFFFFFFF)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(number)


def _pack(outcome: CallOutcome) -> bytes:
    """Pickle an outcome. For an exception, always send its `RemoteError`; also send the original if it unpickles."""
    content, error, remote = None, outcome.error, None
    if outcome.exception is not None:
        remote = RemoteError.of(outcome.exception)
        try:
            content = pickle.dumps(outcome.exception)
            pickle.loads(content)  # many exceptions can be pickled but not unpickled
        except Exception:
            content = None
    elif error is None:
        try:
            content = pickle.dumps(_portable(outcome.value))
        except Exception as failure:
            kind, why = type(outcome.value).__name__, f"{type(failure).__name__}: {failure}"
            error = RewardFunctionError(f"returned a {kind}, which cannot be sent back from a worker process ({why})")
    if content is not None and len(content) > _MAX_ANSWER_MB << 20:
        if remote is None:
            error = RewardFunctionError(
                f"returned {len(content) >> 20} MB, more than the maximum of {_MAX_ANSWER_MB} MB for a worker process"
            )
        content = None
    return pickle.dumps((content, outcome.work_s, error, remote))


def _portable(value: Any) -> Any:
    """Return a returned value without classes that the trainer may not have."""
    if isinstance(value, list):  # of a batched function, whose items may be exceptions
        return [item if isinstance(item, BaseException) else _portable(item) for item in value]
    return portable(value) if isinstance(value, Mapping | tuple) else value


class _Files(importlib.abc.MetaPathFinder):
    """Imports modules from files under the names that `load_function` gave them."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        file = self._files.get(fullname)
        return importlib.util.spec_from_file_location(fullname, file) if file else None
