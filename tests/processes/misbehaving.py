"""A reward function that does what the sample says. It runs in worker processes, so its imports are few."""

from __future__ import annotations

import builtins
import collections
import contextvars
import ctypes
import dataclasses
import datetime
import decimal
import faulthandler
import gc
import importlib
import io
import itertools
import json
import locale
import logging
import math
import os
import pickle
import random
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

kept: list[bytearray] = []


def act(solution_str: str, extra_info: dict[str, Any]) -> Any:
    """Calls the function of that name in this module."""
    return globals()[solution_str](**extra_info)


def works() -> float:
    print("it works", flush=True)
    return 1.0


def takes(text: str) -> float:
    return len(text)


def process_id() -> float:
    return os.getpid()


def sleeps(seconds: float) -> float:
    time.sleep(seconds)
    return 1.0


def hangs(path: str | None = None) -> float:
    if path is not None:
        with open(path, "a") as file:
            file.write(f"{os.getpid()}\n")
    while True:
        time.sleep(1000)


def holds_the_interpreter_lock() -> Any:
    # A regular expression that backtracks for ever does the same.
    return ctypes.PyDLL(None).sleep(1000)


def starts_others(path: str, then: str) -> Any:
    """Starts one in its own session, one that was orphaned as well, and one with a parent of its own."""
    sleep = [
        sys.executable,
        "-c",
        f"import os, time; open({path!r}, 'a').write(f'{{os.getpid()}}\\n'); time.sleep(1000)",
    ]
    subprocess.Popen(sleep, start_new_session=True)
    subprocess.Popen(["sh", "-c", f"setsid '{sys.executable}' -c \"{sleep[2]}\" &"]).wait()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, sleep)
        time.sleep(1000)
    while len(Path(path).read_text().split() if Path(path).exists() else ()) < 3:
        time.sleep(0.01)
    return globals()[then]()


