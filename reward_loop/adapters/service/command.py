"""The command ``reward-loop serve``."""

from __future__ import annotations

import json
import logging
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reward_loop._util.process import raise_descriptor_limit
from reward_loop._util.web_server import api_key, open_listener, serve_until_signal, url_of
from reward_loop.errors import ConfigError
from reward_loop.offline import cli_options

if TYPE_CHECKING:
    from reward_loop.adapters.service.service import RewardService

PORT = 8090

CLOSING_S = 15
"""Seconds, after the grace period, for cancelled samples to end and their answers to be sent."""


def serve(
    context: typer.Context,
    fn: Annotated[
        str | None,
        typer.Argument(
            metavar="FUNCTION",
            help="The reward function: [cyan]file.py:name[/] or [cyan]package.module:name[/]. Left out where each "
            "component of a composite has a path.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on. Without a key, only loopback.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = PORT,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Environment variable that contains the key for requests.", show_default=False
        ),
    ] = None,
    strip: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Removed from the end of responses: an end-of-text token, which OpenRLHF and LLaMA-Factory send. "
            "Repeatable.",
        ),
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(
            "--field",
            "-f",
            metavar="PART=PATH",
            help="For NeMo-Gym: the field of a task that contains a part of the sample, e.g. "
            "[cyan]ground_truth=verifier_metadata.answer[/]. Repeatable.",
        ),
    ] = None,
    data_source: Annotated[str | None, typer.Option(help="The data source of samples without one.")] = None,
    reward_kwarg: cli_options.RewardKwargs = None,
    manager: cli_options.Manager = "naive",
    router_address: cli_options.RouterAddress = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Samples that are scored at a time.")] = 64,
    max_in_flight: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Samples that are accepted at a time; further requests get 429. Default: 16 times --concurrency.",
            show_default=False,
        ),
    ] = None,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Longer bodies get 413.")] = 16,
    timeout: Annotated[
        float,
        typer.Option(
            min=0,
            help="Time limit of the function for a sample, in seconds; 0 for no limit. Keep it below that of the "
            "trainer's client: 120 in slime, 180 in OpenRLHF.",
        ),
    ] = 100,
    isolation: cli_options.Isolation = "thread",
    log_dir: Annotated[
        Path | None,
        typer.Option(help="Record every sample with its exchanges with judges in this folder.", show_default=False),
    ] = None,
    grace: Annotated[int, typer.Option(min=0, help="Seconds for samples in flight to end after Ctrl-C.")] = 30,
    option: cli_options.MoreOptions = None,
) -> None:
    """Serve a reward function over HTTP, for every trainer that can call a URL.

    [cyan]/score[/] takes one sample or many, with groups. Other trainers send
    their own requests to [cyan]/openrlhf[/], [cyan]/slime[/],
    [cyan]/llamafactory[/] and [cyan]/verify[/] (NeMo-Gym). [cyan]/docs[/] describes all
    requests and replies; docs/serve.md shows what to set in each trainer.

    [bold]Example[/]

      reward-loop serve reward.py:compute_score

      curl http://127.0.0.1:8090/score --json '{"solution_str": "4", "ground_truth": "4"}'

    A sample without a score is never answered with a made-up number: /score
    and /verify mark it, the other replies are an error. Choose a number with
    -O on_failed=default -O on_unscored=default -O default_score=0.

    [cyan]/health[/], [cyan]/ready[/] and [cyan]/metrics[/] are for operation. Ctrl-C lets the
    samples in flight end.
    """
    # Here: the help of the command must not wait for FastAPI.
    from reward_loop.adapters.service.app import create_app
    from reward_loop.adapters.service.dialects import DialectOptions
    from reward_loop.adapters.service.service import RewardService
    from reward_loop.config import RewardLoopConfig, parse
    from reward_loop.managers.scorer import load_scorer
    from reward_loop.records import records

    key = api_key(api_key_env)
    options: dict[str, Any] = {
        "timeout": timeout or None,
        "max_threads": concurrency,
        "isolation": isolation,
        "max_failed_share": 1.0,  # the replies report each failure, so the trainer can decide
        "log_dir": None if log_dir is None else str(log_dir),
        **cli_options.more_options(context, option),
    }
    config = parse(RewardLoopConfig, options, cli_options.option_names(context))
    scorer = load_scorer(
        fn,
        manager,
        config,
        reward_kwargs=cli_options.values(reward_kwarg, "--reward-kwarg"),
        router_address=router_address,
    )
    service = RewardService(
        scorer, concurrency=concurrency, max_in_flight=max_in_flight, data_source=data_source, grace_s=grace
    )
    paths = cli_options.pairs(field, "--field")
    if paths and service.needs_groups:
        raise ConfigError(
            f"--field {next(iter(paths))} has no effect: {service.name} compares the samples of a group, so /verify is "
            "not served. Leave it out"
        )
    dialects = DialectOptions(tuple(strip or ()), paths)
    app = create_app(service, options=dialects, key=key, max_body_bytes=max_body_mb * 2**20)
    raise_descriptor_limit()
    with open_listener(host, port, key) as listener:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        _announce(service, listener, api_key_env)
        try:
            serve_until_signal(app, listener, on_signal=service.stop_from_signal, grace_s=grace + CLOSING_S)
        finally:
            if config.log_dir is not None:
                records(config.log_dir).flush()


def _announce(service: RewardService, listener: socket.socket, key_variable: str | None) -> None:
    """Print the address, and a command that scores a sample."""
    body: dict[str, Any] = {"solution_str": "4", "ground_truth": "4"}
    if "data_source" in service.scorer.requires and service.data_source is None:
        body["data_source"] = "test"
    examples = {
        "prompt": "2+2=",
        "response_ids": [19],
        "response_length": 1,
        "is_truncated": False,
        "global_steps": 1,
        "training_progress": 0.01,
        "validate": False,
    }
    asked = [name for name in examples if name in service.scorer.requires]
    body |= {"step" if name == "global_steps" else name: examples[name] for name in asked}
    if service.needs_groups:
        body["group"] = "2+2"
        body = {"samples": [body, {**body, "solution_str": "5"}]}
    key = "" if key_variable is None else f' -H "Authorization: Bearer ${key_variable}"'
    url = url_of(listener)
    print(f"{service.name} is served at {url}; its requests and replies: {url}/docs", flush=True)
    print(f"try it: curl {url}/score{key} --json '{json.dumps(body)}'", flush=True)
    if only_here := [name for name in asked if name != "prompt"]:
        print(
            f"only /score and the paths of NeMo-Gym can pass {', '.join(only_here)}, which the function requires; "
            "others answer with 422",
            flush=True,
        )
    if service.needs_groups:
        print(
            "only /score is served: the function compares the samples of a group, and other trainers send single ones",
            flush=True,
        )
