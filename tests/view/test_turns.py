"""Reading the turns of conversations: of messages, and of responses whose parts have known lengths."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from reward_loop.view.turns import Part, Turn, prompt_turns, response_turns

CALL = '<tool_call>\n{"name": "run", "arguments": {"code": "1 + 1"}}\n</tool_call>'
ARGUMENTS = '{\n  "code": "1 + 1"\n}'


def shown(turns: list[Turn] | None) -> Any:
    """Return the turns as tuples: the role, and of each part what is set of kind, name, text and result."""
    if turns is None:
        return None
    return [
        (turn.role, [tuple(filter(None, (p.kind, p.name, p.text, p.result))) for p in turn.parts]) for turn in turns
    ]


def response(text: Any, **texts: Any) -> Any:
    return shown(response_turns({"response": text, **texts}))


CONVERSATION = [
    {"role": "system", "content": "Use the tool."},
    {"role": "user", "content": "What is 1 + 1?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I compute it.",
        "tool_calls": [
            {"id": "b", "type": "function", "function": {"name": "look", "arguments": "{}"}},
            {"id": "a", "type": "function", "function": {"name": "run", "arguments": '{"code": "1 + 1"}'}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "2"},
    {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "nothing"}]},
    {"role": "assistant", "content": "It is 2."},
]


def test_messages_have_calls_with_their_results() -> None:
    expected = [
        ("system", [("text", "Use the tool.")]),
        ("user", [("text", "What is 1 + 1?")]),
        (
            "assistant",
            [("reasoning", "I compute it."), ("call", "look", "{}", "nothing"), ("call", "run", ARGUMENTS, "2")],
        ),
        ("assistant", [("text", "It is 2.")]),
    ]
    assert shown(prompt_turns({"prompt": CONVERSATION})) == expected
    assert response("It is 2.", extra_info={"completion": CONVERSATION}) == expected


def test_the_lengths_of_the_parts_tell_the_environment_from_the_policy() -> None:
    parts = ["I guess 4.\nuser\nis a word", "\nuser\nToo low.\nassistant\n", "7", "\ntool\nRight.\nassistant\n"]
    assert response("".join(parts), turns=[*map(len, parts)]) == [
        ("assistant", [("text", parts[0])]),
        ("user", [("text", "Too low.")]),
        ("assistant", [("text", "7")]),
        ("tool", [("result", "Right.")]),
    ]
    assert response("".join(parts), turns=[1, 2]) is None


@pytest.mark.parametrize(
    "value",
    ["a plain answer", "", None, 7, [], ["no", "messages"], "<think>\nHm.\n</think>\n\n" + CALL],
)
def test_what_is_no_message_and_has_no_lengths_is_plain_text(value: Any) -> None:
    assert response(value) is None


def test_turns_are_encoded() -> None:
    assert orjson.loads(orjson.dumps([Turn("user", [Part("text", "Hi")])]))[0]["parts"][0]["kind"] == "text"
