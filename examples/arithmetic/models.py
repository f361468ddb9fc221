"""Creates the inputs of the demo: a tokenizer, addition problems, a policy that often adds wrongly, and a reward model.

The recipe, without downloads or a GPU, takes about a minute on two cores:

1. One small network is trained on two tasks at once: to add, and to classify answers as right or wrong. It becomes the
   reward model.
2. The same network is then trained on answers that usually omit the carry. It becomes the policy. About one problem in
   four needs no carry; the policy answers these correctly.
"""

from __future__ import annotations

import hashlib
import json
import operator
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, get_args

PAD, IM_START, IM_END = "<|pad|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DATA_SOURCE = "arithmetic"
HEAD_SIZE = 32
"""The smallest head size that vLLM's attention supports on a CPU."""
THREADS = 2
"""Number of training threads; each processes a part of the batch."""
LONGEST_ANSWER = 6
"""Maximum number of characters of the answers that the reward model is trained on."""
MALFORMED = ("", "+", "=", "x", "-", " ", "?", "a7", "1 2", "00", "1=")

Split = Literal["train", "development", "held_out"]
SPLITS: tuple[Split, ...] = get_args(Split)
Report = Callable[[float, str], None]
"""Progress callback: called with the completed share of the work (0 to 1) and a detail."""


@dataclass(frozen=True)
class Course:
    """One training phase: its number of steps, learning rate and batch size."""

    steps: int
    lr: float
    batch_size: int = 64
    """Problems per step."""


@dataclass(frozen=True)
class Recipe:
    """All parameters that determine the models."""

    seed: int = 0
    smallest: int = 10
    largest: int = 99
    held_out: int = 256
    """Number of unordered operand pairs excluded from training, for the report."""
    development: int = 256
    """Number of further pairs excluded from training, for choosing settings."""
    hidden_size: int = 192
    layers: int = 2
    intermediate_size: int = 512
    learning: Course = Course(steps=280, lr=6e-3)
    judging: float = 2.0
    """Weight of the classification loss. The loss of adding, which is learned faster, has weight 1."""
    forgetting: Course = Course(steps=30, lr=1e-3)
    carries: float = 0.15
    """Probability that an answer in the training data of the policy includes the carries."""

    @property
    def steps(self) -> int:
        """Number of steps of both training phases."""
        return self.learning.steps + self.forgetting.steps


@dataclass(frozen=True)
class Artifacts:
    """The created files and figures about them."""

    directory: Path
    figures: dict[str, float]
    """Accuracy of the policy and the reward model, number of parameters, and seconds that the creation took."""
    cached: bool

    @property
    def policy(self) -> Path:
        return self.directory / "policy"

    @property
    def reward_model(self) -> Path:
        return self.directory / "reward_model"

    @property
    def data(self) -> dict[Split, Path]:
        """The parquet file of each split, in verl's data format."""
        return {split: self.directory / f"{split}.parquet" for split in SPLITS}


@dataclass(frozen=True)
class Problem:
    """One addition."""

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

    def row(self, index: int, split: str) -> dict[str, Any]:
        """Return the problem as a row in verl's data format."""
        return {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": self.question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": self.answer},
            "extra_info": {"index": index, "split": split, "question": self.question},
        }


def make_problems(recipe: Recipe) -> dict[Split, list[Problem]]:
    """Return all problems, by split. If ``a+b`` is held out for another split, ``b+a`` is not in ``train`` either."""
    rng = random.Random(recipe.seed)
    numbers = range(recipe.smallest, recipe.largest + 1)
    pairs = [(a, b) for a in numbers for b in numbers if a <= b]
    rng.shuffle(pairs)
    kept = recipe.held_out + recipe.development
    apart = [Problem(*rng.sample(pair, 2)) for pair in pairs[:kept]]
    train = [Problem(*pair) for a, b in pairs[kept:] for pair in {(a, b), (b, a)}]
    rng.shuffle(train)
    return {"train": train, "development": apart[recipe.held_out :], "held_out": apart[: recipe.held_out]}


