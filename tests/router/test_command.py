from __future__ import annotations

import pytest
from typer.testing import CliRunner

from reward_loop.cli import app
from reward_loop.errors import ConfigError
from reward_loop.router.command import parse_worker


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--worker", "http://127.0.0.1:1", "--host", "0.0.0.0"), "set an API key"),
        (("--worker", "127.0.0.1:1"), "expected http://host:port"),
        (("--worker", "http://127.0.0.1:1,kind=odd"), "kind"),
        (("--worker", "http://127.0.0.1:1", "-O", "policy=odd"), "policy"),
        (("--worker", "http://127.0.0.1:1", "--worker", "http://127.0.0.1:1/,model=x"), "this server is given twice"),
        (("--worker", "http://127.0.0.1:1", "-O", "max_attempt=2"), "did you mean 'max_attempts'"),
        (("--worker", "http://127.0.0.1:1", "-O", "max_attempts=none"), "max_attempts"),
        (("--worker", "http://127.0.0.1:1", "-O", "max_attempts"), "-O max_attempts: expected NAME=VALUE"),
    ],
)
def test_wrong_options_are_named(options: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["route", "--port", "0", *options])
    assert result.exit_code == 2
    assert message in result.output


def test_backend_specifications() -> None:
    backend = parse_worker("http://a:1/,model=x,model=y,kind=generative,engine=vllm")
    assert (backend.url, backend.models, backend.kind, backend.engine) == (
        "http://a:1",
        ("x", "y"),
        "generative",
        "vllm",
    )
    with pytest.raises(ConfigError, match="expected KEY=VALUE, got 'x'"):
        parse_worker("http://a:1,x")
