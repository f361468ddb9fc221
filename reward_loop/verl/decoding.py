"""Decode the token ids of a response to text."""

from __future__ import annotations

import functools
from typing import Any

from reward_loop.scoring.threads import DaemonThreads

_SHORT_RESPONSE = 1024
"""Tokens up to which a fast tokenizer decodes on the event loop: about 0.1 ms, less than the handover to a thread."""

_THREADS = 2
"""Decoding holds the GIL for much of its time, so more threads do not help."""


class ResponseDecoder:
    """Decodes responses as ``tokenizer.decode`` does, by default without special tokens.

    In a byte-level tokenizer, which most models have, each token always represents the same bytes. For these, a lookup
    table takes 2 us for a response of 93 tokens, and ``tokenizer.decode`` 34 us, of about 60 us for the whole sample.

    Args:
        tokenizer: a transformers tokenizer, or another object with the same ``decode``.
        skip_special_tokens: as in ``tokenizer.decode``.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._bytes = _bytes_of_tokens(tokenizer, skip_special_tokens)
        self._threads = DaemonThreads(_THREADS)

    async def decode(self, ids: Any) -> str:
        """Return the text of a response.

        Args:
            ids: the token ids, 0 or larger, a one-dimensional array. Ids above those of the vocabulary give no text if
                the lookup table is used.
        """
        if self._bytes is not None:
            return _join(self._bytes, ids)
        decode = functools.partial(self._tokenizer.decode, ids, skip_special_tokens=self._skips)
        if len(ids) <= _SHORT_RESPONSE and getattr(self._tokenizer, "is_fast", False):
            return decode()
        return await self._threads.run(decode)


def _bytes_of_tokens(tokenizer: Any, skips: bool) -> Any:
    """Return an array of the bytes of each token id; ``None`` if they do not reproduce the tokenizer's decoding."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    # By name: the package `tokenizers` is imported only if the user has a tokenizer of it.
    if type(getattr(backend, "decoder", None)).__name__ != "ByteLevel":
        return None
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    vocabulary = backend.get_vocab()
    import numpy as np  # which transformers needs anyway: other tokenizers have no such backend

    # One more: all ids above the vocabulary stand for the last item. Models have more rows than tokens.
    table = np.full(2 + max(vocabulary.values(), default=-1), b"", dtype=object)
    for token, id in vocabulary.items():
        table[id] = _bytes_of(token) if token not in special else b"" if skips else token.encode()
    # Compare on the whole vocabulary: the tokenizer's class may do more than its backend.
    ids = sorted(vocabulary.values())
    text = _join(table, np.array(ids, dtype=np.int64))
    return table if text == tokenizer.decode(ids, skip_special_tokens=skips) else None


def _bytes_of(token: str) -> bytes:
    try:
        return bytes(map(_BYTES.__getitem__, token))
    except KeyError:  # an added token: its text is literal
        return token.encode()


def _join(table: Any, ids: Any) -> str:
    # As a list: `join` takes twice as long for an array.
    return b"".join(table.take(ids, mode="clip").tolist()).decode(errors="replace")


def _alphabet() -> dict[str, int]:
    """Return the mapping character -> byte of byte-level tokenizers, as in OpenAI's GPT-2 (``bytes_to_unicode``).

    A visible character represents its own code point; other bytes are represented by characters from U+0100 on.
    """
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _alphabet()