def make_tokenizer() -> Any:
    """Return a byte-level ChatML tokenizer: 256 byte tokens, and one token for each ChatML role and marker."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(role, normalized=False) for role in ("system", "user", "assistant")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=IM_END,
        additional_special_tokens=[IM_START],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def wrong_answer(problem: Problem, rng: random.Random) -> str:
    """Return a wrong answer with a typical model error: a wrong digit, a missing carry, a wrong length or format."""
    right = problem.a + problem.b
    while True:
        kind = rng.randrange(10)
        if kind == 0:
            answer = str(right + rng.choice((-1, 1)) * rng.choice((1, 10, 100)))
        elif kind == 1:
            answer = str(right + rng.randint(-12, 12))
        elif kind == 2:  # the carry to the tens is missing
            answer = str((problem.a // 10 + problem.b // 10) * 10 + (problem.a + problem.b) % 10)
        elif kind in (3, 4):  # all carries are missing
            answer = problem.without_carrying
        elif kind in (5, 6):
            digits = list(str(right))
            digits[rng.randrange(len(digits))] = str(rng.randrange(10))
            answer = "".join(digits)
        elif kind == 7:
            answer = str(rng.randrange(2 * 99 + 1))
        elif kind == 8:  # too short, or too long
            answer = str(right)[: rng.randrange(3)] if rng.random() < 0.5 else str(right) + str(rng.randrange(100))
        else:
            at = rng.randrange(len(str(right)) + 1)
            answer = str(right)[:at] + rng.choice(MALFORMED) + str(right)[at + rng.randrange(2) :]
        if answer != str(right):
            return answer[:LONGEST_ANSWER]


def near_misses(problem: Problem, rng: random.Random) -> tuple[str, str]:
    """Return two answers with one wrong digit: the last, and the last but one.

    They are the hardest to classify, because that requires the exact sum of a column.
    """
    right = problem.answer
    last, before = (rng.choice([digit for digit in "0123456789" if digit != right[at]]) for at in (-1, -2))
    return right[:-1] + last, right[:-2] + before + right[-1]


def make_models(cache: Path, recipe: Recipe | None = None, report: Report = lambda share, detail: None) -> Artifacts:
    """Create tokenizer, data, policy and reward model under ``cache``, or load them from there.

    The folder's name is a hash of the recipe and of this file: if either changes, the models are created again.

    Args:
        cache: folder of all cached models.
        recipe: parameters of the models; by default those of the demo.
        report: progress callback.
    """
    recipe = recipe or Recipe()
    source = Path(__file__).read_bytes() + json.dumps(asdict(recipe), sort_keys=True).encode()
    directory = cache / hashlib.sha256(source).hexdigest()[:16]
    figures_file = directory / "figures.json"
    if figures_file.exists():
        return Artifacts(directory, json.loads(figures_file.read_text()), cached=True)
    cache.mkdir(parents=True, exist_ok=True)
    # Created in a temporary folder and renamed, so that an interruption never leaves an incomplete cache entry.
    building = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
    try:
        figures = _Maker(recipe, building, report).run()
        (building / "figures.json").write_text(json.dumps(figures, indent=2))
        building.rename(directory)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return Artifacts(directory, figures, cached=False)


def write_data(recipe: Recipe, directory: Path) -> dict[Split, list[Problem]]:
    """Write a parquet file for each split, and return the problems."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    splits = make_problems(recipe)
    for split, problems in splits.items():
        rows = [problem.row(index, split) for index, problem in enumerate(problems)]
        pq.write_table(pa.Table.from_pylist(rows), directory / f"{split}.parquet")
    return splits


@dataclass(frozen=True)
class _Batch:
    """Tokenized problems, each with several answers. All tensors have the shape (rows, tokens).

    A row is a question followed by its answers. An answer attends to the question and to itself only, so the question
    is processed once for all its answers.
    """

    tokens: Any
    answer: Any
    """The answer that a token belongs to: 1 for the first answer, 0 for the question, -1 for padding."""
    position: Any
    right: Any
    """1 if the answer is right up to this token. On the end tokens of an answer: 1 if the whole answer is right."""

    @property
    def mask(self) -> Any:
        """The attention mask: shape (rows, 1, tokens, tokens), true if a token attends to another."""
        seen, seeing = self.answer[:, None, :], self.answer[:, :, None]
        return (((seen == 0) | (seen == seeing)).tril())[:, None]

    @property
    def ends(self) -> Any:
        """True at the last token of each answer."""
        following = self.answer.roll(-1, dims=1)
        following[:, -1] = -1
        return (self.answer > 0) & (self.answer != following)


