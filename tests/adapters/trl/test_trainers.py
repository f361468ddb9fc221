"""Rewards and overlapped judging in real trainings of TRL, of a tiny model on the CPU."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from reward_loop import ConfigError
from reward_loop._util.web_server import listen
from reward_loop.adapters.trl import reward_function
from reward_loop.records.reader import RecordsReader
from tests.adapters.trl.trainers import (
    GENERATIONS,
    PER_UPDATE,
    UPDATES,
    Call,
    Judge,
    UntilTheNext,
    score,
    trainer,
)
from tests.support.fork_server import run_forked
from tests.support.trl_folder import needs_trl, trl_on_path

pytestmark = [pytest.mark.integration, needs_trl]

STEPS = 6
BATCH = PER_UPDATE * UPDATES
BATCHES = 3
"""Steps of the shared overlapped run. Each accumulates the gradients of a whole batch, as by default: TRL assumes then
that the weights have not changed since the generation."""


@pytest.fixture(scope="module", autouse=True)
def trl() -> Iterator[None]:
    with trl_on_path():
        yield


def test_masked_samples_have_advantage_zero_and_outcomes_are_counted(
    tmp_path: Path, tiny_generative_model: Path
) -> None:
    import pandas
    from trl import GRPOTrainer

    calls = 0

    async def fails_one_call_in_ten(solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        nonlocal calls
        calls += 1
        if calls % 10 == 3:
            raise ConnectionError("the judge is overloaded")
        return score(solution_str)

    options = {"retry": {"max_attempts": 1}}
    with reward_function(
        fails_one_call_in_ten, ground_truth="answer", name="judge", options=options, log_dir=tmp_path / "rewards"
    ) as reward:
        logging: dict[str, Any] = {"log_completions": True, "num_completions_to_print": 0}
        trainer(GRPOTrainer, tiny_generative_model, tmp_path, reward, **logging).train()
    tables = pandas.concat(
        [pandas.read_parquet(file) for file in sorted((tmp_path / "completions").glob("*.parquet"))[::UPDATES]]
    )
    failed = tables[tables["judge"].isna()]
    scored = tables[tables["judge"].notna()]
    assert len(tables) == calls == STEPS * PER_UPDATE
    assert len(failed) == len(range(3, calls + 1, 10))
    assert failed["advantage"].tolist() == [0.0] * len(failed)
    assert scored["advantage"].abs().max() > 0
    assert scored["judge"].tolist() == pytest.approx([score(text) for text in scored["completion"]])
    rows = list(RecordsReader(tmp_path / "rewards").rows())
    assert Counter(row["outcome"] for row in rows) == {"scored": len(scored), "failed": len(failed)}
    assert {row["step"] for row in rows} == set(range(1, STEPS + 1, UPDATES))
    assert set(Counter(row["group"] for row in rows).values()) == {GENERATIONS}


@dataclass
class Run:
    """An overlapped training with a judge that ends a batch only when it has been called for the next one."""

    trainer: Any
    judge: Judge
    output: Path
    trained: list[dict[str, Any]] = field(default_factory=list)
    """The inputs of each update."""
    weights: list[dict[str, Any]] = field(default_factory=list)
    """The weights before each step."""
    in_flight: list[bool] = field(default_factory=list)
    """For each evaluation, whether a batch of the training was at the judge."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_generative_model: Path) -> Run:
    import torch
    from transformers import TrainerCallback

    from reward_loop.adapters.trl import OverlappedGRPOTrainer

    class Watched(OverlappedGRPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self.model.training:
                found.trained.append({k: v.clone() for k, v in inputs.items() if isinstance(v, torch.Tensor)})
            return super().compute_loss(model, inputs, *args, **kwargs)

        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            found.in_flight.append(self._pending is not None and not self._pending.dead)
            return super().evaluate(*args, **kwargs)

    class Weights(TrainerCallback):
        def on_step_begin(self, *_: Any, model: Any, **__: Any) -> None:
            found.weights.append({name: value.clone() for name, value in model.state_dict().items()})

    output = tmp_path_factory.mktemp("overlapped")
    judge = Judge(UntilTheNext(BATCHES))
    made = trainer(
        Watched,
        tiny_generative_model,
        output,
        judge,
        [Weights()],
        max_steps=BATCHES,
        gradient_accumulation_steps=UPDATES,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
    )
    found = Run(made, judge, output)
    made.train()
    return found


def scored(calls: list[Call]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(ids) for call in calls for ids in call.completion_ids)


def trained_on(updates: list[dict[str, Any]]) -> Counter[tuple[int, ...]]:
    return Counter(
        tuple(ids[mask.bool()].tolist())
        for update in updates
        for ids, mask in zip(update["completion_ids"], update["completion_mask"], strict=True)
    )


def test_each_completion_is_scored_once_and_trained_on_once(run: Run) -> None:
    assert run.trainer.state.global_step == BATCHES
    assert [len(call.prompts) for call in run.judge.calls] == [BATCH] * BATCHES
    assert scored(run.judge.calls) == trained_on(run.trained)
    # Judges receive the step in which the batch is trained on.
    assert [call.step for call in run.judge.calls] == [0, 1, 2]


def test_old_log_probabilities_are_those_of_the_weights_that_generated(run: Run) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run.output / f"checkpoint-{BATCHES}").eval()
    assert len(run.trained) == BATCHES * UPDATES
    moved = 0.0
    for index, update in enumerate(run.trained):
        # A batch is generated while the batch before it is trained on; the first two have the first weights.
        step = index // UPDATES
        values = []
        for weights in (run.weights[max(0, step - 1)], run.weights[step]):
            model.load_state_dict(weights)
            with torch.no_grad():
                output = model(
                    input_ids=torch.cat([update["prompt_ids"], update["completion_ids"]], 1),
                    attention_mask=torch.cat([update["prompt_mask"], update["completion_mask"]], 1),
                )
            count = update["completion_ids"].shape[1]
            logps = output.logits[:, -count - 1 : -1].log_softmax(-1)
            values.append(logps.gather(2, update["completion_ids"].unsqueeze(2)).squeeze(2))
        mask = update["completion_mask"].bool()
        torch.testing.assert_close(update["old_per_token_logps"][mask], values[0][mask], atol=1e-4, rtol=1e-4)
        moved = max(moved, (values[1] - values[0])[mask].abs().max().item())
    assert moved > 1e-2  # the weights differ from those that generated


