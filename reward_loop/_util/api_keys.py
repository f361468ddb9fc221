"""API keys of the library's own servers and clients, as environment variables and options contain them."""

from __future__ import annotations

import base64
import binascii
import hmac
import os

from reward_loop.errors import ConfigError

CHALLENGE = {"www-authenticate": "Bearer"}
"""The header that each answer with status 401 must have (RFC 9110, 11.6.1)."""


def api_key_of(variable: str) -> str | None:
    """Return the API key in an environment variable; ``None`` if it is unset or blank.

    Raises:
        ConfigError: the key contains an invisible character.
    """
    return checked_api_key(os.environ.get(variable, ""), f"the environment variable {variable}")


def checked_api_key(key: str, where: str) -> str | None:
    """Return a key without the white space around it, such as the newline at the end of a file; ``None`` if blank.

    Args:
        key: the key.
        where: what contains the key, for the message.

    Raises:
        ConfigError: the key contains an invisible character, such as a line break, which no HTTP header can contain.
    """
    key = key.strip().removeprefix("\ufeff").strip()  # the mark at the beginning of some files
    if not key.isprintable():
        raise ConfigError(f"{where} contains a line break or another invisible character: an API key is a single line")
    return key or None


def has_key(authorization: bytes, key: bytes, *, basic: bool = False) -> bool:
    """Return whether the ``Authorization`` header of a request contains the key.

    Args:
        authorization: the value of the header; empty if the request has none.
        key: the key.
        basic: whether the key may also be the password of HTTP Basic, with any user name.
    """
    # Names of authentication schemes are case-insensitive (RFC 9110, 11.1).
    scheme, _, given = authorization.partition(b" ")
    given = given.strip()
    if basic and scheme.lower() == b"basic":
        try:
            given = base64.b64decode(given, validate=True).partition(b":")[2]
        except binascii.Error:
            return False
    elif scheme.lower() != b"bearer":
        return False
    # Not ==, whose time depends on the number of equal bytes.
    return hmac.compare_digest(given, key)
