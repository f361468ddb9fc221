"""The command ``reward-loop route``."""

from __future__ import annotations

from typing import Annotated, Any, get_args

import typer

from reward_loop.config import parse
from reward_loop.errors import ConfigError
from reward_loop.router.config import (
    API_KEY_VARIABLE,
    WORKER_API_KEY_VARIABLE,
    BackendConfig,
    Engine,
    Kind,
    PolicyName,
    RouterConfig,
)


def _complete_worker(incomplete: str) -> list[str]:
    """Complete ``engine=`` and ``kind=`` in ``URL,KEY=VALUE,...``."""
    before, comma, _ = incomplete.rpartition(",")
    values = [f"engine={engine}" for engine in get_args(Engine)] + [f"kind={kind}" for kind in get_args(Kind)]
    return [f"{before},{value}" for value in values] if comma else []


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
            autocompletion=_complete_worker,
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on. Other than loopback needs an API key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8080,
    policy: Annotated[
        PolicyName,
        typer.Option(help="How to choose a server; affinity: the same one for prompts that begin alike."),
    ] = "round_robin",
    request_timeout: Annotated[float, typer.Option(help="Time limit of a request in seconds, retries included.")] = 290,
    health_interval: Annotated[float, typer.Option(help="Seconds between two health checks of a server in use.")] = 2,
    health_timeout: Annotated[
        float, typer.Option(help="Timeout of a health check of a server in use, in seconds.")
    ] = 4,
    max_failed_checks: Annotated[
        int, typer.Option(min=1, help="Failed health checks in a row after which a server is taken out of use.")
    ] = 2,
    max_failures: Annotated[
        int, typer.Option(min=1, help="5xx answers in a row after which a server is taken out of use.")
    ] = 5,
    max_attempts: Annotated[int, typer.Option(min=1, help="Number of servers on which a request may fail.")] = 4,
    max_in_flight: Annotated[int, typer.Option(min=1, help="Maximum requests in flight; further ones wait.")] = 16384,
    max_queue: Annotated[int, typer.Option(min=0, help="Maximum waiting requests; further ones get 503.")] = 16384,
    queue_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds that a request may wait in the queue before it gets 503. Default: no bound."),
    ] = None,
    ca_file: Annotated[
        str | None, typer.Option(metavar="PEM", help="For https servers: the authorities to trust.")
    ] = None,
    client_cert: Annotated[
        str | None, typer.Option(metavar="PEM", help="For https servers: the router's certificate.")
    ] = None,
    client_key: Annotated[str | None, typer.Option(metavar="PEM", help="The key of --client-cert.")] = None,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Longer bodies get 413.")] = 64,
    max_header_kb: Annotated[int, typer.Option(min=1, help="Longer heads get 431, longer URLs 414.")] = 64,
    grace: Annotated[int, typer.Option(min=0, help="Seconds for requests in flight to finish after SIGTERM.")] = 600,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="REWARD_LOOP_API_KEY", show_default=False, help="Clients must send it as a bearer token."),
    ] = None,
    worker_api_key: Annotated[
        str | None,
        typer.Option(
            envvar="REWARD_LOOP_WORKER_API_KEY",
            show_default=False,
            help="Sent to the servers, instead of the client's key.",
        ),
    ] = None,
) -> None:
    """Put several model servers behind one address.

    Requests are routed by their model, and sent to another server if one fails.
    Bodies and answers are not changed; streams are passed on at once. Set the
    API keys in the environment, where ps does not show them.

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
    from reward_loop._util.api_keys import checked_api_key
    from reward_loop._util.web_server import listen
    from reward_loop.router.app import run_router
    from reward_loop.router.http_client import tls_context

    options = {
        "policy": policy,
        "request_timeout_s": request_timeout,
        "health_interval_s": health_interval,
        "health_timeout_s": health_timeout,
        "max_failed_checks": max_failed_checks,
        "max_failures": max_failures,
        "max_attempts": max_attempts,
        "max_in_flight": max_in_flight,
        "max_queue": max_queue,
        "max_queue_s": queue_timeout,
        "ca_file": ca_file,
        "client_cert": client_cert,
        "client_key": client_key,
        "max_body_bytes": max_body_mb * 1024 * 1024,
        "max_header_bytes": max_header_kb * 1024,
        "api_key": checked_api_key(api_key or "", f"--api-key, or the environment variable {API_KEY_VARIABLE},"),
        "worker_api_key": checked_api_key(
            worker_api_key or "", f"--worker-api-key, or the environment variable {WORKER_API_KEY_VARIABLE},"
        ),
    }
    config = parse(RouterConfig, options, "options")
    workers = [parse_worker(spec) for spec in worker or ()]
    for number, one in enumerate(workers):
        if one.url in [other.url for other in workers[:number]]:
            raise ConfigError(f"--worker {one.url}: this server is given twice; list all its models in one option")
    tls_context(config)  # so that a wrong file is an error at once
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
