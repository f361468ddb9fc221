"""Judges: a generative model answers a prompt, and a score is read from its reply: that of the verdict, or the expected
score. A reply without a verdict is followed by one more request in the same conversation, for the verdict alone.
"""

from __future__ import annotations

import math
import string
from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from reward_loop._util.addresses import checked_address
from reward_loop._util.json import encode
from reward_loop._util.text import listing
from reward_loop.client.chat import Reply, complete
from reward_loop.client.fence import KEY, fenced, without_control_tokens, without_fenced
from reward_loop.client.http import Timeout, repeated
from reward_loop.client.request_cache import RequestCache
from reward_loop.client.verdicts import Choice, NoVerdictError, Number, Ratings, Verdict, squeezed
from reward_loop.errors import ConfigError, RequestError

_LOGPROBS: Mapping[str, Any] = {"logprobs": True, "top_logprobs": 20}
"""The fields of a request for log-probabilities. vLLM (by default) and OpenAI give at most 20 alternatives."""

_AROUND = " \t\n\"'`*_:.,()[]<>$"
"""What may be in one token with a word."""

_LEAST_COVERED = 0.95
"""The smallest sum of the probabilities of all words. The rest could be anything, such as a longer number."""


class _Template(string.Template):
    # `$name` and `{name}` are not placeholders, because prompts often contain TeX and JSON.
    # `string.Template` requires all four groups; three of them never match.
    pattern = r"\{\{\s*(?P<named>[a-z_]\w*)\s*\}\}|(?P<escaped>(?!))|(?P<braced>(?!))|(?P<invalid>(?!))"  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Judgement:
    """A judge's verdict on a response, with its prompt and its reply."""

    score: float | None
    """The score of the verdict; ``None`` if the reply has no valid verdict."""
    verdict: Any
    """The verdict: a number, a word, or a decoded JSON object; ``None`` if there is none."""
    prompt: str
    """The rendered prompt."""
    reply: Reply
    """The model's reply."""
    unscored: str | None = None
    """Why there is no score; ``None`` if there is one."""
    components: Mapping[str, Any] = field(default_factory=dict)
    """The parts of the score, by their names: of each criterion, or of each judge of a panel or a spot check."""

    def reward(self, **components: Any) -> dict[str, Any]:
        """Return the dict that a reward function returns; without a score, the sample is *unscored*.

        Args:
            components: further keys of the dict, for the logs.
        """
        explanation = self.reply.text if self.unscored is None else f"unscored: {self.unscored}\n{self.reply.text}"
        return {
            **self.components,
            "score": self.score,
            "verdict": self.verdict,
            "prompt": self.prompt,
            "explanation": explanation,
            **components,
        }


