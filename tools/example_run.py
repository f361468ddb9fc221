"""A folder of records to look at: samples of arithmetic problems, scored by a rule and by a fake judge.

`write_run` uses the library's own manager, client and writer. The rewards rise from step to step.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reward_loop import NaiveRewardLoopManager, RewardLoopConfig, RewardSample
from reward_loop.client import Judge, Number
from reward_loop.config import parse
from reward_loop.records import records
from reward_loop.testing import FakeJudge, Status

PROBLEMS = (
    ("A bakery sells 14 loaves an hour and is open for 9 hours. How many loaves does it sell?", 126),
    ("Nina has 96 beads and puts 8 on each string. How many strings can she make?", 12),
    ("A train travels at 84 km/h for 2.5 hours. How far does it travel, in km?", 210),
    ("A tank holds 500 litres. A fifth leaks out, then 35 litres are added. How much is in it?", 435),
    ("Three friends share 57 marbles equally. How many does each get?", 19),
    ("A book has 348 pages. Omar reads 29 a day. After how many days is he done?", 12),
    ("Tickets cost 12 euros, and children pay half. What do 3 adults and 4 children pay?", 60),
    ("A rectangle is 17 m long and 6 m wide. What is its perimeter in metres?", 46),
)
RUBRIC = Judge(
    "Question:\n{{question}}\n\nAnswer of a student:\n{{answer}}\n\n"
    "Rate how clear and complete the reasoning is. End with `Score: N`, from 0 to 10.",
    Number(0, 10),
    system="You are a strict teacher of mathematics.",
    model="judge-7b",
    max_tokens=256,
)
WORDS_OF_THE_JUDGE = "The student names each quantity"
"""A part of every good reply of the fake judge."""


def reply(body: Mapping[str, Any]) -> str:
    """Return the fake judge's reply: better for longer answers."""
    answer = body["messages"][-1]["content"].partition("Answer of a student:\n")[2].partition("\n\nRate how")[0]
    steps = answer.count("\n")
    if "no idea" in answer:
        return "I cannot judge this: the answer is a single phrase without any reasoning."
    if steps < 2:
        return "The result is stated without a derivation, so I cannot follow it.\n\nScore: 2"
    return (
        f"{WORDS_OF_THE_JUDGE} and shows {steps} steps. My first draft gave three points, but the units are "
        f"right and the result is checked at the end.\n\n**Score: {min(10, 4 + steps)}/10**"
    )


async def compute_score(
    solution_str: str, ground_truth: str, extra_info: dict[str, Any], reward_router_address: str
) -> dict[str, Any]:
    """Return half of the reward for the right number, and half for the judge's rating."""
    judgement = await RUBRIC(reward_router_address, question=extra_info["question"], answer=solution_str)
    numbers = re.findall(r"-?\d+(?:\.\d+)?", solution_str)
    correct = bool(numbers) and numbers[-1] == ground_truth
    score = None if judgement.score is None else 0.5 * correct + 0.05 * judgement.score
    return {"score": score, "acc": correct, "rubric": judgement.score, "boxed": "\\boxed" in solution_str}


def response(question: str, truth: int, skill: float, dice: random.Random) -> str:
    """Return a response that is right and thorough with the probability `skill`."""
    if dice.random() < 0.04:
        return "I have no idea."
    result = truth if dice.random() < skill else truth + dice.choice([-2, 1, 10])
    if dice.random() > skill:
        return f"The answer is {result}."
    steps = dice.randint(2, 5)
    lines = [f"**Step {i + 1}.** " + STEPS[i % len(STEPS)] for i in range(steps)]
    end = f"So the result is \\boxed{{{result}}}."
    return "\n\n".join([f"Let me read the problem again: {question}", "\n".join(lines), end])


def rating(text: str, dice: random.Random) -> int:
    """Return the rating of a response by a person, from 0 to 10: higher for more lines, with some noise."""
    lines = text.count("\n")
    expected = 0 if "no idea" in text else 2 if lines < 2 else 4 + lines
    return min(10, max(0, expected + dice.choice([0, 0, 0, 0, -1, 1])))


