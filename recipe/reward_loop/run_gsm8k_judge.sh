#!/usr/bin/env bash
# GRPO on GSM8K, judged by a service while generation and training continue. Prepare the data with verl's
# examples/data_preprocess/gsm8k.py, and set OPENAI_API_KEY. Never run on GPUs.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

python3 -m verl.trainer.main_ppo \
    trainer.v1.trainer_mode=reward_pipeline \
    reward.custom_reward_function.path="$here/reward.py" \
    reward.num_workers=8 \
    +reward_loop.limits.judge.max_concurrent=64 \
    +reward_loop.limits.judge.requests_per_minute=3000 \
    reward_loop.budget.max_tokens=20000000 \
    algorithm.adv_estimator=grpo \
    data.train_files="$HOME/data/gsm8k/train.parquet" \
    data.val_files="$HOME/data/gsm8k/test.parquet" \
    data.train_batch_size=256 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path="${POLICY:-Qwen/Qwen2.5-3B-Instruct}" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    trainer.n_gpus_per_node=8 \
    trainer.project_name=reward_loop \
    trainer.experiment_name=gsm8k_judge \
    "$@"
