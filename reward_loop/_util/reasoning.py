"""Where the reasoning of a model is in its text, in whatever tags."""

from __future__ import annotations

import re
from typing import NamedTuple

_REASONING = (
    r"(?:think(?:ing)?|thoughts?|reason(?:ing)?|reflection|analysis|scratch_?pad|monologue|cot|deliberation|rationale)"
)
_TAG = re.compile(
    r"(?i:(?:<|&lt;|\uff1c|\u25c1)[|\uff5c]?(?P<close>/\s?|end_(?:of_)?)?(?:[a-z]{1,12}[:_]){0,3}"
    + _REASONING
    + r"(?:_[a-z]{1,20})?"
    r"(?:[\s:][^<>\u25b7\n]{0,80})?\s?[|\uff5c]?(?:>|&gt;|\uff1e|\u25b7))"
    # The channels of gpt-oss and Gemma; those of gpt-oss also if the server removes special tokens.
    r"|(?P<final><\|channel\|?>\s?final(?:<\|message\|>)?|<channel\|>)|<\|channel\|?>"
    r"|\A\s{0,9}analysis(?!:)|(?P<bare>assistantfinal)|\[(?P<slash>/?)(?i:THINK(?:ING)?)\]"
)


class Reasoning(NamedTuple):
    """A part of a text that is reasoning."""

    start: int
    end: int
    """The offset of the tag that ends it."""
    after: int
    """The offset of the text after this tag."""


def reasoning_of(text: str) -> list[Reasoning] | None:
    """Return the parts of a text that are reasoning; ``None`` if the text ends within its reasoning.

    The first one begins with the text if it has no opening tag: the chat template may have written that tag.
    """
    parts, open_tags, start = list[Reasoning](), 0, 0
    for tag in _TAG.finditer(text):
        ends_all = tag["final"] or (tag["bare"] and open_tags)
        if ends_all or tag["close"] or tag["slash"]:
            open_tags = 0 if ends_all else max(0, open_tags - 1)
            if not open_tags:
                parts.append(Reasoning(start, tag.start(), tag.end()))
                start = tag.end()
        elif not tag["bare"]:
            start = start if open_tags else tag.end()
            open_tags += 1
    return None if open_tags else parts


def without_reasoning(text: str) -> str:
    """Return the text without the text of its reasoning; unchanged if it has none, or ends within it.

    Tags and spaces stay, as in ``<think>\\n\\n</think>``, and at least one space: a rule of the form may demand them.
    """
    made, at = list[str](), 0
    for start, end, _ in reasoning_of(text) or ():
        if reasoning := text[start:end].strip():
            made += text[at:start], text[start:end].replace(reasoning, "") or " "
            at = end
    return "".join(made) + text[at:]
