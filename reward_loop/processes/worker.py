"""The main loop of a worker process, and its `Channel` to the pool.

Calls run one at a time in the main thread, where signals and alarms work. During a call, code of the function may send
messages to the caller, and wait for answers, in any thread.
"""

from __future__ import annotations

import contextlib
import contextvars
import faulthandler
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import os
import pickle
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

from reward_loop._util.framing import frame, receive_frame
from reward_loop.errors import RewardFunctionError
from reward_loop.processes.outcome import CallOutcome, RemoteError, describe_exception, outcome_of
from reward_loop.processes.state import ProcessState, Watch

CALL, ANSWER = b"C", b"A"
"""The kinds of messages to a worker. The kind is the first byte of the frame:

- `CALL`: the context and the arguments of the next call. The first one comes after a frame with the `Setup`.
- `ANSWER`: the answer to a question of the function: its number (`Channel.expect`), and a value.
"""

NO_ANSWER = "no answer"
"""Stands for the answer to a question whose call has ended."""

STARTED, TOLD, ENDED, ENDED_LAST, DIED = b"S", b"T", b"E", b"L", b"D"
"""The kinds of messages from a worker:

- `STARTED`: the function starts.
- `TOLD`: a message of the function to the caller, with the number of its call.
- `ENDED`: the outcome; the worker is idle.
- `ENDED_LAST`: the outcome; the worker must be replaced.
- `DIED`: a `DeathReport` on how the worker died; sent by the fork server.
"""

EXIT_BROKEN = 70
"""The exit status of a worker that failed outside of a call, for instance because it could not send the outcome."""
STACK_SIGNAL = 41
"""A real-time signal, otherwise unused, that makes a worker write its stack."""

processes = 1
"""The maximum number of processes of this function's pool."""

channel: Channel | None = None
"""The channel to the pool; ``None`` outside of worker processes, and in processes that the function has forked."""

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
    max_calls: int | None
    """The number of calls after which the worker is replaced."""


