"""What is true of the whole job, in one Ray actor: limits, budget, failure bound, reasons to stop, counters.

The actor is `Job`, around the same `LocalLimits` that a run of one process has. A reward worker uses it through
`JobLimits`, the trainer through `RunningJob`.

- A worker has at most one `Job.send` in flight; what it reports meanwhile goes with the next one, in order. Calls have
  numbers, so a repeated call is harmless.
- A permit comes with the reply of `send`, or later with that of `Job.events`: one such call of each worker waits in the
  actor for events. Events have numbers, too, and are kept until the worker has seen them.
- A *life* is one process of a worker. What a life holds ends when the next one joins, or when the worker does not come
  back, and messages of an ended life are refused: no permit is lost, and none is granted twice.
- The actor is never restarted. Its death, or an actor that stays unreachable for a worker, ends the run with its cause;
  a checkpoint has what was spent.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, OutOfMemoryError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from reward_loop.config import RewardLoopConfig
from reward_loop.errors import BudgetSpentError, LimitError, RewardLoopError, TooManyFailuresError
from reward_loop.limits import Limits, LocalLimits, Permit
from reward_loop.records import ExchangeCounts
from reward_loop.types import Outcome, RewardResult

PARKED_S = 60.0
"""The longest time that `Job.events` waits for an event, in seconds; the worker then calls again."""

MAX_CONCURRENCY = 100_000
"""Calls that run in the actor at the same time. With Ray's 1,000, those that wait for events could hold back others."""

_ERRORS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (LimitError, BudgetSpentError)}

Event = tuple[Any, ...]
"""``("granted", id)``, ``("refused", id, type of the error, text)``, or ``("spent", why)``."""


class News(NamedTuple):
    """The answer of the actor to a worker."""

    last: int
    """The number of the last event."""
    events: list[Event]
    """The last events, one for each number."""


class _Worker:
    """A life of a worker in the actor: its permits and requests by their ids, and the events that it has not seen."""

    def __init__(self, life: str) -> None:
        self.life = life
        self.heard = 0.0
        """When its last call arrived, by `time.monotonic`."""
        self.number = 0
        """The number of the last call of `send`."""
        self.has_news = asyncio.Event()
        self.is_replying = False
        """Whether events go with the reply of `send`."""
        self._requests: dict[int, asyncio.Future[Permit]] = {}
        self._events: deque[Event] = deque()
        self._last = 0

    def tell(self, *event: Any) -> None:
        self._events.append(event)
        self._last += 1
        if not self.is_replying:
            self.has_news.set()

    def news(self, seen: int) -> News:
        """Return the events after the last one that the worker has seen."""
        while len(self._events) > self._last - seen:
            self._events.popleft()
        return News(self._last, list(self._events))

    def request(self, start: Callable[..., asyncio.Future[Permit]], id: int, *arguments: Any) -> None:
        try:
            request = self._requests[id] = start(*arguments)
        except (LimitError, BudgetSpentError) as error:
            self.tell("refused", id, type(error).__name__, str(error))
        else:
            request.add_done_callback(partial(self._settled, id))

    def _settled(self, id: int, request: asyncio.Future[Permit]) -> None:
        if id not in self._requests:  # withdrawn, or of an ended life
            return
        if _is_granted(request):
            self.tell("granted", id)
            return
        del self._requests[id]
        error = request.exception()
        self.tell("refused", id, type(error).__name__, str(error))

    def used(self, id: int, tokens: float) -> None:
        if (request := self._requests.get(id)) is not None and _is_granted(request):
            request.result().used(tokens)

    def leave(self, id: int, accepted: bool | None, retry_after: float | None) -> None:
        """End a permit as `Permit.leave` does, or withdraw its request."""
        if (request := self._requests.pop(id, None)) is None:
            return
        if _is_granted(request):
            request.result().leave(accepted, retry_after)
        else:
            request.cancel()

    def end(self) -> None:
        """End all permits and requests."""
        for id in list(self._requests):
            self.leave(id, None, None)
        self.has_news.set()


def _is_granted(request: asyncio.Future[Permit]) -> bool:
    return request.done() and not request.cancelled() and request.exception() is None


