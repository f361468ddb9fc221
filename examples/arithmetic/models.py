"""Creates the inputs of the demo: additions, a policy that usually forgets to carry, and a reward model.

No downloads, no GPU, about a minute on two cores:

1. A small network learns two tasks at once: to add, and to classify answers as right or wrong. The wrong ones are near
   misses of many kinds. It is trained until it recognises each kind, and becomes the reward model.
2. The same network is then trained on answers that usually omit the carry. It becomes the policy. About one problem in
   four needs no carry; the policy answers these correctly.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import string
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from examples.tiny_models import IM_END, tiny_tokenizer
from examples.training import write_dataset

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
)
"""A question, directly followed by its answer: ``37+85=122<|im_end|>``. Each character is a token."""
QUESTION_TOKENS = 6
"""Length of all questions: all numbers have two digits."""
HEAD_SIZE = 32
"""The smallest head size that vLLM's attention supports on a CPU."""

Report = Callable[[str], None]
"""Progress callback."""


class WeakRewardModelError(Exception):
    """The reward model accepts too many wrong answers."""


@dataclass(frozen=True)
class Recipe:
    """All parameters that determine the models."""

    seed: int = 0
    held_out: int = 256
    """Number of pairs of numbers that are excluded from all training."""
    hidden_size: int = 96
    layers: int = 4
    batch_size: int = 256
    """Problems per step."""
    steps: int = 350
    """Training steps of the reward model."""
    bound: float = 0.97
    """The reward model must be right about this share of the right answers, and of each kind of near misses that it was
    trained on. Otherwise the policy would learn the wrong answers that the reward model accepts."""
    unseen: tuple[str, ...] = ()
    """Kinds of near misses that the reward model is not trained on. The bound does not apply to them."""
    rounds: int = 8
    """How often the reward model is trained, for a fifth of the steps after the first time, to reach the bound."""
    forgetting_steps: int = 30
    """Training steps from the reward model's network to the policy."""
    right: float = 0.4
    """Probability that an answer in the training data of the reward model is right."""
    carries: float = 0.15
    """Probability that an answer in the training data of the policy includes the carries."""


@dataclass(frozen=True)
class Models:
    """The created models and data."""

    directory: Path
    """Contains ``policy``, ``reward_model``, ``train.parquet`` and ``held_out.parquet``."""
    figures: dict[str, Any]
    """The reward model's accuracy on right answers and on each kind of near misses, its training steps, the number of
    parameters, and the seconds that the creation took."""
    cached: bool


