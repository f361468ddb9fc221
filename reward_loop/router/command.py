"""The command ``reward-loop route``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from reward_loop._util.api_keys import api_key_of
from reward_loop.config import parse
from reward_loop.errors import ConfigError
from reward_loop.router.config import API_KEY_VARIABLE, WORKER_API_KEY_VARIABLE, BackendConfig, RouterConfig


def route(
    worker: Annotated[
        list[str] | None,
        typer.Option(
            "--worker",
            "-w",
            metavar="URL[,KEY=VALUE...]",
            help="A server. Keys: [cyan]model[/] (repeatable; default: what its /v1/models lists), [cyan]kind[/] "
            "(generative, discriminative), [cyan]engine[/] (vllm, sglang, transformers, external), "
            "[cyan]health_path[/]. Repeatable. Servers can also be added while the router runs.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on. Other than loopback needs an API key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8080,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-O",
            metavar="NAME=VALUE",
            help="An option of the router, e.g. [cyan]policy=affinity[/]. Repeatable.",
        ),
    ] = None,
    grace: Annotated[int, typer.Option(min=0, help="Seconds for requests in flight to finish after SIGTERM.")] = 600,
) -> None:
    """Put several model servers behind one address.

    Requests are routed by their model, and sent to another server if one fails.
    Bodies and answers are not changed; streams are passed on at once. With
    [cyan]REWARD_LOOP_API_KEY[/], clients must send this key as a bearer token;
    [cyan]REWARD_LOOP_WORKER_API_KEY[/] is sent to the servers.

    [bold]Examples[/]

      reward-loop route --worker http://127.0.0.1:8001 --worker http://127.0.0.1:8002

      reward-loop route -w http://127.0.0.1:8001,model=judge,kind=generative,engine=vllm
      -w http://127.0.0.1:8002,model=scorer,kind=discriminative

    [bold]While it runs[/]

      curl http://127.0.0.1:8080/workers                                     list

      curl http://127.0.0.1:8080/workers --json '{"url": "http://127.0.0.1:8003"}'    add

      curl -X DELETE 'http://127.0.0.1:8080/workers?url=http://127.0.0.1:8001'        remove

    [cyan]/health[/] and [cyan]/ready[/] are 200 while a server is usable;
    [cyan]/metrics[/] is for Prometheus. On SIGTERM, the router finishes the
    requests in flight and exits.
    """
    # Here, because every command of `reward-loop` imports this module, and only this one needs a router.
    from reward_loop._util.web_server import listen
    from reward_loop.router.app import run_router

    options: dict[str, Any] = {}
    for pair in option or ():
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"-O {pair}: expected NAME=VALUE")
        options[name] = value
    keys = {"api_key": api_key_of(API_KEY_VARIABLE), "worker_api_key": api_key_of(WORKER_API_KEY_VARIABLE)}
    config = parse(RouterConfig, {**options, **keys}, "-O")
    workers = [parse_worker(spec) for spec in worker or ()]
    for number, one in enumerate(workers):
        if one.url in [other.url for other in workers[:number]]:
            raise ConfigError(f"--worker {one.url}: this server is given twice; list all its models in one option")
    try:
        listener = listen(host, port)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: {error.strerror or error}") from None
    with listener:
        run_router(workers, config, listener, grace_s=grace)


def parse_worker(spec: str) -> BackendConfig:
    """Parse the ``--worker`` option ``URL,KEY=VALUE,...`` into a `BackendConfig`.

    Raises:
        ConfigError: the option is malformed.
    """
    url, *pairs = spec.split(",")
    options: dict[str, Any] = {"url": url}
    models: list[str] = []
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not value:
            raise ConfigError(f"--worker {spec}: expected KEY=VALUE, got {pair!r}")
        if key == "model":
            models.append(value)
        else:
            options[key] = value
    if models:
        options["models"] = tuple(models)
    return parse(BackendConfig, options, f"--worker {url}")
