"""The command ``reward-loop``, and ``python -m reward_loop``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command."""
    try:
        # Imported here, so that Ctrl-C during the imports also ends the command with its exit status.
        from reward_loop.cli import main as run
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted.\n")
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
