"""What verl's actor receives and does in each update: rows, weights before and after, gradient before clipping.

In a run of verl's trainer, `recording` gives the environment and `Update` reads what was recorded:

    run = train(directory, policy, ..., function="Mixed", environment=recording(directory))
    for update in updates(directory):
        update.rows["advantages"]
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch

DIRECTORY = "MINI_BATCHES"
"""The environment variable that names the directory of the records."""

ROWS = (
    *("prompts", "responses", "response_mask", "loss_mask", "advantages"),
    *("old_log_probs", "ref_log_prob", "rollout_is_weights"),
)
"""The fields of a row that are recorded if they are there. Each row is a tensor of its own length."""

NAMES = ("uid", "session_id")
"""The fields that name a row."""


@dataclass
class Update:
    """One call of an engine's `train_batch`, over all data-parallel ranks."""

    rows: dict[str, list[Any]]
    """By field, the rows of all ranks in the order of ranks."""
    ranks: int
    global_batch_size: int | None
    """The number of rows that verl's losses ``seq-mean-*`` divide by."""
    before: dict[str, torch.Tensor]
    """The weights before the update, by name."""
    after: dict[str, torch.Tensor]
    gradient: dict[str, torch.Tensor]
    """As it was before clipping."""
    temperature: float

    @property
    def keys(self) -> list[tuple[str, int]]:
        """The prompt and the session of each row."""
        return list(zip(self.rows["uid"], self.rows["session_id"], strict=True))


def recording(directory: Path) -> dict[str, str]:
    """The environment of a run on the CPU whose training workers record their updates in ``directory``."""
    return {
        DIRECTORY: str(directory),
        "VERL_USE_EXTERNAL_MODULES": "examples.verl_cpu.plugin,tests.verl.minibatches",
    }


def updates(directory: Path) -> list[Update]:
    """The updates in their order."""
    numbers = sorted({int(path.stem.rsplit("-", 1)[1]) for path in directory.glob("*.pt")})
    return [_merged(directory, number) for number in numbers]


def _merged(directory: Path, number: int) -> Update:
    paths = sorted(directory.glob(f"*-{number}.pt"), key=lambda path: int(path.stem.split("-")[0]))
    records = [torch.load(path, weights_only=False) for path in paths]
    first = records[0]
    rows = {name: [row for record in records for row in record["rows"][name]] for name in first["rows"]}
    return Update(rows, len(records), **{name: value for name, value in first.items() if name != "rows"})


def install(directory: Path) -> None:
    """Has the actor's engine of this process record its updates."""
    from verl.workers.engine.base import BaseEngine

    train_batch, numbers = BaseEngine.train_batch, itertools.count(1)

    @wraps(train_batch)
    def recorded(self: Any, data: Any, loss_function: Callable[..., Any]) -> Any:
        if self.model_config.model_type != "language_model":
            return train_batch(self, data, loss_function)  # the critic
        record = {"rows": _rows(data), "global_batch_size": _plain(data, "global_batch_size")}
        record |= {"temperature": _plain(data, "temperature") or 1.0, "before": _weights(self)}
        optimizer_step = self.optimizer_step

        def step() -> Any:
            record["gradient"] = _weights(self, gradient=True)
            return optimizer_step()

        self.optimizer_step = step
        try:
            output = train_batch(self, data, loss_function)
        finally:
            del self.optimizer_step
        record["after"] = _weights(self)
        torch.save(record, directory / f"{self.get_data_parallel_rank()}-{next(numbers)}.pt")
        return output

    BaseEngine.train_batch = recorded


def _rows(data: Any) -> dict[str, list[Any]]:
    rows = {name: [row.clone() for row in data[name].unbind()] for name in ROWS if name in data.keys()}  # noqa: SIM118
    for name in NAMES:
        if name in data.keys():  # noqa: SIM118
            rows[name] = [value.item() if hasattr(value, "item") else value for value in data[name]]
    return rows


def _plain(data: Any, name: str) -> Any:
    from verl.utils import tensordict_utils as tu

    return tu.get(data, name)


def _weights(engine: Any, gradient: bool = False) -> dict[str, torch.Tensor]:
    """Whole tensors, also where they are sharded: all ranks must call this."""
    weights = {}
    for name, parameter in engine.module.named_parameters():
        tensor = parameter.grad if gradient else parameter
        if tensor is not None:
            tensor = tensor.detach()
            weights[name] = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()
    return weights


if os.environ.get("WG_BACKEND") == "ray" and DIRECTORY in os.environ:  # set by verl in its training workers alone
    install(Path(os.environ[DIRECTORY]))
