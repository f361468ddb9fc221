"""``python -m reward_loop``: the command ``reward-loop``."""

from __future__ import annotations

from reward_loop.cli import main

if __name__ == "__main__":
    main()
