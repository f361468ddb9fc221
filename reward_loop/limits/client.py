"""The client of the limiter service, for a worker of a job."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from typing import Any

from reward_loop._util.framing import frame, read_frame
from reward_loop.errors import ConfigError, JobServiceError, TooManyFailuresError
from reward_loop.limits.local import FailureBound, LocalLimits
from reward_loop.limits.options import JobOptions
from reward_loop.limits.outages import FORGET_S, JudgeAddress
from reward_loop.limits.permit import Limits, Order, Permit
from reward_loop.limits.protocol import MAX_LENGTH, MessageQueue, decode, enable_keepalive, proof, receive, refusal
from reward_loop.types import Outcome, RewardResult

__all__ = ["RemoteLimits", "SharedFailureBound", "failure_bound", "open_limits"]

TIMEOUT_S = 30.0
"""Seconds to connect to the service, or to get a response. After that, the service is away."""


def open_limits(options: JobOptions) -> Limits:
    """Return new limits: a client of the limiter service at ``options.job``, or local limits if it is not set.

    Raises:
        ConfigError: ``options.job`` is not an address.
    """
    return RemoteLimits(options.job, options) if options.job else LocalLimits(options)


class RemoteLimits(Limits):
    """Limits kept by a limiter service. Connects at the first use in an event loop, and after a lost connection.

    Args:
        address: ``host:port:token``, as returned by `LimitServer.start`.
        options: the options of the worker. The limits are those of the service.

    Raises:
        ConfigError: ``address`` has another form.
    """

    def __init__(self, address: str, options: JobOptions | None = None) -> None:
        try:
            # From the right: an IPv6 host has colons.
            host, port, self._token = address.rsplit(":", 2)
            self._address = host, int(port)
        except ValueError:
            raise ConfigError("reward_loop.job: expected host:port:token, the address of a limiter service") from None
        super().__init__(options or JobOptions(job=address))
        self.name = f"{host}:{port}"
        self.max_waits = {}
        self.is_known = False
        self.stopped: str | None = None
        """Why the run must stop, once too many samples of the job have failed."""
        self._messages: MessageQueue | None = None
        self._connection: asyncio.Task[None] | None = None
        self._lost: JobServiceError | None = None
        self._unsent = MessageQueue()
        """What happened without a connection, for the service."""
        self._service = f"the limiter service at {self.name}"
        self._away_since: float | None = None
        """When the service stopped answering, by `time.monotonic`."""
        self._away_until = 0.0
        """When it did not answer last."""
        self._received = 0
        """How many times messages arrived."""
        self._numbers = itertools.count()
        self._open: dict[int, tuple[Permit, asyncio.Future[Permit]]] = {}
        """The permits that are requested or held, by their id."""
        self._answers: dict[int, asyncio.Future[Any]] = {}

    def request(self, name: str, tokens: float = 0, order: Order = (0.0, 0.0)) -> asyncio.Future[Permit]:
        messages = self._connect()
        # Numbers are never used again: an answer that comes late must not settle another request.
        permit = Permit(self, name, tokens, next(self._numbers))
        request: asyncio.Future[Permit] = asyncio.get_running_loop().create_future()
        messages.send("request", permit.id, name, tokens, order)
        self._open[permit.id] = permit, request
        request.add_done_callback(functools.partial(self._settled, permit))
        return request

    def _settled(self, permit: Permit, request: asyncio.Future[Permit]) -> None:
        if request.cancelled() or request.exception() is not None:
            self.release(permit, None, None)

    def correct(self, permit: Permit, tokens: float) -> None:
        if permit.id in self._open:
            self._connect().send("used", permit.id, tokens)

    def release(self, permit: Permit, accepted: bool | None, retry_after: float | None) -> None:
        # Without an entry, the service has ended the permit, for example when the connection was lost.
        if self._open.pop(permit.id, None) is not None:
            self._connect().send("leave", permit.id, accepted, retry_after)

    def spend(self, cost: float, tokens: float) -> None:
        self._report("spend", cost, tokens)

    def count(self, result: RewardResult, of: str = "") -> None:
        """Count one sample for the failure bound of the job, or its component ``of``.

        Raises:
            TooManyFailuresError: the service has counted too many failures; raised at one of the next samples.
            JobServiceError: the service has been unreachable for longer than ``outage_timeout_s``.
        """
        if self.stopped is not None:
            raise TooManyFailuresError(self.stopped)
        lost = self._lost
        # The error may contain model output with surrogates, which UTF-8 cannot encode.
        texts = (result.error, result.cause)
        error, cause = (text and text.encode("utf-8", "backslashreplace").decode() for text in texts)
        self._report("count", result.outcome is Outcome.FAILED, error, cause, of)
        if lost is not None and not self._is_awaited(lost):
            raise lost

    def _report(self, *message: Any) -> None:
        """Send a message that needs no answer, or keep it until the service is back."""
        messages = self._connect()
        # Also while the first connection is being opened: it may fail.
        (messages if messages.is_connected else self._unsent).send(*message)

    def _is_awaited(self, error: JobServiceError) -> bool:
        """Return whether calls wait until the service is reachable again, instead of failing."""
        # Not until now: without a use of the limits, nothing has tried to reach the service since it was away.
        away_s = 0.0 if self._away_since is None else self._away_until - self._away_since
        return error.unreachable is not None and away_s < self.options.outage_timeout_s

    async def why_stopped(self) -> str | None:
        try:
            await self.status()  # the service has then counted all samples that were sent before
        except JobServiceError as error:
            return None if self._is_awaited(error) else str(error)
        return None if self.stopped is None else f"TooManyFailuresError: {self.stopped}"

    async def status(self) -> dict[str, Any]:
        status: dict[str, Any] = await self._ask("status")
        return status

    def close(self) -> None:
        super().close()  # the end of the connection also ends its permits
        self._away_since = self._lost = None  # for a later use, with its own bound
        if self._connection is not None and not (loop := self._connection.get_loop()).is_closed():
            # Threadsafe: the event loop may run in another thread than the one that closes the limits.
            loop.call_soon_threadsafe(self._connection.cancel)

    async def _ask(self, question: str, *arguments: Any) -> Any:
        messages, number = self._connect(), next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        messages.send(question, number, *arguments)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise self._unreachable(f"no answer within {TIMEOUT_S:g} s") from None
        finally:
            self._answers.pop(number, None)

    def _connect(self) -> MessageQueue:
        """Return the message queue of the connection; open a connection if there is none."""
        loop = self.check_loop()
        if self._connection is not None and self._connection.get_loop() is not loop:
            self._messages, self._open, self._answers = None, {}, {}  # they belong to an earlier event loop
        if self._messages is None:
            self._messages = MessageQueue()
            self._connection = loop.create_task(self._run(self._messages))
        return self._messages

    async def _run(self, messages: MessageQueue) -> None:
        writer: asyncio.StreamWriter | None = None
        watch: asyncio.Task[None] | None = None
        why, closed, awaited = "the connection has ended", False, True
        try:
            async with asyncio.timeout(TIMEOUT_S):
                reader, writer = await asyncio.open_connection(*self._address)
                enable_keepalive(writer)
                writer.write(frame(proof(self._token, await read_frame(reader, MAX_LENGTH))))
                first = await read_frame(reader, MAX_LENGTH)
            if not first:
                # Not an outage: a service with another token belongs to another job, and will never accept this one.
                awaited = False
                raise ConnectionError("the service does not accept the token")
            self._receive(decode(first))
            self._lost = None
            # First, so that an answer to a queued question includes them.
            unsent, self._unsent = self._unsent, MessageQueue()
            unsent.connect(writer)
            # Only now: requests that were queued meanwhile must not reach the service before the proof.
            messages.connect(writer)
            watch = asyncio.create_task(self._end_if_frozen(messages, writer))
            while True:
                self._receive(await receive(reader))
        except asyncio.CancelledError:
            closed, awaited, why = True, False, "this process has closed the connection"
        except EOFError:
            pass
        except TimeoutError:
            why = f"no answer within {TIMEOUT_S:g} s"
        except (OSError, ValueError) as error:
            why = str(error) or type(error).__name__
        finally:
            if watch is not None:
                if watch.done() and not watch.cancelled():
                    why = f"no answer within {TIMEOUT_S:g} s"
                watch.cancel()
            lost = self._unreachable(why, awaited)
            # Otherwise another event loop, or a later connection, owns the state by now.
            if self._messages is messages:
                self._messages = None
                # After a deliberate close, the next use connects again.
                self._lost = None if closed else lost
                opened, self._open = self._open, {}
                for _, request in opened.values():
                    if not request.done():
                        request.set_exception(lost)
                for answer in self._answers.values():
                    if not answer.done():
                        answer.set_exception(lost)
            if writer is not None:
                writer.close()

    async def _end_if_frozen(self, messages: MessageQueue, writer: asyncio.StreamWriter) -> None:
        """Close the connection if calls wait for an answer and the service does not answer even a question.

        A permit may come late because a limit is used up, so a wait alone shows nothing.
        """
        while True:
            received = self._received
            await asyncio.sleep(TIMEOUT_S / 2)
            waits = [*(request for _, request in self._open.values()), *self._answers.values()]
            if received == self._received and not all(wait.done() for wait in waits):
                messages.send("status", -1)  # no call waits for the answer
                await asyncio.sleep(TIMEOUT_S / 2)
                if received == self._received:
                    # Not `close`, which would wait for the frozen peer to read what is buffered.
                    writer.transport.abort()
                    return

    def _receive(self, messages: list[list[Any]]) -> None:
        self._received += 1
        if self._away_since is not None:
            self._away_since = None
            # Here: the call that has its turn may end without a sign of the answer, for example without a permit.
            self.outages.answered(JudgeAddress(self._service))
        for what, *rest in messages:
            if what == "settled":
                number, why = rest
                # The permit of a refused request must not be ended: the service has none.
                permit, request = (self._open.get if why is None else self._open.pop)(number, (None, None))
                if permit is None or request is None or request.done():
                    continue
                if why is None:
                    request.set_result(permit)
                else:
                    request.set_exception(refusal(*why))
            elif what == "limits":
                self.max_waits, self.is_known = rest[0], True
            elif what == "spent":
                self.spent = rest[0]
            elif what == "stop":
                self.stopped = rest[0]
            elif (answer := self._answers.get(rest[0])) is not None and not answer.done():
                answer.set_result(rest[1])

    def _unreachable(self, why: str, awaited: bool = True) -> JobServiceError:
        if awaited:
            now = time.monotonic()
            # Without a use for longer, nothing has tried to reach the service: its outage begins anew.
            if self._away_since is None or now - self._away_until > FORGET_S:
                self._away_since = now
            self._away_until = now
        return JobServiceError(
            f"the limiter service at {self.name} is unreachable ({why}). It keeps the limits of all workers of the "
            "job, so no calls are made without it. It runs in the process that started the job: check that process "
            "first",
            self._service if awaited else None,
        )


class SharedFailureBound:
    """The failure bound over all workers of a job, counted by the limiter service; otherwise as `FailureBound`."""

    def __init__(self, limits: RemoteLimits, of: str = "") -> None:
        self._limits = limits
        self._of = of

    def count(self, result: RewardResult) -> None:
        """Count one sample; raises as `RemoteLimits.count` does."""
        self._limits.count(result, self._of)


def failure_bound(options: JobOptions, limits: Limits, of: str = "") -> FailureBound | SharedFailureBound:
    """Return the failure bound of the whole job if it has a limiter service, otherwise of one manager."""
    if options.job and isinstance(limits, RemoteLimits):
        return SharedFailureBound(limits, of)
    return FailureBound.of_options(options, of)
