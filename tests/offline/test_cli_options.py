from types import SimpleNamespace

import pytest
import typer

from reward_loop.offline.cli_options import more_options

CONTEXT = SimpleNamespace(get_parameter_source=lambda name: None)
"""Of a command without options of its own."""


def test_dots_become_nested_options():
    options = more_options(CONTEXT, ["limits.judge.max_concurrent=8", "limits.judge.adaptive=true", "timeout=5"])
    assert options == {"limits": {"judge": {"max_concurrent": 8, "adaptive": True}}, "timeout": 5}


@pytest.mark.parametrize(
    "given",
    [
        ["limits.judge.max_concurrent=8", "limits={}"],
        ["limits=1", "limits.judge.max_concurrent=8"],
        ["timeout=5", "timeout=5"],
    ],
)
def test_options_that_contradict_each_other_are_refused(given):
    with pytest.raises(typer.BadParameter, match=r"contradicts|given twice"):
        more_options(CONTEXT, given)
