"""``python -m reward_loop.serving.reaper --parent-pipe N -- COMMAND``: runs a server, and ends all its processes.

For engines, which start further processes and cannot watch the pipe themselves. All of them are killed when the parent
closes the pipe or dies, and when the server's first process ends for any reason. If the reaper itself is killed, the
first process is killed, too. SIGTERM and SIGINT are forwarded to the server. The reaper exits with the server's exit
status or signal.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from types import FrameType

from reward_loop._util.process import adopt_orphans, die_with_parent, exit_with_parent, kill_children

__all__ = ["main"]


def main() -> None:
    """Runs the command, and exits with its exit status or signal."""
    parser = argparse.ArgumentParser(prog="python -m reward_loop.serving.reaper", description=__doc__)
    parser.add_argument(
        "--parent-pipe",
        type=int,
        required=True,
        metavar="N",
        help="file descriptor of an inherited pipe; the server ends when the parent closes it or dies",
    )
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="the server's program and its arguments")
    args = parser.parse_args()
    adopt_orphans()
    exit_with_parent(args.parent_pipe, kill_children)
    server: subprocess.Popen[bytes] | None = None
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if server:
            server.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    try:
        server = subprocess.Popen(args.command, preexec_fn=die_with_parent)
    except OSError as error:
        sys.exit(f"{args.command[0]} cannot be started: {error}")
    if received:  # before the server was started
        server.send_signal(received[0])
    code = server.wait()
    kill_children()
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
