"""The turns of a conversation: of chat messages, or of a response whose parts have known lengths.

A turn is a role and its parts, in their order. Messages are those of OpenAI's chat completions, with ``tool_calls``,
``tool_call_id`` and ``reasoning_content``. Tags of chat templates in a text stay text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from reward_loop._util.json import decode

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "ipython", "function", "observation"})
_RESULTS = frozenset({"tool", "ipython", "function", "observation"})
"""The roles whose turns are results of tool calls."""


@dataclass
class Part:
    """A part of a turn."""

    kind: Literal["text", "reasoning", "call", "result"]
    text: str
    """The text; of a call, its arguments as indented JSON."""
    name: str | None = None
    """The name of the tool."""
    id: str | None = None
    """The ID of a call, or of the call that a result belongs to."""
    result: str | None = None
    """The result of a call, if it is recorded."""


@dataclass
class Turn:
    """What one role says, or what tools return."""

    role: str
    parts: list[Part] = field(default_factory=list)


def prompt_turns(texts: Mapping[str, Any]) -> list[Turn] | None:
    """Return the turns of a sample's prompt; ``None`` if it is plain text.

    Args:
        texts: the line of the sample's texts.
    """
    return _of_messages(texts.get("prompt"))


def response_turns(texts: Mapping[str, Any]) -> list[Turn] | None:
    """Return the turns of a sample's response; ``None`` if it is plain text.

    They are those of the messages in ``extra_info["completion"]`` if there are any, as with TRL; otherwise those of the
    response, whose parts by the policy and by the environment have the lengths in ``turns``, as in a verl run.
    """
    extra, response, lengths = (texts.get(name) for name in ("extra_info", "response", "turns"))
    completion = extra.get("completion") if isinstance(extra, Mapping) else None
    if (turns := _of_messages(completion)) is not None:
        return turns
    if isinstance(response, str) and isinstance(lengths, list) and sum(lengths) == len(response):
        return list(_of_lengths(response, lengths))
    return _of_messages(response)


def _of_messages(value: Any) -> list[Turn] | None:
    """Return the turns of messages; ``None`` for another value."""
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) and "role" in one for one in value):
        return None
    return _answered(map(_of_message, value))


def _of_message(message: Mapping[str, Any]) -> Turn:
    role, content, calls = str(message["role"]), message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        content = "\n".join(map(_text_of, content))
    text = content if isinstance(content, str) else "" if content is None else _indented(content)
    if role in _RESULTS:
        return Turn(role, [Part("result", text, message.get("name"), message.get("tool_call_id"))])
    turn = Turn(role)
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        turn.parts.append(Part("reasoning", reasoning))
    if text.strip():
        turn.parts.append(Part("text", text))
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            arguments = function.get("arguments")
            text = _reindented(arguments) if isinstance(arguments, str) else _indented(arguments)
            turn.parts.append(Part("call", text, str(function.get("name")), call.get("id")))
    return turn


def _text_of(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else _indented(part)


def _of_lengths(text: str, lengths: Iterable[int]) -> Iterator[Turn]:
    """Yield the turns of a text whose parts are by the policy and by the environment in turn.

    Special tokens are missing in it: the first line of a part by the environment is the name of its role, and its last
    line that of the next turn.
    """
    start = 0
    for number, length in enumerate(lengths):
        part, start = text[start : start + length], start + length
        if number % 2 == 0:
            yield Turn("assistant", [Part("text", part)])
            continue
        role, _, rest = part.lstrip("\n").partition("\n")
        if role not in ROLES:
            role, rest = "user", part
        before, _, last = rest.rstrip().rpartition("\n")
        body = (before if last in ROLES else rest).strip("\n")
        yield Turn(role, [Part("result" if role in _RESULTS else "text", body)])


def _indented(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _reindented(text: str) -> str:
    try:
        return _indented(decode(text))
    except ValueError:
        return text


def _answered(turns: Iterable[Turn]) -> list[Turn]:
    """Return turns in which each result is at its call: that with its ID, otherwise the first one without a result."""
    found: list[Turn] = []
    calls: Sequence[Part] = ()
    for turn in turns:
        if any(part.kind == "call" for part in turn.parts):
            calls = [part for part in turn.parts if part.kind == "call"]
        left = []
        for part in turn.parts:
            waiting = [call for call in calls if call.result is None and part.id in (None, call.id)]
            if part.kind == "result" and waiting:
                waiting[0].result = part.text
            else:
                left.append(part)
        if left or not turn.parts:
            found.append(Turn(turn.role, left))
    return found
