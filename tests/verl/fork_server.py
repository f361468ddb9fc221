"""``python -m tests.verl.fork_server NAME``: runs the fork server of a node, until its standard input is closed."""

from __future__ import annotations

import sys

from reward_loop.verl.cpu.preload import preloaded

if __name__ == "__main__":
    with preloaded(name=sys.argv[1]) as executable:
        print(executable, flush=True)
        sys.stdin.read()
