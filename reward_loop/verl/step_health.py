"""The monitors of docs/health.md in verl's trainer: metrics, warnings in the log and their tests, and records.

A test of a warning: the judge scores the same answers with and without what the warning is about.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reward_loop._util.text import listing
from reward_loop.audit import AblationCount, AuditCounts, Feature
from reward_loop.audit.ablation import Effect, EffectVerdict, effect_of
from reward_loop.audit.monitors import HealthWarning, HealthWatch
from reward_loop.audit.values import JudgeCalls, Observation
from reward_loop.config import RewardLoopConfig
from reward_loop.records import HealthRecords
from reward_loop.types import Outcome, returned_numbers
from reward_loop.verl.reward_metrics import StepRewards, TrajectoryReward
from reward_loop.verl.tq_rows import read_rows
from reward_loop.verl.trajectory_keys import session_of, uid_of
from reward_loop.verl.workers import RewardWorkers

PAIRS = 64
"""The number of answers that are scored again for a warning."""


@dataclass(frozen=True, slots=True)
class Tested:
    """A warning that was tested."""

    warning: HealthWarning
    effect: Effect
    message: str


@dataclass
class _Open:
    """A warning whose answers are being scored."""

    warning: HealthWarning
    expected: int
    count: AblationCount = field(default_factory=AblationCount)


class Ablations:
    """Asks the reward workers for the probes of warnings, and collects their scores.

    Args:
        workers: the reward workers.
        steps: after this number of steps, the scores that have arrived count.
        decode: the method of the tokenizer.
    """

    def __init__(self, workers: RewardWorkers, steps: int, decode: Callable[..., str]) -> None:
        self._workers = workers
        self._steps = steps
        self._decode = decode
        self._open: dict[Feature, _Open] = {}

    def start(self, warnings: Sequence[HealthWarning]) -> None:
        """Ask for the probes of the warnings that are about a phrase or about length."""
        for warning in warnings:
            feature = self._feature(warning)
            if feature is not None and (expected := self._workers.ablate(feature, PAIRS)):
                self._open[feature] = _Open(warning, expected)

    def read(self, step: int, audit: AuditCounts) -> list[Tested]:
        """Add the scores of a step, and return the warnings whose answers have all been scored."""
        tested = []
        for feature, waiting in list(self._open.items()):
            found, count = audit.ablations.get(feature.name, AblationCount()), waiting.count
            count.pairs += found.pairs
            count.failed += found.failed
            if len(count.pairs) + count.failed < waiting.expected and step - waiting.warning.step < self._steps:
                continue
            del self._open[feature]
            sign = -1 if feature.phrase is None and waiting.warning.value < 0 else 1
            effect = effect_of(count.pairs, sign)
            tested.append(Tested(waiting.warning, effect, effect.describe(feature.name)))
        return tested

    def _feature(self, warning: HealthWarning) -> Feature | None:
        if warning.monitor == "length_correlation":
            return Feature()
        # The answers that judges read have no special tokens.
        phrase = self._decode(warning.tokens, skip_special_tokens=True).strip() if warning.tokens else ""
        return Feature(phrase) if phrase else None


logger = logging.getLogger(__name__)


class StepHealth:
    """Runs the monitors on each training step. Without records, the monitors of judges have no values.

    The reward workers count the requests to judges.

    Args:
        options: the options of the run.
        workers: its reward workers.
        decode: the method of the tokenizer, for the phrases of warnings.
    """

    def __init__(self, options: RewardLoopConfig, workers: RewardWorkers, decode: Callable[..., str]) -> None:
        self._options = options
        self._workers = workers
        self._watch = HealthWatch(options.health, decode)
        self._ablations = Ablations(workers, options.health.window, decode) if options.audit.share else None
        self._is_reference_checked = False
        self._records = HealthRecords(options.log_dir) if options.log_dir else None

    def metrics(self, step: int, rewards: StepRewards, audit: AuditCounts | None = None) -> dict[str, float]:
        """Return the values of the monitors for a step, and log and record the warnings that begin with it.

        An error of a monitor is logged, and does not stop the run.
        """
        if not self._options.health.enabled or not rewards.trajectories:
            return {}
        try:
            audit = audit or AuditCounts()
            observation = self._observe(step, rewards, audit)
            self._check_reference(observation)
            tested = [] if self._ablations is None else self._ablations.read(step, audit)
            for one in tested:
                if one.effect.verdict == EffectVerdict.CLEARED:
                    self._watch.clear(one.warning)
            found = self._watch.check(observation)
        except Exception:  # observability must not stop a run
            logger.exception("the monitors of reward_loop.health failed in step %d", step)
            return {}
        for warning in found.warnings:
            samples = f" Samples: {'; '.join(warning.samples)}." if warning.samples else ""
            where = f" Records: {self._options.log_dir}." if self._options.log_dir else ""
            logger.warning("reward_loop.health.%s: %s%s%s", warning.monitor, warning.message, samples, where)
        if self._records is not None:
            self._records.write_values(step, found.values)
            self._records.write_warnings([dataclasses.asdict(warning) for warning in found.warnings])
            self._records.write_effects([_effect(step, one) for one in tested])
        for one in tested:
            logger.warning("reward_loop.health.%s of step %d: %s", one.warning.monitor, one.warning.step, one.message)
        if self._ablations is not None:
            try:
                self._ablations.start(found.warnings)
            except Exception:
                logger.exception("the warnings of step %d cannot be tested", step)
        metrics = {f"reward_loop/health/{name}": value for name, value in found.values.items()}
        metrics |= {f"reward_loop/health/{one.warning.monitor}/effect": one.effect.mean for one in tested}
        return metrics | {"reward_loop/health/warnings": float(found.active)}

    def flush(self) -> None:
        """Wait until all values and warnings are in the records, at most ten seconds."""
        if self._records is not None:
            self._records.flush()

    def _observe(self, step: int, rewards: StepRewards, audit: AuditCounts) -> Observation:
        by_key = rewards.samples()
        keys, samples = list(by_key), list(by_key.values())
        _, groups = np.unique([uid_of(key) for key in keys], return_inverse=True)
        options, pairs = self._options.health, audit.pairs
        places = {key: place for place, key in enumerate(keys)}
        sampled = sampled_keys(keys, groups, options.sampled_responses)
        return Observation(
            step=step,
            rewards=np.array([np.nan if sample.is_masked else sample.reward for sample in samples]),
            groups=groups,
            lengths=np.array([sample.tokens for sample in samples]),
            scores=np.array([sample.raw_score if sample.is_scored else np.nan for sample in samples]),
            components=_components(samples),
            uids=[session_of(key)[0] for key in keys],
            unscored=sum(sample.outcome == Outcome.UNSCORED for sample in samples),
            responses=[
                ends(response.numpy(), options.sampled_tokens)
                for (response,) in read_rows(sampled, "train", "responses")
            ],
            response_samples=np.array([places[key] for key in sampled]),
            judges=self._judges(),
            probes=audit.probes,
            reference_pairs=np.array([(pair.score, pair.reference) for pair in pairs], dtype=float).reshape(-1, 2),
            reference_uids=[str(pair.uid) for pair in pairs],
        )

    def _check_reference(self, observation: Observation) -> None:
        """Log once that the function does not return the reference."""
        name = self._options.health.reference
        # Not in a step without scores, whose samples have no other numbers either.
        if name is None or self._is_reference_checked or not np.isfinite(observation.scores).any():
            return
        self._is_reference_checked = True
        if name not in observation.components:
            logger.warning(
                "reward_loop.health.reference=%s: no sample of step %d has a number of this name. The function "
                "returned: %s. Return the number beside the score, or name another one.",
                name,
                observation.step,
                listing(["score", *observation.components]),
            )

    def _judges(self) -> JudgeCalls | None:
        if self._records is None:
            return None
        counts = self._workers.exchange_counts()
        seconds = [duration for count in counts for duration in count["seconds"]]
        return JudgeCalls(
            calls=sum(count["calls"] for count in counts),
            without_verdict=sum(count["without_verdict"] for count in counts),
            seconds=np.array(seconds, dtype=float),
        )


def sampled_keys(keys: Sequence[str], groups: np.ndarray, size: int) -> list[str]:
    """Return the keys of at most ``size`` samples: whole groups, spread evenly over the step.

    If the groups are larger than ``size``, they are the first samples of one group.
    """
    if len(keys) <= size:
        return list(keys)
    count = int(groups.max()) + 1
    taken = max(1, size * count // len(keys))
    is_chosen = np.isin(groups, np.linspace(0, count - 1, taken).astype(int))
    return [key for key, chosen in zip(keys, is_chosen, strict=True) if chosen][:size]


def ends(tokens: np.ndarray, size: int) -> np.ndarray:
    """Return at most `size` tokens: of a longer response, half of them from its start and half from its end."""
    return tokens if len(tokens) <= size else np.concatenate([tokens[: size - size // 2], tokens[-(size // 2) :]])


def _components(samples: Sequence[TrajectoryReward]) -> Mapping[str, np.ndarray]:
    """Return the numbers that the function returned, without the measurements of the reward loop."""
    numbers = [returned_numbers(sample.info) for sample in samples]
    names = dict.fromkeys(name for of_sample in numbers for name in of_sample if name != "score")
    return {name: np.array([of_sample.get(name, np.nan) for of_sample in numbers]) for name in names}


def _effect(step: int, tested: Tested) -> dict[str, Any]:
    warning, effect = tested.warning, tested.effect
    about = {"step": step, "warned": warning.step, "monitor": warning.monitor, "subject": warning.subject}
    return {**about, "message": tested.message, **dataclasses.asdict(effect)}
