"""Known answers: a right and a wrong answer made from the ground truth of a sample."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reward_loop.types import RewardSample

TEMPLATES = (
    "\\boxed{{{}}}",
    "#### {}",
    "Answer: {}",
    "{}",
    "<answer>{}</answer>",
    "The answer is {}.",
    "The answer is \\boxed{{{}}}.\n#### {}\nAnswer: {}",
    "<think>\nI compute it.\n</think>\n<answer>{}</answer>",
    "<think>\nI compute it.\n</think>\n\\boxed{{{}}}",
    "<think>\nI compute it.\n</think>\n<answer>\\boxed{{{}}}</answer>",
)
"""The forms in which a reference answer is tried as an answer."""

_MAX_TEXTS = 4
"""The largest number of reference texts that are tried: each takes calls."""


@dataclass(frozen=True, slots=True)
class KnownAnswers:
    """A right answer and a wrong one to the same question."""

    right: RewardSample
    wrong: RewardSample
    score: float
    """The score of the right answer."""
    wrong_score: float
    """The score of the wrong answer, which is smaller."""


Score = Callable[[RewardSample], Awaitable[float | None]]
"""Scores an answer; returns ``None`` if it has no score."""


async def find_pair(sample: RewardSample, truths: Sequence[Any], score: Score) -> KnownAnswers | str:
    """Return a right and a wrong answer that a function distinguishes, or why there are none.

    Args:
        sample: the sample with the ground truth of the answers, and the other arguments of the function.
        truths: ground truths of other samples, whose right answers are wrong ones here.
        score: calls the function.
    """
    if sample.ground_truth is None:
        return "its samples have no ground truth"
    texts = list(_texts(sample.ground_truth))[:_MAX_TEXTS]
    # Preferred to `_another`: they are of the kind that the function expects.
    others = [text for truth in truths for text in _texts(truth) if text not in texts][:2]

    async def scored(template: str, text: str) -> float | None:
        return await score(_answer(sample, template, text))

    best: KnownAnswers | None = None
    for text in texts:
        rights = await asyncio.gather(*(scored(template, text) for template in TEMPLATES))
        known = [(right, template) for right, template in zip(rights, TEMPLATES, strict=True) if right is not None]
        for right, template in sorted(known, key=lambda one: -one[0])[:3]:
            if best is not None and right <= best.score:
                break
            for other in (*others, _another(text)):
                wrong = await scored(template, other)
                if wrong is not None and wrong < right:
                    pair = _answer(sample, template, text), _answer(sample, template, other)
                    best = KnownAnswers(*pair, right, wrong)
                    break
        if best is not None and best.score >= 1.0:
            break
    return best or "no answer made from the ground truth scores more than a wrong one"


def right_answers(sample: RewardSample) -> list[str]:
    """Return what may be right answers to a sample: the likeliest text of its ground truth, in each form."""
    text = next(_texts(sample.ground_truth), "")
    return [_answer(sample, template, text).solution_str for template in TEMPLATES]


def _answer(sample: RewardSample, template: str, text: str) -> RewardSample:
    answer = template.format(*[text] * template.count("{}"))
    # `None` stands for unknown, and a function that requires the argument could not be called.
    cut_off = None if sample.is_truncated is None else False
    return replace(sample, solution_str=answer, uid="known answer", group=None, turns=None, is_truncated=cut_off)


def _texts(truth: Any) -> Iterator[str]:
    """Yield texts that may be the answer within a ground truth, the likeliest first."""
    if isinstance(truth, bool) or truth is None:
        yield str(truth)
    elif isinstance(truth, str):
        yield truth
        for pattern in (r"####\s*(.+?)\s*$", r"\\boxed\{(.*)\}", r"<answer>\s*(.*?)\s*</answer>"):
            if found := re.search(pattern, truth, re.DOTALL):
                yield found[1]
    elif isinstance(truth, Mapping):
        for value in truth.values():
            yield from _texts(value)
    elif isinstance(truth, Sequence) or hasattr(truth, "tolist"):
        items = truth.tolist() if hasattr(truth, "tolist") else truth
        for item in items if isinstance(items, list | tuple) else [str(items)]:
            yield from _texts(item)
    else:
        yield str(truth)


def _another(text: str) -> str:
    """Return a text of the same kind that is another answer: its last digit or letter is changed."""
    for place in range(len(text) - 1, -1, -1):
        if text[place].isdigit():
            return f"{text[:place]}{'7' if text[place] != '7' else '3'}{text[place + 1 :]}"
    if len(text) == 1:
        return "B" if text != "B" else "C"
    return text[::-1] if text[::-1] != text else text + "x"