class Job:
    """The actor. Its methods run on one event loop, and none of them waits but `events`.

    Args:
        options: the limits, the budget and the failure bound of the run.
        period: seconds over which requests and tokens are counted; shorter than a minute only in tests.
    """

    def __init__(self, options: RewardLoopConfig, period: float = 60.0) -> None:
        self._limits = LocalLimits(options, period)
        self._limits.on_spent = self._tell_spent
        self._workers: dict[str, _Worker] = {}
        self._ended: set[str] = set()
        """The lives that have ended."""
        self._exchanges = ExchangeCounts()

    async def join(self, worker: str, life: str) -> None:
        """Begin a life of a worker, and end what its last life held."""
        self._of(worker, life)

    async def send(self, worker: str, life: str, number: int, seen: int, messages: list[tuple[Any, ...]]) -> News:
        """Apply the messages of a worker.

        Args:
            worker, life: the worker, and its process.
            number: the number of the call, from 1.
            seen: the number of the last event that the worker has seen.
            messages: each is its name and its arguments.
        """
        sender = self._of(worker, life)
        if number > sender.number:  # otherwise a repeated call
            sender.number = number
            sender.is_replying = True
            try:
                for what, *arguments in messages:
                    self._apply(sender, what, arguments)
                await asyncio.sleep(0)  # now those events are known that the messages caused
            finally:
                sender.is_replying = False
        return sender.news(seen)

    async def events(self, worker: str, life: str, seen: int) -> News:
        """Wait until there are events for a worker, at most `PARKED_S` seconds; see `send`."""
        asking = self._of(worker, life)
        asking.has_news.clear()
        if not asking.news(seen).events:
            try:
                async with asyncio.timeout(PARKED_S):
                    await asking.has_news.wait()
            except TimeoutError:
                pass
        return asking.news(seen)

    async def stop(self, why: str) -> None:
        """Record why the run must stop; the first reason stays."""
        self._limits.stop(why)

    async def lose(self, worker: str, quiet_s: float) -> None:
        """End what a worker holds that has been unreachable for ``quiet_s`` seconds: it may never restart.

        Without effect if it was heard of since then. The messages of this life are refused from now on.
        """
        found = self._workers.get(worker)
        if found is not None and time.monotonic() - found.heard >= quiet_s:
            self._end(found)
            del self._workers[worker]

    async def count_failure(self, error: str, cause: str) -> None:
        """Count a sample that has failed without a worker, for the failure bound."""
        self._count(True, error, cause)

    async def why_stopped(self) -> str | None:
        """Return why the run must stop, or ``None``."""
        return self._limits.stopped

    async def usage(self) -> tuple[float, float]:
        """Return the cost and the tokens that count for the budget."""
        return self._limits.cost, self._limits.tokens

    async def spend(self, cost: float, tokens: float) -> None:
        """Add usage to the budget."""
        self._limits.spend(cost, tokens)

    async def exchange_counts(self) -> dict[str, Any]:
        """Return the counts of exchanges with model servers since the last call."""
        return self._exchanges.take()

    async def snapshot(self) -> dict[str, Any]:
        """Return the limits and their current usage."""
        return self._limits.snapshot()

    def _of(self, worker: str, life: str) -> _Worker:
        found = self._workers.get(worker)
        if found is None or found.life != life:
            if life in self._ended:
                raise RewardLoopError(f"{worker} was replaced by another process, or was unreachable for too long")
            if found is not None:
                self._end(found)
            found = self._workers[worker] = _Worker(life)
            if self._limits.spent is not None:
                found.tell("spent", self._limits.spent)
        found.heard = time.monotonic()
        return found

    def _end(self, worker: _Worker) -> None:
        self._ended.add(worker.life)
        worker.end()

    def _apply(self, sender: _Worker, what: str, arguments: list[Any]) -> None:
        if what == "request":
            sender.request(self._limits.request, *arguments)
        elif what == "used":
            sender.used(*arguments)
        elif what == "leave":
            sender.leave(*arguments)
        elif what == "spend":
            self._limits.spend(*arguments)
        elif what == "stop":
            self._limits.stop(*arguments)
        elif what == "exchanges":
            self._exchanges.merge(*arguments)
        elif what == "count":
            self._count(*arguments)

    def _count(self, failed: bool, error: str | None, cause: str | None) -> None:
        try:
            self._limits.add_outcome(failed, error, cause)
        except TooManyFailuresError as stop:
            self._limits.stop(f"{type(stop).__name__}: {stop}")

    def _tell_spent(self, why: str) -> None:
        for worker in self._workers.values():
            worker.tell("spent", why)