def test_an_evaluation_with_a_batch_in_flight_scores_its_own_completions(run: Run) -> None:
    assert run.in_flight == [True, True, False]
    assert len(run.judge.evaluations) > 0
    entries = [entry for entry in run.trainer.state.log_history if "eval_reward" in entry]
    assert len(entries) == 3
    assert not any("eval_judge/number" in entry for entry in entries)


def test_metrics_logged_by_judges_belong_to_their_own_batch_and_the_waiting_is_logged(run: Run) -> None:
    logged = [entry for entry in run.trainer.state.log_history if "judge/number" in entry]
    assert {entry["step"]: entry["judge/number"] for entry in logged} == {1: 0.0, 2: 1.0, 3: 2.0}
    for entry in logged:
        assert entry["overlap/waiting_seconds"] >= 0
        assert entry["overlap/judging_seconds"] >= 0
        assert 0 <= entry["overlap/hidden_share"] <= 1


def test_a_resumed_training_judges_the_batch_in_flight_again(run: Run, tiny_generative_model: Path) -> None:
    from reward_loop.adapters.trl import OverlappedGRPOTrainer

    judge = Judge(UntilTheNext(2))
    options = {"max_steps": BATCHES, "gradient_accumulation_steps": UPDATES}
    resumed = trainer(OverlappedGRPOTrainer, tiny_generative_model, run.output, judge, **options)
    resumed.train(resume_from_checkpoint=str(run.output / "checkpoint-1"))
    assert resumed.state.global_step == BATCHES
    assert [call.step for call in judge.calls] == [1, 2]
    assert [call.prompts for call in judge.calls] == [call.prompts for call in run.judge.calls[1:]]


def test_an_error_of_a_judge_ends_the_same_step_as_in_grpo_trainer(tmp_path: Path, tiny_generative_model: Path) -> None:
    from trl import GRPOTrainer

    from reward_loop.adapters.trl import OverlappedGRPOTrainer

    steps = []
    for kind in (GRPOTrainer, OverlappedGRPOTrainer):
        next_batch = asyncio.Event()

        async def fails(index: int, is_last: asyncio.Event = next_batch) -> None:
            if index == 1:
                raise ValueError("the second batch cannot be judged")
            if index == 2:
                is_last.set()
                await asyncio.Event().wait()

        judge = Judge(fails)
        made = trainer(kind, tiny_generative_model, tmp_path, judge)
        with pytest.raises(ValueError, match="the second batch cannot be judged"):
            made.train()
        steps.append(made.state.global_step)
    assert steps == [UPDATES, UPDATES]
    assert made._pending is None
    flush(made)
    assert all(call.cancelled for call in judge.calls[2:])


