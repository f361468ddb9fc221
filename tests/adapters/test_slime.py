"""The reward for slime and miles, with samples that have the fields of theirs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from reward_loop.adapters.slime import custom_rm, normalise
from reward_loop.errors import ConfigError, ScoringError
from tests.adapters.rewards import FUNCTION


@dataclass
class Sample:
    """The fields of ``Sample`` that slime (August 2026) and miles (August 2026) have in common."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    remove_sample: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    custom_rm_path: str | None = None

    def get_reward_value(self, args: Any) -> Any:
        return self.reward if not args.reward_key else self.reward[args.reward_key]  # type: ignore[index]


def arguments(*, options: dict[str, Any] | None = None, **values: Any) -> SimpleNamespace:
    config = {"function": FUNCTION, **(options or {})}
    defaults = {"reward_key": None, "eval_reward_key": None, "group_rm": False, "reward_loop_config": config}
    return SimpleNamespace(**{**defaults, **values})


def sample(response: str, index: int = 0, **fields: Any) -> Sample:
    return Sample(response=response, index=index, label="4", response_length=3, **fields)


async def test_a_sample_gets_its_reward_and_its_components() -> None:
    right, wrong = sample("4", metadata={"level": "easy"}), sample("5", metadata={})
    assert [await custom_rm(arguments(), each, evaluation=False) for each in (right, wrong)] == [1.0, 0.0]
    assert not right.remove_sample
    assert right.metadata["level"] == "easy"
    assert right.metadata["reward_loop"] == {
        "score": 1.0,
        "words": 1.0,
        "reward_outcome": "scored",
        "reward_masked": False,
        "reward_error": "",
    }


@pytest.mark.parametrize(
    ("response", "options", "score", "outcome", "error"),
    [
        ("none", {}, None, "unscored", "gave no score"),
        ("fail", {}, None, "failed", "is broken"),
        ("fail", {"reward_loop": {"on_failed": "default", "default_score": -1.0}}, -1.0, "failed", "is broken"),
        ("abc", {"manager": "tests.adapters.rewards:VerlManager"}, 3.0, "scored", ""),  # it reports no outcome
    ],
)
async def test_only_a_sample_without_a_score_is_removed_from_the_loss(
    response: str, options: dict[str, Any], score: float | None, outcome: str, error: str
) -> None:
    each = sample(response, metadata={"reward_loop": "a column of the data set, which is replaced"})
    assert await custom_rm(arguments(options=options), each) == (score or 0.0)
    assert each.remove_sample is (score is None)
    assert each.metadata["reward_loop"]["reward_outcome"] == outcome
    assert error in each.metadata["reward_loop"]["reward_error"]


async def test_a_removed_sample_that_is_scored_again_is_trained_on() -> None:
    again = sample("fail", metadata={})
    await custom_rm(arguments(), again)
    again.response = "4"
    assert await custom_rm(arguments(), again) == 1.0
    assert not again.remove_sample


async def test_the_policy_raise_stops_the_run() -> None:
    with pytest.raises(ScoringError, match=r"sample 7: .*is broken"):
        await custom_rm(arguments(options={"reward_loop": {"on_failed": "raise"}}), sample("fail", index=7))


async def test_with_a_reward_key_the_reward_is_a_dict_of_components() -> None:
    args = arguments(reward_key="score", eval_reward_key="words")
    scored, failed = sample("4"), sample("fail")
    for each in (scored, failed):
        each.reward = await custom_rm(args, each)
    assert scored.reward == {"score": 1.0, "words": 1.0}
    assert failed.reward == {"score": 0.0, "words": 0.0}
    with pytest.raises(ConfigError, match=r"sample 3: .*no component 'acuracy'.*score, words"):
        await custom_rm(arguments(reward_key="acuracy"), sample("4", index=3))


@pytest.mark.parametrize(
    ("name", "manager", "rewards"),
    [
        ("rank", "group", [[0.5, 0.0, 1.0], [0.0, 1.0, 0.5]]),
        ("Centred", "naive", [[0, -1, 1], [-4 / 3, 5 / 3, -1 / 3]]),
    ],
)
async def test_groups_are_compared_with_group_rm_only(name: str, manager: str, rewards: list[list[float]]) -> None:
    options = {"function": FUNCTION.replace("compute_score", name), "manager": manager}
    # Both groups have the same index, as a group of training and one of evaluation may have.
    groups = [[sample(text, group_index=0) for text in texts] for texts in (("aa", "a", "aaa"), ("b", "bbbb", "bb"))]
    scored = await asyncio.gather(*(custom_rm(arguments(options=options, group_rm=True), group) for group in groups))
    assert scored == [pytest.approx(group) for group in rewards]
    with pytest.raises(ConfigError, match="set --group-rm"):
        await custom_rm(arguments(options=options), sample("a"))