class JobLimits(Limits):
    """The limits of the job, in a worker. Permits are requested, and usage and outcomes reported, by messages.

    Args:
        job: the handle of the actor.
        worker: the name of the worker, the same after a restart.
        options: the options of the run.
        take_counts: returns new counts of exchanges with model servers, which are reported with the next message.
    """

    def __init__(
        self, job: Any, worker: str, options: RewardLoopConfig, take_counts: Callable[[], dict[str, Any]] | None = None
    ) -> None:
        super().__init__(options)
        self._job = job
        self._answer_timeout_s = options.worker_answer_timeout_s
        self._worker = worker
        self._life = uuid.uuid4().hex
        self._take_counts = take_counts
        self._messages: list[tuple[Any, ...]] = []
        """What is not sent yet."""
        self._number = self._seen = self._last_id = 0
        self._open: dict[int, tuple[Permit, asyncio.Future[Permit]]] = {}
        """The permits that are requested or held, by their ids."""
        self._sending: asyncio.Task[None] | None = None
        self._arrival: asyncio.Future[None] | None = None
        """Done when the last message has arrived, or the actor is lost."""
        self._listening: asyncio.Task[None] | None = None
        self._lost: str | None = None
        """Why the actor does not answer any more."""
        # Now, not with the first sample: other workers may wait for what a process before this one has held.
        job.join.remote(worker, self._life)

    def request(self, name: str, tokens: float = 0, order: tuple[float, float] = (0.0, 0.0)) -> asyncio.Future[Permit]:
        loop = self.check_loop()
        if self.spent is not None or name not in self.max_waits:
            raise self.refusal(name)
        if self._lost is not None:
            raise LimitError(self._lost)
        self._last_id += 1
        permit = Permit(self, name, tokens, self._last_id)
        request: asyncio.Future[Permit] = loop.create_future()
        self._open[permit.id] = permit, request
        request.add_done_callback(partial(self._settled, permit))
        self._send("request", permit.id, name, tokens, order)
        if self._listening is None or self._listening.done():
            self._listening = loop.create_task(self._listen())
        return request

    def _settled(self, permit: Permit, request: asyncio.Future[Permit]) -> None:
        if request.cancelled() or request.exception() is not None:
            self.release(permit, None, None)

    def correct(self, permit: Permit, tokens: float) -> None:
        if permit.id in self._open:
            self._send("used", permit.id, tokens)

    def release(self, permit: Permit, accepted: bool | None, retry_after: float | None) -> None:
        if self._open.pop(permit.id, None) is not None:
            self._send("leave", permit.id, accepted, retry_after)

    def spend(self, cost: float, tokens: float) -> None:
        self._send("spend", cost, tokens)

    def count(self, result: RewardResult) -> None:
        self._send("count", result.outcome is Outcome.FAILED, result.error, result.cause)

    def stop(self, why: str) -> None:
        self._send("stop", why)

    async def arrived(self) -> None:
        # Not until nothing is left to send: while other samples end, something is.
        if self._arrival is not None:
            await asyncio.shield(self._arrival)
        if self._lost is not None:
            raise LimitError(self._lost)

    def close(self) -> None:
        super().close()
        if self._listening is not None and not (loop := self._listening.get_loop()).is_closed():
            loop.call_soon_threadsafe(self._listening.cancel)  # any thread may close the limits

    def _send(self, *message: Any) -> None:
        if self._lost is not None:
            return
        loop = self.check_loop()
        if not self._messages:
            self._arrival = loop.create_future()
        self._messages.append(message)
        if self._sending is None or self._sending.done():
            self._sending = loop.create_task(self._send_all())

    async def _send_all(self) -> None:
        while self._messages:
            if self._take_counts is not None and (counts := self._take_counts())["calls"]:
                self._messages.append(("exchanges", counts))
            messages, self._messages = self._messages, []
            arrival = self._arrival
            self._number += 1
            self._receive(await self._call(self._job.send, self._number, lambda: self._seen, messages))
            assert arrival is not None
            arrival.set_result(None)

    async def _listen(self) -> None:
        while self._lost is None:
            self._receive(await self._call(self._job.events, lambda: self._seen))

    async def _call(self, method: Any, *arguments: Any) -> News | None:
        """Call the actor, again while it is unreachable; ``None`` if it is lost, or stays unreachable for too long."""
        since: float | None = None
        while True:
            given = [one() if callable(one) else one for one in arguments]
            try:
                news: News = await method.remote(self._worker, self._life, *given)
                return news
            # Not only `RayActorError`: the end by Ray's memory monitor is none, nor is an error that the actor raises.
            except (RayError, RewardLoopError) as error:
                now = time.monotonic()
                since = since or now
                if isinstance(error, ActorUnavailableError) and now - since < self._answer_timeout_s:
                    continue  # Ray has tried for a second or more; a repeated call is harmless
                for_long = f" after {now - since:.0f} s (reward_loop.worker_answer_timeout_s)" if now > since else ""
                self._lose(f"the limits of the job are lost{for_long}: {error}")
                return None

    def _receive(self, news: News | None) -> None:
        if news is None:
            return
        # Both calls may bring the same event.
        for event in news.events[max(0, len(news.events) - (news.last - self._seen)) :]:
            if event[0] == "granted":
                self._settle(event[1], None)
            elif event[0] == "refused":
                self._settle(event[1], _ERRORS[event[2]](event[3]))
            else:
                self.spent = event[1]
        self._seen = max(self._seen, news.last)

    def _settle(self, id: int, error: Exception | None) -> None:
        # Without an entry, the request was withdrawn: the actor ends the permit when it gets that message.
        permit, request = (self._open.get if error is None else self._open.pop)(id, (None, None))
        if permit is None or request is None or request.done():
            return
        if error is None:
            request.set_result(permit)
        else:
            request.set_exception(error)

    def _lose(self, why: str) -> None:
        self._lost = why
        opened, self._open = self._open, {}
        for _, request in opened.values():
            if not request.done():
                request.set_exception(LimitError(why))


