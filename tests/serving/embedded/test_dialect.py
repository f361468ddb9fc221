"""Requests that the embedded server cannot serve are refused with status 400."""

from __future__ import annotations

import pytest

from reward_loop.serving.embedded.dialect import ApiError, ChatRequest, ClassifyRequest, PromptRequest, parse

MESSAGES = '"messages": [{"role": "user", "content": "x"}]'


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, '{"messages": [{"role": "user", "content": "\\ud83d"}]}'),
        (ChatRequest, f'{{{MESSAGES}, "model": "\\ud83d"}}'),
        (ClassifyRequest, '{"input": "a \\ud800 b"}'),
    ],
)
def test_lone_surrogates_are_refused(kind: type[PromptRequest], body: str) -> None:
    with pytest.raises(ApiError, match=r"lone surrogate.*replace") as refused:
        parse(kind, body.encode())
    assert refused.value.code == 400


@pytest.mark.parametrize(
    ("name", "value"), [("response_format", '{"type": "json_object"}'), ("tools", "[1]"), ("min_tokens", "3")]
)
def test_options_that_are_not_supported_are_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ApiError, match=f"`{name}`") as refused:
        parse(ChatRequest, f'{{{MESSAGES}, "{name}": {value}}}'.encode())
    assert refused.value.code == 400
    assert refused.value.body["error"]["param"] == name


@pytest.mark.parametrize(("name", "value"), [("tool_calls", "[1]"), ("function_call", "{}")])
def test_fields_of_messages_that_are_not_supported_are_refused_by_name(name: str, value: str) -> None:
    messages = f'{{"messages": [{{"role": "assistant", "content": "x", "{name}": {value}}}]}}'
    for kind in (ChatRequest, ClassifyRequest):
        with pytest.raises(ApiError, match=f"`{name}`") as refused:
            parse(kind, messages.encode())
        assert refused.value.code == 400
    harmless = messages.replace(value, "null")
    assert parse(ChatRequest, harmless.encode()).messages[0].as_dict() == {"role": "assistant", "content": "x"}


def test_harmless_values_of_such_options_are_accepted() -> None:
    body = f'{{{MESSAGES}, "response_format": {{"type": "text"}}, "tools": [], "min_tokens": 0, "n": null}}'
    assert parse(ChatRequest, body.encode()).n == 1
