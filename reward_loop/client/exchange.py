"""Records the requests of a reward function to model servers, in the record of the sample."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

from reward_loop.errors import RequestError
from reward_loop.limits.process_call import WorkerCall, call_here
from reward_loop.records import current

__all__ = ["Exchange"]


class Exchange:
    """One request to a model server, with its reply.

    It is added to the record of the sample as soon as it begins, so that a request that never ends is recorded, too.
    Fields are sent at the beginning and by `end` only, because each message from a worker process takes time.
    Outside of a recorded sample, an exchange has no effect.

    Args:
        fields: the first fields; docs/records.md has all names.
    """

    def __init__(self, **fields: Any) -> None:
        self._id = secrets.token_hex(4)
        self._send = _destination()
        self._fields: dict[str, Any] = {}
        self.end(**fields)

    def update(self, **fields: Any) -> None:
        """Add fields; call `end` afterwards."""
        self._fields |= fields

    def end(self, **fields: Any) -> None:
        """Add fields, and store all that were added so far. Later fields can be added in the same way."""
        if self._send is not None:
            self._send({"id": self._id, **self._fields, **fields})
        self._fields.clear()

    def use(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Add tokens; call `end` afterwards."""
        for name, tokens in (("prompt_tokens", prompt_tokens), ("completion_tokens", completion_tokens)):
            self._fields[name] = self._fields.get(name, 0) + tokens

    def failed(self, problem: str) -> RequestError:
        """Add the error of an answer with status 200 that has no usable content, and return it as an exception."""
        self.end(error=problem)
        return RequestError(problem, status=200)


def _destination() -> Callable[[Mapping[str, Any]], None] | None:
    """Return the function that takes the fields of an exchange; ``None`` if the calling code has no recorded sample."""
    call, sample = call_here(), current()
    if isinstance(call, WorkerCall):
        return call.exchange if call.is_recorded else None
    if sample is None or not sample.is_recorded:
        return None
    attempt = 1 if call is None else call.attempt
    return lambda fields: sample.exchange({**fields, "attempt": attempt})
