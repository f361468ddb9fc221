"""The game as an agent runner of verl's uni-agent, whose agent loop manager writes its rows itself.

The player is the policy behind the gateway's ``/chat/completions``. The secret is in the row's
``extra_info.tools_kwargs``. Options, in addition to those of a run and of ``custom_reward_function``:

    ++actor_rollout_ref.rollout.agent.agent_loop_manager_class=uni_agent.framework.entry.AgentFrameworkRolloutAdapter
    ++actor_rollout_ref.rollout.custom.agent_framework.gateway_count=1
    ++actor_rollout_ref.rollout.custom.agent_framework.agent_runners.game.runner_fqn=examples.guessing.uni_agent_runner.run
"""

from __future__ import annotations

from typing import Any

import aiohttp

import reward_loop
from examples.guessing.game import Game


async def run(*, raw_prompt: Any, session: Any, tools_kwargs: dict[str, Any], **_: Any) -> None:
    """Play one game, and post its reward to the session. A failed reward is masked in the trainer."""
    game, messages = Game(int(tools_kwargs["secret"])), [dict(message) for message in raw_prompt]
    async with aiohttp.ClientSession(raise_for_status=True) as http:
        while not game.is_over:
            body = {"model": "policy", "messages": messages, "max_tokens": 16}
            async with http.post(f"{session.base_url}/chat/completions", json=body) as response:
                text = (await response.json())["choices"][0]["message"]["content"] or ""
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": game.answer(text)}]
        async with reward_loop.scorer("examples/guessing/reward.py:compute_score"):
            reward = await reward_loop.score(game.transcript, ground_truth=game.secret, extra_info=game.evidence())
        # uni-agent takes `reward` as the score, and all other keys as the extra info of the row.
        posted = {"reward": reward["reward_score"], **reward["reward_extra_info"]}
        async with http.post(session.reward_info_url, json={"reward_info": posted}):
            pass
