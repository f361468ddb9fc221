"""Phrases are found if their frequency rises together with the reward, and only then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from reward_loop.audit.monitors import MONITORS, HealthWarning, HealthWatch
from reward_loop.audit.phrases import unexplained_rewards
from reward_loop.audit.values import Observation
from reward_loop.config import HealthConfig

GROUPS, SIZE, STEPS = 32, 8, 28
COUNT = GROUPS * SIZE
PHRASE = [7, 8, 9, 10]
GROUP = np.repeat(np.arange(GROUPS), SIZE)

Write = Callable[[np.ndarray, np.random.Generator], np.ndarray]
"""Returns a response with the phrase."""


def inside(text: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    start = int(rng.integers(0, len(text) - 4))
    return np.concatenate([text[:start], PHRASE, text[start + 4 :]])


def at_the_end(text: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.concatenate([text, PHRASE])


def longer(text: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.concatenate([text, rng.integers(100, 9000, 100), PHRASE])


def alone(text: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.array(PHRASE[:1])


def steps(
    effect: float = 0.3,
    shares: tuple[float, float] = (0.0, 0.5),
    write: Write = inside,
    by_length: float = 0.0,
    words: tuple[int, int] = (20, 200),
    seed: int = 0,
) -> list[Observation]:
    """Steps in which the share of responses with the phrase goes from one value to another after the 16th step."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(1, STEPS + 1):
        share = shares[0] + (shares[1] - shares[0]) * max(0, number - 16) / (STEPS - 16)
        has_phrase = rng.random(COUNT) < share
        texts = [rng.integers(100, 9000, rng.integers(*words)) for _ in range(COUNT)]
        texts = [write(text, rng) if has else text for text, has in zip(texts, has_phrase, strict=True)]
        lengths = np.array([len(text) for text in texts])
        acc = has_phrase * effect
        rewards = rng.normal(0.5, 0.2, COUNT) + acc + by_length * lengths / 200
        found.append(
            Observation(
                step=number,
                rewards=rewards,
                groups=GROUP,
                lengths=lengths,
                scores=rewards,
                components={"acc": acc},
                uids=[f"{number}-{i}" for i in range(COUNT)],
                responses=texts,
                response_samples=np.arange(COUNT),
            )
        )
    return found


def run(observations: list[Observation], **options: object) -> list[HealthWarning]:
    off = {monitor.name: None for monitor in MONITORS if monitor.name != "phrases"}
    watch = HealthWatch(HealthConfig.model_validate({**off, **options}), lambda tokens: f"<{tokens}>")
    return [warning for observation in observations for warning in watch.check(observation).warnings]


@pytest.mark.parametrize(
    ("write", "words", "text"),
    [
        (inside, (20, 200), PHRASE),
        (at_the_end, (20, 200), PHRASE),
        (at_the_end, (300, 600), PHRASE),
        (alone, (20, 200), PHRASE[:1]),
    ],
)
def test_a_phrase_that_rises_with_the_reward_is_named(write: Write, words: tuple[int, int], text: list[int]) -> None:
    observations = steps(write=write, words=words)
    (warning,) = run(observations)
    assert f"<{text}>" in warning.message
    assert warning.value > 0.15
    latest = observations[warning.step - 1]
    uids = {uid: i for i, uid in enumerate(latest.uids)}
    chosen = [uids[uid] for uid in warning.samples]
    assert len({int(GROUP[i]) for i in chosen}) == 5
    assert all(set(text) <= set(latest.responses[i]) for i in chosen)


@pytest.mark.parametrize(
    "changes",
    [
        {"effect": 0.0},
        {"effect": -0.3},
        {"shares": (0.4, 0.4)},
        {"shares": (0.5, 0.0)},
        {"shares": (0.0, 0.1)},
        {"effect": 0.0, "write": longer, "by_length": 1.0},
    ],
    ids=["no reward", "a lower reward", "constant", "falling", "rare", "only longer"],
)
@pytest.mark.parametrize("seed", range(2))
def test_other_phrases_give_no_warning(changes: dict[str, object], seed: int) -> None:
    assert run(steps(**changes, seed=seed)) == []  # type: ignore[arg-type]


def test_a_phrase_whose_reward_the_reference_explains_gives_no_warning() -> None:
    assert run(steps(), reference="acc") == []


def test_without_a_tokenizer_the_warning_shows_token_ids() -> None:
    off = {monitor.name: None for monitor in MONITORS if monitor.name != "phrases"}
    watch = HealthWatch(HealthConfig.model_validate(off))
    messages = [warning.message for step in steps() for warning in watch.check(step).warnings]
    assert [str(PHRASE) in message for message in messages] == [True]


def test_masked_samples_and_equal_rewards_have_no_unexplained_reward() -> None:
    (first, *_) = steps()
    masked = np.where(np.arange(COUNT) % 3 == 0, np.nan, first.rewards)
    left = unexplained_rewards(replace(first, rewards=masked), None)
    assert np.isnan(left).sum() == np.isnan(masked).sum()
    assert np.nanstd(left) == pytest.approx(1)
    assert np.nansum(left * first.lengths) == pytest.approx(0, abs=1e-6)
    assert not unexplained_rewards(replace(first, rewards=np.ones(COUNT)), None).any()


@pytest.mark.parametrize("responses", [[], [np.array([], dtype=int)] * 4, [np.arange(1000)] * 2])
def test_a_step_with_few_or_empty_responses_is_read(responses: list[np.ndarray]) -> None:
    (first, *_) = steps()
    assert run([replace(first, responses=responses, response_samples=np.arange(len(responses)))] * STEPS) == []


@pytest.mark.parametrize("changes", [{"rewards": np.full(COUNT, np.nan)}, {"groups": np.arange(COUNT)}])
def test_without_groups_of_unmasked_samples_there_is_no_warning(changes: dict[str, np.ndarray]) -> None:
    assert run([replace(step, **changes) for step in steps()]) == []  # type: ignore[arg-type]