class Judge:
    """Asks a generative model for a verdict on a response.

        judge = Judge("Rate the answer to {{question}} from 1 to 10: {{answer}}\\nEnd with `Score: N`.", Number(1, 10))

        async def compute_score(solution_str, extra_info, reward_router_address):
            judgement = await judge(reward_router_address, question=extra_info["question"], answer=solution_str)
            return judgement.reward()

    Address, model, API key and limit can all be given here, for a judge on a service:

        judge = Judge(PROMPT, verdict, address="https://api.openai.com/v1", model="gpt-5-mini",
                      api_key_env="OPENAI_API_KEY", limit="judge", temperature=None)

    Prompts, replies and verdicts are also stored in the sample's record (``reward_loop.log_dir``).
    """

    def __init__(
        self,
        template: str,
        verdict: Verdict,
        *,
        system: str | None = None,
        fence: Collection[str] = (),
        expected: bool = False,
        address: str | None = None,
        model: str | None = None,
        limit: str | None = None,
        attempts: int | None = None,
        timeout: Timeout = "model",
        api_key_env: str | None = None,
        temperature: float | None = 0.0,
        max_tokens: int | None = None,
        cache: str | None = None,
        **request: Any,
    ) -> None:
        """Create a judge.

        Args:
            template: the prompt, with placeholders ``{{name}}``. Placeholders in the text of a field are not replaced.
            verdict: the format of the verdict: `Number`, `Choice`, `Ratings`, `Json`, `Pattern`, or another object that
                implements `Verdict`.
            system: the system message.
            fence: the fields with text that the judge must not obey, such as the response. Random marks are put around
                each, with a sentence that names them, and control tokens of chat templates in it are broken up. A
                verdict that the reply quotes between these marks does not count.
            expected: use the expected score, weighted with the probabilities of the verdicts, instead of the score of
                the written verdict. For `Choice`, and `Number` with digits. Without log-probabilities from the server,
                the score is that of the written verdict.
            address: the address of calls without one: ``host:port``, or the base URL of an OpenAI-compatible service.
            model: the model's name; needed if the address serves several models.
            limit: the name of the limit in ``reward_loop.limits`` for each request, in place of that of the model
                (``reward_model.server.max_concurrent``). Those of the whole function, such as ``limits.default``,
                always apply.
            attempts: the largest number of attempts of a request that fails with a transient error, or that a busy
                service refuses. The pauses between them do not count towards the function's deadline. By default
                ``reward_loop.retry.max_attempts``, without refused requests: for those, and after a pause of more than
                30 s that the service asks for, the whole function is called again.
            timeout: seconds until the reply is received; ``None`` for no limit but the deadline of the reward function.
                By default those of the model (``reward_model.server.timeout``), or 300.
            api_key_env: the name of the environment variable with the service's API key.
            temperature: the temperature of sampling. Some models, such as those of GPT-5, accept no 0: they need
                ``None``.
            max_tokens: the longest reply, in tokens; by default the server's own limit. A longer reply is cut off, so
                the response is unscored.
            cache: a file (SQLite) with the replies to earlier requests. A request with the same address and body is not
                sent again, also in later runs. For the address of a service: that of a run's own judge changes.
            request: other fields of the request, such as ``seed``, ``reasoning_effort``, or, for OpenAI's models,
                ``max_completion_tokens`` in place of ``max_tokens``. A field that is ``None`` is left out.

        Raises:
            ConfigError: a field of `fence` is not in the template, the verdict has no expected score, the address is
                invalid, there are no attempts, or the cache cannot be used.
        """
        self._template = _Template(template)
        self.fields = frozenset(self._template.get_identifiers())
        """The names of the placeholders."""
        if unknown := set(fence) - self.fields:
            raise ConfigError(f"fence: the template has no field {listing(unknown)}, only {listing(self.fields)}")
        if attempts is not None and attempts < 1:
            raise ConfigError(f"attempts={attempts}: a judge needs at least 1 attempt")
        if cache is not None and temperature:
            raise ConfigError(
                f"cache: at temperature={temperature:g} each reply is another one, and a cache would repeat the first "
                "one: set the temperature to 0, or leave out the cache"
            )
        stored = None if cache is None else RequestCache(cache)
        self._fence_key = KEY if stored is None else stored.secret
        self._expected = expected
        if expected:
            if not isinstance(verdict, Number | Choice):
                raise ConfigError(f"expected: {type(verdict).__name__} has no expected score, only Number and Choice")
            verdict.words  # noqa: B018 - raises if they are not single tokens
        self._fence = frozenset(fence)
        self._verdict = verdict
        self._system = system
        self._address = address and checked_address(address)
        self._model = model
        self._attempts = attempts
        self._options = {
            "limit": limit,
            "timeout": timeout,
            "api_key_env": api_key_env,
            "cache": stored,
        }
        given = {
            "temperature": temperature,
            "max_tokens": max_tokens,
            **(_LOGPROBS if expected else {}),
            **verdict.request,
            **request,
        }
        self._request = {name: value for name, value in given.items() if value is not None}

    def render(self, **fields: Any) -> str:
        """Return the prompt: the template with its placeholders replaced.

        Args:
            fields: the value for each placeholder: a text; a conversation, as a list of messages with ``role`` and
                ``content``, each shown below its role; or a list of texts, which are numbered from 1.

        Raises:
            ConfigError: a field is missing, or the template has no placeholder for a field.
        """
        return self._render(fields)[0]

    def _render(self, fields: Mapping[str, Any]) -> tuple[str, list[str]]:
        """Return the prompt, and the marks of its fences."""
        if missing := self.fields - fields.keys():
            raise ConfigError(
                f"the call of the judge lacks {listing(missing)}: its template has the fields {listing(self.fields)}, "
                f"and the arguments are {listing(fields)}"
            )
        if unused := fields.keys() - self.fields:
            single = [name for name in unused if f"{{{name}}}" in self._template.template]
            hint = f"; write {{{{{single[0]}}}}} instead of {{{single[0]}}} in the template" if single else ""
            raise ConfigError(
                f"the judge's template has no field {listing(unused)}, which the call gives: its fields are "
                f"{listing(self.fields)}{hint}"
            )
        texts = {name: _labelled(value) for name, value in fields.items()}
        fences = {name: fenced(texts[name], self._fence_key) for name in self._fence}
        shown = {
            name: "\n\n".join(f"{label}\n{text}" if label else text for label, text in parts)
            for name, parts in texts.items()
        }
        prompt = self._template.substitute({**shown, **{name: text for name, (text, _) in fences.items()}})
        if "response_format" in self._verdict.request and self._verdict.again.startswith("{"):
            prompt += f"\n\nWrite {self._verdict.again}."
        return prompt, [mark for _, marks in fences.values() for mark in marks]

    async def __call__(self, address: str | None = None, **fields: Any) -> Judgement:
        """Ask the model for a verdict on one response.

        Args:
            address: ``host:port`` as in ``reward_router_address``, or the base URL of an OpenAI-compatible service; by
                default the judge's own ``address``.
            fields: the value for each placeholder of the template: see `render`.

        Returns:
            the judgement; its `score` is ``None`` if the reply may be cut off, or if neither it nor the reply to a
            second request, for the verdict alone, has a verdict.

        Raises:
            RequestError: there is no usable answer; see its ``status``, ``retry_after`` and ``transient``.
            ConfigError: the fields do not match the template, the address is missing or invalid, or the API key is not
                set.
            LimitError: the limit is unknown, or did not allow the request within its ``max_wait``.
        """
        prompt, marks = self._render(fields)
        messages = [{"role": "user", "content": prompt}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system})
        address = address or self._address
        judgement = await self._ask(address, prompt, messages, marks)
        reply = judgement.reply
        # A longer reply would be cut off again.
        if judgement.unscored is None or self._is_cut_off(reply) or not self._verdict.again:
            return judgement
        messages += [
            {"role": "assistant", "content": without_control_tokens(reply.text) or "(no text)"},
            {"role": "user", "content": f"Reply with only {self._verdict.again}."},
        ]
        try:
            second = await self._ask(address, prompt, messages, marks, again=True)
        except RequestError as error:
            if error.status not in (400, 413, 422):
                raise
            # Such as a conversation that is now too long for the model: another call would end in the same way.
            return replace(judgement, unscored=f"{judgement.unscored}; the server refused the second request: {error}")
        text, usage = f"{reply.text}\n\n[asked again]\n{second.reply.text}", reply.usage + second.reply.usage
        return replace(second, reply=replace(second.reply, text=text, usage=usage))

    async def _ask(
        self, address: str | None, prompt: str, messages: list[dict[str, str]], marks: list[str], again: bool = False
    ) -> Judgement:
        """Return the judgement of the reply to a conversation; see `Verdict.read` for ``again``."""
        try:
            reply, exchange = await repeated(
                lambda: complete(address, messages, self._model, self._options, self._request), address, self._attempts
            )
        except RequestError as error:
            if error.status in (400, 422) and "response_format" in self._request:
                await self._check_format(address)
            raise
        judgement = self._judge(prompt, reply, marks, again)
        more = {"asked_again": True} if again else {}
        exchange.end(verdict=judgement.verdict, score=judgement.score, unscored=judgement.unscored, **more)
        return judgement

    async def _check_format(self, address: str | None) -> None:
        """Ask a short question in the format of the verdict, after a request in this format was refused.

        Raises:
            ConfigError: the server does not support the format. Otherwise, the request itself was refused.
        """
        kept = ("response_format", "max_tokens", "max_completion_tokens", "reasoning_effort")
        request = {name: value for name, value in self._request.items() if name in kept}
        try:
            _, exchange = await complete(address, "Write an example.", self._model, self._options, request)
        except RequestError as error:
            if error.status in (400, 422):
                raise ConfigError(
                    f"enforce=True: the server refuses response_format of type json_schema ({error}). Leave enforce "
                    "out: the judge is then asked for the format by its prompt alone"
                ) from error
        else:
            exchange.end()

    def _is_cut_off(self, reply: Reply) -> bool:
        return reply.cut_off or (reply.finish_reason == "tool_calls" and not self._request.get("tools"))

    def _judge(self, prompt: str, reply: Reply, marks: list[str], again: bool) -> Judgement:
        if self._is_cut_off(reply):
            reason = f"the reply may be cut off: its finish_reason is {reply.finish_reason!r}, not 'stop'"
            hint = "; max_tokens may be too low" if reply.finish_reason == "length" else ""
            return Judgement(None, None, prompt, reply, reason + hint)
        try:
            text = without_fenced(reply.text, marks)
            verdict, score = self._verdict.read(text, again)
            if self._expected and isinstance(self._verdict, Number | Choice):
                expected = expected_score(self._verdict, text, reply, again)
                score = score if expected is None else expected
        except NoVerdictError as error:
            return Judgement(None, None, prompt, reply, str(error))
        components = verdict if isinstance(self._verdict, Ratings) else {}
        return Judgement(score, verdict, prompt, reply, components=components)