STEPS = (
    "First I name the quantities: let $x$ be what we look for.",
    "The problem gives two numbers, and a relation between them.",
    "I put them into the equation \\(x = a \\cdot b\\) and solve it.",
    "The units agree, so the result is a plain number.",
    "As a check, I insert the result: the equation holds.",
)


async def score(folder: Path, samples: list[RewardSample], seed: int = 0) -> None:
    """Score samples as a trainer does: each one when its generation ends. One request in 60 fails."""
    dice = random.Random(seed)
    options = {"log_dir": str(folder), "on_failed": "mask", "on_unscored": "mask"}
    config = parse(RewardLoopConfig, options, "reward_loop")
    with FakeJudge(reply, model="judge-7b", latency=(0.02, 0.12), faults={Status(500): 1 / 60}, seed=seed) as judge:
        manager = NaiveRewardLoopManager(config, compute_score=compute_score, reward_router_address=judge.address)
        start = time.time()
        try:
            await asyncio.gather(*(rollout(folder, manager, sample, start, dice.random()) for sample in samples))
            await asyncio.sleep(0.2)  # training
            trained = time.time()
            write_phases(folder, samples[0].step or 0, start, trained)
            await asyncio.to_thread(records(folder).flush)
        finally:
            await asyncio.to_thread(manager.close)


async def rollout(
    folder: Path, manager: NaiveRewardLoopManager, sample: RewardSample, start: float, seconds: float
) -> None:
    """Generate a response in a part of a second, score it, and write the event of the rollout."""
    await asyncio.sleep(0.1 + 0.4 * seconds**3)
    end = time.time()
    await manager.run_single(sample)
    times = {"end": end, "scoring": end, "scored": time.time()}
    about = {"validate": bool(sample.validate), "start": start, "times": times, "error": None}
    records(folder).write_rollout(str(sample.uid), sample.group, sample.step, **about)


def write_phases(folder: Path, step: int, start: float, end: float) -> None:
    """Record the phases of a step: its last fifth of a second is training."""
    writer = records(folder)
    writer.write_phase("gen", step, start, end - 0.2, "rewards")
    writer.write_phase("old_log_prob", step, end - 0.2, end - 0.14)
    writer.write_phase("update_actor", step, end - 0.14, end - 0.02)
    writer.write_phase("update_weights", step, end - 0.02, end)
    writer.write_phase("step", step, start, end)


def step_samples(step: int, *, groups: int = 8, size: int = 4, steps: int = 8) -> list[RewardSample]:
    """Return the samples of a step. The first group of a step is easy: all of its responses are equal."""
    dice, people = random.Random(step), random.Random(f"people {step}")
    skill = 0.35 + 0.6 * step / steps
    found = []
    for group in range(groups):
        question, truth = PROBLEMS[(step + group) % len(PROBLEMS)]
        for i in range(size):
            text = f"It is\n\n{truth}." if group == 0 else response(question, truth, skill, dice)
            found.append(
                RewardSample(
                    text,
                    data_source="arithmetic" if group % 3 else "arithmetic/easy",
                    ground_truth=str(truth),
                    extra_info={"question": question, "index": group, "rating": rating(text, people)},
                    uid=f"s{step}-p{group}-{i}",
                    response_length=max(4, len(text) // 4),
                    group=f"s{step}-p{group}",
                    prompt=[{"role": "user", "content": question}],
                    step=step,
                )
            )
    return found


def write_run(folder: Path, *, steps: int = 8, groups: int = 8, size: int = 4) -> Path:
    """Write the records of a run with so many steps, prompts a step, and responses a prompt."""
    for step in range(1, steps + 1):
        samples = step_samples(step, groups=groups, size=size, steps=steps)
        asyncio.run(score(folder, samples, seed=step))
    return folder
