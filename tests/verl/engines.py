"""verl's own training workers and engines on a tiny model, one process a rank, without Ray and without a trainer.

    python -m tests.verl.engines MODEL DIRECTORY RANKS CASE...

runs the cases of `CASES` one after the other, each with a new worker, and records their updates in DIRECTORY/CASE (see
:mod:`tests.verl.minibatches`), with the metrics that the worker returned in ``metrics.json``.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.support.fork_server import module_environment, run_forked
from tests.verl import minibatches

VOCABULARY = 256
LENGTHS = (3, 1, 5, 9, 1, 6, 1, 4)
"""Tokens of the responses of a mini-batch. As in verl, padding has a response of one token."""
PADDING = (1, 4, 6)
"""The rows that are padding, in each rank's half at least one."""
MICRO_BATCH = 2
"""Rows of a micro-batch, where a case has no other."""


@dataclass(frozen=True)
class Case:
    """One call of `train_mini_batch` with one mini-batch of eight rows."""

    actor: dict[str, Any] = field(default_factory=dict)
    """Options of verl's `ActorConfig`, or of its `CriticConfig`."""
    critic: bool = False
    micro_batch: int = MICRO_BATCH
    without_padding: bool = False
    """Whether the padding does not exist at all. On one rank."""


AGGREGATIONS = {
    "token-mean": {"loss_agg_mode": "token-mean"},
    "token-sum": {"loss_agg_mode": "token-sum"},
    "seq-mean-token-sum": {"loss_agg_mode": "seq-mean-token-sum"},
    "seq-mean-token-mean": {"loss_agg_mode": "seq-mean-token-mean"},
    "seq-mean-token-sum-norm": {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 16},
    "seq-mean-token-sum-norm-longest": {"loss_agg_mode": "seq-mean-token-sum-norm"},
}
POLICY_LOSSES = (
    *("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro", "cispo"),
)

CASES = {
    **{f"actor-{name}": Case(options) for name, options in AGGREGATIONS.items()},
    **{f"critic-{name}": Case(options, critic=True) for name, options in AGGREGATIONS.items()},
    **{
        f"policy-loss-{name}{suffix}": Case(
            {"policy_loss": {"loss_mode": name, "dro_beta": 0.1}}, micro_batch=size, without_padding=without
        )
        for name in POLICY_LOSSES
        for suffix, size, without in (("", len(LENGTHS), False), ("-alone", len(LENGTHS) - len(PADDING), True))
    },
}


