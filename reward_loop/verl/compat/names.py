"""The names of verl and TransferQueue that the reward loop uses. verl documents few of them.

The keys of the tables are ``module``, ``module:Class`` or ``module:Class.attribute``. Their values say what is used,
and why:

- a function with the parameters that the reward loop passes or declares, such as ``step(metrics, timing_raw)``. ``**``
  at the end stands for further parameters, which an override accepts and passes on;
- an attribute, such as ``poll_interval``.

A reason that starts with ``overridden`` marks a method that the reward loop overrides. verl calls it, so it must list
all its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["COMMAND", "CPU", "TRAINING", "Names"]

Names = Mapping[str, Mapping[str, str]]

COMMAND: Names = {
    "verl.trainer.main_ppo": {
        "run_ppo(config, task_runner_class)": "starts Ray and our task runner",
        "TaskRunnerV1": "base class of our task runner",
    },
    "verl.trainer.main_ppo:TaskRunnerV1": {
        "run(config)": "overridden: runs within the services of rewards",
    },
    "verl.trainer.ppo.utils": {
        "need_critic(config)": "argument of `validate_config`",
        "need_reference_policy(config)": "argument of `validate_config`",
    },
    "verl.utils.config": {
        "validate_config(config, use_reference_policy, use_critic)": "verl's own check of the configuration",
    },
    "verl.utils.device": {"auto_set_device(config)": "called as verl's command does"},
}
"""Used by the command (`main_ppo`), before Ray starts."""

TRAINING: Names = {
    # task_runner
    "verl.trainer.ppo.v1": {"get_trainer_cls(name)": "the trainer of a mode, which `with_reward_loop` extends"},
    "transfer_queue": {
        "kv_list(partition_id)": "the tags of prompts and trajectories",
        "kv_batch_get(keys, partition_id, select_fields)": "reads rewards and masks",
        "kv_batch_put(keys, partition_id, fields, tags)": "writes rewards, masks and tags; returns the field names",
        "kv_clear(keys, partition_id)": "deletes trained and stale rows",
        "async_kv_put(key, partition_id, tag)": "writes the tags `generated` and `error`",
        "async_kv_batch_put(keys, partition_id, fields, tags)": "writes the rewards of a session",
        "KVBatchMeta": "the rows of a batch",
    },
    "transfer_queue:KVBatchMeta": {
        "keys": "the row's keys, `{uid}_{session}_{index}`",
        "tags": "`is_prompt`, `is_padding`, `status`, `min_global_steps`",
        "partition_id": "`train` or `val`",
        "extra_info": "copied, because verl changes it",
        "fields": "field names after a write",
    },
    # trainer: overridden by `RewardLoopTrainer`
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer": {
        "__init__(config)": "receives a configuration without verl's own rewards",
        "_build_replay_buffer()": "overridden: returns a `RewardReplayBuffer`",
        "_setup()": "overridden: starts the reward workers",
        "_fetch_one_gen_batch()": "overridden: adds the column `group_size`",
        "fit(agent_loop_manager)": "overridden: stops the agent loop workers at the end",
        "step(metrics, timing_raw)": "overridden: metrics of rewards; raises the workers' fatal errors",
        "_step_once(metrics, timing_raw, sample_batch_size)": "overridden: skips an update without any score",
        "_validate()": "overridden: raises the workers' fatal errors",
        "_val_metrics_update(data_sources, sample_uids, reward_extra_infos_dict, sample_turns, expected_acc_counts)": (
            "overridden: means without masked samples"
        ),
        "_dump_generations(inputs, outputs, gts, scores, reward_extra_infos_dict, dump_path)": (
            "overridden: no score for masked samples"
        ),
        "_compute_metrics(batch, metrics, timing_raw, global_steps, epoch)": "overridden: adds metrics",
        "_compute_reward_colocate(batch, metrics)": "overridden: scores the batch after the rollout",
        "_compute_advantage(batch, metrics)": "overridden: excludes padding",
        "on_sample_begin()": "called by the mode reward_pipeline",
        "on_sample_end()": "overridden: raises the workers' fatal errors",
        "on_init_end()": "overridden: checks the queue of the mode separate_async",
        "on_step_end()": "overridden: sends the step to the workers of the mode separate_async",
        "get_reward_handles()": "the reward client, in the mode separate_async",
        "config": "verl's configuration",
        "agent_loop_manager": "its workers, in the mode separate_async",
        "replay_buffer": "gets our checks",
        "resource_pool_manager": "the GPUs for a colocated reward model",
        "val_dataloader": "gets the column `group_size`",
        "timing_raw": "the time of the advantage without waiting for rewards",
        "global_steps": "for messages and staleness",
        "logger": "the loggers that are running",
        "tokenizer": "decodes the samples that are logged",
        "local_trigger_step": "the update within a step",
        "parameter_sync_step": "updates in a step",
        # pipeline
        "trainer_mode": "verl's checkpoints and data loader depend on this name",
        "_init_dataloader()": "overridden: sets `trainer_mode`",
        "_load_checkpoint()": "overridden: restores the submitted prompts",
        "_next_train_batch(num_prompts)": "the prompts to submit",
        "_submit_batch_to_rollout(batch)": "submits prompts",
        "_balance_batch(batch, metrics, **)": "overridden: rows without a reward leave the batch",
        "_get_required_batch_multiple(dp_size)": "the rows of a mini-batch",
        "_compute_old_log_prob(batch, metrics)": "called before the first update",
        "_compute_ref_log_prob(batch, metrics)": "called before the first update",
        "_compute_values(batch, metrics)": "called before the first update",
        "_update_critic(batch, metrics)": "called for full mini-batches",
        "_update_actor(batch, metrics)": "called for full mini-batches",
        "use_critic": "whether there is a critic",
        "use_reference_policy": "whether there is a reference policy",
        "use_teacher_policy": "whether there is a teacher",
        "total_training_steps": "the last step",
        "steps_per_epoch": "the last step",
        "actor_rollout_wg": "its `update_actor` gets the number of rows with an advantage",
        "critic_wg": "its `train_mini_batch` gets the number of rows with an advantage",
    },
    "verl.trainer.ppo.v1.trainer_base": {
        "RewardLoopManager(config, rm_resource_pool)": "replaced while the trainer is set up: starts the reward model",
        "register_trainer(name)": "registers the mode reward_pipeline",
        "TRAINER_REGISTRY": "receives the trainer of the run's mode with our overrides: there is no function for that",
    },
    "verl.trainer.ppo.v1.trainer_sync": {"PPOTrainerSync": "base class of the mode reward_pipeline"},
    "verl.trainer.ppo.v1.trainer_separate_async": {
        "PPOTrainerSeparateAsync": "base class of the mode separate_async with a queue",
    },
    "verl.utils.tracking:Tracking": {"logger": "the names of the loggers that are running"},
    "verl.single_controller.ray:RayWorkerGroup": {"_dispatch_info": "the number of data-parallel ranks"},
    "verl.single_controller.ray:ResourcePoolManager": {
        "max_colocate_count": "the CPUs that verl reserves for each GPU",
        "get_resource_pool(role)": "the GPUs for a colocated reward model",
    },
    "verl.single_controller.ray:RayResourcePool": {
        "get_placement_groups(device_name)": "the GPUs for a colocated reward model",
    },
    "verl.plugin.platform": {"get_platform()": "the name of the accelerator for Ray, the servers' variables"},
    "verl.trainer.ppo.utils:Role": {"RewardModel": "role of a worker"},
    "verl.trainer.ppo.v1.utils:MetricsAggregator": {
        "add_step_metrics(metrics, sample_count)": "merges the metrics of updates as verl does",
        "get_aggregated_metrics()": "merges the metrics of updates as verl does",
    },
    "verl.utils.debug": {"marked_timer(name, timing_raw, color)": "verl's timings"},
    "verl.trainer.ppo.core_algos": {
        "register_adv_est(name_or_enum)": "registers the estimator reward_loop_gdpo",
        "compute_gdpo_outcome_advantage(token_level_rewards, response_mask, index, config, non_tensor_batch, batch)": (
            "computes the estimator reward_loop_gdpo"
        ),
    },
    # replay_buffer: overridden by `RewardReplayBuffer`
    "verl.trainer.ppo.v1.replay_buffer": {
        "_accumulate_eviction_metrics(acc, new, stale_count)": "metrics of evicted groups, in the mode reward_pipeline",
    },
    "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer": {
        "_wait_for_next_poll(partition_id, last_debug_time)": "overridden: checks, time limit, polling interval",
        "_dapo_filtered_keys(partition_id)": "overridden: masked samples do not count",
        "_evict_terminal_groups(global_steps, partition_id, eviction_reasons)": "overridden: checks failed groups",
        "_terminal_eviction_reasons(global_steps, partition_id)": "called by the mode reward_pipeline",
        "_sync_metadata_from_transfer_queue()": "called by the mode reward_pipeline",
        "_dapo_classification_cache": "receives our decision for each group",
        "poll_interval": "changed during a wait",
        "partitions": "the keys of trajectories",
        "pending_keys": "prompts that a wait is for",
        "running_keys": "prompts that a wait is for",
        "finished_keys": "groups that may be filtered",
        "filter_groups_metric": "the metric of algorithm.filter_groups",
        "sync_refill_failed_groups": "whether failed groups are replaced",
    },
    # agent_loop, separate_async: overridden in our agent loop workers
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ": {
        "_run_prompt(prompt, sampling_params, trajectory, trace)": "overridden: the sessions of a prompt",
        "_run_agent_loop(sampling_params, trajectory, **)": "overridden: the end or failure of a session",
        "_agent_loop_postprocess(output, validate)": "overridden: publishes the trajectory before its reward",
        "_compute_score(outputs, kwargs, **)": "overridden: the start of judging",
        "config": "verl's configuration",
        "generate_sequences(batch)": "called with the prompts of a worker",
        "reward_loop_worker_handles": "holds the reward client",
    },
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopManagerTQ": {
        "agent_loop_workers_class": "set to our worker class",
        "agent_loop_workers": "the workers to listen to, to replace, and to stop at the end",
        "_init_agent_loop_workers()": "overridden: waits for the death of each worker",
        "generate_sequences(prompts)": "overridden: records which worker has which prompts, and survives a dead worker",
        "config": "argument of a replaced worker",
        "llm_client": "argument of a replaced worker",
        "teacher_client": "argument of a replaced worker",
        "reward_loop_worker_handles": "argument of a replaced worker",
    },
    "verl.experimental.agent_loop.agent_loop:AgentLoopOutput": {
        "as_dict()": "the fields of a trajectory with its reward",
        "reward_score": "set when the reward arrives",
        "extra_fields": "holds `reward_extra_info` and the versions of the weights",
    },
    "verl.utils.tensordict_utils": {
        "list_of_dict_to_tensordict(list_of_dicts)": "rows for TransferQueue",
        "assign_non_tensor(tensor_dict)": "arguments of a training worker",
        "assign_non_tensor_stack(tensor_dict, key, val)": "the column `group_size`",
    },
    # workers: managers and functions of verl
    "verl.trainer.ppo.reward": {"load_reward_manager(config, tokenizer)": "builds a manager that was written for verl"},
    "verl.experimental.reward_loop.reward_manager.registry": {"REWARD_MANAGER": "the names of verl's managers"},
    "verl.utils.reward_score": {
        "default_compute_score(data_source, solution_str, ground_truth)": "the function if the user has set none",
    },
    "verl.utils": {"hf_tokenizer(name_or_path)": "loads tokenizers as verl does"},
    "verl.utils.fs": {"copy_to_local(src)": "a model's local directory"},
    "verl.protocol:DataProto": {
        "batch": "the tensors that a reward worker receives",
        "non_tensor_batch": "the columns that a reward worker receives",
    },
}
"""Used by the task runner, the trainer, agent loop workers, training workers and reward workers."""

CPU: Names = {
    "verl.plugin.platform.platform_manager:PlatformRegistry": {"register(platform)": "registers the platform `cpu`"},
    "verl.plugin.platform.platform_base": {"PlatformBase": "base class of the platform `cpu`"},
    "verl.workers.rollout.base": {
        "BaseRollout": "base class of the adapter that sends weights",
        "_ROLLOUT_REGISTRY": "receives the rollout `transformers`: there is no function for that",
    },
    "verl.workers.rollout.replica": {
        "RolloutReplica": "base class of the CPU rollout",
        "TokenOutput": "the answer of a rollout server",
    },
    "verl.workers.rollout.replica:RolloutReplica": {
        "_server_address": "set by `launch_servers`",
        "_server_handle": "set by `launch_servers`",
        "servers": "set by `launch_servers`",
        "workers": "the first one's node gets the server",
    },
    "verl.workers.rollout.replica:RolloutReplicaRegistry": {
        "register(name, loader)": "registers the rollout `transformers`",
    },
    "verl.workers.rollout.utils": {"ensure_async_iterator(iterable)": "iterates over weights"},
    "verl.workers.engine.base:EngineRegistry": {
        "register(model_type, backend, device)": "registers the FSDP engines for the device `cpu`",
    },
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead": {
        "_build_fsdp_module(module)": "overridden: no offloading, which needs pinned memory",
    },
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithValueHead": {
        "_build_fsdp_module(module)": "overridden: no offloading, which needs pinned memory",
    },
    "verl.utils.model": {
        "load_valuehead_model(local_path, torch_dtype, model_config, trust_remote_code)": (
            "replaced: verl's requests FlashAttention, which needs a GPU"
        ),
    },
    "verl.checkpoint_engine.base:CheckpointEngineRegistry": {"register(backend)": "registers the backend `ray`"},
}
"""Used in addition by a run on a CPU (`reward_loop.verl.cpu`)."""
