"""``python -m reward_loop.router --worker '{"url": "http://host:port"}' ...``: the router, as the manager runs it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import orjson

from reward_loop._util import server_process
from reward_loop._util.output import open_standard_streams
from reward_loop.config import parse
from reward_loop.errors import ConfigError
from reward_loop.router.config import API_KEY_VARIABLE, WORKER_API_KEY_VARIABLE, RouterConfig, WorkerConfig
from reward_loop.router.run import run_router

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the router until SIGTERM; returns the exit status."""
    open_standard_streams()
    parser = argparse.ArgumentParser(prog="python -m reward_loop.router", description=__doc__)
    parser.add_argument(
        "--worker", action="append", default=[], metavar="JSON", help="a server, as a WorkerConfig; may be repeated"
    )
    parser.add_argument(
        "--request-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="from a request's arrival to the end of its answer (default: %(default)g)",
    )
    server_process.add_arguments(parser)
    args = parser.parse_args(argv)
    server_process.follow_lifeline(args)
    options = {
        "request_timeout_s": args.request_timeout,
        "api_key": os.environ.get(API_KEY_VARIABLE) or None,
        "worker_api_key": os.environ.get(WORKER_API_KEY_VARIABLE) or None,
    }
    try:
        config = parse(RouterConfig, options, "router")
        workers = [parse(WorkerConfig, orjson.loads(worker), "--worker") for worker in args.worker]
        run_router(workers, config, server_process.open_listener(args))
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
