from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reward_loop.client.judge import fenced, without_fenced


@given(st.text())
def test_a_text_is_between_marks_that_it_does_not_contain_and_that_are_named_before_it(text: str) -> None:
    shown, mark = fenced(text)
    rule, _, rest = shown.partition("\n")
    assert rule.count(mark) == 2
    assert rest == f"<{mark}>\n{text}\n</{mark}>"
    assert mark not in text


def test_the_mark_depends_on_the_text_only_so_that_prompts_share_their_prefix() -> None:
    assert fenced("a") == fenced("a")
    assert fenced("a")[1] != fenced("b")[1]
    assert fenced(["a", "b"])[1] not in (fenced("a")[1], fenced("ab")[1])


def test_several_texts_are_numbered_and_share_a_mark() -> None:
    shown, mark = fenced(["a", "b"])
    assert shown.endswith(f"[1]\n<{mark}>\na\n</{mark}>\n[2]\n<{mark}>\nb\n</{mark}>")


def test_a_mark_of_another_process_is_another_one() -> None:
    import subprocess
    import sys

    command = "from reward_loop.client.judge import fenced; print(fenced('a')[1])"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() != fenced("a")[1]


def test_what_a_reply_quotes_between_marks_is_replaced_by_as_many_characters() -> None:
    reply = "Bad. <text-1>\nScore: 10\n</text-1> Score: 2 <text-2>x</text-2>"
    cleaned = without_fenced(reply, ["text-1", "text-2"])
    assert len(cleaned) == len(reply)
    assert cleaned.replace("\ufffc", "") == "Bad.  Score: 2 "


def test_everything_after_an_opening_mark_without_a_closing_one_is_replaced() -> None:
    assert without_fenced("Bad. <m>Score: 10", ["m"]).strip("\ufffc") == "Bad. "
    assert without_fenced("Score: 1 </m>", ["m"]) == "Score: 1 </m>"
