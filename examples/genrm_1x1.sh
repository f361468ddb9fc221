#!/usr/bin/env bash
# GRPO on GSM8K with a generative judge on the GPU of the trainer: one GPU with 80 GB. The judge is awake only while the
# rollout sleeps, so judging overlaps with nothing. Needs no flash-attn.
#
#   pip install '.[verl]' 'verl[vllm]==0.9.1'
#   python examples/gsm8k/prepare.py
#   bash examples/genrm_1x1.sh [more options of verl]
#
# On one H100, these options of devices and engines were run with small random models: `python -m benchmarks.gpu --only
# colocated` does the same in minutes. With the models below, the script was never run.
set -euo pipefail
cd "$(dirname "$0")/.."

python3 -m verl.trainer.main_ppo \
    reward.custom_reward_function.path="$PWD"/examples/gsm8k/judge.py \
    reward.reward_model.enable=True \
    reward.reward_model.enable_resource_pool=False \
    reward.reward_model.model_path="${JUDGE:-Qwen/Qwen2.5-7B-Instruct}" \
    reward.reward_model.rollout.name=vllm \
    reward.reward_model.rollout.tensor_model_parallel_size=1 \
    reward.reward_model.rollout.gpu_memory_utilization=0.35 \
    reward.reward_model.rollout.max_model_len=4096 \
    reward.reward_model.rollout.max_num_seqs=256 \
    reward.reward_model.rollout.dtype=bfloat16 \
    reward.num_workers=2 \
    reward_model.use_reward_loop=True \
    trainer.v1.trainer_mode=sync \
    reward_loop.log_dir="$PWD"/outputs/genrm_1x1/rewards \
    algorithm.adv_estimator=grpo \
    data.train_files="$PWD"/data/gsm8k/train.parquet \
    data.val_files="$PWD"/data/gsm8k/test.parquet \
    data.train_batch_size=64 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="${POLICY:-Qwen/Qwen2.5-1.5B-Instruct}" \
    actor_rollout_ref.model.use_remove_padding=False \
    ++actor_rollout_ref.model.override_config.attn_implementation=sdpa \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.fsdp_config.strategy=fsdp2 \
    actor_rollout_ref.ref.strategy=fsdp2 \
    actor_rollout_ref.ref.fsdp_config.strategy=fsdp2 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    actor_rollout_ref.rollout.enforce_eager=True \
    actor_rollout_ref.rollout.free_cache_engine=True \
    actor_rollout_ref.rollout.agent.num_workers=2 \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=1 \
    trainer.total_epochs=1 \
    trainer.test_freq=10 \
    trainer.save_freq=50 \
    trainer.logger='[console]' \
    trainer.project_name=reward_loop \
    trainer.experiment_name=genrm_1x1 \
    "$@"
