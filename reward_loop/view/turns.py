"""The turns of a conversation, read from chat messages or from the text of a chat template.

A turn is a role and its parts, in their order. These formats are read:

- messages of OpenAI's chat completions, with ``tool_calls``, ``tool_call_id`` and ``reasoning_content``;
- text of ChatML (``<|im_start|>ROLE``, as in Qwen) and of Llama 3 (``<|start_header_id|>ROLE<|end_header_id|>``);
- within a turn, ``<think>``, ``<tool_response>``, and ``<tool_call>`` with JSON or Qwen3-Coder's ``<function=NAME>``.

A tag counts only at the beginning of a line, at its end, or after another tag, and not in fenced code. Other tags, and
those that are not closed, stay text. The time to read a text is linear in its length.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from reward_loop._util.json import decode

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "ipython", "function", "observation"})
_RESULTS = frozenset({"tool", "ipython", "function", "observation"})
"""The roles whose turns are results of tool calls."""

_HEADER = re.compile(
    r"<\|im_start\|>([a-z]{1,20})(?:\n|$)|<\|start_header_id\|>([a-z]{1,20})<\|end_header_id\|>\n{0,2}"
)
# Repetitions are bounded: with `*`, a text of many spaces or end tokens would take quadratic time.
_END = re.compile(r"(?:<\|(?:im_end|eot_id|eom_id|end_of_text|endoftext)\|>\s{0,8}){1,4}\Z")
_TAG = re.compile(r"<(think|tool_call|tool_response)>|```")
_TAGS = {"assistant": {"think", "tool_call", "tool_response"}, "system": set[str](), "developer": set[str]()}
"""The tags that count in the turns of a role, by default ``tool_response``: system prompts show examples of others."""
_AFTER = ("</think>", "</tool_call>", "</tool_response>", "|>")
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)


@dataclass
class Part:
    """A part of a turn."""

    kind: Literal["text", "reasoning", "call", "result"]
    text: str
    """The text; of a call, its arguments as indented JSON."""
    name: str | None = None
    """The name of the tool; ``None`` for a call that is not well-formed."""
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
    turns = _turns_of(texts.get("prompt"), "user")
    if turns and not turns[-1].parts:
        turns.pop()  # the header of the response
    return turns


def response_turns(texts: Mapping[str, Any]) -> list[Turn] | None:
    """Return the turns of a sample's response; ``None`` if it is plain text.

    They are those of the messages in ``extra_info["completion"]`` if there are any, as with TRL; otherwise those of the
    response, whose parts by the policy and by the environment have the lengths in ``turns``, as in a verl run.
    """
    extra, response, lengths = (texts.get(name) for name in ("extra_info", "response", "turns"))
    completion = extra.get("completion") if isinstance(extra, Mapping) else None
    if isinstance(completion, list) and (turns := _turns_of(completion, "assistant")) is not None:
        return turns
    if isinstance(response, str) and isinstance(lengths, list) and sum(lengths) == len(response):
        return _answered(_of_lengths(response, lengths))
    return _turns_of(response, "assistant")


def _turns_of(value: Any, role: str) -> list[Turn] | None:
    """Return the turns of messages or of a text, which begins with a turn of ``role``."""
    if isinstance(value, list):
        if not value or not all(isinstance(one, dict) and "role" in one for one in value):
            return None
        return _answered(itertools.chain.from_iterable(map(_of_message, value)))
    if not isinstance(value, str):
        return None
    turns = _answered(_of_text(value, role))
    is_plain = len(turns) == 1 and turns[0].role == role and [part.kind for part in turns[0].parts] == ["text"]
    return None if is_plain or not turns else turns


def _of_message(message: Mapping[str, Any]) -> Iterator[Turn]:
    """Yield the turn of a message; several if its text is that of a whole rollout."""
    role, content, calls = str(message["role"]), message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        content = "\n".join(map(_text_of, content))
    turns = list(_split(content if isinstance(content, str) else "" if content is None else _indented(content), role))
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        turns[0].parts.insert(0, Part("reasoning", reasoning))
    if role in _RESULTS:
        turns[0].parts[0].name, turns[0].parts[0].id = message.get("name"), message.get("tool_call_id")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            arguments = function.get("arguments")
            text = _reindented(arguments) if isinstance(arguments, str) else _indented(arguments)
            turns[-1].parts.append(Part("call", text, str(function.get("name")), call.get("id")))
    yield from turns


def _text_of(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else _indented(part)


def _of_text(text: str, role: str) -> Iterator[Turn]:
    """Yield the turns of a text, which may have headers with roles."""
    text = text.removeprefix("<|begin_of_text|>")
    headers = [found for found in _HEADER.finditer(text) if (found[1] or found[2]) in ROLES and _begins(text, found)]
    ends = [found.start() for found in headers] + [len(text)]
    if text[: ends[0]].strip("\n"):
        yield from _split(_END.sub("", text[: ends[0]]), role)
    for header, end in zip(headers, ends[1:], strict=True):
        yield from _split(_END.sub("", text[header.end() : end]), header[1] or header[2])


def _of_lengths(text: str, lengths: Iterable[int]) -> Iterator[Turn]:
    """Yield the turns of a text whose parts are by the policy and by the environment in turn.

    Special tokens are missing in it: the first line of a part by the environment is the name of its role, and its last
    line that of the next turn.
    """
    start = 0
    for number, length in enumerate(lengths):
        part, start = text[start : start + length], start + length
        if number % 2 == 0:
            yield from _split(part, "assistant")
            continue
        role, _, rest = part.lstrip("\n").partition("\n")
        body = _without_header(rest if role in ROLES else part)
        yield from _split(body.strip("\n"), role if role in ROLES else "user")


def _split(text: str, role: str) -> Iterator[Turn]:
    """Yield the turns of a text without headers: results of tools in it are turns of their own."""
    if role in _RESULTS and "<tool_response>" not in text:
        yield Turn(role, [Part("result", text)])
        return
    parts = list(_parts(text, role))
    found = [list(group) for _, group in itertools.groupby(parts, lambda part: part.kind == "result")]
    for number, group in enumerate(found):
        if group[0].kind == "result":
            yield Turn("tool", group)
            continue
        # Without special tokens, the roles around a result are lines of text.
        if number + 1 < len(found):
            group[-1].text = _without_header(group[-1].text)
        if number:
            first, _, rest = group[0].text.lstrip("\n").partition("\n")
            group[0].text = rest if first == "assistant" else group[0].text
        parts = [part for part in group if part.kind != "text" or part.text.strip()]
        if parts or len(found) == 1:
            yield Turn("assistant" if number else role, parts)
    if not found:
        yield Turn(role)


def _without_header(text: str) -> str:
    """Return a text without its last line, if that is the name of a role."""
    before, _, last = text.rstrip().rpartition("\n")
    return before if last in ROLES else text


def _parts(text: str, role: str) -> Iterator[Part]:
    """Yield the parts of a turn."""
    shown = at = 0  # up to `shown`, the text is in parts; at `at`, the search for tags goes on
    tags, absent = _TAGS.get(role, {"tool_response"}), set[str]()
    end = text.find("\n</think>")
    if "think" in tags and end >= 0 and not 0 <= text.find("<think>") < end:  # the prompt has the opening tag
        yield Part("reasoning", text[:end].strip("\n"))
        shown = at = end + len("\n</think>")
    while (found := _TAG.search(text, at)) is not None:
        at, tag = found.end(), found[1]
        closing = "\n```" if tag is None else f"</{tag}>"
        counts = _begins(text, found) or (tag is not None and text.startswith("\n", at))
        if not counts or closing in absent or (tag is not None and tag not in tags):
            continue
        end = text.find(closing, at)
        if end < 0:
            # Looked for once: a text with many opening tags would otherwise take quadratic time.
            absent.add(closing)
            if tag != "think":
                continue
            end = len(text)  # the response was cut
        content, at = text[at:end], end + len(closing)
        if tag is None:
            continue
        if text[shown : found.start()].strip():
            yield Part("text", text[shown : found.start()].strip("\n"))
        shown = at
        if tag == "tool_call":
            yield _call(content)
        elif tag == "tool_response":
            yield Part("result", content.strip("\n"))
        elif content.strip():
            yield Part("reasoning", content.strip("\n"))
    if text[shown:].strip():
        yield Part("text", text[shown:].strip("\n") if shown else text)


def _begins(text: str, found: re.Match[str]) -> bool:
    """Return whether a match is at the beginning of a line or after another tag."""
    start = found.start()
    return not start or text[start - 1] == "\n" or text.endswith(_AFTER, 0, start)


def _call(content: str) -> Part:
    """Return a call of a tool. If it is not well-formed, the part has no name, and its text is what the model wrote."""
    try:
        call = decode(content)
    except ValueError:
        call = None
    if isinstance(call, dict) and isinstance(call.get("name"), str):
        return Part("call", _indented(call.get("arguments", call.get("parameters"))), call["name"])
    if (function := _FUNCTION.fullmatch(content)) is not None:
        pairs = (one.partition("<parameter=")[2].partition(">") for one in function[2].split("</parameter>")[:-1])
        return Part("call", _indented({name: value.strip("\n") for name, _, value in pairs}), function[1].strip())
    return Part("call", content.strip("\n"))


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
