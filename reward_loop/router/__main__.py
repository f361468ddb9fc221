"""``python -m reward_loop.router --options JSON --worker JSON ...``: the router, as `RewardModelManager` runs it."""

from __future__ import annotations

import argparse
import sys

import orjson

from reward_loop._util import web_server
from reward_loop._util.api_keys import api_key_of
from reward_loop._util.process import exit_with_parent
from reward_loop._util.standard_streams import open_standard_streams
from reward_loop.config import parse
from reward_loop.errors import ConfigError
from reward_loop.router.app import run_router
from reward_loop.router.config import API_KEY_VARIABLE, WORKER_API_KEY_VARIABLE, BackendConfig, RouterConfig

__all__ = ["main"]


def main() -> int:
    """Run the router until SIGTERM; return the exit status."""
    open_standard_streams()
    parser = argparse.ArgumentParser(prog="python -m reward_loop.router", description=__doc__)
    parser.add_argument("--options", default="{}", metavar="JSON", help="options, as a RouterConfig")
    parser.add_argument(
        "--worker", action="append", default=[], metavar="JSON", help="a server, as a BackendConfig; may be repeated"
    )
    web_server.add_arguments(parser)
    args = parser.parse_args()
    if args.parent_pipe is not None:
        exit_with_parent(args.parent_pipe)  # before any slow work
    try:
        keys = {"api_key": api_key_of(API_KEY_VARIABLE), "worker_api_key": api_key_of(WORKER_API_KEY_VARIABLE)}
        config = parse(RouterConfig, {**orjson.loads(args.options), **keys}, "--options")
        backends = [parse(BackendConfig, orjson.loads(backend), "--worker") for backend in args.worker]
        # The manager stops the servers next, so requests in flight cannot be finished.
        run_router(backends, config, web_server.listener_of(args), grace_s=0)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
