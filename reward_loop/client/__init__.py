"""Clients for model servers, for use in reward functions.

They work with vLLM, SGLang, the embedded server, and OpenAI-compatible services.

    from reward_loop.client import Choice, Judge, Number, chat_complete, classify, score

======================== =====================================================================
`Judge`                  asks a generative model for a verdict, and reads the score from it
`panel`                  asks several judges, or one several times, and combines their verdicts
`spot_check`             checks a random share of a cheap judge's scores by a strong judge, without bias
`chat_complete`          sends a prompt to a generative model
`classify`               returns the logits of a discriminative model
`score`                  returns a reranking model's scores of documents
`without_control_tokens` breaks up control tokens of chat templates in a response
======================== =====================================================================
"""

from __future__ import annotations

from reward_loop.client.chat import Reply, Usage, chat_complete
from reward_loop.client.discriminative import classify, score
from reward_loop.client.fence import without_control_tokens
from reward_loop.client.judge import Judge, Judgement
from reward_loop.client.panel import majority, mean, panel, spot_check
from reward_loop.client.verdicts import Choice, Json, NoVerdictError, Number, Pattern, Ratings, Verdict

__all__ = [
    "Choice",
    "Json",
    "Judge",
    "Judgement",
    "NoVerdictError",
    "Number",
    "Pattern",
    "Ratings",
    "Reply",
    "Usage",
    "Verdict",
    "chat_complete",
    "classify",
    "majority",
    "mean",
    "panel",
    "score",
    "spot_check",
    "without_control_tokens",
]
