"""The reward manager of a reward worker: ours, one that was written for verl, or the one of a discriminative model."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from reward_loop._util.api_keys import api_key_of
from reward_loop.client import classify, without_control_tokens
from reward_loop.errors import ConfigError
from reward_loop.limits import Limits
from reward_loop.managers import NaiveRewardLoopManager, RewardLoopManagerBase, scoring_function
from reward_loop.processes import usable_cores
from reward_loop.router.config import API_KEY_VARIABLE
from reward_loop.scoring import ScoringFunction
from reward_loop.types import RewardSample
from reward_loop.verl.options import RewardSettings
from reward_loop.verl.workers.own_scorers import guard


def build_manager(
    settings: RewardSettings, reward_router_address: str | None, limits: Limits, workers_on_node: int
) -> RewardLoopManagerBase:
    """Return the reward manager of the run, with its tokenizers and the user's function.

    Args:
        settings: the settings of rewards.
        reward_router_address: ``host:port`` of the reward model router, if there is one.
        limits: the limits of the worker.
        workers_on_node: the number of reward workers on this node, which share its cores.

    Raises:
        ConfigError, FunctionLoadError: the manager or the function cannot be loaded, or they do not fit together.
    """
    from verl.utils import hf_tokenizer
    from verl.utils.fs import copy_to_local

    guard()  # also for managers and functions that call verl's scorers themselves

    def tokenizer(path: str) -> Any:
        return hf_tokenizer(copy_to_local(path), trust_remote_code=True)

    policy = settings.config.actor_rollout_ref.model
    model_path = settings.model.model_path if settings.model is not None else None  # external servers may have none
    keywords = {
        "tokenizer": tokenizer(policy.get("tokenizer_path") or policy.path),
        "reward_router_address": reward_router_address,
        "reward_model_tokenizer": tokenizer(model_path) if model_path else None,
    }
    if settings.scores_by_model:
        assert settings.model is not None
        score = scoring_function(
            DiscriminativeRewardLoopManager,
            score_by_model,
            settings.options,
            reward_kwargs={"model": settings.model.served_model_name or model_path, "timeout": settings.model.timeout},
            limits=limits,
        )
        return DiscriminativeRewardLoopManager(settings.config, compute_score=score, **keywords)
    function = None if settings.function is None else settings.function.load()  # may register the manager
    cls = settings.manager.load()
    manager: RewardLoopManagerBase
    if cls is not None and issubclass(cls, RewardLoopManagerBase):
        score = _scoring_function(cls, settings, function, limits, workers_on_node)
        manager = cls(config=settings.config, compute_score=score, **keywords)
    else:
        from verl.trainer.ppo.reward import load_reward_manager

        verls: Any = load_reward_manager(settings.config, keywords.pop("tokenizer"), **keywords)
        ours = isinstance(verls, RewardLoopManagerBase)
        manager = verls if ours else VerlManager(verls, settings.config, limits)
    if settings.function is not None and hasattr(function, "post_process_scores") and not manager.post_processes:
        raise ConfigError(
            f"custom_reward_function {settings.function.path}:{settings.function.name} has post_process_scores, which "
            f"reward manager {settings.manager.name} would not call: use the manager `naive`, or your own subclass of "
            "RewardLoopManagerBase"
        )
    return manager


class VerlManager(RewardLoopManagerBase):
    """Runs a reward manager that was written for verl as the function, which gets the row of a sample.

    Args:
        manager: an object with verl's ``run_single``.
        config: verl's configuration, or the options of the reward loop.
        limits: the limits of the worker.
    """

    def __init__(self, manager: Any, config: Any, limits: Limits) -> None:
        async def run_single(**sample: Any) -> dict[str, Any]:
            returned = await manager.run_single(sample["row"])
            return {**(returned.get("reward_extra_info") or {}), "score": returned["reward_score"]}

        run_single.__qualname__, run_single.__module__ = type(manager).__qualname__, type(manager).__module__
        super().__init__(config, compute_score=run_single, limits=limits)

    async def to_sample(self, data: Any) -> RewardSample:
        """Return the sample without its text: only the manager decodes it.

        Raises:
            ConfigError: ``data`` is a `RewardSample`, of which the manager could not read anything.
        """
        if isinstance(data, RewardSample):
            raise ConfigError(
                f"an agent loop called reward_loop.score, which reward manager {self.name} cannot answer, since it was "
                "written for verl's batches: use a manager of reward_loop"
            )
        return RewardSample("", kwargs={"row": data}, **self.converter.undecoded(data))


def _scoring_function(
    cls: type[RewardLoopManagerBase], settings: RewardSettings, function: Any, limits: Limits, workers_on_node: int
) -> Any:
    options = settings.options
    processes = options.max_processes or max(1, usable_cores() // workers_on_node)
    options = options.model_copy(update={"max_processes": processes})
    if settings.function is not None:
        reward_kwargs = settings.function.kwargs
    elif issubclass(cls.function_type, ScoringFunction):
        from reward_loop.verl.workers.default_scorer import default_compute_score  # imports all of verl's scorers

        function, reward_kwargs = default_compute_score, _sandbox_kwargs(settings, processes)
    else:
        raise ConfigError(
            f"reward_model.reward_manager={settings.manager.name} needs a function of lists: set "
            "custom_reward_function.path"
        )
    return scoring_function(cls, function, options, reward_kwargs=reward_kwargs, limits=limits)


def _sandbox_kwargs(settings: RewardSettings, processes: int) -> dict[str, Any]:
    sandbox = settings.config.reward.sandbox_fusion
    if not sandbox.url:
        return {}
    return {
        "sandbox_fusion_url": sandbox.url,
        # The limit holds for the whole job: each process of each worker has its share, at least 1.
        "sandbox_requests": max(1, sandbox.max_concurrent // settings.num_workers // processes),
        "memory_limit_mb": sandbox.memory_limit_mb,
    }


class DiscriminativeRewardLoopManager(NaiveRewardLoopManager):
    """Scores the conversation of a rollout with the reward model, as verl's own reward loop does.

    The conversation is the row's ``raw_prompt``, followed by the response as the assistant's turn. The response keeps
    its special tokens, except the policy's end-of-sequence token. The reward model's chat template is applied to the
    conversation.
    """

    async def to_sample(self, data: Any) -> RewardSample:
        """Return the sample, with the reward model's input as ``extra_info["reward_model_input"]``."""
        sample = await super().to_sample(data)
        if sample.prompt is None:
            lacks = 'the sample has no prompt (in a row, non_tensor_batch["raw_prompt"]), the conversation to score'
            return replace(sample, error=lacks)
        ids = None
        if not isinstance(data, RewardSample):  # otherwise of an agent loop that calls `reward_loop.score`
            row = data if data.batch["responses"].ndim == 1 else data[-1]
            ids = row.batch["responses"][: sample.response_length]
        try:
            text = await asyncio.to_thread(self._input, sample, ids)
        except Exception as error:  # a chat template is code from the model's author
            return replace(sample, error=f"the reward model's chat template failed: {type(error).__name__}: {error}")
        return replace(sample, extra_info={**sample.extra_info, "reward_model_input": text})

    def _input(self, sample: RewardSample, ids: Any) -> str:
        prompt, response = sample.prompt, sample.solution_str
        if ids is not None:
            response = self.tokenizer.decode(ids).replace(self.tokenizer.eos_token or "", "")
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        # What the policy wrote must not end its turn, and begin another one.
        turns.append({"role": "assistant", "content": without_control_tokens(response)})
        text: str = self.reward_model_tokenizer.apply_chat_template(turns, add_generation_prompt=False, tokenize=False)
        # The server's tokenizer adds the token again.
        return text.removeprefix(self.reward_model_tokenizer.bos_token or "")


async def score_by_model(
    extra_info: dict[str, Any], reward_router_address: str, model: str | None = None, timeout: float | None = None
) -> dict[str, float]:
    """Return the logit of ``extra_info["reward_model_input"]``; if there are several, the last one, as in verl."""
    logits = await classify(
        reward_router_address,
        extra_info["reward_model_input"],
        templated=True,
        model=model,
        timeout=timeout,
        api_key_env=API_KEY_VARIABLE if api_key_of(API_KEY_VARIABLE) else None,
    )
    return {"score": logits[-1] if isinstance(logits, list) else logits}
