"""Reward functions in the forms that people publish, written anew: of open-r1, TRL, OpenRLHF, EasyR1 and others."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np


def tagged(completions, **kwargs):
    """open-r1: conversations, columns unread."""
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"<think>.*</think>", content) else 0.0 for content in contents]


def solved(completions: list[list[dict[str, str]]], solution: list[str], **kwargs) -> list[float | None]:
    """open-r1 and TRL: conversations by annotation, a column, and no opinion on some."""
    rewards: list[float | None] = []
    for completion, truth in zip(completions, solution, strict=True):
        rewards.append(None if truth == "?" else float(completion[0]["content"].endswith(truth)))
    return rewards


async def of_texts(prompts: list[str], completions: list[str], answer: list[str], level=None, **kwargs) -> list[float]:
    """TRL: texts, two columns, one of them optional, async."""
    assert level is None or len(level) == len(prompts)
    return [float(c.endswith(a)) + len(p) for p, c, a in zip(prompts, completions, answer, strict=True)]


class Overlong:
    """TRL: a callable with token ids alone."""

    def __init__(self, limit: int = 3) -> None:
        self.limit = limit

    def __call__(self, completion_ids: list[list[int]], **kwargs) -> list[float]:
        return [-1.0 if len(ids) > self.limit else 0.0 for ids in completion_ids]


def scheduled(completions, trainer_state, log_extra, log_metric, **kwargs):
    """TRL: the trainer's state, and its functions for logs."""
    log_extra("length", [len(completion[0]["content"]) for completion in completions])
    log_metric("weight", trainer_state.global_step / trainer_state.max_steps)
    return [trainer_state.global_step / trainer_state.max_steps for _ in completions]


def relative(completions, **kwargs):
    """open-r1: compares the completions of the list."""
    lengths = [len(completion[0]["content"]) for completion in completions]
    return [0.0 if max(lengths) == min(lengths) else (max(lengths) - one) / max(lengths) for one in lengths]


def reward_func(queries, prompts, labels, **kwargs):
    """OpenRLHF: arrays, and logs beside the rewards."""
    rewards = np.array([float(q[len(p) :] == a) for q, p, a in zip(queries, prompts, labels, strict=True)])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"length": np.array([len(q) for q in queries])}}


def reward_list(queries, prompts, labels):
    """OpenRLHF: a list of arrays with one element."""
    return [np.array([float(query.endswith(label))]) for query, label in zip(queries, labels, strict=True)]


def of_inputs(reward_inputs: list[dict[str, Any]], format_weight: float = 0.1) -> list[dict[str, float]]:
    """EasyR1: a list of dicts, with an option."""
    scores = []
    for one in reward_inputs:
        accuracy = float(one["response"] == one["ground_truth"])
        scores.append({"overall": accuracy + format_weight, "accuracy": accuracy, "tokens": one["response_length"]})
    return scores


def of_input(reward_input: dict[str, Any]) -> dict[str, float]:
    """EasyR1: one dict."""
    return {"overall": float(reward_input["response"] == reward_input["ground_truth"]), "format": 1.0}


def of_predicts(predicts: list[str], ground_truths: list[str]) -> list[dict[str, float]]:
    """EasyR1, older: lists of texts."""
    return [{"overall": float(p == t)} for p, t in zip(predicts, ground_truths, strict=True)]


def of_predict(predict_str: str, ground_truth: str) -> float:
    """verl and EasyR1, older."""
    return float(predict_str == ground_truth)


def batched(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    """verl's batch manager."""
    rows = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
    return [
        {"score": float(text == truth), "source": source, "level": info["level"]} for source, text, truth, info in rows
    ]


@dataclass
class RewardOutput:
    reward: float
    is_correct: bool | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


class MathFn:
    """rllm: a class whose instance is called with a task and an action."""

    def __init__(self, correct: float = 1.0) -> None:
        self.correct = correct

    def __call__(self, task_info: dict[str, Any], action: str) -> RewardOutput:
        is_correct = action == task_info["ground_truth"] and task_info["question"] == "2+2="
        return RewardOutput(self.correct * is_correct, is_correct, {"level": task_info["level"]})


async def correct_answer(prompt, completion, answer, info, state) -> float:
    """verifiers: some of the arguments by their names."""
    assert state["info"] == info
    assert prompt[-1]["role"] == "user"
    return 1.0 if completion[-1]["content"] == answer else 0.0
