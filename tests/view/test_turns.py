"""Reading the turns of conversations: the formats of chat templates, and what is malformed."""

from __future__ import annotations

import time
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


@pytest.mark.parametrize(
    "text",
    [
        f"<think>\nHm.\n</think>\n\n{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nIt is 2.<|im_end|>",
        f"Hm.\n</think>\n\n{CALL}\nuser\n<tool_response>\n2\n</tool_response>\nassistant\nIt is 2.",
        f"<think>Hm.</think>{CALL}<tool_response>2</tool_response>It is 2.",
    ],
    ids=["special tokens", "without special tokens", "without roles"],
)
def test_the_response_of_a_rollout_with_tools(text: str) -> None:
    assert response(text) == [
        ("assistant", [("reasoning", "Hm."), ("call", "run", ARGUMENTS, "2")]),
        ("assistant", [("text", "It is 2.")]),
    ]


def test_the_lengths_of_the_parts_tell_the_environment_from_the_policy() -> None:
    parts = ["I guess 4.\nuser\nis a word", "\nuser\nToo low.\nassistant\n", "7", "\ntool\nRight.\nassistant\n"]
    assert response("".join(parts), turns=[*map(len, parts)]) == [
        ("assistant", [("text", parts[0])]),
        ("user", [("text", "Too low.")]),
        ("assistant", [("text", "7")]),
        ("tool", [("result", "Right.")]),
    ]
    assert response("".join(parts), turns=[1, 2]) is None


def test_text_of_llama_3_has_its_roles() -> None:
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    text = (
        "<|begin_of_text|>" + header.format("system") + "Be brief.<|eot_id|>" + header.format("user") + "Hi<|eot_id|>"
    )
    turns = shown(prompt_turns({"prompt": text + header.format("assistant")}))
    assert turns == [("system", [("text", "Be brief.")]), ("user", [("text", "Hi")])]


def test_the_format_of_qwen3_coder() -> None:
    text = "<tool_call>\n<function=run>\n<parameter=code>\n1 + 1\n</parameter>\n</function>\n</tool_call>"
    assert response(text) == [("assistant", [("call", "run", ARGUMENTS)])]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a plain answer", None),
        ("", None),
        (None, None),
        (7, None),
        ([], None),
        (["no", "messages"], None),
        ("Use `<tool_call>` and </think> with `<|im_start|>user`.", None),
        ("```\n" + CALL + "\n```", None),
        ("<tool_call>\nnever closed", None),
        ('<tool_call>\n{"name": run}\n</tool_call>', [("assistant", [("call", '{"name": run}')])]),
        ("<tool_call>\n[1]\n</tool_call>", [("assistant", [("call", "[1]")])]),
        ("<tool_call>" + "[" * 9000 + "</tool_call>", [("assistant", [("call", "[" * 9000)])]),
        ("<think>\ncut", [("assistant", [("reasoning", "cut")])]),
        ("<think>\n\n</think>\n\n4", None),
        ("<think>\na <tool_call> b\n</think>", [("assistant", [("reasoning", "a <tool_call> b")])]),
        ("<tool_response>\n2\n</tool_response>", [("tool", [("result", "2")])]),
        ("4<|im_end|>\n<|im_start|>user\n<|im_end|>", [("assistant", [("text", "4")]), ("user", [])]),
    ],
)
def test_malformed_and_quoted_text(text: Any, expected: Any) -> None:
    assert response(text) == expected


def test_the_examples_of_a_system_prompt_are_text() -> None:
    system = f"<|im_start|>system\nAnswer like this:\n{CALL}<|im_end|>\n"
    text = system + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert shown(prompt_turns({"prompt": text})) == [
        ("system", [("text", f"Answer like this:\n{CALL}")]),
        ("user", [("text", "Hi")]),
    ]


@pytest.mark.parametrize(
    "piece", ["<tool_call>\n", "<think>\n", "\n```", "<parameter=a>", "\n<|im_start|>user\n", "\nuser\n"]
)
def test_a_hostile_text_takes_linear_time(piece: str) -> None:
    def seconds(text: str) -> float:
        began = time.process_time()
        response_turns({"response": text})
        return time.process_time() - began

    text = f"<tool_call><function=a>{piece * 20_000}</function></tool_call>" if "=" in piece else piece * 20_000
    assert seconds(text) < 2.0


def test_turns_are_encoded() -> None:
    assert orjson.loads(orjson.dumps([Turn("user", [Part("text", "Hi")])]))[0]["parts"][0]["kind"] == "text"
