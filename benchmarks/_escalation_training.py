"""The models and the training loop of `benchmarks.escalation`, with torch."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import Qwen2ForCausalLM, Qwen2ForSequenceClassification
from transformers.utils import logging

from examples.arithmetic.models import Models, Problem, Recipe, make_problems, wrong_answer
from examples.arithmetic.reward import FORMAT_WEIGHT
from examples.tiny_models import IM_END, tiny_tokenizer
from reward_loop.client import spot_check

logging.set_verbosity_error()  # transformers ignores the zero bias of the reward model, and says so
logging.disable_progress_bar()

PROMPTS, ANSWERS, MINI_BATCH = 32, 8, 8
CLIP, LEARNING_RATE = 0.2, 1e-4
MAX_TOKENS = 5
HELD_OUT = 256
HIDDEN = 96
"""The width of the cheap judge."""
SYMBOLS = "0123456789+-=x? "


@dataclass
class Batch:
    """Some answers of a step; the samples of a prompt are neighbours."""

    problems: Sequence[Problem]
    texts: Sequence[str]
    cheap: list[float]
    """The cheap judge's probability that each answer is right."""
    strong: list[float]
    """The strong judge's verdicts, 0 or 1. A design may only use those that it counts as calls."""
    step: int

    def right(self) -> list[bool]:
        """Return whether each answer is right."""
        return [text == problem.answer for text, problem in zip(self.texts, self.problems, strict=True)]


Design = Callable[[Batch, float, random.Random], tuple[list[float], int]]
"""Returns the scores of a batch and the number of calls of the strong judge, for a share of calls."""


def _replaced(chosen: Sequence[int], batch: Batch) -> tuple[list[float], int]:
    scores = list(batch.cheap)
    for index in chosen:
        scores[index] = batch.strong[index]
    return scores, len(chosen)


def _uncertain(batch: Batch, share: float, rng: random.Random) -> tuple[list[float], int]:
    order = sorted(range(len(batch.texts)), key=lambda i: (abs(batch.cheap[i] - 0.5), rng.random()))
    return _replaced(order[: round(share * len(order))], batch)


def _random(batch: Batch, share: float, rng: random.Random) -> tuple[list[float], int]:
    return _replaced(rng.sample(range(len(batch.texts)), round(share * len(batch.texts))), batch)


def _debiased(batch: Batch, share: float, rng: random.Random) -> tuple[list[float], int]:
    seed, calls = rng.randrange(2**32), 0

    async def strong(index: int) -> float:
        nonlocal calls
        calls += 1
        return batch.strong[index]

    async def scores() -> list[Any]:
        return [
            (await spot_check(score, strong(i), share, uid=f"{batch.step}_{i}", seed=seed)).score
            for i, score in enumerate(batch.cheap)
        ]

    return asyncio.run(scores()), calls


DESIGNS: dict[str, Design] = {
    "cheap": lambda batch, share, rng: (batch.cheap, 0),
    "strong": lambda batch, share, rng: (batch.strong, len(batch.strong)),
    "uncertain": _uncertain,
    "random": _random,
    "debiased": _debiased,
}
"""How cheap and strong scores become rewards."""


class Judges:
    """The demo's reward model as the strong judge; a small network without six kinds of near misses as the cheap one.

    Args:
        models: the demo's models.
        seed: of the cheap judge.
        steps: training steps of the cheap judge.
        unseen: the kinds of near misses that the cheap judge is not trained on.
    """

    def __init__(self, models: Models, seed: int, steps: int, unseen: Sequence[str]) -> None:
        self._tokenizer = tiny_tokenizer()
        self._strong = Qwen2ForSequenceClassification.from_pretrained(models.directory / "reward_model").float().eval()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        train, _ = make_problems(Recipe())
        drawn = [(problem, rng.random() < Recipe.right) for problem in train * 2]
        texts = [problem.answer if right else wrong_answer(problem, rng, unseen) for problem, right in drawn]
        inputs = _features([problem for problem, _ in drawn], texts)
        labels = torch.tensor([float(right) for _, right in drawn])
        layers = [torch.nn.Linear(inputs.shape[1], HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, HIDDEN)]
        self._cheap = torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 1))
        optimizer = torch.optim.AdamW(self._cheap.parameters(), lr=3e-3, weight_decay=0.01)
        for step in range(steps):
            rows = torch.randint(len(labels), (256,))
            logits = self._cheap(inputs[rows]).squeeze(-1)
            optimizer.zero_grad()
            functional.binary_cross_entropy_with_logits(logits, labels[rows]).backward()
            optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, 2 * (1 - step / steps) + 0.02)
            optimizer.step()

    @torch.no_grad()
    def __call__(self, problems: Sequence[Problem], texts: Sequence[str], step: int) -> Batch:
        """Judge the answers."""
        cheap = self._cheap(_features(problems, texts)).squeeze(-1).sigmoid().tolist()
        pairs = list(zip(problems, texts, strict=True))
        asked = {pair: i for i, pair in enumerate(dict.fromkeys(pairs))}
        whole = [f"{problem.question}{text}{IM_END}" for problem, text in asked]
        encoded = self._tokenizer(whole, padding=True, padding_side="right", return_tensors="pt")
        verdicts = (self._strong(**encoded).logits.squeeze(-1) > 0).float().tolist()
        return Batch(problems, texts, cheap, [verdicts[asked[pair]] for pair in pairs], step)


