"""``python -m reward_loop.serving.reaper --lifeline-fd N -- COMMAND``: runs a server that knows no lifeline.

Engines start processes of their own. All of them are killed when the guard's parent dies, when the server's first
process ends, however that happened, and when the guard is killed itself. Signals to end are passed on to the server,
and its exit status is that of the guard.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Runs the command, and exits with its exit status or signal."""
    parser = argparse.ArgumentParser(prog="python -m reward_loop.serving.reaper", description=__doc__)
    parser.add_argument("--lifeline-fd", type=int, required=True, metavar="N", help="an inherited pipe")
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    args = parser.parse_args()
    libc = ctypes.CDLL(None, use_errno=True)
    # Orphaned processes of the server become children of this process, even if they started their own session.
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    threading.Thread(target=_follow, args=(args.lifeline_fd,), name="lifeline", daemon=True).start()
    server: subprocess.Popen[bytes] | None = None
    asked: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if server:
            server.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    try:
        server = subprocess.Popen(
            args.command, preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        )
    except OSError as error:
        sys.exit(f"{args.command[0]} cannot be started: {error}")
    if asked:
        server.send_signal(asked[0])
    code = server.wait()
    _kill_descendants()
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _follow(fd: int) -> None:
    os.read(fd, 1)
    _kill_descendants()
    os._exit(1)


def _kill_descendants() -> None:
    """Kills all children until none is left. Children of a killed process become children of this process."""
    while children := _children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    me = os.getpid()
    return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if _parent(path) == me]


def _parent(stat: Path) -> int | None:
    try:
        # "PID (NAME) STATE PPID ..."; NAME may contain spaces and parentheses.
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


if __name__ == "__main__":
    main()
