"""Ask model servers from within reward functions: vLLM, SGLang, the embedded server, any OpenAI-compatible service."""

from __future__ import annotations

from reward_loop.client.chat import Reply, Usage, chat_complete
from reward_loop.client.discriminative import classify, score
from reward_loop.client.judge import Judge, Judgement
from reward_loop.client.verdicts import Choice, Json, NoVerdictError, Number, Verdict

__all__ = [
    "Choice",
    "Json",
    "Judge",
    "Judgement",
    "NoVerdictError",
    "Number",
    "Reply",
    "Usage",
    "Verdict",
    "chat_complete",
    "classify",
    "score",
]