async def test_a_list_of_samples_without_group_rm_is_scored_sample_by_sample() -> None:
    assert await custom_rm(arguments(), [sample("4"), sample("5")]) == [1.0, 0.0]
    assert await custom_rm(arguments(), []) == []


async def test_the_ground_truth_may_be_a_field_of_the_metadata() -> None:
    args = arguments(options={"ground_truth": "answer"})
    assert await custom_rm(args, sample("5", metadata={"answer": "5"})) == 1.0
    with pytest.raises(ConfigError, match=r"the data has no field 'answer': set `ground_truth` .* label, other"):
        await custom_rm(args, sample("5", metadata={"other": "5"}))


def normalisation(**values: Any) -> SimpleNamespace:
    defaults = {"advantage_estimator": "grpo", "rewards_normalization": True, "grpo_std_normalization": False}
    return SimpleNamespace(reward_key=None, **{**defaults, **values})


def rewarded(*groups: list[float | None]) -> list[Sample]:
    return [
        Sample(group_index=i, index=10 * i + j, reward=reward or 0.0, remove_sample=reward is None)
        for i, group in enumerate(groups)
        for j, reward in enumerate(group)
    ]


def test_a_removed_sample_is_not_part_of_the_baseline() -> None:
    samples = rewarded([1.0, 0.5, None], [1.0, 1.0, 1.0], [None, None, 1.0], [None, None, None])
    raw, normalised = normalise(normalisation(), samples)
    assert raw == [1.0, 0.5, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert normalised == [0.25, -0.25, 0.0, *[0.0] * 9]


@pytest.mark.parametrize(("estimator", "divided"), [("grpo", True), ("reinforce_plus_plus_baseline", False)])
def test_complete_groups_are_normalised_as_by_slime(estimator: str, divided: bool) -> None:
    torch = pytest.importorskip("torch")
    samples = rewarded([1.0, 0.5, 0.0, 0.0], [0.3, 0.2, 1.0, 1.0])
    args = normalisation(advantage_estimator=estimator, grpo_std_normalization=True)
    rewards = torch.tensor([each.reward for each in samples]).reshape(2, 4)
    expected = rewards - rewards.mean(dim=-1, keepdim=True)
    if divided:
        expected = expected / (expected.std(dim=-1, keepdim=True) + 1e-6)
    assert normalise(args, samples)[1] == pytest.approx(expected.flatten().tolist(), abs=1e-6)


def test_rewards_of_other_estimators_are_not_changed() -> None:
    samples = rewarded([1.0, 0.5])
    for args in (normalisation(advantage_estimator="ppo"), normalisation(rewards_normalization=False)):
        assert normalise(args, samples) == ([1.0, 0.5], [1.0, 0.5])


def test_normalisation_needs_one_sample_for_each_rollout_and_the_index_of_the_group() -> None:
    samples = rewarded([1.0, 0.5])
    for each in samples:
        each.rollout_id = 1
    with pytest.raises(ConfigError, match="several samples"):
        normalise(normalisation(), samples)
    samples[0].group_index = None
    with pytest.raises(ConfigError, match="no group_index"):
        normalise(normalisation(), samples)


async def test_a_function_gets_tokens_and_whether_slime_cut_them_off() -> None:
    config = {"function": "tests.adapters.rewards:asked"}
    given = sample("4", tokens=[7, 8, 19, 2, 2], prompt="2+2=")
    given.status = SimpleNamespace(value="truncated")  # type: ignore[attr-defined]
    args = arguments(reward_loop_config=config, reward_key="score")
    reward = await custom_rm(args, given)
    assert reward == {"score": 1.0, "tokens": 3.0, "cut": 1.0}


async def test_a_function_that_asks_for_what_slime_lacks_is_an_error_at_the_start() -> None:
    config = {"function": "tests.adapters.rewards:scheduled"}
    with pytest.raises(ConfigError, match="requires global_steps, which this trainer does not pass"):
        await custom_rm(arguments(reward_loop_config=config), sample("4"))
