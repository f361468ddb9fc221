from __future__ import annotations

import pytest

from reward_loop._util.api_keys import api_key_of, checked_api_key
from reward_loop._util.web_server import api_key
from reward_loop.errors import ConfigError


@pytest.mark.parametrize("value", ["secret", "secret\n", "\r\n secret\t\n", "\ufeffsecret\r\n", "\u2028secret\xa0"])
def test_a_key_has_no_white_space_around_it(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", value)
    assert checked_api_key(value, "x") == api_key_of("A_KEY") == api_key("A_KEY") == "secret"


@pytest.mark.parametrize("value", ["", "\n"])
def test_a_blank_key_is_none(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", value)
    assert api_key_of("A_KEY") is None
    assert api_key_of("NOT_SET") is None


@pytest.mark.parametrize(
    "value", ["one\ntwo", "one\r\ntwo", "one\x00two", "one\x7ftwo", "one\u200btwo", "one\u2028two"]
)
def test_a_key_on_two_lines_is_an_error(value: str) -> None:
    with pytest.raises(ConfigError, match="A_KEY contains a line break"):
        checked_api_key(value, "A_KEY")
