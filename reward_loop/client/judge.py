"""A judge: a prompt, a model, and a way to read the verdict."""

from __future__ import annotations

import string
import time
from dataclasses import dataclass
from typing import Any

from reward_loop._util.text import listing
from reward_loop.client.bounds import MAX_REPLY_BYTES
from reward_loop.client.chat import Reply, chat_complete
from reward_loop.client.verdicts import NoVerdictError, Verdict
from reward_loop.errors import ConfigError, RequestError
from reward_loop.records import current

__all__ = ["Judge", "Judgement"]


class _Template(string.Template):
    # Not `$name` and not `{name}`: prompts are full of TeX and JSON.
    pattern = r"\{\{\s*(?P<named>[a-z_]\w*)\s*\}\}|(?P<escaped>(?!))|(?P<braced>(?!))|(?P<invalid>(?!))"  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a judge made of a response."""

    score: float | None
    """The score of the verdict; ``None`` where there is none."""
    verdict: Any
    """A number, a word, or the containers of a JSON object."""
    prompt: str
    reply: Reply
    unscored: str | None = None
    """Why there is no score."""

    def reward(self, **components: Any) -> dict[str, Any]:
        """What a reward function returns, with further components for the logs; *unscored* where there is no score."""
        explanation = self.reply.text if self.unscored is None else f"unscored: {self.unscored}\n{self.reply.text}"
        return {
            "score": self.score,
            "verdict": self.verdict,
            "prompt": self.prompt,
            "explanation": explanation,
            **components,
        }


class Judge:
    """Asks a generative model for a verdict.

        judge = Judge("Rate the answer to {{question}} from 1 to 10: {{answer}}\\nEnd with `Score: N`.", Number(1, 10))

        async def compute_score(solution_str, extra_info, reward_router_address):
            judgement = await judge(reward_router_address, question=extra_info["question"], answer=solution_str)
            return judgement.reward()

    What is asked and replied is also kept in the sample's record (``reward_loop.log_dir``).
    """

    def __init__(
        self,
        template: str,
        verdict: Verdict,
        *,
        system: str | None = None,
        model: str | None = None,
        timeout: float | None = 300.0,
        api_key_env: str | None = None,
        max_reply_bytes: int = MAX_REPLY_BYTES,
        **request: Any,
    ) -> None:
        """Say what to ask, and how.

        Args:
            template: the prompt; ``{{name}}`` stands for a field. The text of a field is not looked through for more.
            verdict: `Number`, `Choice`, `Json`, or something of your own that has `read`.
            system: a system message.
            model: which model, where there are several.
            timeout: seconds until a reply must be there; ``None`` for no limit but the reward's own deadline.
            api_key_env: the name of an environment variable that holds the service's API key.
            max_reply_bytes: the longest answer of the server, in bytes after decompression; a longer one is an error.
            request: other fields of the request; ``temperature`` is 0 unless it is given.
        """
        self._template = _Template(template)
        self._fields = set(self._template.get_identifiers())
        self._verdict = verdict
        self._system = system
        self._request: dict[str, Any] = {
            "model": model,
            "timeout": timeout,
            "api_key_env": api_key_env,
            "max_reply_bytes": max_reply_bytes,
            "temperature": 0.0,
            **verdict.request,
            **request,
        }

    def render(self, **fields: Any) -> str:
        """Put the fields into the template.

        Raises:
            ConfigError: a field is missing, or the template has no such field.
        """
        if wrong := self._fields ^ fields.keys():
            raise ConfigError(
                f"the judge's template has the fields {listing(self._fields)}, and was given {listing(fields)}: "
                f"see to {listing(wrong)}"
            )
        return self._template.substitute(fields)

    async def __call__(self, address: str | None, **fields: Any) -> Judgement:
        """Ask about one response.

        Raises:
            RequestError: there is no usable answer; it has ``status``, ``retry_after`` and ``transient``.
            ConfigError: the fields are not those of the template, or there is no address or no key.
        """
        prompt = self.render(**fields)
        messages = [{"role": "user", "content": prompt}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system})
        transcript: dict[str, Any] = {"messages": messages}
        if (call := current()) is not None:
            call.transcripts = [*call.transcripts, transcript]
        started = time.perf_counter()
        try:
            reply = await chat_complete(address, messages, **self._request)
        except RequestError as error:
            transcript["error"] = str(error)
            raise
        finally:
            transcript["seconds"] = time.perf_counter() - started
        judgement = self._judge(prompt, reply)
        transcript |= {
            "model": reply.model,
            "reply": reply.text,
            "finish_reason": reply.finish_reason,
            "verdict": judgement.verdict,
            "score": judgement.score,
            "unscored": judgement.unscored,
        }
        return judgement

    def _judge(self, prompt: str, reply: Reply) -> Judgement:
        if reply.cut_off:
            reason = f"the reply was cut off (finish_reason {reply.finish_reason!r}); max_tokens may be too low"
            return Judgement(None, None, prompt, reply, reason)
        try:
            verdict, score = self._verdict.read(reply.text)
        except NoVerdictError as error:
            return Judgement(None, None, prompt, reply, str(error))
        return Judgement(score, verdict, prompt, reply)
