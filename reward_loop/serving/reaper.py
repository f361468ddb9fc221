"""``python -m reward_loop.serving.reaper N COMMAND...``: runs a server, and ends all its processes.

For engines, which start further processes and cannot watch a pipe themselves. ``N`` is the file descriptor of an
inherited pipe. All processes are killed when the parent closes the pipe or dies, and when the server's first process
ends for any reason. If the reaper itself is killed, the
first process is killed, too. SIGTERM and SIGINT are forwarded to the server. The reaper exits with the server's exit
status or signal.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import FrameType

from reward_loop._util.process import adopt_orphans, die_with_parent, exit_with_parent, kill_children


def main() -> None:
    """Run the command, and exit with its exit status or signal."""
    _, pipe, *command = sys.argv
    # Before the server starts: otherwise, what a dead process of it has started would become a child of init.
    adopt_orphans()
    exit_with_parent(int(pipe), kill_children)
    server: subprocess.Popen[bytes] | None = None
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if server:
            server.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    try:
        server = subprocess.Popen(command, preexec_fn=die_with_parent)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error}")
    if received:  # before the server was started
        server.send_signal(received[0])
    code = server.wait()
    kill_children()
    if code < 0:
        # SIGKILL has no handler that could be reset: `signal.signal` would raise an error.
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
