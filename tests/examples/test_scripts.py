"""The example scripts for GPUs: their options exist, fit each other and pass verl's own checks. No GPU is needed."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")

from examples.gsm8k import prepare
from reward_loop.serving.engines import ENGINES
from reward_loop.verl.main_ppo import check_function
from reward_loop.verl.options import RewardSettings
from tests.verl.configs import resolved

pytestmark = pytest.mark.integration

EXAMPLES = Path(prepare.__file__).parents[1]
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.sh"))
CASES: dict[str, tuple[str, ...]] = dict.fromkeys(SCRIPTS, ()) | {
    # A whole node for training.
    "genrm_async_1x8.sh on 2x8": (
        *("trainer.n_gpus_per_node=8", "actor_rollout_ref.rollout.n_gpus_per_node=4"),
        "reward.reward_model.n_gpus_per_node=4",
    ),
    "../recipe/reward_loop/run_gsm8k_judge.sh": (),
}
"""The scripts, and more options for one."""


def command(script: str, directory: Path, *more: str) -> list[str]:
    """Run a script with a `python3` that only writes its arguments to a file, and return them."""
    written = directory / "arguments.json"
    python = directory / "python3"
    program = f"import json, sys; json.dump(sys.argv[1:], open({str(written)!r}, 'w'))"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(program)} "$@"\n')
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}"}
    subprocess.run(["bash", EXAMPLES / script, *more], env=environment, cwd=directory, check=True, timeout=60)
    return json.loads(written.read_text())


@pytest.fixture(scope="module", params=CASES)
def settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RewardSettings:
    script = request.param.split()[0]
    flag, module, *overrides = command(script, tmp_path_factory.mktemp("script"), *CASES[request.param])
    assert (flag, module) == ("-m", "verl.trainer.main_ppo")
    assert {"trainer.v1.trainer_mode=reward_pipeline", "reward_model.use_reward_loop=True"} & set(overrides)
    return resolved(*overrides)


def test_there_are_scripts_to_check() -> None:
    assert [
        *("disrm_colocated.sh", "genrm_1x1.sh", "genrm_1x8.sh", "genrm_2x8.sh", "genrm_async_1x8.sh", "gsm8k_grpo.sh")
    ] == SCRIPTS


def test_the_options_pass_our_checks_and_verls(settings: RewardSettings) -> None:
    from verl.utils.config import validate_config

    check_function(settings)
    validate_config(config=settings.config, use_reference_policy=True, use_critic=False)


def test_policy_and_reward_model_fit_on_the_nodes(settings: RewardSettings) -> None:
    config, model = settings.config, settings.model
    trainer = config.trainer.nnodes * config.trainer.n_gpus_per_node
    own = 0
    if config.reward.reward_model.enable_resource_pool:
        own = config.reward.reward_model.nnodes * config.reward.reward_model.n_gpus_per_node
        assert model is not None
        assert model.replicas * model.tensor_parallel_size == own, "no GPU of the reward model's pool is idle"
    if settings.mode.name == "separate_async":
        rollout = config.actor_rollout_ref.rollout
        own += rollout.nnodes * rollout.n_gpus_per_node
        assert rollout.n_gpus_per_node + config.reward.reward_model.n_gpus_per_node <= 8, "they share a node"
    assert trainer + own in (1, 8, 16)
    samples = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    assert samples % trainer == 0
    assert config.data.train_batch_size % config.actor_rollout_ref.actor.ppo_mini_batch_size == 0


def test_vllms_parser_accepts_the_command_line_of_the_reward_models_servers(settings: RewardSettings) -> None:
    if settings.model is None:
        pytest.skip("the script has no reward model")
    cli = pytest.importorskip("vllm.entrypoints.launchers.cli_args")
    parsing = pytest.importorskip("vllm.utils.argparse_utils")
    kind = "discriminative" if settings.scores_by_model else "generative"
    model = settings.model.model_copy(update={"kind": kind, "served_model_name": "m"})
    line = ENGINES["vllm"].command(model, "127.0.0.1", 8000)
    given = cli.make_arg_parser(parsing.FlexibleArgumentParser()).parse_args(line[line.index("serve") + 1 :])
    assert given.runner == ("pooling" if settings.scores_by_model else "auto")
    assert given.tensor_parallel_size == model.tensor_parallel_size
    # CUDA graphs make the tokens of a judge faster, and take memory of the trainer's GPUs.
    own_gpus = settings.config.reward.reward_model.enable_resource_pool
    assert given.enforce_eager != (own_gpus and not settings.scores_by_model)