# A fault whose signal is blocked kills the process before `faulthandler` writes the stack. `STACK_SIGNAL` must also
# arrive while the function sends a message.
_CATCHABLE_SIGNALS = signal.valid_signals() - {
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL),
    STACK_SIGNAL,
}


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    # Read on its own: an alarm that raises between the call that blocks and `try` would leave the signals blocked.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, _CATCHABLE_SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Channel:
    """The worker's end of the connection to the pool.

    Several threads of the function may use it. An alarm of the function must not cut a message in two: signals are
    blocked while a message is sent, and after the first `expect`, a separate thread receives. (A thread of the function
    may still get the signal; Python then runs the handler in the main thread. A message that is longer than the buffer
    of the socket can then be cut: its call fails.)
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._starting = threading.Lock()
        self._numbers = itertools.count()
        self._answered: dict[int, Callable[[Any], None]] = {}
        self._calls: queue.SimpleQueue[bytes | None] | None = None
        """The calls that the receiving thread has received, and ``None`` at the end; no queue without the thread."""
        self._is_detached = False
        self.call = 0
        """The number of the current call. The pool ignores messages with the number of an earlier call."""

    def send(self, kind: bytes, content: bytes = b"") -> None:
        """Send a message, unless this is a copy of the channel in a forked process."""
        if self._is_detached:
            return
        # In this order: an alarm must not raise while the lock is held.
        with _blocked_signals(), self._sending:
            self._connection.sendall(frame(kind, content))

    def tell(self, call: int, *message: Any) -> None:
        """Send a message of the function to the caller, who handles the messages of a call in order."""
        self.send(TOLD, pickle.dumps((call, *message)))

    def expect(self, answered: Callable[[Any], None]) -> int:
        """Return the number of a question, to be sent with `tell`.

        ``answered`` is called with the answer in another thread, or with `NO_ANSWER` if the call ends before.
        """
        with _blocked_signals(), self._starting:  # the thread inherits the blocked signals
            if self._calls is None:
                calls: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
                threading.Thread(target=self._receive, args=(calls,), name="reward-channel", daemon=True).start()
                self._calls = calls
        number = next(self._numbers)
        self._answered[number] = answered
        return number

    def detach(self) -> None:
        """Make all messages without effect: the connection belongs to the process from which this one was forked."""
        self._is_detached = True

    def next_call(self) -> bytes:
        """Wait for the next call, and return its content; exit if the pool has closed its end."""
        content = self.receive()[1:] if self._calls is None else self._calls.get()
        if content is None:
            os._exit(0)
        self.call += 1
        while self._answered:  # of threads that the function has left behind
            self._answered.popitem()[1](NO_ANSWER)
        return content

    def receive(self) -> bytes:
        """Wait for a frame; exit if the pool has closed its end."""
        try:
            return receive_frame(self._connection)
        except EOFError:
            os._exit(0)

    def _receive(self, calls: queue.SimpleQueue[bytes | None]) -> None:
        # At a deadline, the pool closes its end first: the main thread must then still write its stack.
        try:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    message = receive_frame(self._connection)
                    if message[:1] == CALL:
                        calls.put(message[1:])
                    else:
                        number, answer = pickle.loads(memoryview(message)[1:])
                        if (answered := self._answered.pop(number, None)) is not None:
                            answered(answer)
        finally:
            # The main thread exits when it looks for the next call.
            calls.put(None)


def _detach() -> None:
    """Leave the channel to the worker: this is a process that the function has forked."""
    global channel
    if channel is not None:
        channel.detach()  # permits that the function held when it forked still refer to it
        channel = None


def serve(connection: socket.socket, stack_fd: int, max_memory_mb: int | None) -> NoReturn:
    """Run calls until the pool closes its end of the socket, then exit.

    Args:
        connection: the worker's end of the socket pair.
        stack_fd: the file that `faulthandler` writes stacks to.
        max_memory_mb: the memory limit of the worker in 2^20 bytes, enforced by the fork server.
    """
    faulthandler.enable(stack_fd, all_threads=False)
    # Not a handler in Python, which would not run while the function holds the global lock.
    faulthandler.register(STACK_SIGNAL, stack_fd, all_threads=False)
    max_growth_mb = _MAX_GROWTH_MB if max_memory_mb is None else min(_MAX_GROWTH_MB, max_memory_mb / 2)
    # Opened once: opening this file takes longer than all other work between two calls.
    memory_fd = os.open("/proc/self/statm", os.O_RDONLY)
    pid, folder, had_streams, first_mb = os.getpid(), os.open(".", os.O_PATH), _settle_streams(), None
    fchdir, getpid, setitimer = os.fchdir, os.getpid, signal.setitimer  # graders of generated code set them to None
    cancel_dump = faulthandler.cancel_dump_traceback_later
    global channel
    channel = to_pool = Channel(connection)
    os.register_at_fork(after_in_child=_detach)
    watch = Watch()
    function, max_calls, failure = _load(to_pool.receive())
    _settle_streams()
    # After the import of the function: what the import has changed belongs to the state of the process.
    state = ProcessState(watch)
    while True:
        arguments = to_pool.next_call()
        if failure is None:
            to_pool.send(STARTED)
        outcome = failure or _call(function, arguments)
        if getpid() != pid:
            os._exit(0)  # The function forked, and this is the child process.
        # Reset what the function may have left behind: first what could disturb the answer, then, while the pool reads
        # the answer, the rest.
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            setitimer(timer, 0)
        # A `dump_traceback_later(exit=True)` of the function would end the process in a later call.
        cancel_dump()
        fchdir(folder)
        memory_mb = _memory_mb(memory_fd)
        # Measured after the first call, which may load what all later calls use.
        first_mb = first_mb or memory_mb
        # Compared with the start of the worker: a stream that was closed already then does not replace it.
        spoiled = _settle_streams() < had_streams or memory_mb - first_mb > max_growth_mb
        is_last = failure is not None or spoiled or (max_calls is not None and to_pool.call >= max_calls)
        kind = ENDED_LAST if is_last else ENDED
        try:
            to_pool.send(kind, _pack(outcome))
        except Exception:  # the function has replaced something that sending needs
            state.restore()
            to_pool.send(kind, _pack(outcome))
        if failure or not state.restore():
            os._exit(0)  # if the pool has already sent the next call, it sends that to another worker


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
    return pickle.dumps((content, outcome.work_s, error, remote))


def _dumps(value: Any) -> bytes:
    """Pickle with `pickle`, or by value with `cloudpickle` if that fails, such as for a lambda.

    Raises:
        Exception: the value cannot be pickled.
    """
    try:
        return pickle.dumps(value)
    except Exception:
        # Only if it is needed: workers start with few modules.
        import cloudpickle

        return cloudpickle.dumps(value)


def _load(setup: bytes) -> tuple[Callable[..., Any], int | None, CallOutcome | None]:
    try:
        made: Setup = pickle.loads(setup)
        global processes
        processes = made.processes
        # Before the function, whose module may be one of these files.
        sys.meta_path.append(_Files(made.files))
        return pickle.loads(made.function), made.max_calls, None
    # The module may call `sys.exit`.
    except BaseException as error:
        problem = f"cannot be loaded in a worker process: {describe_exception(error)}"
        return _load, None, CallOutcome(None, None, 0.0, RewardFunctionError(problem))


def _call(function: Callable[..., Any], arguments: bytes) -> CallOutcome:
    try:
        kwargs = pickle.loads(arguments)
    except Exception as error:
        problem = f"received arguments that cannot be unpickled in a worker process: {type(error).__name__}: {error}"
        return CallOutcome(None, None, 0.0, RewardFunctionError(problem))
    # In a context of its own: what the call sets in context variables, such as numpy's `errstate`, ends with it.
    return contextvars.copy_context().run(outcome_of, function, kwargs)


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
