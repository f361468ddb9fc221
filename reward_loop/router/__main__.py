"""``python -m reward_loop.router --worker http://host:port ...``: one address in front of several model servers."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from reward_loop.router import serving
from reward_loop.router.app import create_app

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the router until SIGTERM; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m reward_loop.router", description=__doc__)
    parser.add_argument("--worker", action="append", required=True, metavar="URL", help="a server; may be repeated")
    parser.add_argument(
        "--request-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="from a request's arrival to the end of its answer (default: %(default)g)",
    )
    serving.add_arguments(parser)
    args = parser.parse_args(argv)
    serving.follow_lifeline(args)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    serving.run(create_app(args.worker, timeout_s=args.request_timeout), args, "router")
    return 0


if __name__ == "__main__":
    sys.exit(main())
