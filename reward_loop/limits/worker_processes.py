"""Limits inside functions that run in worker processes: `WorkerCall` there, `ServedCall` in the calling process.

Both sides use the channel that carries the call (`processes.worker.Channel`). The worker sends, each with the number of
the call before it:

    ["request", number, name, tokens]       answered with ``None`` if granted, or with the type and text of the error
    ["used", number, tokens]
    ["leave", number, accepted, retry_after]
    ["spend", cost, tokens]
    ["answer", accepted, retry_after]       how the service responded to a request of the call
    ["wait", what], ["go on", what]         the clock of the deadline stops in between
    ["exchange", fields]                    an exchange with a model server, for the record of the sample

All permits of a call end with the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from reward_loop._util.api_keys import api_key_of
from reward_loop.errors import LimitError
from reward_loop.limits.call import Call, Deadlines, RequestRetries, current_call
from reward_loop.limits.permit import ABANDONED, ModelRequests, PeerPermits, Permit
from reward_loop.limits.protocol import MAX_LENGTH, refusal
from reward_loop.processes import worker
from reward_loop.records import TEXT_FIELDS, current, encode_record, hide, shares_result, waiting_for

_MAX_EXCHANGE = MAX_LENGTH // 2


@dataclass(eq=False, repr=False, slots=True)
class WorkerCall:
    """The current call of a worker process; also the `Holder` of its permits."""

    _channel: worker.Channel
    """The channel to the process that made the call."""
    is_recorded: bool
    """Whether the sample has a record."""
    group: str | None
    """The group of the sample."""
    request_retries: RequestRetries
    """See `Call.request_retries`."""
    models: Mapping[str, ModelRequests]
    """See `Call.models`."""
    shares_result: bool
    """See `records.shares_result`."""
    _number: int = field(init=False)

    def __post_init__(self) -> None:
        self._number = self._channel.call

    async def acquire(self, name: str, tokens: float) -> Permit:
        """Acquire a permit, on the function's own event loop; raises as `Limits.acquire` does."""
        loop = asyncio.get_running_loop()
        reply = loop.create_future()

        def settle(error: Any) -> None:
            if not reply.done():
                reply.set_result(error)

        def answered(error: Any) -> None:
            # Another thread reads the channel, and the function may have closed its own loop since it asked.
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, error)

        permit = Permit(self, name, tokens, self._channel.expect(answered))
        try:
            self._tell("request", permit.id, name, tokens)
            error = await reply
        except BaseException:
            # The other side may have granted the permit already.
            permit.leave()
            raise
        return _granted(permit, error)

    def acquire_in_thread(self, name: str, tokens: float) -> Permit:
        """Acquire a permit, as `acquire` does, without an event loop."""
        reply: queue.SimpleQueue[Any] = queue.SimpleQueue()
        permit = Permit(self, name, tokens, self._channel.expect(reply.put))
        try:
            self._tell("request", permit.id, name, tokens)
            error = reply.get()
        except BaseException:  # an alarm of the function, for example
            permit.leave()
            raise
        return _granted(permit, error)

    def _tell(self, *message: Any) -> None:
        self._channel.tell(self._number, *message)

    def correct(self, permit: Permit, tokens: float) -> None:
        """Replace the token estimate of the permit."""
        self._tell("used", permit.id, tokens)

    def release(self, permit: Permit, accepted: bool | None, retry_after: float | None) -> None:
        """End the permit."""
        self._tell("leave", permit.id, accepted, retry_after)

    def spend(self, cost: float, tokens: float) -> None:
        """Report what the call used."""
        self._tell("spend", cost, tokens)

    def answer(self, accepted: bool | None, retry_after: float | None) -> None:
        """Report how the service responded to a request of the call; see `Permit.answer`."""
        self._tell("answer", accepted, retry_after)

    def exchange(self, fields: Mapping[str, Any]) -> None:
        """Report an exchange with a model server, or further fields of it, for the record of the sample.

        The texts of an exchange above `_MAX_EXCHANGE` bytes are left out.
        """
        size = len(encode_record(fields))
        if size > _MAX_EXCHANGE:
            small = {name: value for name, value in fields.items() if name not in TEXT_FIELDS}
            fields = {**small, "record_error": f"{size} bytes are too long for a record"}
        self._tell("exchange", dict(fields))

    def begin_wait(self, what: str) -> None:
        """Stop the clock of the deadline until `end_wait`."""
        self._tell("wait", what)

    def end_wait(self, what: str) -> None:
        """End a wait for `what`."""
        self._tell("go on", what)

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function that uses this object, at once in this thread."""
        function(*arguments)


def _granted(permit: Permit, error: Any) -> Permit:
    """Return the permit, or raise the error with which the request was answered."""
    if error == worker.NO_ANSWER:
        raise LimitError(ABANDONED)
    if error is not None:
        raise refusal(*error)
    return permit


def call_here() -> Call | WorkerCall | None:
    """Return the call of a reward function that the current code belongs to, also in a worker process.

    Calls of a proof are none, in a thread as in a process: limits and records do not apply to them.
    """
    if worker.channel is not None:
        if worker.context is None:
            return None
        # A new object: it keeps the number of the current call, and the pool ignores what is sent after that call.
        return WorkerCall(worker.channel, *worker.context)
    return current_call.get()


@contextlib.contextmanager
def outside_the_deadline(what: str) -> Iterator[None]:
    """Stop the clock of the deadline within ``with``, in any thread of the function, and record the wait for `what`."""
    if (call := call_here()) is None:  # a sample may be active all the same, for example in a manager of the user
        with waiting_for(current(), what):
            yield
        return
    call.run(call.begin_wait, what)
    try:
        yield
    finally:
        call.run(call.end_wait, what)


class ServedCall:
    """Serves a call in a worker process; see `processes.pool.Caller`.

    Args:
        call: the call.
        deadlines: those of the event loop.
    """

    def __init__(self, call: Call, deadlines: Deadlines) -> None:
        sample = call.sample
        recorded = (False, None) if sample is None else (sample.is_recorded, sample.sample.group)
        self.context = (*recorded, call.request_retries, call.models, shares_result.get())
        self._call = call
        # A list: requests of one call may pause at the same time, with the same text.
        self._pauses: list[str] = []
        self._deadlines = deadlines
        self._permits = PeerPermits()

    def begin(self, ended: asyncio.Future[Any]) -> None:
        """Start the call's clock."""
        # The deadline sets its error on this future, for which the pool waits.
        self._call.future = ended
        self._call.begin()
        self._deadlines.watch(self._call)

    def told(self, message: tuple[Any, ...], answer: Callable[[int, Any], None]) -> None:
        """Handle a message of the function."""
        match message:
            case ("request", number, name, tokens):
                acquire = partial(self._call.acquire, name, tokens)
                self._permits.request(number, lambda: self._call.loop.create_task(acquire()), answer)
            case ("used", number, tokens):
                self._permits.used(number, tokens)
            case ("leave", number, accepted, retry_after):
                self._permits.leave(number, accepted, retry_after)
            case ("spend", cost, tokens):
                self._call.spend(cost, tokens)
            case ("answer", accepted, retry_after):
                self._call.answer(accepted, retry_after)
            case ("wait", what):
                self._call.begin_wait(what)
                self._pauses.append(what)
            case ("go on", what):
                self._pauses.remove(what)
                self._call.end_wait(what)
            case ("exchange", fields):
                # The worker sends the name of the variable, not the key, which records written here must hide.
                if (variable := fields.get("api_key_env")) and (key := api_key_of(variable)):
                    hide(key)
                if self._call.sample is not None:
                    self._call.sample.exchange({**fields, "attempt": self._call.attempt})

    def close(self) -> None:
        """Stop serving: the function has ended."""
        # The worker may have ended within a pause, and the sample would be shown as waiting for ever.
        for what in self._pauses:
            self._call.end_wait(what)
        self._pauses.clear()
        self._permits.close()
