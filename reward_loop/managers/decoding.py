"""From the tokens of a response to its text."""

from __future__ import annotations

import functools
from itertools import repeat
from typing import Any

from reward_loop.scoring.threads import DaemonThreads

__all__ = ["ResponseDecoder"]

_SHORT_RESPONSE = 1024
"""Tokens that a fast tokenizer decodes in less time (about 0.1 ms) than it takes to hand them to a thread."""

_THREADS = 2
"""Decoding holds the interpreter's lock for much of its time: more threads bring nothing."""


class ResponseDecoder:
    """Decodes responses, without special tokens, as ``tokenizer.decode`` does.

    Tokenizers make a string of each token, as their decoders may look at all of them. With byte-level tokenizers, as
    most models have, a token stands for some bytes wherever it is: a table of those takes a third of the time.

    Args:
        tokenizer: of transformers, or whatever has its ``decode``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._bytes = _bytes_of_tokens(tokenizer)
        self._threads = DaemonThreads(_THREADS)

    async def decode(self, ids: Any) -> str:
        """Return the text of token ids, an array of one dimension. An id that is no token's has no text."""
        if self._bytes is not None:
            return _join(self._bytes, ids.tolist())
        decode = functools.partial(self._tokenizer.decode, ids, skip_special_tokens=True)
        if len(ids) <= _SHORT_RESPONSE and getattr(self._tokenizer, "is_fast", False):
            return decode()
        return await self._threads.run(decode)


def _bytes_of_tokens(tokenizer: Any) -> dict[int, bytes] | None:
    """Return what each token stands for; ``None`` if it takes more than that to decode as the tokenizer does."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if type(getattr(backend, "decoder", None)).__name__ != "ByteLevel":
        return None
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    table = {id: b"" if token in special else _bytes_of(token) for token, id in backend.get_vocab().items()}
    # The whole vocabulary once: the tokenizer's class may do more than its backend.
    ids = sorted(table)
    return table if _join(table, ids) == tokenizer.decode(ids, skip_special_tokens=True) else None


def _bytes_of(token: str) -> bytes:
    try:
        return bytes(map(_BYTES.__getitem__, token))
    except KeyError:  # an added token: it is written as it is
        return token.encode()


def _join(table: dict[int, bytes], ids: list[int]) -> str:
    return b"".join(map(table.get, ids, repeat(b""))).decode(errors="replace")


def _alphabet() -> dict[str, int]:
    """Return the characters by which byte-level tokenizers write bytes: themselves, or from U+0100 on for those that
    cannot be seen. As in OpenAI's GPT-2 (``bytes_to_unicode``)."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _alphabet()