@dataclass(frozen=True)
class Problem:
    """An addition of two numbers with two digits each."""

    a: int
    b: int

    @property
    def question(self) -> str:
        return f"{self.a}+{self.b}="

    @property
    def answer(self) -> str:
        return str(self.a + self.b)

    @property
    def without_carrying(self) -> str:
        """The answer with each column added separately: ``37+85=12``."""
        tens, ones = (self.a // 10 + self.b // 10) % 10, (self.a + self.b) % 10
        return f"{tens}{ones}"


def make_problems(recipe: Recipe) -> tuple[list[Problem], list[Problem]]:
    """Return the problems to train on and the held-out ones. If ``a+b`` is held out, ``b+a`` is not trained on."""
    rng = random.Random(recipe.seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    rng.shuffle(pairs)
    held_out = [Problem(*rng.sample(pair, 2)) for pair in pairs[: recipe.held_out]]
    train = [Problem(*pair) for a, b in pairs[recipe.held_out :] for pair in {(a, b), (b, a)}]
    rng.shuffle(train)
    return train, held_out


def _differing_by(*differences: int) -> Callable[[Problem, random.Random], str]:
    return lambda problem, rng: str(int(problem.answer) + rng.choice(differences))


def _carry_forgotten(problem: Problem, rng: random.Random) -> str:
    return rng.choice((problem.without_carrying, problem.answer[1:]))


def _digits_swapped(problem: Problem, rng: random.Random) -> str:
    text, at = problem.answer, rng.randrange(len(problem.answer) - 1)
    return text[:at] + text[at + 1] + text[at] + text[at + 2 :]


def _digit_wrong(problem: Problem, rng: random.Random) -> str:
    text, at = problem.answer, rng.randrange(len(problem.answer))
    return text[:at] + rng.choice(string.digits) + text[at + 1 :]


def _length_wrong(problem: Problem, rng: random.Random) -> str:
    text, digit = problem.answer, rng.choice(string.digits)
    return rng.choice((text + digit, digit + text, text[:-1], ""))


def _question_repeated(problem: Problem, rng: random.Random) -> str:
    return rng.choice((problem.question[:5], problem.question[:3], str(problem.a), str(problem.b)))


def _other_characters(problem: Problem, rng: random.Random) -> str:
    return "".join(rng.choices(string.digits + "+-=x? ", k=rng.randint(1, 5)))


NEAR_MISSES: dict[str, Callable[[Problem, random.Random], str]] = {
    "off by 1": _differing_by(-1, 1),
    "off by 2": _differing_by(-2, 2),
    "off by 10": _differing_by(-10, 10),
    "carry forgotten": _carry_forgotten,
    "carry invented": _differing_by(10, 100),
    "digits swapped": _digits_swapped,
    "digit wrong": _digit_wrong,
    "length wrong": _length_wrong,
    "question repeated": _question_repeated,
    "other characters": _other_characters,
}
"""The kinds of wrong answers. A function may return the right answer by chance."""


_WEIGHTS = {"off by 1": 4, "off by 2": 2, "off by 10": 3}
"""How often a kind is drawn for the training, relative to the others: these are the hardest to recognise."""


def wrong_answer(problem: Problem, rng: random.Random, unseen: Sequence[str] = ()) -> str:
    """Return a wrong answer of a random kind, except those in ``unseen``."""
    kinds = [kind for kind in NEAR_MISSES if kind not in unseen]
    weights = [_WEIGHTS.get(kind, 1) for kind in kinds]
    while True:
        (kind,) = rng.choices(kinds, weights)
        answer = NEAR_MISSES[kind](problem, rng)
        if answer != problem.answer:
            return answer


def answers_by_kind(problems: Sequence[Problem], rng: random.Random) -> dict[str, list[tuple[Problem, str]]]:
    """Return the right answers, and wrong answers of each kind."""
    wrong = {
        kind: [(problem, text) for problem in problems if (text := draw(problem, rng)) != problem.answer]
        for kind, draw in NEAR_MISSES.items()
    }
    return {"right": [(problem, problem.answer) for problem in problems], **wrong}


def make_models(cache: Path, recipe: Recipe | None = None, report: Report = lambda text: None) -> Models:
    """Create data, policy and reward model under ``cache``, or load them from there.

    The folder's name is a hash of the recipe and of this file: if either changes, the models are created again.

    Args:
        cache: folder of all cached models.
        recipe: parameters of the models; by default those of the demo.
        report: progress callback.

    Raises:
        WeakRewardModelError: the reward model did not reach the bound of the recipe.
    """
    recipe = recipe or Recipe()
    source = Path(__file__).read_bytes() + json.dumps(asdict(recipe)).encode()
    directory = cache / hashlib.sha256(source).hexdigest()[:16]
    figures_file = directory / "figures.json"
    if figures_file.exists():
        return Models(directory, json.loads(figures_file.read_text()), cached=True)
    cache.mkdir(parents=True, exist_ok=True)
    # Created in a temporary folder and renamed, so that an interruption never leaves an incomplete cache entry.
    building = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
    try:
        figures = _make(recipe, building, report)
        (building / "figures.json").write_text(json.dumps(figures, indent=2))
        building.rename(directory)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return Models(directory, figures, cached=False)


def _make(recipe: Recipe, directory: Path, report: Report) -> dict[str, Any]:
    import torch
    from transformers import Qwen2ForCausalLM, Qwen2ForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    began, rng = time.monotonic(), random.Random(recipe.seed)
    train, held_out = make_problems(recipe)
    for split, problems in (("train", train), ("held_out", held_out)):
        pairs = [(problem.question, problem.answer) for problem in problems]
        write_dataset(directory / f"{split}.parquet", "arithmetic", split, pairs)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE

    def save(model: Any, name: str) -> None:
        model.save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        judge = Qwen2ForSequenceClassification(_config(recipe, tokenizer))
        # transformers creates this head without a bias, and SGLang fills a missing bias randomly: a zero bias is saved.
        judge.score = torch.nn.Linear(recipe.hidden_size, 1)
        judge.score.bias.data.zero_().requires_grad_(False)
        policy = Qwen2ForCausalLM(_config(recipe, tokenizer))
        policy.model = judge.model  # one network with two heads

        def batch() -> list[Problem]:
            return rng.choices(train, k=recipe.batch_size)

        def adding_and_judging() -> Any:
            texts = [
                (p, p.answer if rng.random() < recipe.right else wrong_answer(p, rng, recipe.unseen)) for p in batch()
            ]
            answers = _Answers(tokenizer, texts)
            hidden = policy.model(answers.tokens).last_hidden_state
            # All beginnings of an answer are classified, not only the whole answer: that gives more training signal.
            verdicts = judge.score(hidden[answers.mask]).squeeze(-1)
            judging = torch.nn.functional.binary_cross_entropy_with_logits(verdicts, answers.right[answers.mask])
            return 2 * judging + _language_loss(policy, hidden, answers.truth, answers.is_next)

        def forgetting_to_carry() -> Any:
            texts = [(p, p.answer if rng.random() < recipe.carries else p.without_carrying) for p in batch()]
            answers = _Answers(tokenizer, texts)
            hidden = policy.model(answers.tokens).last_hidden_state
            return _language_loss(policy, hidden, answers.tokens, answers.mask)

        judged = {kind: _Answers(tokenizer, texts) for kind, texts in answers_by_kind(held_out, rng).items()}
        accuracy: dict[str, float] = {}
        trained = 0
        for round_ in range(recipe.rounds):
            steps, lr = (recipe.steps // 5, 3e-3) if round_ else (recipe.steps, 1e-2)
            for loss in _train([policy, judge.score], steps, lr, adding_and_judging):
                trained += 1
                report(f"step {trained} of the reward model, loss {loss:.2f}")
            accuracy = {kind: _verdict_accuracy(judge, answers) for kind, answers in judged.items()}
            seen = {kind: share for kind, share in accuracy.items() if kind not in recipe.unseen}
            worst = min(seen, key=seen.__getitem__)
            if seen[worst] >= recipe.bound:
                break
        else:
            raise WeakRewardModelError(
                f"After {trained} steps, the reward model is right about {accuracy[worst]:.1%} of the held-out answers "
                f"of the kind {worst!r}, less than {recipe.bound:.0%}: the policy would learn its mistakes. Try "
                "another --seed."
            )
        save(judge, "reward_model")
        for step, loss in enumerate(_train([policy], recipe.forgetting_steps, 1e-3, forgetting_to_carry), 1):
            report(f"step {step} of the policy, loss {loss:.2f}")
        save(policy, "policy")
    return {
        "reward_model_accuracy": accuracy,
        "reward_model_steps": trained,
        "parameters": sum(p.numel() for p in policy.parameters()),
        "seconds": time.monotonic() - began,
    }


class _Answers:
    """Tokenized answers, each after its question. All tensors have the shape (answers, tokens).

    Attributes:
        tokens: question, answer and end token, padded on the right.
        truth: the same with the right answers.
        mask: true for the tokens of the answer and its end token.
        right: 1 if the answer is right up to this token, otherwise 0.
        is_next: true for the tokens of the right answer that follow a right beginning.
    """

    def __init__(self, tokenizer: Any, answers: Sequence[tuple[Problem, str]]) -> None:
        given = [f"{problem.question}{answer}{IM_END}" for problem, answer in answers]
        truth = [f"{problem.question}{problem.answer}{IM_END}" for problem, _ in answers]
        tokens = tokenizer([*given, *truth], padding=True, padding_side="right", return_tensors="pt")["input_ids"]
        self.tokens, self.truth = tokens.chunk(2)
        is_token = tokens != tokenizer.pad_token_id
        is_token[:, :QUESTION_TOKENS] = False
        self.mask, is_true = is_token.chunk(2)
        self.right = (self.tokens == self.truth).cumprod(1).float()
        self.is_next = is_true & (self.right.roll(1, 1) > 0)

    @property
    def ends(self) -> Any:
        """Index of the end token of each answer."""
        return QUESTION_TOKENS + self.mask.sum(1) - 1


def _language_loss(model: Any, hidden: Any, tokens: Any, predicted: Any) -> Any:
    """Return the language-model loss of the tokens whose mask ``predicted`` is true."""
    import torch

    logits = model.lm_head(hidden[:, :-1][predicted[:, 1:]])
    return torch.nn.functional.cross_entropy(logits, tokens[:, 1:][predicted[:, 1:]])


def _train(modules: Sequence[Any], steps: int, lr: float, loss: Callable[[], Any]) -> Iterator[float]:
    """Train with Muon for the matrices of the layers and AdamW for the rest; yields the loss of each step."""
    import torch

    parameters = {name: p for module in modules for name, p in module.named_parameters() if p.requires_grad}
    matrices = [p for name, p in parameters.items() if p.ndim == 2 and ".layers." in name]
    others = [p for name, p in parameters.items() if not (p.ndim == 2 and ".layers." in name)]
    optimizers = [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.01),
    ]

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / (steps / 8), max(0.02, 2 * (1 - step / steps)))  # warm-up, constant, decay

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, factor) for optimizer in optimizers]
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_([*matrices, *others], 1.0)
        for one in (*optimizers, *schedules):
            one.step()
        yield value.item()


def _config(recipe: Recipe, tokenizer: Any) -> Any:
    from transformers import Qwen2Config

    heads = max(1, recipe.hidden_size // HEAD_SIZE)
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=8 * recipe.hidden_size // 3,
        num_hidden_layers=recipe.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
        num_labels=1,
        dtype="float32",
    )


def _verdict_accuracy(judge: Any, answers: _Answers) -> float:
    """Return the share of answers that the reward model classifies correctly."""
    import torch

    rows = torch.arange(len(answers.tokens))
    with torch.no_grad():
        verdicts = judge.score(judge.model(answers.tokens).last_hidden_state[rows, answers.ends]).squeeze(-1)
    return float(((verdicts > 0) == (answers.right[rows, answers.ends] > 0)).float().mean())
