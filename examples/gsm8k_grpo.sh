#!/usr/bin/env bash
# GRPO on GSM8K with a reward function, on one node with 8 GPUs.
#
#   pip install '.[verl]' 'verl[vllm]==0.9.1' # and flash-attn, see docs/verl.md
#   python examples/gsm8k/prepare.py
#   bash examples/gsm8k_grpo.sh [more options of verl]
#
# Tests check the configuration; the run itself has never been tried on GPUs.
set -euo pipefail
cd "$(dirname "$0")/.."

python3 -m verl.trainer.main_ppo \
    reward.custom_reward_function.path="$PWD"/examples/gsm8k/reward.py \
    trainer.v1.trainer_mode=reward_pipeline \
    reward_loop.log_dir="$PWD"/outputs/gsm8k_grpo/rewards \
    algorithm.adv_estimator=grpo \
    data.train_files="$PWD"/data/gsm8k/train.parquet \
    data.val_files="$PWD"/data/gsm8k/test.parquet \
    data.train_batch_size=512 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="${POLICY:-Qwen/Qwen2.5-7B-Instruct}" \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=8 \
    trainer.total_epochs=5 \
    trainer.test_freq=10 \
    trainer.save_freq=50 \
    trainer.logger='[console]' \
    trainer.project_name=reward_loop \
    trainer.experiment_name=gsm8k_grpo \
    "$@"