def _labelled(value: Any) -> list[tuple[str, str]]:
    """Return the texts of a field, each with its label: messages with their roles, texts of a list with numbers."""
    items = value.tolist() if hasattr(value, "tolist") else value  # numpy, from a parquet file
    if not isinstance(items, list | tuple):
        return [("", str(items))]
    if items and all(isinstance(item, Mapping) and "role" in item for item in items):
        return [(f"[{message['role']}]", _content(message)) for message in items]
    return [(f"[{number}]", str(item)) for number, item in enumerate(items, 1)]


def _content(message: Mapping[str, Any]) -> str:
    """Return the text of a message, with its calls of tools; parts that are not text, such as images, by their type."""
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else [{"type": "text", "text": content or ""}]
    texts = [part["text"] if "text" in part else f"({part.get('type')})" for part in parts]
    texts += [encode(call).decode() for call in message.get("tool_calls") or ()]
    return "\n".join(map(str, texts))


def expected_score(verdict: Number | Choice, text: str, reply: Reply, again: bool = False) -> float | None:
    """Return the expected score at the position of the verdict, as in G-Eval (arXiv 2303.16634).

    The first token of the verdict decides: the alternatives that begin exactly one word of the verdict count, with
    their probabilities, normalised to a sum of 1. The token that was written must begin only the word that was written,
    and the alternatives that count must have nearly all of the probability.

    Args:
        verdict: the format of the verdict.
        text: the text from which the verdict is read.
        reply: the reply, with log-probabilities if the server gives them.
        again: whether the judge was asked for the verdict alone.

    Returns:
        The expected score; ``None`` without one, so that the written verdict counts.

    Raises:
        NoVerdictError: the text contains no valid verdict.
    """
    written, tail = verdict.find(text, again)
    token = None if tail is None else _token_at(reply, tail)
    if token is None:
        return None
    written_words = [word for word in verdict.words if squeezed(word) == squeezed(written)]
    weights: dict[str, float] = {}
    try:
        if not written_words or _begun(verdict, token["token"]) != written_words:
            return None
        # Also the token that was written, which is not always among the most probable ones.
        logprobs = {one["token"]: one["logprob"] for one in (token, *token["top_logprobs"])}
        for text_of, logprob in logprobs.items():
            # Several tokens may begin one word: with a space or a capital letter.
            words = _begun(verdict, text_of)
            if len(words) == 1:
                weights[words[0]] = weights.get(words[0], 0.0) + math.exp(logprob)
    except (KeyError, TypeError, AttributeError, OverflowError):  # the server sends another form
        return None
    total = sum(weights.values())
    # The sum of rounded probabilities may be a little above 1.
    if not _LEAST_COVERED <= total <= 1.01:
        return None
    return sum(verdict.words[word] * weight for word, weight in weights.items()) / total


def _begun(verdict: Number | Choice, token: str) -> list[str]:
    """Return the words that begin with the text of a token."""
    start = token.strip(_AROUND).lower()
    return [word for word in verdict.words if start and word.lower().startswith(start)]


def _token_at(reply: Reply, tail: str) -> Mapping[str, Any] | None:
    """Return the token with the first character of the end of the reply; ``None`` if there is none."""
    tokens = reply.logprobs or ()
    texts = [str(token.get("token")) for token in tokens]
    # Found from the end: the tokens may also contain reasoning before the text, and parts of characters.
    found = "".join(texts).rfind(tail)
    return None if found < 0 else tokens[bisect_right(list(accumulate(map(len, texts))), found)]