def _features(problems: Sequence[Problem], texts: Sequence[str]) -> torch.Tensor:
    """Return one-hot characters of question and answer, and one-hot pairs of the digits of each column."""
    places = {symbol: i for i, symbol in enumerate(SYMBOLS)}
    rows = []
    for problem, text in zip(problems, texts, strict=True):
        digits = [problem.a // 10, problem.a % 10, problem.b // 10, problem.b % 10]
        answer = [places.get(symbol, len(SYMBOLS)) for symbol in text[:MAX_TOKENS]]
        answer += [len(SYMBOLS) + 1] * (MAX_TOKENS - len(answer))
        rows.append([*digits, *answer, digits[0] * 10 + digits[2], digits[1] * 10 + digits[3]])
    sizes = [10] * 4 + [len(SYMBOLS) + 2] * MAX_TOKENS + [100] * 2
    columns = torch.tensor(rows).T
    parts = [functional.one_hot(column, size) for column, size in zip(columns, sizes, strict=True)]
    return torch.cat(parts, dim=1).float()


class Training:
    """GRPO with PPO's clip and the standard deviation of the group, without a KL term.

    Args:
        models: the demo's models, whose policy is trained.
    """

    def __init__(self, models: Models) -> None:
        self._first = Qwen2ForCausalLM.from_pretrained(models.directory / "policy").float()
        self._tokenizer = tiny_tokenizer()
        self._train, self._held_out = make_problems(Recipe())

    def run(
        self, design: Design, judges: Judges, seed: int, steps: int, share: float, by_std: bool
    ) -> dict[str, float]:
        """Train a copy of the policy; advantages are divided by the standard deviation of the group if `by_std`.

        Returns:
            ``exact``, the share of held-out problems that are answered right; ``calls`` of the strong judge for each
            answer; and ``deceived``, the share of answers of the last five steps that are wrong and score above 0.5.
        """
        torch.manual_seed(seed)
        rng = random.Random(seed)
        policy = copy.deepcopy(self._first)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
        calls, deceived = 0, []
        for step in range(steps):
            problems = [problem for problem in rng.sample(self._train, PROMPTS) for _ in range(ANSWERS)]
            tokens, mask, texts = self._answer(policy, problems[::ANSWERS], ANSWERS)
            batch = judges(problems, texts, step)
            scores, asked = design(batch, share, rng)
            calls += asked
            right = batch.right()
            deceived.append(sum(score > 0.5 and not ok for score, ok in zip(scores, right, strict=True)) / len(right))
            formats = [float(text.isascii() and text.isdigit()) for text in texts]
            weighted = [(1 - FORMAT_WEIGHT) * a + FORMAT_WEIGHT * b for a, b in zip(scores, formats, strict=True)]
            rewards = torch.tensor(weighted).view(PROMPTS, ANSWERS)
            spread = rewards.std(1, keepdim=True) + 1e-6 if by_std else 1.0
            advantages = ((rewards - rewards.mean(1, keepdim=True)) / spread).view(-1)
            self._update(policy, optimizer, tokens, mask, advantages, rng)
        problems = self._held_out[:HELD_OUT]
        _, _, texts = self._answer(policy, problems, 1)
        exact = sum(text == problem.answer for text, problem in zip(texts, problems, strict=True)) / len(problems)
        last = deceived[-5:]
        return {
            "exact": exact,
            "calls": calls / (steps * PROMPTS * ANSWERS),
            "deceived": sum(last) / len(last),
        }

    @torch.no_grad()
    def _answer(self, policy: Any, problems: Sequence[Problem], count: int) -> tuple[Any, Any, list[str]]:
        """Return questions with answers as tokens, the mask of the answers' tokens, and the answers as texts.

        One answer is the most probable one; several are sampled.
        """
        questions = self._tokenizer([problem.question for problem in problems], return_tensors="pt")["input_ids"]
        end, padding = self._tokenizer.convert_tokens_to_ids(IM_END), self._tokenizer.pad_token_id
        policy.eval()
        how = {"do_sample": True, "top_k": 0, "num_return_sequences": count} if count > 1 else {"do_sample": False}
        tokens = policy.generate(
            questions,
            attention_mask=torch.ones_like(questions),
            max_new_tokens=MAX_TOKENS,
            eos_token_id=end,
            pad_token_id=padding,
            **how,
        )
        answers = tokens[:, questions.shape[1] :]
        ended = (answers == end).cumsum(1)
        mask = torch.zeros_like(tokens, dtype=torch.float32)
        mask[:, questions.shape[1] :] = ((ended == 0) | ((ended == 1) & (answers == end))).float()
        return tokens, mask, self._tokenizer.batch_decode(answers, skip_special_tokens=True)

    def _update(self, policy: Any, optimizer: Any, tokens: Any, mask: Any, advantages: Any, rng: random.Random) -> None:
        def log_probs(rows: Any) -> Any:
            logits = policy(tokens[rows][:, :-1]).logits.log_softmax(-1)
            return logits.gather(2, tokens[rows][:, 1:, None]).squeeze(-1)

        policy.train()
        with torch.no_grad():
            old = log_probs(torch.arange(len(tokens)))
        order = rng.sample(range(PROMPTS), PROMPTS)
        for start in range(0, PROMPTS, MINI_BATCH):
            prompts = order[start : start + MINI_BATCH]
            rows = torch.tensor([prompt * ANSWERS + i for prompt in prompts for i in range(ANSWERS)])
            ratio = (log_probs(rows) - old[rows]).exp()
            advantage, counted = advantages[rows, None], mask[rows][:, 1:]
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            optimizer.zero_grad()
            (-(gain * counted).sum() / counted.sum()).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
