"""Teaches a small language model to add, with TRL's GRPO and a judge behind HTTP that fails one call in ten, on a CPU.

    python -m examples.trl_grpo [--quick] [--overlapped | --plain]

The policy, the problems and the reward function are those of `examples.arithmetic`. The judge is the fake judge of
`reward_loop.testing`; it adds correctly. Failed samples are masked: TRL gives them the advantage 0. ``--overlapped``
hides judging behind training. ``--plain`` trains without this library, to compare: a plain function of TRL's computes
the same scores and never fails.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# OpenMP threads that wait actively waste shared cores. Set before torch is loaded, which reads it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from examples.arithmetic.models import Problem, make_models, make_problems
from examples.arithmetic.models import Recipe as ModelRecipe
from examples.arithmetic.reward import compute_score, sigmoid, weighted
from reward_loop.adapters.trl import reward_function
from reward_loop.records.reader import RecordsReader
from reward_loop.testing import FakeJudge, Status

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "arithmetic"
ANSWER_TOKENS = 5
CERTAIN = 4.0
"""The absolute value of the judge's logits: it is 98 % certain."""


@dataclass(frozen=True)
class Settings:
    """The settings of a training run."""

    steps: int = 24
    """Batches of answers. Each is used for 4 updates."""
    prompts: int = 32
    """Problems per step."""
    answers: int = 8
    """Answers per problem."""
    held_out: int = 256
    """Problems of the test before and after the training."""
    failing: float = 0.1
    """The probability that a call of the judge fails."""
    judge_latency: float = 0.5
    """Mean additional latency of the judge in seconds."""
    overlapped: bool = False
    plain: bool = False
    """Train with `plain_reward`, without a judge."""
    seed: int = 0


QUICK = Settings(steps=4, prompts=16, held_out=128, judge_latency=0.1)


def judge(settings: Settings) -> FakeJudge:
    """Return a judge that adds correctly, and answers the given share of requests with an error."""
    fault = Status(400, message="the judge fails one call in ten")
    return FakeJudge(logit=logit, faults={fault: settings.failing}, seed=settings.seed)


def logit(text: str) -> float:
    """Return a positive number if the text is a correct addition."""
    found = re.fullmatch(r"(\d+)\+(\d+)=(\d+)<\|im_end\|>", text)
    return CERTAIN if found and int(found[1]) + int(found[2]) == int(found[3]) else -CERTAIN


def plain_reward(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
    """Return the scores that `compute_score` would return with a judge that never fails. TRL calls this."""
    answers = [completion[0]["content"] for completion in completions]
    return [
        weighted(sigmoid(logit(f"{prompt[0]['content']}{answer}<|im_end|>")), answer)["score"]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


@contextmanager
def rewards(records: Path, tokenizer: Any, settings: Settings) -> Iterator[Any]:
    """Yield the reward function of the trainer. While it is used, the judge runs."""
    if settings.plain:
        yield plain_reward
        return
    with (
        judge(settings) as server,
        reward_function(
            compute_score,
            ground_truth="answer",
            reward_kwargs={"latency_s": settings.judge_latency},
            reward_router_address=server.address,
            reward_model_tokenizer=tokenizer,
            group_size=settings.answers,
            log_dir=records,
        ) as reward,
    ):
        yield reward


def rows(problems: list[Problem]) -> Any:
    """Return the data set: prompts, and the columns for the reward function."""
    from datasets import Dataset

    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": problem.question}],
                "answer": problem.answer,
                "question": problem.question,
                "split": "train",
            }
            for problem in problems
        ]
    )


def accuracy(model: Any, tokenizer: Any, problems: list[Problem]) -> float:
    """Return the share of problems that the model answers correctly, without sampling."""
    import torch

    tokens = tokenizer([problem.question for problem in problems], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        answers = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=ANSWER_TOKENS
        )
    texts = tokenizer.batch_decode(answers[:, tokens.shape[1] :], skip_special_tokens=True)
    return sum(text == problem.answer for text, problem in zip(texts, problems, strict=True)) / len(problems)


def config(output: Path, settings: Settings) -> Any:
    """Return the options of TRL's trainer."""
    from trl import GRPOConfig

    updates = 4
    return GRPOConfig(
        output_dir=str(output / "trl"),
        max_steps=settings.steps * updates,
        per_device_train_batch_size=settings.prompts * settings.answers // updates,
        steps_per_generation=updates,
        num_generations=settings.answers,
        max_completion_length=ANSWER_TOKENS,
        learning_rate=5e-5,
        lr_scheduler_type="constant",
        seed=settings.seed,
        logging_steps=updates,
        log_completions=True,
        num_completions_to_print=0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )


