"""`Audit`: probes of a judge, in tasks of their own, beside the samples of a manager.

Invariants:

- A probe changes no reward: its samples are copies with ``is_probe``, which managers neither count nor cache.
- A probe delays no sample: it starts when at most half of the threads or processes are in use, and the limits grant it
  a permit only if no sample waits. What waits is bounded; further probes are skipped, and counted.
- The audit owns its tasks. `drain` waits for them; `drain` and `close` cancel those that are left, and wait until they
  have ended, at most `ENDING_S` seconds.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
import random
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any

from reward_loop._util.bounded_tasks import BoundedTasks
from reward_loop._util.text import cut
from reward_loop.audit.ablation import AblationCount, Feature
from reward_loop.audit.counts import REJECTED, AuditCounts, ReferencePair
from reward_loop.audit.probes import ABLATION, CANARY, LabelledAnswers, Probe, Probes
from reward_loop.config import CacheConfig
from reward_loop.errors import ConfigError, FunctionLoadError, ScoringError
from reward_loop.managers import RewardLoopManagerBase
from reward_loop.records import AUDIT, ActiveSample, Records, exchanges_of, new_row, records
from reward_loop.scoring import ScoringFunction, load_function
from reward_loop.scoring.results import check_result
from reward_loop.types import Outcome, RewardResult, RewardSample, returned_numbers

logger = logging.getLogger(__name__)

MAX_RUNNING = 32
"""The largest number of probes in flight."""

MAX_WAITING = 64
"""The largest number of probes that wait for room, not counting labelled answers."""

MAX_SCORES = 512
"""The number of latest scores that tell what the judge accepts."""

MAX_RECENT = 64
"""The number of latest samples, or groups, in which a feature can be inserted or removed."""

OUTLIERS = 20
"""One in this number of the latest scores is an outlier at either end, such as a score with a penalty."""

MIN_SCORES = 32
"""Labelled answers wait for this number of scores of samples, which tell what the judge accepts."""

MAX_ANSWER = 2000
"""The largest number of characters of a probed answer in a record."""

ENDING_S = 10.0
"""The seconds within which cancelled probes must end."""

CANCEL_AGAIN_S = 1.0
"""A probe is cancelled again after this number of seconds: a function may suppress the first cancellation."""

LABELLED, REFERENCE = Probe("labelled"), Probe("reference")


def open_audit(manager: Any) -> Audit | None:
    """Start the audit of a manager if its options ask for one, and have the manager show it each result.

    Call it before the first sample: a manager whose options ask for an audit stops without one. The manager closes it.

    Args:
        manager: a `RewardLoopManagerBase`. Other managers have no audit.

    Returns:
        The audit; ``None`` if the options do not ask for one.

    Raises:
        ConfigError: see `Audit`.
    """
    if not isinstance(manager, RewardLoopManagerBase) or not manager.options.audit.is_on:
        return None
    manager.observer = audit = Audit(manager)
    return audit


class Audit:
    """Makes the probes of `AuditConfig`, for a share of the samples that a manager scores.

    With ``log_dir``, each probe is a row in its sub-folder ``audit``; see docs/health.md.

    Args:
        manager: the manager, which calls `offer` and closes the audit; see `open_audit`.

    Raises:
        ConfigError: the reference judge or the labelled answers cannot be loaded, or do not fit the manager.
    """

    part = (0, 1)
    """The position of this process among those that share the labelled answers, and their number."""

    def __init__(self, manager: RewardLoopManagerBase) -> None:
        self._manager = manager
        self._options = options = manager.options.audit
        # Not the global generator: the user's function may depend on its state.
        self._random = random.Random()
        self._probes = Probes(options, manager.needs_group, self._random)
        self._reference = _reference(manager) if options.reference else None
        self._labelled: LabelledAnswers | None = None
        if options.labelled:
            if manager.needs_group:
                raise ConfigError("reward_loop.audit.labelled: the manager scores whole groups, not single answers")
            self._labelled = LabelledAnswers(options.labelled, options.labelled_every)
            for answer, _ in self._labelled.answers:
                if (problem := manager.why_not_scored(answer)) is not None:
                    raise ConfigError(f"reward_loop.audit.labelled: {answer.uid}: {problem}")
        self._records: Records | None = None
        if manager.options.log_dir:
            self._records = records(Path(manager.options.log_dir) / AUDIT, manager.options.record.max_bytes)
        self._numbers = itertools.count()
        self._scores: deque[float] = deque(maxlen=MAX_SCORES)
        self._lowest, self._highest = math.inf, -math.inf
        self._counts = AuditCounts()
        self._recent: deque[tuple[int, list[RewardSample], list[float | None]]] = deque(maxlen=MAX_RECENT)
        self._advance = 0
        """The number of probes of features that were made before `AuditConfig.share` allowed them."""
        self._waiting: deque[Callable[[], Coroutine[Any, Any, None]]] = deque()
        self._labelled_waiting: deque[Callable[[], Coroutine[Any, Any, None]]] = deque()
        # Not in the contexts of the samples, which belong to their calls.
        self._probing = BoundedTasks(self._start_one, _log_error, MAX_RUNNING)
        self._running = self._probing.tasks
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_draining = self._is_closed = False

    @property
    def labelled(self) -> Sequence[tuple[RewardSample, bool]]:
        """The labelled answers, with their labels."""
        return () if self._labelled is None else self._labelled.answers

    def offer(self, samples: Sequence[RewardSample], results: Sequence[RewardResult]) -> None:
        """Start probes of samples that were scored together, if they are chosen. Returns at once.

        Args:
            samples: one sample, or the samples of a group. Validation samples and probes are not chosen.
            results: their results. Samples without a score are not chosen.
        """
        if self._is_closed or samples[0].is_probe:
            return
        self._loop = asyncio.get_running_loop()
        if not samples[0].validate:
            self._choose(samples, results)
        # Also without a new probe: a result is a sign of room for those that wait.
        self._probing.fill()

    def _choose(self, samples: Sequence[RewardSample], results: Sequence[RewardResult]) -> None:
        scores = [result.score for result in results]
        scored = {index: score for index, score in enumerate(scores) if score is not None}
        self._scores.extend(scored.values())
        self._lowest = min([self._lowest, *scored.values()])
        self._highest = max([self._highest, *scored.values()])
        if self._labelled is not None:
            is_first = self._labelled.is_first
            first = samples[0]
            step = first.generated_step if first.step is None else first.step
            for answer, label in self._labelled.due(step, self.part):
                # The function may require what only a run has.
                answer = replace(
                    answer, step=step, training_progress=first.training_progress, is_truncated=first.is_truncated
                )
                self._labelled_waiting.append(functools.partial(self._ask_labelled, answer, label, is_first))
        for index in scored:
            if self._reference is not None and self._random.random() < self._options.reference_share:
                self._enqueue(functools.partial(self._ask_reference, samples[index], results[index]))
        if not scored:
            return
        index = self._random.choice(list(scored))
        if self._options.share:
            self._recent.append((index, list(samples), scores))
        if self._random.random() < self._options.share:
            if self._advance:
                self._advance -= 1
            elif (probe := self._probes.choose(samples[index])) is not None:
                self._enqueue(functools.partial(self._ask, probe, index, list(samples), scores))
        self._probes.remember(samples[index])

    def ablate(self, feature: Feature, most: int) -> int:
        """Start probes of the latest answers with a feature inserted or removed, and return their number.

        The same number of later probes is left out, so that all together stay within `AuditConfig.share`.

        Args:
            feature: the feature.
            most: the largest number of probes.
        """
        if self._is_closed or not self._options.share:
            return 0
        answers = [samples[index].solution_str for index, samples, _ in self._recent]
        chosen = [self._recent[i] for i in feature.choose(answers, most, self._random)]
        place = feature.place(answers)
        for index, samples, scores in chosen:
            answer, inserted = feature.change(samples[index].solution_str, place)
            probe = Probe(ABLATION, feature.name, answer, inserted)
            # Other probes can wait: a warning is open until these have ended.
            self._waiting.appendleft(functools.partial(self._ask, probe, index, list(samples), scores))
        self._advance += len(chosen)
        self._probing.fill()
        return len(chosen)

    def take(self) -> AuditCounts:
        """Return the counts since the last call, and start again from zero."""
        taken, self._counts = self._counts, AuditCounts()
        return taken

    async def drain(self, timeout: float | None) -> None:
        """Wait until the probes have ended, at most ``timeout`` seconds; then cancel the others, and wait for them."""
        try:
            async with asyncio.timeout(timeout):
                self._is_draining = True
                self._probing.fill()
                await self._probing.drain()
        except TimeoutError:
            logger.warning("%d probes were cancelled: they took longer than %g s", len(self._running), timeout)
        finally:
            self._is_draining = False
        await self._end()

    def close(self) -> None:
        """Cancel the probes, wait until they have ended, and write the records. Later samples have no probes.

        Callable from any thread but that of the event loop, where it cannot wait, and only cancels the probes.
        """
        self._is_closed = True
        if self._loop is not None and self._loop.is_running():
            # Not `get_running_loop`, which raises in a thread without a loop.
            if asyncio._get_running_loop() is self._loop:
                self._forget_waiting()
                for task in self._running:
                    task.cancel()
            else:
                self._end_from_thread(self._loop)
        if self._reference is not None:
            self._reference.close()
        if self._records is not None:
            self._records.flush()

    def _end_from_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        ending = asyncio.run_coroutine_threadsafe(self._end(), loop)
        try:
            # Longer than `_end` takes itself, so a timeout means that the loop is blocked or has been stopped.
            ending.result(ENDING_S + CANCEL_AGAIN_S)
        except (TimeoutError, CancelledError):  # the loop is blocked, or has been stopped meanwhile
            ending.cancel()
            logger.warning("the event loop did not end the probes of reward_loop.audit within %g s", ENDING_S)

    async def _end(self) -> None:
        """Cancel the probes, again if they suppress it, and wait until they have ended, at most `ENDING_S` seconds."""
        self._forget_waiting()
        if left := await self._probing.end(ENDING_S, CANCEL_AGAIN_S):
            logger.warning("%d probes do not end: their function suppresses the cancellation", left)

    def _forget_waiting(self) -> None:
        self._waiting.clear()
        self._labelled_waiting.clear()

    def _enqueue(self, probe: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(probe)
        else:
            self._counts.skipped += 1

    def _start_one(self) -> asyncio.Task[None] | None:
        queue = self._next_queue()
        if self._is_closed or not queue or not self._manager.has_room(len(self._running)):
            return None
        return asyncio.create_task(queue.popleft()())

    def _next_queue(self) -> deque[Callable[[], Coroutine[Any, Any, None]]]:
        # While the audit drains, no further scores will come.
        is_known = self._options.accept is not None or len(self._scores) >= MIN_SCORES or self._is_draining
        return self._waiting or (self._labelled_waiting if is_known else deque())

    def _accepts(self, score: float) -> bool | None:
        """Return whether a score is that of an accepted answer; ``None`` while all scores are equal.

        By default, it must be in the upper half of the range of scores. A median would be the score of a wrong answer
        if most answers are wrong.
        """
        if self._options.accept is not None:
            return score >= self._options.accept
        ordered = sorted(self._scores)
        if not ordered:
            return None
        low, high = ordered[len(ordered) // OUTLIERS], ordered[-1 - len(ordered) // OUTLIERS]
        if low == high:  # almost all answers are right, or wrong
            low, high = self._lowest, self._highest
        return None if score == low == high else score > (low + high) / 2

    async def _ask(self, probe: Probe, index: int, samples: list[RewardSample], scores: Sequence[float | None]) -> None:
        """Make a probe of one sample, or of one in its group; compare the scores, and record them."""
        if probe.answer is not None:
            samples[index] = await self._manager.with_answer(samples[index], probe.answer)
        if self._manager.needs_group:
            # A group of its own: the manager would join these samples with those of the run, or of another probe.
            name = f"{samples[0].group} (probe {next(self._numbers)})"
            samples = [replace(sample, group=name, group_size=len(samples)) for sample in samples]
        order = list(range(len(samples)))
        if probe.kind == "order":
            order.reverse()
        # The judge gets the answers of a group in the order of these calls.
        calls = (self._score(replace(samples[i], is_probe=True)) for i in order)
        found = dict(zip(order, await asyncio.gather(*calls), strict=True))
        # With a changed answer, the others of its group are compared with another answer than before.
        compared = order if probe.answer is None else [index]
        for position in sorted(compared):
            score = scores[position]
            if score is None:
                continue
            result, active = found[position]
            is_right: bool | None = None
            if probe.kind == ABLATION:
                score, result, is_right = self._count_pair(probe, score, result)
            elif result.score is None:
                self._counts.without_score += 1
            else:
                difference = abs(result.score - score)
                is_right = difference <= self._options.tolerance
                if probe.kind == CANARY and (is_right := self._accepts(result.score)) is not None:
                    self._probes.ended(probe, is_right)
                if is_right is not None:
                    self._counts.add(probe.name, samples[position].uid, is_right, difference)
            # The members of a group have the same exchanges.
            more: dict[str, Any] = {} if position == min(compared) else {"exchanges": []}
            self._record(probe, samples[position], score, result, active, is_right, **more)

    def _count_pair(self, probe: Probe, score: float, result: RewardResult) -> tuple[float, RewardResult, bool | None]:
        """Count an answer with and without a feature.

        Returns:
            What is recorded: the score with the feature, that without it as a result, and whether the feature was
            inserted.
        """
        count = self._counts.ablations.setdefault(probe.variant, AblationCount())
        if result.score is None:
            self._counts.without_score += 1
            count.failed += 1
            return score, result, None
        without, having = (score, result.score) if probe.inserted else (result.score, score)
        count.pairs.append((without, having))
        return having, replace(result, score=without), probe.inserted

    async def _ask_labelled(self, answer: RewardSample, label: bool, is_first: bool) -> None:
        assert self._labelled is not None
        # The manager adds what the file does not have, such as the token ids.
        sample = await self._manager.with_answer(answer, answer.solution_str)
        result, active = await self._score(sample)
        accepted = None if result.score is None else self._accepts(result.score)
        if result.score is None:
            self._counts.without_score += 1
        else:
            if (drift := self._labelled.drift(str(sample.uid), result.score)) is not None:
                self._counts.drifts.append(drift)
            if accepted is not None:
                self._counts.add_labelled(sample.uid, label, accepted)
        texts = {"prompt": sample.prompt, "ground_truth": sample.ground_truth} if is_first else {}
        self._record(LABELLED, sample, float(label), result, active, accepted, **texts)

    async def _ask_reference(self, sample: RewardSample, judged: RewardResult) -> None:
        assert self._reference is not None
        assert judged.score is not None
        result, active = await self._score(replace(sample, is_probe=True), self._reference)
        components: dict[str, tuple[float, float]] = {}
        if result.score is None:
            self._counts.without_score += 1
        else:
            first, second = _components(judged), _components(result)
            components = {name: (first[name], second[name]) for name in first if name in second}
            self._counts.pairs.append(ReferencePair(sample.uid, judged.score, result.score, components))
            if self._accepts(result.score) is False and (accepted := self._accepts(judged.score)) is not None:
                self._counts.add(REJECTED, sample.uid, accepted)
        self._record(REFERENCE, sample, judged.score, result, active, None, components=components)

    async def _score(
        self, sample: RewardSample, reference: ScoringFunction | None = None
    ) -> tuple[RewardResult, ActiveSample]:
        """Score a sample by the manager, or by the reference judge."""
        manager = self._manager
        name = manager.name if reference is None else reference.name
        # The watchdog does not log it: a probe waits for a limit as long as any sample does.
        with ActiveSample(sample, name, is_recorded=self._records is not None) as active:
            try:
                if reference is None:
                    # Not `score`, which applies the policies and records the probe as a sample.
                    result = await manager.score_one(sample)
                else:
                    result = await reference(
                        sample,
                        reward_router_address=manager.reward_router_address,
                        reward_model_tokenizer=manager.reward_model_tokenizer,
                    )
                # The number of tokens of a changed answer is unknown, so dense rewards cannot be checked.
                return check_result(replace(sample, response_length=None), result), active
            except Exception as error:  # an audit must not stop a run
                problem = ScoringError(f"raised {type(error).__name__}: {error}", sample=sample)
                return RewardResult(Outcome.FAILED, None, error=str(problem), exception=problem), active

    def _record(
        self,
        probe: Probe,
        sample: RewardSample,
        score: float,
        result: RewardResult,
        active: ActiveSample,
        accepted: bool | None,
        **more: Any,
    ) -> None:
        """Write the row of a probe. ``more``: further columns, and those whose value differs from the usual one."""
        if self._records is None:
            return
        columns: dict[str, Any] = {
            "uid": sample.uid,
            "group": sample.group,
            "step": sample.step,
            "generated_step": sample.generated_step,
            "function": active.function,
            "probe": probe.kind,
            "variant": probe.variant,
            "score": score,
            "probe_score": result.score,
            "components": {},
            "accepted": accepted,
            # A phrase may be at the end.
            "answer": sample.solution_str if probe.kind == ABLATION else cut(sample.solution_str, MAX_ANSWER),
            "outcome": result.outcome,
            "error": result.error,
            "seconds": active.seconds,
            "exchanges": exchanges_of(active),
        }
        self._records.write_rows([new_row(AUDIT, **columns | more)])


def _log_error(probe: asyncio.Task[None]) -> None:
    if not probe.cancelled() and (error := probe.exception()) is not None:  # an audit must not stop a run
        logger.error("a probe of reward_loop.audit failed", exc_info=error)


def _components(result: RewardResult) -> dict[str, float]:
    """Return the numbers that a function returned beside the score; none if it returned a plain number."""
    numbers = returned_numbers(result.extra_info)
    return {name: value for name, value in numbers.items() if name != "score"} if "score" in numbers else {}


def _reference(manager: RewardLoopManagerBase) -> ScoringFunction:
    path = manager.options.audit.reference
    assert path is not None
    try:
        # A cache of scores would be that of the judge itself; probes are not cached.
        options = manager.options.model_copy(update={"cache": CacheConfig()})
        return ScoringFunction(load_function(path), options=options, limits=manager.limits)
    except (ConfigError, FunctionLoadError) as error:
        raise ConfigError(f"reward_loop.audit.reference={path}: {error}") from error
