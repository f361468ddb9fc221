#!/usr/bin/env bash
# Fully asynchronous GRPO on GSM8K with a generative judge, all on GPUs of their own: one node with 8 GPUs, 4 for training,
# 2 for rollouts and 2 for the judge (one server). docs/verl.md describes the mode. On two nodes with 8
# GPUs each: RAY_ADDRESS=auto, trainer.n_gpus_per_node=8, actor_rollout_ref.rollout.n_gpus_per_node=4,
# reward.reward_model.n_gpus_per_node=4.
#
#   pip install '.[verl]' 'verl[vllm]==0.9.1' # flash-attn and cupy, see docs/verl.md
#   python examples/gsm8k/prepare.py
#   bash examples/genrm_async_1x8.sh [more options of verl]
#
# Tests check the configuration; the run itself has never been tried on GPUs.
set -euo pipefail
cd "$(dirname "$0")/.."

python3 -m verl.trainer.main_ppo \
    reward.custom_reward_function.path="$PWD"/examples/gsm8k/judge.py \
    reward.reward_model.enable=True \
    reward.reward_model.enable_resource_pool=True \
    reward.reward_model.nnodes=1 \
    reward.reward_model.n_gpus_per_node=2 \
    reward.reward_model.model_path="${JUDGE:-Qwen/Qwen2.5-32B-Instruct}" \
    reward.reward_model.rollout.name=vllm \
    reward.reward_model.rollout.tensor_model_parallel_size=2 \
    reward.reward_model.rollout.gpu_memory_utilization=0.85 \
    reward.reward_model.rollout.max_model_len=8192 \
    reward.reward_model.rollout.enforce_eager=False \
    reward.num_workers=8 \
    reward_model.use_reward_loop=True \
    trainer.v1.trainer_mode=separate_async \
    trainer.v1.separate_async.parameter_sync_step=4 \
    reward_loop.log_dir="$PWD"/outputs/genrm_async_1x8/rewards \
    algorithm.adv_estimator=grpo \
    data.train_files="$PWD"/data/gsm8k/train.parquet \
    data.val_files="$PWD"/data/gsm8k/test.parquet \
    data.train_batch_size=256 \
    data.max_prompt_length=512 \
    data.max_response_length=2048 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="${POLICY:-Qwen/Qwen2.5-7B-Instruct}" \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.nnodes=1 \
    actor_rollout_ref.rollout.n_gpus_per_node=2 \
    actor_rollout_ref.rollout.checkpoint_engine.backend=nccl \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=4 \
    trainer.total_epochs=5 \
    trainer.test_freq=10 \
    trainer.save_freq=50 \
    trainer.logger='[console]' \
    trainer.project_name=reward_loop \
    trainer.experiment_name=genrm_async_1x8 \
    "$@"