def run(policy: Path, output: Path, settings: Settings, recipe: ModelRecipe | None = None) -> dict[str, Any]:
    """Train, and return the figures of the run.

    Args:
        policy: the folder of the policy.
        output: the folder for the records and TRL's files.
        settings: the settings of the training.
        recipe: what the policy was made from, to know which problems are held out.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
    from trl import GRPOTrainer

    from reward_loop.adapters.trl import OverlappedGRPOTrainer

    train, held_out = make_problems(recipe or ModelRecipe())
    test = held_out[: settings.held_out]
    tokenizer = AutoTokenizer.from_pretrained(policy)
    model = AutoModelForCausalLM.from_pretrained(policy)
    before = accuracy(model, tokenizer, test)
    records = output / "rewards"
    trainer_type = OverlappedGRPOTrainer if settings.overlapped else GRPOTrainer
    with rewards(records, tokenizer, settings) as reward:
        trainer = trainer_type(
            model,
            reward_funcs=reward,
            args=config(output, settings),
            train_dataset=rows(train),
            processing_class=tokenizer,
        )
        trainer.remove_callback(PrinterCallback)
        # TRL warns of each batch with a masked sample.
        logging.getLogger("trl.trainer.grpo_trainer").setLevel(logging.ERROR)
        began = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - began
    by_step = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    masked = masked_advantages(output, reward.__name__)
    return {
        "accuracy_before": before,
        "accuracy_after": accuracy(model, tokenizer, test),
        "rewards": {} if settings.plain else dict(Counter(row["outcome"] for row in RecordsReader(records).rows())),
        "masked": len(masked),
        "masked_with_advantage": sum(advantage != 0 for advantage in masked),
        "seconds": seconds,
        "final_reward": statistics.fmean(by_step[-max(1, len(by_step) // 4) :]),
        "rewards_by_step": by_step,
    }


def masked_advantages(output: Path, name: str) -> list[float]:
    """Return the advantages of the samples without a reward, from TRL's tables of completions.

    Args:
        output: the folder of the run.
        name: the name of the reward function, which is a column of the tables.
    """
    import pandas

    table = pandas.concat(map(pandas.read_parquet, (output / "trl" / "completions").glob("*.parquet")))
    return table.loc[table[name].isna(), "advantage"].tolist()


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser("python -m examples.trl_grpo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer and smaller steps, to see that it works")
    parser.add_argument("--steps", type=int, metavar="N", help=f"batches of answers ({Settings.steps})")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--overlapped", action="store_true", default=None, help="hide judging behind training")
    kind.add_argument("--plain", action="store_true", default=None, help="TRL alone, with a plain function")
    parser.add_argument("--failing", type=float, metavar="P", help=f"share of failing calls ({Settings.failing})")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the training (0)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("outputs/trl"),
        metavar="DIR",
        help="folder of the results, which replace those of an earlier run (%(default)s)",
    )
    arguments = parser.parse_args(argv)
    given = {name: value for name, value in vars(arguments).items() if value is not None and hasattr(Settings, name)}
    settings = replace(QUICK if arguments.quick else Settings(), **given)
    models = make_models(CACHE, report=lambda text: print(f"Creating the models, once: {text}", flush=True))
    output = arguments.output.resolve()
    for name in ("rewards", "trl"):
        shutil.rmtree(output / name, ignore_errors=True)
    output.mkdir(parents=True, exist_ok=True)
    figures = run(models.directory / "policy", output, settings)
    print(f"Exact match on held-out problems: {figures['accuracy_before']:.1%} -> {figures['accuracy_after']:.1%}")
    print(f"Mean reward of the last quarter of the steps: {figures['final_reward']:.3f}")
    if not settings.plain:
        print(f"Rewards: {', '.join(f'{count} {outcome}' for outcome, count in sorted(figures['rewards'].items()))}")
        print(f"Masked: {figures['masked']}, {figures['masked_with_advantage']} of them with an advantage other than 0")
        print(f"See every sample: reward-loop view {output / 'rewards'} --open")
    print(f"Training took {figures['seconds']:.0f} s.")
    (output / "report.json").write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
