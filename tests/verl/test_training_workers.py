"""Which rows a training worker passes to verl, without an engine; `tests.verl.test_masked_rows` has verl's engines."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import TrainingWorker

from reward_loop.verl.training_workers import MaskingTrainingWorker, without_masked_rows

pytestmark = pytest.mark.integration  # imports verl


def nested(*rows: list[int]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def batch(*masks: list[int]) -> TensorDict:
    data = TensorDict({"loss_mask": nested(*masks), "response_mask": nested(*masks)}, batch_size=len(masks))
    tu.assign_non_tensor(data, global_batch_size=len(masks))
    return data


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker of one rank. `trained` has the ``global_batch_size`` of each call of verl's `train_batch`."""

    def train_batch(self: Any, data: Any) -> Any:
        self.trained.append(tu.get(data, "global_batch_size"))
        return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": {"loss": 1.0}})

    monkeypatch.setattr(TrainingWorker, "train_batch", train_batch)
    worker: Any = object.__new__(MaskingTrainingWorker)
    worker.device_name, worker.engine_config = "cpu", SimpleNamespace()
    worker.engine = SimpleNamespace(
        get_data_parallel_group=lambda: None, is_mp_src_rank_with_outputs=lambda: True, lr_scheduler_step=lambda: 0.5
    )
    worker.trained = []
    return worker


def metrics(output: Any) -> dict[str, Any]:
    return dict(tu.get(output, "metrics"))


def test_the_number_of_rows_is_that_of_the_unmasked_ones(worker: Any) -> None:
    output = worker.train_batch(batch([1, 1], [0, 0, 0], [0, 1]))
    assert worker.trained == [2]
    assert metrics(output) == {"loss": 1.0, "skipped_share": 0.0}


def test_rows_are_counted_over_the_data_parallel_group(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    group = object()

    def all_reduce(tensor: torch.Tensor, group: object = None) -> None:
        reduced.append(group)
        tensor *= 4  # four ranks, each with as many rows

    reduced: list[object] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    worker.engine.get_data_parallel_group = lambda: group
    worker.train_batch(batch([1, 1], [0, 0, 0], [0, 1]))
    assert (reduced, worker.trained) == ([group], [8])
    # TorchTitan has no group if all ranks are tensor-parallel: torch would add the same rows once for each rank.
    worker.engine.get_data_parallel_group = lambda: None
    worker.train_batch(batch([1, 1], [0, 0, 0], [0, 1]))
    assert (reduced, worker.trained) == ([group], [8, 2])
    # With dynamic context parallelism, every rank has the whole batch.
    worker.engine.get_data_parallel_group = lambda: group
    worker.engine_config.dynamic_context_parallel = True
    worker.train_batch(batch([1, 1], [0, 0, 0], [0, 1]))
    assert (reduced, worker.trained) == ([group], [8, 2, 2])


@pytest.mark.parametrize("schedule", [False, True])
def test_a_mini_batch_without_an_unmasked_row_is_not_trained_on(worker: Any, schedule: bool) -> None:
    data = batch([0, 0], [0, 0, 0])
    tu.assign_non_tensor(data, update_lr_scheduler=schedule)
    assert metrics(worker.train_batch(data)) == {"skipped_share": 1.0, **({"lr": 0.5} if schedule else {})}
    assert worker.trained == []


def test_a_loss_receives_the_unmasked_rows_alone() -> None:
    seen: list[Any] = []

    def loss(*, model_output: Any, data: Any) -> None:
        seen.append(([row.tolist() for row in model_output["log_probs"].unbind()], len(data)))

    data = batch([1, 1], [0, 0, 0], [0, 1])
    without_masked_rows(loss, model_output={"log_probs": nested([1, 2], [3, 4, 5], [6, 7])}, data=data)
    assert seen == [([[1, 2], [6, 7]], 2)]
    # Every rank needs a backward pass, even if all its rows are masked.
    data = batch([0, 0], [0])
    without_masked_rows(loss, model_output={"log_probs": nested([1, 2], [3])}, data=data)
    assert seen[1:] == [([[1, 2], [3]], 2)]


@pytest.mark.parametrize("values", [False, True])
def test_gradients_flow_through_the_selected_rows_of_megatrons_outputs(values: bool) -> None:
    packed = torch.ones((1, 8, 1) if values else (1, 8), requires_grad=True)
    rows = [packed[0][first:last] for first, last in ((0, 2), (3, 5), (6, 8))]  # with padding between rows
    output = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    if values:
        output = output.squeeze(-1)

    def loss(*, model_output: Any, data: Any) -> torch.Tensor:
        return model_output["values"].values().sum()

    without_masked_rows(loss, model_output={"values": output}, data=batch([1, 1], [0, 0], [0, 1])).backward()
    assert packed.grad is not None
    assert packed.grad.flatten().tolist() == [1, 1, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("unmasked", [0, 1])
def test_a_distillation_loss_without_an_unmasked_token_is_zero(unmasked: int) -> None:
    from verl.trainer.distillation import distillation_ppo_loss

    settings = {"loss_mode": "k3", "loss_max_clamp": 10.0, "use_policy_gradient": False, "use_task_rewards": False}
    loss = partial(
        distillation_ppo_loss,
        config=SimpleNamespace(loss_agg_mode="token-mean", loss_scale_factor=None, global_batch_info={}),
        distillation_config=SimpleNamespace(distillation_loss=SimpleNamespace(**settings)),
    )
    mask = nested([0, 0], [0, unmasked])
    data = TensorDict(
        {
            "prompts": nested([1], [1]),
            "responses": nested([2, 3], [4, 5]),
            "teacher_logprobs": torch.nested.as_nested_tensor(list(torch.full((2, 3, 1), -1.0)), layout=torch.jagged),
            "response_mask": mask,
            "loss_mask": mask,
        },
        batch_size=2,
    )
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=8, global_batch_size=4)
    weights = torch.full((2, 3), -0.5, requires_grad=True)
    log_probs = torch.nested.as_nested_tensor(list(weights), layout=torch.jagged)
    value, logged = without_masked_rows(loss, model_output={"log_probs": log_probs}, data=data)
    value.backward()
    assert weights.grad is not None
    assert bool(weights.grad.any()) == bool(value) == bool(unmasked)
    assert logged["distillation/loss_min"].aggregate() > 0
    assert torch.equal(data["response_mask"].values(), mask.values())