def tells_and_hangs(fifo: str) -> float:
    with open(fifo, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(1000)
    return 0.0


def says(fifo: str) -> float:
    with open(fifo, "w") as file:
        file.write("hello")
    return 1.0


def hears(fifo: str) -> float:
    with open(fifo) as file:
        return float(file.read() == "hello")


def raises() -> float:
    raise ValueError("no number")


def raises_with_a_lock() -> float:
    raise ValueError("locked", threading.Lock())


class Picky(Exception):
    def __init__(self, code: int, *, text: str) -> None:
        super().__init__(f"{code}: {text}")


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Its attributes cannot be set, so not its ``__cause__`` either."""


def raises_what_cannot_be_changed() -> float:
    raise Frozen


def raises_what_cannot_be_made_again() -> float:
    raise Picky(7, text="picky")


def exits() -> float:
    raise SystemExit(3)


def exits_at_once() -> float:
    os._exit(3)


def crashes() -> Any:
    return ctypes.string_at(0)


def aborts() -> None:
    os.abort()


def kills_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def gets_a_real_time_signal() -> None:
    os.kill(os.getpid(), signal.SIGRTMIN + 3)


def signals_its_group() -> None:
    os.killpg(0, signal.SIGTERM)


def recurses() -> Any:
    return recurses()


def overflows_the_stack() -> Any:
    sys.setrecursionlimit(1 << 30)
    return max([0], key=lambda _: overflows_the_stack())


def returns_a_lock() -> Any:
    return threading.Lock()


def returns_too_much() -> Any:
    return {"score": 1.0, "log": b"0" * (65 << 20)}


def returns_a_coroutine() -> Any:
    async def coroutine() -> float:
        return 1.0

    return coroutine()


def closes_its_streams() -> float:
    sys.stdout.close()
    os.closerange(0, 3)
    return 1.0


def closes_all_files() -> float:
    os.closerange(0, 1024)
    return 1.0


def prints_a_lot() -> float:
    for _ in range(1000):
        print("x" * 1000)
        print("x" * 1000, file=sys.stderr)
    return 1.0


def disables_the_operating_system() -> Any:
    """Graders that run generated code take these away from it, as HumanEval's ``reliability_guard`` does."""
    for module, names in ((os, "kill fork fchdir chdir getcwd setuid killpg unlink remove"), (shutil, "rmtree move")):
        for name in names.split():
            setattr(module, name, None)
    faulthandler.disable()
    return {"score": 1.0, "pid": os.getpid()}


CHANGES: dict[str, Callable[[], Any]] = {
    "limit of files": lambda: resource.setrlimit(
        resource.RLIMIT_NOFILE, (16, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    ),
    "hard limit": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 4096)),
    "environment": lambda: (os.environ.clear(), os.environ.update({"NEW": "1", "TZ": "Asia/Tokyo"}), time.tzset()),
    "umask": lambda: os.umask(0o777),
    "handlers": lambda: (signal.signal(signal.SIGCHLD, signal.SIG_IGN), signal.signal(signal.SIGALRM, print)),
    "blocked signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM}),
    "folder": lambda: os.chdir("/"),
    "os": lambda: [setattr(os, name, None) for name in ("getpid", "fchdir", "kill", "umask", "environ", "_exit")],
    "builtins": lambda: [setattr(builtins, name, None) for name in ("len", "zip", "open", "dict", "isinstance")],
    "a builtin that lies": lambda: setattr(builtins, "round", lambda number, digits=0: 1.0),
    "subprocess": lambda: (setattr(subprocess, "Popen", None), setattr(shutil, "rmtree", None)),
    "a deleted name": lambda: delattr(os, "getcwd"),
    "sys": lambda: (setattr(sys, "argv", None), setattr(sys, "exit", None), setattr(sys, "stdin", None)),
    "modules": lambda: (sys.modules.update(resource=None), sys.modules.pop("shutil"), setattr(os, "kill", None)),
    "a module that cannot be imported": lambda: sys.modules.update({"numpy.random": None}),
    "import path": lambda: sys.path.clear(),
    "import hooks": lambda: sys.meta_path.clear(),
    "recursion limit": lambda: sys.setrecursionlimit(60),
    "digits of integers": lambda: sys.set_int_max_str_digits(700),
    "decimal context": lambda: (
        setattr(decimal.getcontext(), "prec", 2),
        decimal.getcontext().traps.update({decimal.Inexact: True}),
    ),
    "locale": lambda: locale.setlocale(locale.LC_ALL, "C.UTF-8"),
    "warnings": lambda: warnings.simplefilter("error"),
    "streams": lambda: (setattr(sys, "stdout", None), setattr(sys, "stderr", io.StringIO())),
    "logging": lambda: logging.disable(logging.CRITICAL),
    "garbage collector": lambda: (gc.disable(), gc.set_threshold(0)),
    "sockets": lambda: socket.setdefaulttimeout(0.001),
    "trace": lambda: sys.setprofile(lambda *_: None),
    "math": lambda: setattr(math, "isclose", lambda *_: True),
    "regular expressions": lambda: setattr(re, "match", None),
    "json": lambda: setattr(json, "loads", lambda text: {}),
    "a module": lambda: sys.modules.update(json=types.ModuleType("json")),
    "clock": lambda: [setattr(time, name, None) for name in ("time", "sleep", "monotonic")],
    "pickle": lambda: (setattr(pickle, "loads", None), setattr(pickle, "dumps", None)),
    "context variables": lambda: setattr(contextvars, "copy_context", None),
    "environment in bytes": lambda: os.environb.update({b"NEW": b"1"}),
    "environment of children": lambda: (os.putenv("NEW", "1"), os.unsetenv("HOME")),
    "priority": lambda: os.nice(1),
    "other modules": lambda: [
        setattr(sys.modules[module], name, None)
        for module, name in (
            *(("socket", "create_connection"), ("threading", "Lock"), ("struct", "pack"), ("datetime", "datetime")),
            *(("itertools", "chain"), ("pathlib", "Path"), ("importlib", "import_module"), ("tempfile", "mkdtemp")),
            *(("collections", "Counter"), ("resource", "getrlimit")),
        )
    ],
    "a deleted name of socket": lambda: delattr(socket, "socket"),
    "the folder of temporary files": lambda: setattr(tempfile, "tempdir", "/nowhere"),
    "classes": lambda: (
        *(setattr(Path, "exists", lambda self: True), delattr(Path, "read_text")),
        *(setattr(json.JSONEncoder, "encode", None), setattr(subprocess.Popen, "wait", lambda *_: 0)),
    ),
    "a class that hides an inherited attribute": lambda: setattr(type(Path()), "is_file", lambda self: True),
    "interrupts": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    "a death of later": lambda: faulthandler.dump_traceback_later(0.001, exit=True),
}
"""Changes of the process that a reward function may leave behind."""


def changes(what: str) -> float:
    CHANGES[what]()
    return 1.0