def _rows(model: Path) -> dict[str, list[torch.Tensor]]:
    """The rows by field."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model)
    draw = torch.Generator().manual_seed(0)
    made: dict[str, list[torch.Tensor]] = {}

    def add(**fields: torch.Tensor) -> None:
        for name, value in fields.items():
            made.setdefault(name, []).append(value)

    for row, length in enumerate(LENGTHS):
        prompt = torch.randint(0, VOCABULARY, (3 + row % 2,), generator=draw)
        response = torch.randint(0, VOCABULARY, (length,), generator=draw)
        keep = int(row not in PADDING)
        mask = torch.full((length,), keep)
        if length > 4:
            mask[2] = 0  # as of a tool
        add(
            prompts=prompt,
            responses=response,
            input_ids=torch.cat([prompt, response]),
            position_ids=torch.arange(len(prompt) + length),
            loss_mask=mask,
            response_mask=mask,
            advantages=torch.randn(1, generator=draw).expand(length) * keep,
            returns=torch.randn(length, generator=draw) * keep,
            values=torch.randn(length, generator=draw),
            # Close to those of the policy, so that no ratio is clipped.
            old_log_probs=_log_probs(policy, prompt, response) + 0.02 * torch.randn(length, generator=draw),
            uid=torch.tensor(0),
            session_id=torch.tensor(row),
        )
    return made


@torch.no_grad()
def _log_probs(policy: Any, prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    tokens = torch.cat([prompt, response])
    log_probs = policy(tokens[None]).logits[0, :-1].log_softmax(-1)
    return log_probs.gather(1, tokens[1:, None])[-len(response) :, 0]


def _batch(case: Case, model: Path, rank: int, ranks: int) -> Any:
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    own = len(LENGTHS) // ranks
    mine = [i for i in range(rank * own, (rank + 1) * own) if not (case.without_padding and i in PADDING)]
    fields = {
        name: (
            torch.stack([values[i] for i in mine])
            if values[0].dim() == 0
            else torch.nested.as_nested_tensor([values[i] for i in mine], layout=torch.jagged)
        )
        for name, values in _rows(model).items()
    }
    data = TensorDict(fields, batch_size=len(mine))
    tu.assign_non_tensor(
        data,
        global_batch_size=len(LENGTHS) - len(PADDING),  # as the trainer sets it
        mini_batch_size=len(mine) * ranks,
        epochs=1,
        seed=1,
        dataloader_kwargs={"shuffle": False},
        temperature=1.0,
    )
    return data


def _worker(case: Case, model: Path) -> Any:
    from verl.workers.config import (
        ActorConfig,
        CriticConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
        PolicyLossConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss, value_loss

    precision = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    config = TrainingWorkerConfig(
        model_type="value_model" if case.critic else "language_model",
        model_config=HFModelConfig(
            path=str(model),
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "sdpa"},
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            model_dtype="fp32",
            mixed_precision=precision,
            use_torch_compile=False,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=case.micro_batch,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, lr_warmup_steps=0, total_training_steps=100, clip_grad=1e6),
    )
    worker = TrainingWorker(config)
    worker.reset()
    options = dict(case.actor)
    if "policy_loss" in options:
        options["policy_loss"] = PolicyLossConfig(**options["policy_loss"])
    shared = {"strategy": "fsdp2", "ppo_micro_batch_size_per_gpu": case.micro_batch, **options}
    if case.critic:
        # Without clipping of values, so that the loss is (v - R)^2 / 2.
        loss = partial(value_loss, config=CriticConfig(**shared, cliprange_value=1e6, model=config.model_config))
    else:
        loss = partial(ppo_loss, config=ActorConfig(**shared, rollout_n=1))
    worker.set_loss_fn(loss)
    return worker


def _run(model: Path, directory: Path, rank: int, ranks: int, names: list[str]) -> None:
    from verl.utils import tensordict_utils as tu

    import examples.verl_cpu.engine  # noqa: F401  registers the engines

    for name in names:
        case = CASES[name]
        minibatches.install(directory / name)
        worker = _worker(case, model)
        torch.manual_seed(0)
        output = worker.train_mini_batch(_batch(case, model, rank, ranks))
        if rank == 0:
            metrics = {key: getattr(value, "values", value) for key, value in tu.get(output, "metrics").items()}
            (directory / name / "metrics.json").write_text(json.dumps(metrics, default=float))


def run(model: Path, directory: Path, ranks: int = 1, names: list[str] | None = None) -> None:
    """Runs cases in processes of their own and waits for their end."""
    names = list(CASES) if names is None else names
    for name in names:
        (directory / name).mkdir(parents=True, exist_ok=True)
    module = ["tests.verl.engines", str(model), str(directory), str(ranks), *names]
    environment = {
        **os.environ,
        **module_environment(),
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "examples.verl_cpu.plugin",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }

    def process(rank: int) -> tuple[int | None, Path]:
        folder = directory / f"process-{ranks}-{rank}"
        folder.mkdir()
        own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        return run_forked(module, own, folder, folder / "log"), folder / "log"

    with ThreadPoolExecutor(ranks) as pool:
        for status, log in pool.map(process, range(ranks)):
            assert status == 0, log.read_text()[-5000:]


def _main() -> None:
    model, directory, ranks, *names = sys.argv[1:]
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        backend="cpu:gloo",
        rank=int(os.environ["RANK"]),
        world_size=int(ranks),
        init_method=f"file://{directory}/meeting-{ranks}",
    )
    _run(Path(model), Path(directory), int(os.environ["RANK"]), int(ranks), names)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _main()