def test_an_early_stop_cancels_the_judges_of_the_batch_in_flight(tmp_path: Path, tiny_generative_model: Path) -> None:
    from transformers import TrainerCallback

    from reward_loop.adapters.trl import OverlappedGRPOTrainer

    class Stop(TrainerCallback):
        def on_step_end(self, *args: Any, **_: Any) -> Any:
            assert called.wait(60)
            args[2].should_training_stop = True

    called = threading.Event()

    async def hangs_at_the_second(index: int) -> None:
        if index == 1:
            called.set()
            await asyncio.Event().wait()

    judge = Judge(hangs_at_the_second)
    made = trainer(OverlappedGRPOTrainer, tiny_generative_model, tmp_path, judge, [Stop()])
    made.train()
    assert made.state.global_step == 1
    flush(made)
    assert [call.cancelled for call in judge.calls] == [False, True]


def flush(made: Any) -> None:
    """Wait until the event loop of the judges has delivered the cancellations."""

    async def turn() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=60)

    asyncio.run_coroutine_threadsafe(turn(), made.async_loop).result(60)


def test_sync_functions_and_several_async_ones_keep_their_order(tmp_path: Path, tiny_generative_model: Path) -> None:
    from reward_loop.adapters.trl import OverlappedGRPOTrainer

    def first(completions: Any, log_metric: Any, **_: Any) -> list[float]:
        log_metric("first/ran", 1.0)
        return [1.0] * len(completions)

    async def second(completions: Any, **_: Any) -> list[float]:
        return [2.0] * len(completions)

    made = trainer(
        OverlappedGRPOTrainer,
        tiny_generative_model,
        tmp_path,
        [first, second, Judge(UntilTheNext(2))],
        max_steps=2,
        steps_per_generation=1,
        num_iterations=1,
    )
    made.train()
    logged = [entry for entry in made.state.log_history if "reward" in entry]
    assert [entry["rewards/first/mean"] for entry in logged] == [1.0, 1.0]
    assert [entry["rewards/second/mean"] for entry in logged] == [2.0, 2.0]
    assert [entry["first/ran"] for entry in logged] == [1.0, 1.0]


def test_completions_that_are_used_several_times_are_scored_once(tmp_path: Path, tiny_generative_model: Path) -> None:
    from reward_loop.adapters.trl import OverlappedGRPOTrainer

    judge = Judge(UntilTheNext(2))
    options = {"max_steps": 4, "steps_per_generation": 2, "num_iterations": 2, "gradient_accumulation_steps": 2}
    made = trainer(OverlappedGRPOTrainer, tiny_generative_model, tmp_path, judge, **options)
    made.train()
    assert made.state.global_step == 4
    assert [call.step for call in judge.calls] == [0, 2]


def test_unsupported_options_are_refused_and_the_clip_range_is_wider_by_default(
    tmp_path: Path, tiny_generative_model: Path
) -> None:
    from reward_loop.adapters.trl import OverlappedGRPOTrainer

    def sync(completions: Any, **_: Any) -> list[float]:
        return [1.0] * len(completions)

    with pytest.raises(ConfigError, match="hides the time of async reward functions, and reward_funcs has none"):
        trainer(OverlappedGRPOTrainer, tiny_generative_model, tmp_path, sync)

    async def scores(completions: Any, **_: Any) -> list[float]:
        return [1.0] * len(completions)

    for options, bound in (({}, 0.4), ({"epsilon_high": 0.3}, 0.3), ({"loss_type": "cispo"}, 0.2)):
        made = trainer(OverlappedGRPOTrainer, tiny_generative_model, tmp_path, scores, **options)
        assert made.epsilon_high == bound


def test_another_release_of_trl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from reward_loop.adapters.trl.overlapped import check_version

    check_version()
    monkeypatch.setattr("importlib.metadata.version", lambda _: "1.17.0")
    with pytest.raises(ConfigError, match=r"trl 1\.17\.0 is installed: install trl 1\.16, or use GRPOTrainer"):
        check_version()


def test_two_processes_with_uneven_judges_have_equal_weights(tmp_path: Path, tiny_generative_model: Path) -> None:
    with closing(listen("127.0.0.1")) as listener:
        port = str(listener.getsockname()[1])
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }

    def process(rank: str) -> str:
        folder = tmp_path / rank
        folder.mkdir()
        module, own = ["tests.adapters.trl.one_of_two", str(tiny_generative_model)], {"RANK": rank, "LOCAL_RANK": rank}
        run_forked([*module, str(tmp_path)], environment | own, folder, folder / "log")
        return (folder / "log").read_text()

    with ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(process, ("0", "1")))
    digests = [re.search(r"^digest (\w+) (\d) (\d)$", output, re.MULTILINE) for output in outputs]
    assert all(digests), outputs
    assert {found.groups()[1:] for found in digests if found} == {("3", "2")}
    assert len({found[1] for found in digests if found}) == 1