def state() -> dict[str, Any]:
    """Returns the state of the process that `CHANGES` change, and its id."""
    limits = [resource.getrlimit(limit) for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)]
    mask = os.umask(0o22)
    os.umask(mask)
    handlers = [str(signal.getsignal(number)) for number in (signal.SIGCHLD, signal.SIGALRM, signal.SIGINT)]
    found = [
        *(limits, sorted(os.environ.items()), time.tzname, mask, handlers, os.getcwd(), decimal.getcontext()),
        *(len(signal.pthread_sigmask(signal.SIG_BLOCK, ())), round(2.0), subprocess.run(["true"]).returncode),
        *(os.kill, shutil.rmtree, sys.argv, sys.exit, sys.stdin.name, sys.stdout.name, sys.stderr.name),
        *(sys.modules["resource"], sys.path, len(sys.meta_path), sys.getrecursionlimit()),
        *(sys.get_int_max_str_digits(), locale.setlocale(locale.LC_ALL), warnings.filters),
        *(logging.root.manager.disable, gc.isenabled(), gc.get_threshold(), socket.getdefaulttimeout()),
        *(sys.getprofile(), math.isclose(1, 2), re.match, json.loads("[1]"), sys.modules["json"], pickle.dumps),
        *(socket.create_connection, socket.socket, threading.Lock, struct.pack, datetime.datetime, itertools.chain),
        *(importlib.import_module, tempfile.mkdtemp, tempfile.gettempdir(), collections.Counter),
        *(
            resource.getrlimit,
            Path.exists,
            Path("/no").exists(),
            Path("/no").is_file(),
            Path.read_text,
        ),
        *(json.dumps([]), subprocess.Popen.wait, "is_file" in vars(type(Path()))),
        *(time.time, time.sleep, contextvars.copy_context, os.getpriority(os.PRIO_PROCESS, 0)),
        sorted(subprocess.run(["env"], capture_output=True).stdout.splitlines()),
    ]
    return {"score": 1.0, "state": repr(found), "pid": os.getpid()}


def draws_with_a_seed() -> dict[str, Any]:
    """Seeds the global random generators, and draws before that."""
    import numpy as np

    drawn = [random.random(), np.random.random()]
    random.seed(0)
    np.random.seed(0)
    return {"score": 1.0, "drawn": repr(drawn), "pid": os.getpid()}


def works_for(seconds: float, limit: int) -> float:
    """Limits its CPU time, as graders of code do, and uses some."""
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return 1.0


def writes(path: str) -> float:
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    Path(path).write_bytes(b"0" * 100)
    return 1.0


def leaves_numpy_strict() -> float:
    import numpy

    numpy.seterr(all="raise")
    return 1.0


def divides_by_zero() -> float:
    import numpy

    return float(numpy.array(1.0) / 0.0 > 0)


def comes_back_twice() -> float:
    """Forks, and forgets to end the child."""
    os.fork()
    return 1.0


def leaves_an_alarm() -> float:
    signal.alarm(1000)
    return 1.0


def leaves_a_timer_of_its_processor_time() -> float:
    signal.setitimer(signal.ITIMER_VIRTUAL, 1000)
    signal.setitimer(signal.ITIMER_PROF, 1000)
    return 1.0


def alarm_left() -> float:
    timers = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
    return sum(signal.getitimer(timer)[0] for timer in timers)


def changes_folder() -> float:
    os.chdir("/")
    return 1.0


def is_in(folder: str) -> float:
    return float(os.getcwd() == folder)


def uses_an_alarm() -> float:
    """As Math-Verify does; outside the main thread this raises."""

    def ring(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        for _ in range(1000):  # an alarm just before a sleep is noticed only when that is over
            time.sleep(0.1)
    except TimeoutError:
        return 1.0
    return 0.0


def grows(megabytes: int) -> float:
    """Keeps memory from call to call."""
    kept.append(bytearray(os.urandom(1 << 20) * megabytes))
    return os.getpid()


def leaks() -> float:
    while True:
        kept.append(bytearray(os.urandom(1 << 20)))
        time.sleep(0.005)  # lest it takes all there is before a busy machine comes to look


def starts_one_that_leaks() -> float:
    leak = "import os, time; kept = []\nwhile True: kept.append(os.urandom(1 << 20)); time.sleep(0.005)"
    subprocess.run([sys.executable, "-c", leak])
    return 1.0


def verifies(answer: str, gold: str) -> float:
    """Math-Verify, which sets alarms."""
    import math_verify

    return float(math_verify.verify(math_verify.parse(gold), math_verify.parse(answer)))


def verifies_as_verl_does(answer: str, gold: str) -> float:
    from verl.utils.reward_score import math_verify

    # The limit is verl's own, and counts the import of verl in the processes that this starts.
    return math_verify.compute_score(answer, gold, timeout=250)


class StatusError(Exception):
    """As `httpx.HTTPStatusError` and openai's status errors: keyword-only arguments, which pickle cannot pass."""

    def __init__(self, message: str, *, status_code: int, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code
        self.retry_after = retry_after


def _count(path: str) -> None:
    with open(path, "a") as file:
        file.write("called\n")


def raises_status(path: str, status: int, retry_after: float | None = None) -> float:
    _count(path)
    raise StatusError("the service says no", status_code=status, retry_after=retry_after)


def raises_from_status(path: str, status: int) -> float:
    _count(path)
    try:
        raise StatusError("the service says no", status_code=status)
    except StatusError as error:
        raise ConnectionError("the judge failed") from error


def raises_value_error_from_status(path: str, status: int) -> float:
    _count(path)
    try:
        raise StatusError("the service says no", status_code=status)
    except StatusError as error:
        raise ValueError("no verdict") from error
