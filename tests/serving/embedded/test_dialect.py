"""Requests that the embedded server cannot serve are refused with status 400."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reward_loop.serving.embedded.dialect import ApiError, ChatRequest, ClassifyRequest, PromptRequest, parse

MESSAGES = [{"role": "user", "content": "x"}]
LONE = "a \ud800 b"


def read(kind: type[PromptRequest], **fields: Any) -> Any:
    given = {"input": "x"} if kind is ClassifyRequest and "messages" not in fields else {"messages": MESSAGES}
    return parse(kind, json.dumps({**given, **fields}).encode())


@pytest.mark.parametrize(
    ("kind", "fields"),
    [(ChatRequest, {"messages": [{"role": "user", "content": LONE}]}), (ClassifyRequest, {"input": LONE})],
)
def test_lone_surrogates_are_refused(kind: type[PromptRequest], fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="hex escape") as refused:
        read(kind, **fields)
    assert refused.value.code == 400


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_format", {"type": "json_object"}),
        ("stop", ["a"]),
    ],
)
def test_options_that_are_not_supported_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ApiError, match=f"{name}: Extra inputs are not permitted") as refused:
        read(ChatRequest, **{name: value})
    assert refused.value.code == 400
    assert refused.value.body["error"]["param"] == name
