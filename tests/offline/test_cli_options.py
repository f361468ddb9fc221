import pytest
import typer

from reward_loop.offline.cli_options import nested, pairs


def test_dots_become_nested_options():
    options = pairs(["limits.judge.max_concurrent=8", "limits.judge.adaptive=true", "timeout=5"], "-O")
    assert nested(options, "-O") == {"limits": {"judge": {"max_concurrent": 8, "adaptive": True}}, "timeout": 5}


@pytest.mark.parametrize(
    "given",
    [
        ["limits.judge.max_concurrent=8", "limits={}"],
        ["limits={}", "limits.judge.max_concurrent=8"],
        ["limits.judge.max_concurrent=8", "limits.judge={}"],
        ["retry.max_attempts=1", "retry.max_attempts=2"],
        ["timeout=5", "timeout=5"],
    ],
)
def test_options_that_contradict_each_other_are_refused(given):
    with pytest.raises(typer.BadParameter, match=r"contradicts|given twice"):
        nested(pairs(given, "-O"), "-O")
