"""``python -m reward_loop.serving.embedded --model PATH``: serves a small transformers model with vLLM's HTTP API.

The endpoints are ``/v1/chat/completions`` for a generative model, ``/classify`` for a discriminative one, and
``/v1/models`` and ``/health`` for both.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from reward_loop._util import web_server
from reward_loop._util.process import exit_with_parent, raise_descriptor_limit
from reward_loop._util.standard_streams import open_standard_streams
from reward_loop.errors import ConfigError
from reward_loop.serving.checkpoint import ModelKind, model_kind

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server until SIGTERM; returns the exit status."""
    open_standard_streams()
    args = _parser().parse_args(argv)
    if args.parent_pipe is not None:
        exit_with_parent(args.parent_pipe)  # before any slow work
    name = args.served_model_name or args.model
    try:
        kind: ModelKind = model_kind(args.model, "--model")
        if args.kind not in ("auto", kind):
            raise ConfigError(f"--kind {args.kind}: the model in {args.model} is {kind}")
        raise_descriptor_limit()
        # Imports torch, which takes seconds, so the options are checked first.
        from reward_loop.serving.embedded.app import create_app
        from reward_loop.serving.embedded.model import EmbeddedModel

        model = EmbeddedModel(
            args.model, name=name, kind=kind, max_batch_size=args.max_batch_size, max_wait_s=args.max_wait_ms / 1000
        )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    web_server.serve(create_app(model, can_sleep=args.enable_sleep_mode), args, f"{kind} model {name}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m reward_loop.serving.embedded", description=__doc__)
    parser.add_argument("--model", required=True, metavar="PATH", help="a model directory")
    parser.add_argument("--served-model-name", metavar="NAME", help="name of the model in requests (default: the path)")
    parser.add_argument(
        "--kind", choices=["auto", "generative", "discriminative"], default="auto", help="expected kind (default: any)"
    )
    parser.add_argument(
        "--max-batch-size", type=int, default=64, metavar="N", help="requests in a batch at most (default: %(default)d)"
    )
    parser.add_argument(
        "--max-wait-ms", type=float, default=3.0, metavar="MS", help="wait for a full batch (default: %(default)g)"
    )
    parser.add_argument("--enable-sleep-mode", action="store_true", help="serve /sleep, /wake_up and /is_sleeping")
    web_server.add_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
