"""The game as an agent loop of verl, which asks for its reward itself.

    python -m verl.trainer.main_ppo \\
        trainer.v1.trainer_mode=reward_pipeline \\
        actor_rollout_ref.rollout.agent.agent_loop_config_path=examples/guessing/agent_loop.yaml \\
        actor_rollout_ref.rollout.agent.default_agent_loop=guessing \\
        reward.custom_reward_function.path=examples/guessing/reward.py \\
        ...
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

import reward_loop
from examples.guessing.game import Game


class GuessingAgentLoop(AgentLoopBase):
    """Plays one game. Each guess is a turn of the policy; the answers of the game are masked."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        secret = kwargs["reward_model"]["ground_truth"]
        game, messages = Game(int(secret)), list(kwargs["raw_prompt"])
        tokens = await self.ct_build_initial_tokens(messages)
        prompt_length, room = len(tokens), self.rollout_config.response_length
        mask: list[int] = []
        logprobs: list[float] | None = None
        versions: dict[str, Any] = {}
        request_id = uuid4().hex
        while len(mask) < room and not game.is_over:
            output = await self.server_manager.generate(
                request_id=request_id, prompt_ids=tokens, sampling_params=sampling_params
            )
            # The weights may change between two turns: the oldest and the newest version count.
            versions = {**output.extra_fields, **{k: v for k, v in versions.items() if k == "min_global_steps"}}
            merged, mask, logprobs = await self.ct_merge_assistant_token(
                tokens, output.token_ids, mask, logprobs or ([] if output.log_probs else None), output.log_probs
            )
            tokens = merged.token_ids
            text = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
            told = game.answer(text)
            if game.is_over or len(mask) >= room:
                break
            before = [*messages, {"role": "assistant", "content": text}]
            messages = [*before, {"role": "user", "content": told}]
            merged, mask, logprobs = await self.ct_merge_context_msg(before, messages, tokens, mask, logprobs)
            tokens = merged.token_ids
        reward = await reward_loop.score(
            game.transcript, ground_truth=secret, extra_info={**kwargs["extra_info"], **game.evidence()}
        )
        return AgentLoopOutput(
            prompt_ids=tokens[:prompt_length],
            response_ids=tokens[prompt_length:][:room],
            response_mask=mask[:room],
            response_logprobs=logprobs[:room] if logprobs else None,
            num_turns=2 * len(game.guesses),
            metrics={},
            reward_score=reward["reward_score"],
            extra_fields={**versions, "reward_extra_info": reward["reward_extra_info"]},
        )
