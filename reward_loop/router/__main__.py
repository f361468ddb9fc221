"""``python -m reward_loop.router --worker '{"url": "http://host:port"}' ...``: the router, as the manager runs it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import orjson

from reward_loop._util import server_process
from reward_loop._util.output import open_standard_streams
from reward_loop._util.parent_death_pipe import exit_with_parent
from reward_loop.config import parse
from reward_loop.errors import ConfigError
from reward_loop.router.config import API_KEY_VARIABLE, WORKER_API_KEY_VARIABLE, BackendConfig, RouterConfig
from reward_loop.router.run import run_router

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the router until SIGTERM; returns the exit status."""
    open_standard_streams()
    parser = argparse.ArgumentParser(prog="python -m reward_loop.router", description=__doc__)
    parser.add_argument(
        "--worker", action="append", default=[], metavar="JSON", help="a server, as a BackendConfig; may be repeated"
    )
    parser.add_argument(
        "--request-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="time limit of a request (default: %(default)g)",
    )
    defaults = RouterConfig()
    parser.add_argument(
        "--max-in-flight",
        type=int,
        default=defaults.max_in_flight,
        metavar="N",
        help="maximum requests in flight; further ones wait (default: %(default)d)",
    )
    parser.add_argument(
        "--health-interval",
        type=float,
        default=defaults.health_interval_s,
        metavar="SECONDS",
        help="between two health checks of a server in use (default: %(default)g)",
    )
    parser.add_argument(
        "--health-timeout",
        type=float,
        default=defaults.health_timeout_s,
        metavar="SECONDS",
        help="timeout of a health check of a server in use (default: %(default)g)",
    )
    parser.add_argument(
        "--max-failed-checks",
        type=int,
        default=defaults.max_failed_checks,
        metavar="N",
        help="failed health checks in a row after which a server is taken out of use (default: %(default)d)",
    )
    parser.add_argument(
        "--grace",
        type=int,
        default=5,
        metavar="SECONDS",
        help="for requests in flight to finish after SIGTERM (default: %(default)d)",
    )
    server_process.add_arguments(parser)
    args = parser.parse_args(argv)
    if args.parent_pipe is not None:
        exit_with_parent(args.parent_pipe)  # before any slow work
    options = {
        "request_timeout_s": args.request_timeout,
        "max_in_flight": args.max_in_flight,
        "health_interval_s": args.health_interval,
        "health_timeout_s": args.health_timeout,
        "max_failed_checks": args.max_failed_checks,
        "api_key": os.environ.get(API_KEY_VARIABLE) or None,
        "worker_api_key": os.environ.get(WORKER_API_KEY_VARIABLE) or None,
    }
    try:
        config = parse(RouterConfig, options, "router")
        backends = [parse(BackendConfig, orjson.loads(backend), "--worker") for backend in args.worker]
        run_router(backends, config, server_process.open_listener(args), grace_s=args.grace)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
