"""A reward function that does what the sample says. It runs in worker processes, so its imports are few."""

from __future__ import annotations

import builtins
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

kept: list[bytearray] = []


def act(solution_str: str, extra_info: dict[str, Any]) -> Any:
    """Calls the function of that name in this module."""
    return globals()[solution_str](**extra_info)


class MadeInTheTemplate:
    """Cannot be pickled, and scores with the process in which it was made."""

    def __init__(self, bonus: float = 0.0) -> None:
        self.lock = threading.Lock()
        self.made_in = os.getpid()
        self.bonus = bonus

    def compute_score(self) -> dict[str, float]:
        with self.lock:
            return {"score": self.bonus, "made_in": self.made_in, "parent": os.getppid()}

    def post_process_scores(self, scores: list[float]) -> list[float]:
        return [score + self.bonus for score in scores]


def works() -> float:
    print("it works", flush=True)
    return 1.0


def takes(text: str) -> float:
    return len(text)


def process_id() -> float:
    return os.getpid()


def parent_id() -> float:
    return os.getppid()


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


class Picky(Exception):
    def __init__(self, code: int, *, text: str) -> None:
        super().__init__(f"{code}: {text}")


def raises_what_cannot_be_made_again() -> float:
    raise Picky(7, text="picky")


def exits() -> float:
    raise SystemExit(3)


def exits_at_once() -> float:
    os._exit(3)


def crashes() -> Any:
    return ctypes.string_at(0)


def kills_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def signals_its_group() -> None:
    os.killpg(0, signal.SIGTERM)


def overflows_the_stack() -> Any:
    sys.setrecursionlimit(1 << 30)
    return max([0], key=lambda _: overflows_the_stack())


def returns_a_lock() -> Any:
    return threading.Lock()


def closes_its_streams() -> float:
    sys.stdout.close()
    os.closerange(0, 3)
    return 1.0


def prints_a_lot() -> float:
    for _ in range(1000):
        print("x" * 1000)
        print("x" * 1000, file=sys.stderr)
    return 1.0


CHANGES: dict[str, Callable[[], Any]] = {
    "environment": lambda: (os.environ.clear(), os.environ.update({"NEW": "1"})),
    "folder": lambda: os.chdir("/"),
    "os": lambda: [setattr(os, name, None) for name in ("getpid", "fork", "kill", "umask", "environ", "_exit")],
    "builtins": lambda: [setattr(builtins, name, None) for name in ("len", "zip", "open", "dict", "isinstance")],
    "memory": lambda: kept.append(bytearray(1)),
}
"""Changes of the process that a reward function may leave behind."""


def changes(what: str) -> float:
    CHANGES[what]()
    return 1.0


def state() -> dict[str, Any]:
    """Returns the state of the process that `CHANGES` change."""
    return {"score": 1.0, "state": repr([sorted(os.environ.items()), os.getcwd(), os.kill, len(kept)])}


def comes_back_twice() -> float:
    """Forks, and forgets to end the child."""
    os.fork()
    return 1.0


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


def leaks() -> float:
    while True:
        kept.append(bytearray(os.urandom(1 << 20)))
        time.sleep(0.005)  # lest it takes all there is before a busy machine comes to look


def starts_one_that_leaks() -> float:
    leak = "import os, time; kept = []\nwhile True: kept.append(os.urandom(1 << 20)); time.sleep(0.005)"
    subprocess.run([sys.executable, "-c", leak])
    return 1.0


class StatusError(Exception):
    """As `httpx.HTTPStatusError` and openai's status errors: keyword-only arguments, which pickle cannot pass."""

    def __init__(self, message: str, *, status_code: int, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code
        self.retry_after = retry_after


def raises_status(status: int, retry_after: float) -> float:
    raise StatusError("the service says no", status_code=status, retry_after=retry_after)