class RunningJob:
    """The job's actor, as the process uses it that starts the run. It runs on the same node, until `close`.

    Args:
        options: the options of the run.
        timeout_s: seconds for an answer of the actor.
    """

    def __init__(self, options: RewardLoopConfig, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.name = f"reward_loop job {uuid.uuid4().hex}"
        """The name by which reward workers find the actor. With a handle among its arguments, Ray could not always
        restart a worker."""
        node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self.handle = (
            ray.remote(Job)
            .options(
                name=self.name,
                num_cpus=0,
                max_restarts=0,
                max_concurrency=MAX_CONCURRENCY,
                scheduling_strategy=node,
            )
            .remote(options)
        )

    def check(self) -> None:
        """Raise the first reason to stop the run, if there is one.

        Raises:
            RewardLoopError: a sample had no score and the policy is ``raise``, too many samples failed, a worker cannot
                be restarted; or the actor died.
        """
        if (why := self._ask("why_stopped")) is not None:
            raise RewardLoopError(why)

    def exchange_counts(self) -> dict[str, Any]:
        """Return the counts of exchanges with model servers since the last call."""
        counts: dict[str, Any] = self._ask("exchange_counts")
        return counts

    def usage(self) -> tuple[float, float]:
        """Return the cost and the tokens that count for the budget."""
        cost, tokens = self._ask("usage")
        return cost, tokens

    def spend(self, cost: float, tokens: float) -> None:
        """Add usage to the budget, such as that of the run that is resumed."""
        self._ask("spend", cost, tokens)

    def close(self) -> None:
        """End the actor."""
        ray.kill(self.handle)

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return ray.get(getattr(self.handle, method).remote(*arguments), timeout=self._timeout_s)
        except (RayActorError, OutOfMemoryError) as error:
            raise RewardLoopError(
                "the process with the limits and the failures of the run died. Start the same command again: the run "
                f"resumes from its last checkpoint. {error}"
            ) from error
        except GetTimeoutError as error:
            raise RewardLoopError(
                f"the process with the limits and the failures of the run did not answer within {self._timeout_s:g} s "
                "(reward_loop.worker_answer_timeout_s): is the machine overloaded?"
            ) from error
