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
import importlib.machinery
import importlib.util
import os
import pickle
import random
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from reward_loop._util.json import portable
from reward_loop.errors import RewardFunctionError
from reward_loop.processes.outcome import CallOutcome, RemoteError, describe_exception, outcome_of

HEADER = struct.Struct("!?Q")
"""What each message of the process starts with: whether it is the last one, and the length of its content, which is the
outcome of a call. A message without content says that the call has started.

The pool sends the pickled timeout, key and pickled arguments of each call; or ``None``, to which the answer is an
outcome that says whether the function is loaded.
"""

EXIT_BROKEN = 70
"""The exit status of a process that failed outside of a call, for instance because it could not send the outcome."""

_is_isolated = False


@dataclass(frozen=True, slots=True)
class Setup:
    """What the processes of a function need."""

    name: str
    """The function's name in messages."""
    files: Mapping[str, str]
    """Modules loaded from files, which cannot be imported by name alone: name -> path."""
    function: bytes
    """The pickled function, object or class, and the arguments of the class's constructor."""
    calls: int | None
    """The number of calls of a process that is forked from the template; ``None``: each process loads the function
    itself, and runs calls until it is killed."""
    max_memory_mb: int | None
    """The largest memory of a process with its descendants, in 2^20 bytes, in addition to that of the template."""
    load_s: float
    """The seconds in which a child must have loaded the function."""


Function = Callable[..., Any] | RewardFunctionError
"""The loaded function, or why it could not be loaded."""


def in_isolated_call() -> bool:
    """Return whether this process runs calls of an isolated function, or was forked by one."""
    return _is_isolated


def callable_of(function: Any) -> Any:
    """Return what is called of a function or an object: its method ``compute_score``, if it has one."""
    method = getattr(function, "compute_score", None)
    return method if callable(method) else function


def load(setup: Setup) -> Function:
    """Import the function's module, and make the object if the function is a class."""
    # Before the function, whose module may be one of these files.
    sys.meta_path.append(_Files(setup.files))
    try:
        function, constructor = pickle.loads(setup.function)
        function = callable_of(function(**constructor) if isinstance(function, type) else function)
        if "numpy" in sys.modules:
            importlib.import_module("numpy.random")  # once here, so that each call can seed it
    # The module may call `sys.exit`.
    except BaseException as error:
        return RewardFunctionError(f"cannot be loaded in a worker process: {describe_exception(error)}")
    if not callable(function):
        return RewardFunctionError(f"cannot be called: its object is a {type(function).__name__}")
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
    connection.setblocking(True)  # the function's module may have called `socket.setdefaulttimeout`
    received = connection.makefile("rb")
    error = function if isinstance(function, RewardFunctionError) else None
    if error is not None:
        calls = 1  # another process may load it: this one, which fails at once, would get most of the calls
    while calls is None or calls > 0:
        try:
            call = pickle.load(received)
        except (EOFError, OSError, pickle.UnpicklingError):  # the pool has closed the connection
            leave(0)
        if call is None:
            _send(connection, _pack(CallOutcome(None, None, 0.0, error)))
            continue
        timeout, key, arguments = call
        _send(connection)
        if timeout is not None:
            # In a thread of C, which ends the process also while the function holds the interpreter's lock.
            faulthandler.dump_traceback_later(timeout, exit=True, file=report_fd)
        outcome = _call(function, key, arguments)
        if getpid() != pid:
            leave(0)  # the function forked, and this is the copy
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the function may have closed or replaced it
                stream.flush()
        calls = None if calls is None else calls - 1
        _send(connection, _pack(outcome), is_last=calls == 0)
        if calls != 0:
            cancel()  # this waits for the thread
    leave(0)


def _send(connection: socket.socket, content: bytes = b"", is_last: bool = False) -> None:
    connection.sendall(HEADER.pack(is_last, len(content)) + content)


def _call(function: Function, key: str, arguments: bytes) -> CallOutcome:
    if isinstance(function, RewardFunctionError):
        return CallOutcome(None, None, 0.0, function)
    try:
        given = pickle.loads(arguments)
    except Exception as error:
        problem = f"received arguments that cannot be unpickled in a worker process: {type(error).__name__}: {error}"
        return CallOutcome(None, None, 0.0, RewardFunctionError(problem))
    number = int.from_bytes(hashlib.blake2b(key.encode(errors="replace"), digest_size=8).digest())
    random.seed(number)
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed(number & 0xFFFFFFFF)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(number)
    return outcome_of(function, given)


def _pack(outcome: CallOutcome) -> bytes:
    """Pickle an outcome whose exception is a `RemoteError`, and the original exception, or ``b""`` in its place."""
    original = b""
    if outcome.exception is not None:
        with contextlib.suppress(Exception):
            pickled = pickle.dumps(outcome.exception)
            pickle.loads(pickled)  # many exceptions can be pickled but not unpickled
            original = pickled
        outcome.exception = RemoteError.of(outcome.exception)
    try:
        outcome.value = _portable(outcome.value)
        return pickle.dumps((outcome, original))
    except Exception as failure:
        kind, why = type(outcome.value).__name__, f"{type(failure).__name__}: {failure}"
        error = RewardFunctionError(f"returned a {kind}, which cannot be sent back from a worker process ({why})")
        return pickle.dumps((CallOutcome(None, None, outcome.work_s, error), b""))


def _portable(value: Any) -> Any:
    """Return a returned value without classes that the trainer may not have."""
    if isinstance(value, list):  # of a batched function, whose items may be exceptions
        return [RemoteError.of(item) if isinstance(item, BaseException) else _portable(item) for item in value]
    return portable(value) if isinstance(value, Mapping | tuple) else value


@dataclass(frozen=True)
class _Files:
    """Imports modules from files under the names that `load_function` gave them."""

    files: Mapping[str, str]

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_file_location(name, self.files[name]) if name in self.files else None
