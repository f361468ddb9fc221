from __future__ import annotations

import pytest

from reward_loop._util.api_keys import api_key_of, checked_api_key, has_key
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


@pytest.mark.parametrize(
    ("header", "is_bearer", "is_either"),
    [
        (b"Bearer key", True, True),
        (b"bEARER  key ", True, True),
        (b"Bearer other", False, False),
        (b"Basic dXNlcjprZXk=", False, True),  # user:key
        (b"Basic dXNlcjpvdGhlcg==", False, False),
        (b"Basic !", False, False),
        (b"Digest key", False, False),
        (b"key", False, False),
        (b"", False, False),
    ],
)
def test_a_request_has_the_key_as_a_bearer_token_or_as_the_password(
    header: bytes, is_bearer: bool, is_either: bool
) -> None:
    assert (has_key(header, b"key"), has_key(header, b"key", basic=True)) == (is_bearer, is_either)
