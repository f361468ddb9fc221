"""Tests of warnings: the judge scores the same answers with and without what a warning is about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from reward_loop.audit import AblationCount, AuditCounts, Feature
from reward_loop.audit.effect import Effect, effect_of
from reward_loop.audit.watch import HealthWarning
from reward_loop.verl.workers import RewardWorkers

__all__ = ["Ablations", "Tested"]

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
