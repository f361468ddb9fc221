"""NeMo-Gym: a resources server that verifies with `reward-loop serve`."""

import math
import os

import httpx
from nemo_gym import base_resources_server as gym
from pydantic import ConfigDict

CLIENT = httpx.AsyncClient(timeout=httpx.Timeout(3600, pool=None), limits=httpx.Limits(max_connections=256))
URL = os.environ.get("REWARD_URL", "http://127.0.0.1:8090/score")


class VerifyRequest(gym.BaseVerifyRequest):
    model_config = ConfigDict(extra="allow")  # the fields of the task


class VerifyResponse(gym.BaseVerifyResponse):
    model_config = ConfigDict(extra="allow")


class RewardLoopServer(gym.SimpleResourcesServer):
    """Scores what the model wrote; a sample without a score is masked."""

    config: gym.BaseResourcesServerConfig

    async def verify(self, body: VerifyRequest) -> VerifyResponse:
        """Return the request with its reward."""
        task = body.model_dump(mode="json")
        contents = [item["content"] for item in task["response"]["output"] if item.get("role") == "assistant"]
        texts = [[one] if isinstance(one, str) else [part.get("text", "") for part in one] for one in contents]
        extra_info = {name: value for name, value in task.items() if name not in gym.BaseVerifyRequest.model_fields}
        sample = {
            "solution_str": "".join(text for parts in texts for text in parts),
            "ground_truth": extra_info.get("ground_truth", extra_info.get("expected_answer")),
            "extra_info": extra_info,
            "prompt": task["responses_create_params"]["input"],
        }
        reply = await CLIENT.post(URL, json=sample)
        if reply.is_error:
            raise RuntimeError(f"{URL}: {reply.text}")
        result = reply.json()
        reward, components = result["score"] or 0.0, result["components"]
        # NeMo-RL takes them for the parts of the reward, and raises if they do not sum to it.
        has_parts = components and math.isclose(sum(components.values()), reward, rel_tol=1e-6, abs_tol=1e-6)
        return VerifyResponse(
            **task,
            reward=reward,
            mask_sample=result["score"] is None,
            failure_kind={"failed": "verifier_error", "unscored": "reward_loop:unscored"}.get(result["outcome"]),
            failure_reason=result["error"],
            **({"reward_components": components} if has_parts else {}),
        )


if __name__ == "__main__":
    RewardLoopServer.run_webserver()