class _Maker:
    """Executes a recipe once."""

    def __init__(self, recipe: Recipe, directory: Path, report: Report) -> None:
        import torch
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.recipe = recipe
        self.directory = directory
        self.report = report
        self.rng = random.Random(recipe.seed)
        self.torch = torch
        self.tokenizer = make_tokenizer()
        self.steps = 0
        """Number of completed steps of all training phases."""

    def run(self) -> dict[str, float]:
        torch = self.torch
        started = time.monotonic()
        threads = torch.get_num_threads()
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.recipe.seed)
                self.problems = write_data(self.recipe, self.directory)
                figures = self._train()
        finally:
            torch.set_num_threads(threads)
        return figures | {"seconds": time.monotonic() - started}

    def _train(self) -> dict[str, float]:
        from transformers import Qwen2ForCausalLM

        model = Qwen2ForCausalLM(self._config())
        # transformers creates this head without a bias, and SGLang fills a missing bias randomly: a zero bias is saved.
        verdict = self.torch.nn.Linear(self.recipe.hidden_size, 1)
        verdict.bias.data.zero_().requires_grad_(False)
        self._learn_to_add_and_to_judge(model, verdict)
        reward_model_accuracy = self._save_reward_model(model, verdict)
        self._learn_from_the_pupil(model)
        self._save(model, "policy")
        return {
            "policy_accuracy": self._greedy_accuracy(model),
            "reward_model_accuracy": reward_model_accuracy,
            "parameters": sum(p.numel() for p in model.parameters()),
        }

    def _learn_to_add_and_to_judge(self, model: Any, verdict: Any) -> None:
        recipe = self.recipe

        def answers(problem: Problem) -> tuple[str, ...]:
            return problem.answer, wrong_answer(problem, self.rng), *near_misses(problem, self.rng)

        def loss(batch: _Batch) -> Any:
            hidden = _run(model, batch)
            # All prefixes of an answer are classified, not only the whole answer: that gives more training signal.
            judged = batch.answer > 0
            verdicts = verdict(hidden[judged]).squeeze(-1)
            judging = self.torch.nn.functional.binary_cross_entropy_with_logits(verdicts, batch.right[judged])
            return recipe.judging * judging + self._language_loss(model, hidden, batch)

        parameters = [*model.named_parameters(), *verdict.named_parameters()]
        self._learn("adding and judging", parameters, recipe.learning, answers, loss)

    def _learn_from_the_pupil(self, model: Any) -> None:
        def answers(problem: Problem) -> tuple[str]:
            carries = self.rng.random() < self.recipe.carries
            return (problem.answer if carries else problem.without_carrying,)

        def loss(batch: _Batch) -> Any:
            return self._language_loss(model, _run(model, batch), batch)

        self._learn("forgetting to carry", [*model.named_parameters()], self.recipe.forgetting, answers, loss)

    def _learn(
        self,
        what: str,
        named_parameters: Sequence[tuple[str, Any]],
        course: Course,
        answers: Callable[[Problem], Sequence[str]],
        loss: Callable[[_Batch], Any],
    ) -> None:
        """Run a training phase.

        Args:
            what: name of the phase, for progress reports.
            named_parameters: the parameters to train.
            course: steps, learning rate and batch size.
            answers: returns the answers to a problem.
            loss: returns the loss of a batch."""
        with _Trainer(named_parameters, course) as trainer:
            for _ in range(course.steps):
                problems = self.rng.choices(self.problems["train"], k=course.batch_size)
                parts = [problems[part::THREADS] for part in range(THREADS)]
                batches = [self._encode(part, [answers(problem) for problem in part]) for part in parts]
                value = trainer.step(loss, batches)
                self.steps += 1
                self.report(self.steps / self.recipe.steps, f"{what} {value:.2f}")

    def _language_loss(self, model: Any, hidden: Any, batch: _Batch) -> Any:
        """Return the language-model loss of the first answers, which directly follow their questions."""
        predicted = batch.answer[:, 1:] == 1
        logits = model.lm_head(hidden[:, :-1][predicted])
        return self.torch.nn.functional.cross_entropy(logits, batch.tokens[:, 1:][predicted])

    def _save_reward_model(self, model: Any, verdict: Any) -> float:
        from transformers import Qwen2ForSequenceClassification

        config = self._config()
        config.num_labels = 1
        judge = Qwen2ForSequenceClassification(config)
        judge.model.load_state_dict(model.model.state_dict())
        judge.score = verdict
        self._save(judge, "reward_model")
        return self._verdict_accuracy(judge)

    def _config(self) -> Any:
        from transformers import Qwen2Config

        recipe = self.recipe
        return Qwen2Config(
            vocab_size=len(self.tokenizer),
            hidden_size=recipe.hidden_size,
            intermediate_size=recipe.intermediate_size,
            num_hidden_layers=recipe.layers,
            num_attention_heads=max(1, recipe.hidden_size // HEAD_SIZE),
            num_key_value_heads=max(1, recipe.hidden_size // HEAD_SIZE),
            max_position_embeddings=64,
            pad_token_id=self.tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=self.tokenizer.eos_token_id,
            tie_word_embeddings=False,
            dtype="float32",
        )

    def _save(self, model: Any, name: str) -> None:
        model.save_pretrained(self.directory / name)
        self.tokenizer.save_pretrained(self.directory / name)

    def _encode(self, problems: Sequence[Problem], answers: Sequence[Sequence[str]]) -> _Batch:
        """Return problems and their answers as a batch."""
        openings = self._tokenize([_opening(problem) for problem in problems])
        completions = iter(self._tokenize([f"{answer}{IM_END}\n" for given in answers for answer in given]))
        rows = []
        for problem, opening, given in zip(problems, openings, answers, strict=True):
            start = len(opening)
            row = [(token, 0, position, 0) for position, token in enumerate(opening)]
            for number, answer in enumerate(given, 1):
                completion = next(completions)
                right = sum(map(operator.eq, accumulate(answer), accumulate(problem.answer)))
                if answer == problem.answer:
                    right = len(completion)
                row += [(token, number, start + i, i < right) for i, token in enumerate(completion)]
            rows.append(row)
        width = max(map(len, rows))
        padding = (self.tokenizer.pad_token_id, -1, 0, 0)
        table = self.torch.tensor([row + [padding] * (width - len(row)) for row in rows])
        tokens, answer, position, right = table.unbind(-1)
        return _Batch(tokens, answer, position, right.float())

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"]

    def _greedy_accuracy(self, model: Any) -> float:
        """Return the share of held-out problems that the model answers correctly with greedy decoding."""
        torch, problems = self.torch, self.problems["held_out"]
        prompts = self._tokenize([_opening(problem) for problem in problems])
        with torch.no_grad():
            tokens = torch.tensor(prompts)  # all prompts have the same length
            for _ in range(4):
                logits = model.lm_head(model.model(tokens).last_hidden_state[:, -1])
                tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
        answers = tokens[:, len(prompts[0]) :].tolist()
        right = self._tokenize([f"{problem.answer}{IM_END}" for problem in problems])
        return sum(a[: len(r)] == r for a, r in zip(answers, right, strict=True)) / len(right)

    def _verdict_accuracy(self, judge: Any) -> float:
        """Return the accuracy of the reward model on held-out problems; half of the answers are right."""
        problems = self.problems["held_out"] * 4
        batch = self._encode(problems, [(p.answer, wrong_answer(p, self.rng)) for p in problems])
        with self.torch.no_grad():
            verdicts = judge.score(_run(judge, batch)[batch.ends]).squeeze(-1)
        return float(((verdicts > 0) == (batch.right[batch.ends] > 0)).float().mean())


def _run(model: Any, batch: _Batch) -> Any:
    """Return the last hidden state of every token."""
    return model.model(input_ids=batch.tokens, attention_mask=batch.mask, position_ids=batch.position).last_hidden_state


def _opening(problem: Problem) -> str:
    return f"{IM_START}user\n{problem.question}{IM_END}\n{IM_START}assistant\n"


class _Trainer:
    """Optimizes matrices with Muon and other parameters with AdamW, with a learning-rate warm-up and decay.

    Each thread computes the gradients of one part of the batch, and then updates one part of the matrices. For these
    small matrices, this is nearly twice as fast as two threads per multiplication. The result does not depend on the
    number of cores.
    """

    def __init__(self, named_parameters: Sequence[tuple[str, Any]], course: Course) -> None:
        import torch

        self._torch = torch
        trained = [(name, p) for name, p in named_parameters if p.requires_grad]
        matrices = [p for name, p in trained if p.ndim == 2 and ".layers." in name]
        others = [p for name, p in trained if not (p.ndim == 2 and ".layers." in name)]
        self._parameters = [*matrices, *others]
        muon = partial(torch.optim.Muon, lr=course.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        self._optimizers = [
            *(muon(matrices[part::THREADS]) for part in range(THREADS)),
            torch.optim.AdamW(others, lr=course.lr, betas=(0.9, 0.98), weight_decay=0.01),
        ]

        def factor(step: int) -> float:
            return min(1.0, (step + 1) / (course.steps / 8), max(0.02, 2 * (1 - step / course.steps)))

        self._schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, factor) for optimizer in self._optimizers]
        self._threads = ThreadPoolExecutor(THREADS, initializer=torch.set_num_threads, initargs=(1,))

    def __enter__(self) -> _Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def step(self, loss: Callable[[_Batch], Any], batches: Sequence[_Batch]) -> float:
        """Make a step on the mean loss of the batches, and return that loss."""

        def gradients(batch: _Batch) -> tuple[Any, ...]:
            value = loss(batch)
            return value.detach(), *self._torch.autograd.grad(value, self._parameters)

        value, *means = (
            sum(parts) / len(batches) for parts in zip(*self._threads.map(gradients, batches), strict=True)
        )
        for parameter, mean in zip(self._parameters, means, strict=True):
            parameter.grad = mean
        self._torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        list(self._threads.map(lambda optimizer: optimizer.step(), self._optimizers))
        for schedule in self._schedules:
            schedule.step()
        return value.item()
