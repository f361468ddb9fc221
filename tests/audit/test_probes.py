"""`Probes` chooses what is asked about an answer again."""

from __future__ import annotations

import random
from typing import Any

import pytest

from reward_loop import RewardSample
from reward_loop.audit.probes import CANARIES, CANARY, FRAME, Probe, Probes, question_of
from reward_loop.config import AuditConfig

KEYS = AuditConfig().keys

SAMPLE = RewardSample("2 + 2 is 4. The answer is 4", ground_truth="4", prompt="What is 2 + 2?", group="a")
OTHER = RewardSample("It is 9", ground_truth="9", prompt="What is 3 * 3?", group="b")


def probes(*kinds: str, in_groups: bool = False, keys: tuple[str, ...] = KEYS) -> Probes:
    return Probes(AuditConfig(probes=kinds or AuditConfig().probes, keys=keys), in_groups, random.Random())


def chosen(of: Probes, sample: RewardSample = SAMPLE) -> Probe:
    probe = of.choose(sample)
    assert probe is not None
    return probe


def test_all_kinds_take_turns() -> None:
    of = probes()
    of.remember(OTHER)
    names = [chosen(of).name for _ in range(14)]
    assert sorted(names[:7]) == sorted([*(f"{CANARY}/{kind}" for kind in CANARIES), "again", "frame"])
    assert names[:7] == names[7:]


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("empty", ""),
        ("other_answer", "It is 9"),
        ("cut_off", "2 + 2 is 4. T"),
        ("question", "What is 2 + 2?"),
        ("frame", FRAME + SAMPLE.solution_str),
        ("again", None),
    ],
)
def test_each_kind_has_its_answer(kind: str, answer: str | None) -> None:
    of = probes(kind)
    of.remember(OTHER)
    assert chosen(of).answer == answer


@pytest.mark.parametrize("keys", [KEYS, (*KEYS, "As an expert:"), (":",)])
def test_every_master_key_gets_its_turn(keys: tuple[str, ...]) -> None:
    of = probes("master_key", keys=keys)
    assert {chosen(of).answer for _ in keys} == set(keys)


def test_a_key_that_was_accepted_is_asked_every_second_time_until_it_is_rejected_as_often() -> None:
    of = probes("master_key")
    while (probe := chosen(of)).answer != ":":
        of.ended(probe, False)
    of.ended(probe, True)
    answers = [chosen(of).answer for _ in range(6)]
    assert answers[::2] == [":"] * 3
    assert ":" not in answers[1::2]
    of.ended(probe, False)
    assert ":" not in {chosen(of).answer for _ in range(5)}


@pytest.mark.parametrize(
    "sample",
    [
        RewardSample("x", ground_truth="9", prompt="Another question", group="b"),  # the same reference answer
        RewardSample("x", ground_truth="1", prompt=SAMPLE.prompt, group="b"),  # the same question in another batch
        RewardSample("x", ground_truth="1", prompt="Another question", group="a"),  # the same group
        RewardSample("x"),  # nothing is known about the question
    ],
)
def test_an_answer_that_may_belong_to_the_same_question_is_not_another_answer(sample: RewardSample) -> None:
    of = probes("other_answer")
    of.remember(RewardSample("y", ground_truth="9", prompt=SAMPLE.prompt, group="a"))
    assert of.choose(sample) is None


@pytest.mark.parametrize(
    ("sample", "kind"),
    [(RewardSample(""), "empty"), (RewardSample("a"), "cut_off"), (RewardSample("a"), "question")],
)
def test_a_canary_that_does_not_differ_from_the_answer_or_has_no_text_is_passed_over(
    sample: RewardSample, kind: str
) -> None:
    assert probes(kind).choose(sample) is None
    assert chosen(probes(kind, "again"), sample).kind == "again"


def test_the_order_of_answers_is_reversed_only_in_groups() -> None:
    assert probes("order").choose(SAMPLE) is None
    assert chosen(probes("order", in_groups=True)) == Probe("order")


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("How?", "How?"),
        ([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "tool", "content": "t"}], "u"),
        ([{"role": "user", "content": [{"type": "image"}]}], None),
        ([{"role": "system", "content": "s"}], None),
        ({"role": "user"}, None),
        (None, None),
        (7, None),
    ],
)
def test_the_question_is_the_prompt_or_the_last_message_of_the_user(prompt: Any, text: str | None) -> None:
    assert question_of(prompt) == text
