"""The pages of the viewer in a real browser, with the real server, on records of the library's own writer."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from reward_loop import RewardSample
from reward_loop.records.trainer_events import HealthRecords
from tests.support import made_up
from tools.browser import CHROMIUM, browser, server
from tools.example_run import WORDS_OF_THE_JUDGE, score, step_samples, write_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytest.importorskip("playwright", reason="the viewer is tested with Playwright")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: install the package chromium"),
]

STEPS, GROUPS, SIZE = 4, 6, 4
AGENT_STEP, HOSTILE_STEP, MANY_STEP, LATER_STEP, UNGROUPED_STEP, RETRIED_STEP = 30, 50, 60, 70, 40, 45
MANY_GROUPS = 10_000
ATTACK = "<img src=x onerror=hacked=1><script>hacked=1</script><b>bold</b>"


def hostile(uid: str, text: str, **fields: Any) -> RewardSample:
    fields = {"data_source": ATTACK, "ground_truth": ATTACK, "group": ATTACK, "step": HOSTILE_STEP, **fields}
    fields["extra_info"] = {"question": ATTACK}
    return RewardSample(text, uid=uid, prompt=[{"role": ATTACK, "content": text[:1000]}], **fields)


HOSTILE = (
    hostile(f"html {ATTACK}", f"no idea {ATTACK}\n[click](javascript:hacked=1) `{ATTACK}` **{ATTACK}**"),
    hostile("ansi", "no idea \x1b[31mred\x1b[0m \x00 \x07 and \u202egnp.exe"),
    hostile("surrogate", "no idea \ud800 and \udfff"),
    hostile("large", "no idea " + "word <i> " * 560_000 + "THE END"),
)


EXPECTED = {
    "html": ATTACK,
    "ansi": "\u241b[31mred\u241b[0m \u2400 \u2407 and \u27e8U+202E\u27e9gnp.exe",
    "surrogate": r"\ud800",
}
"""What the page shows of them."""


def many_groups() -> Iterator[dict[str, Any]]:
    """Rows of 10,000 groups, as the writer writes them."""
    row = {"version": 1, "kind": "sample", "time": 1.8e9, "step": MANY_STEP, "outcome": "scored", "validate": False}
    for group in range(MANY_GROUPS):
        for i in range(2):
            reward = (group % 7) / 7 * i
            names = {"id": f"many-{group}-{i}", "uid": f"many-{group}-{i}", "group": f"many-{group:05}"}
            yield {**row, **names, "score": reward, "reward": reward, "masked": False, "components": {}, "judges": []}


def rollouts() -> list[RewardSample]:
    """Conversations of an agent with a tool, in two groups."""
    found = []
    for group, size in (("small", 2), ("large", 4)):
        for i in range(size):
            code = f"print({i})\n" + "\n".join(f"line {n}" for n in range(3 + 20 * i))
            call = {"id": "c", "function": {"name": "run_code", "arguments": json.dumps({"code": code})}}
            completion = [
                {"role": "assistant", "reasoning_content": f"I compute it, attempt {i}.", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": f"stdout: {i} {ATTACK}\n" + "output\n" * (1 + 30 * i)},
                {"role": "assistant", "content": f"{ATTACK} **Step {i}.**" + "\nand so on" * i},
            ]
            prompt = [{"role": "system", "content": "You have a tool."}, {"role": "user", "content": f"Task {group}"}]
            names: dict[str, Any] = {"uid": f"{group}-{i}", "group": group, "prompt": prompt, "step": AGENT_STEP}
            extra = {"question": "?", "completion": completion}
            found.append(RewardSample(f"Step {i}.", ground_truth="3", extra_info=extra, **names))
    return found


EXPLANATION = " ".join(f"reason-{number}" for number in range(20))


def retried() -> dict[str, Any]:
    """A row of a sample whose function was called twice, with a text among its components."""
    calls = [
        {"function": "compute_score (judge.py)", "start_s": start, "queue_s": 0.0, "wait_s": 0.0, "work_s": 2.0} | error
        for start, error in ((0.0, {"error": "RewardModelError"}), (40.0, {"error": None}))
    ]
    components = {"a_note": EXPLANATION, "acc": 1.0, "grade": "B"}
    names = {"id": "retried-0", "uid": "retried", "group": None, "step": RETRIED_STEP}
    row = {"version": 1, "kind": "sample", "time": 1.8e9, "validate": False, "outcome": "scored", "masked": False}
    return {**row, **names, "score": 1.0, "reward": 1.0, "attempts": 2, "calls": calls, "components": components}


def in_a_thread(function: Any, *args: Any, **options: Any) -> None:
    """Call a function that starts an event loop: Playwright's own runs in the thread of the tests."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(function, *args, **options).result()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("view") / "rewards"
    in_a_thread(write_run, folder, steps=STEPS, groups=GROUPS, size=SIZE)
    in_a_thread(asyncio.run, score(folder, list(HOSTILE)))
    in_a_thread(asyncio.run, score(folder, rollouts()))
    warning = {"monitor": "repetition", "message": f"jump {ATTACK}", "value": 0.5, "threshold": 0.3}
    health = HealthRecords(folder)
    health.write_warnings([{"step": AGENT_STEP, "since": AGENT_STEP - 1, **warning}])
    assert health.flush(60.0)
    ungrouped = RewardSample("no idea", uid="ungrouped", step=UNGROUPED_STEP, extra_info={"question": "?"})
    in_a_thread(asyncio.run, score(folder, [ungrouped]))
    (folder / "retried.jsonl").write_text(json.dumps(retried()) + "\n")
    (folder / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in many_groups()))
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with server(folder) as address:
        yield address


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture
def page(chromium: Browser, address: str) -> Iterator[Page]:
    """A page with the viewer. The test fails if its console has an error, which a violated CSP is, too."""
    page = chromium.new_page(viewport={"width": 1366, "height": 860}, base_url=address)
    page.set_default_timeout(20_000)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    yield page
    assert page.evaluate("typeof hacked") == "undefined"
    page.close()
    assert problems == []


def open_view(page: Page, view: str) -> None:
    page.goto(f"/#/{view}")
    page.wait_for_selector("h1")


def column(page: Page, field: str) -> list[str]:
    """Return the texts of a column of the table of samples, of the rows that are drawn."""
    return page.locator(f".pane:not(.groups) .tabulator-cell[tabulator-field='{field}']").all_inner_texts()


def wait_for_total(page: Page, expected: int, pane: str = "Samples") -> None:
    page.locator(f"section[aria-label='{pane}'] .total", has_text=re.compile(f"^{expected:,}$")).wait_for()


def open_first_sample(page: Page, view: str) -> str:
    """Open the first sample of a table, and return its title."""
    open_view(page, view)
    page.locator(".pane:not(.groups) .tabulator-row a").first.click()
    page.wait_for_selector(".view.sample h1")
    return page.locator("h1").inner_text()


def test_the_run_shows_charts_and_leads_to_a_step(page: Page) -> None:
    open_view(page, "run")
    titles = page.locator(".chart h3").all_inner_texts()
    assert {"Reward", "Components, mean", "Judge time of a sample", "Groups without a signal"} <= set(titles)
    assert page.locator(".chart canvas").count() == len(titles)
    page.get_by_role("link", name="2", exact=True).click()
    page.wait_for_selector("h1:has-text('Step 2')")
    assert page.title() == "Step 2 · reward_loop"


def test_the_table_of_samples_sorts_and_the_link_keeps_the_order(page: Page) -> None:
    open_view(page, "step/2")
    wait_for_total(page, GROUPS * SIZE)
    for direction in ("desc", "asc"):
        with page.expect_response(lambda response: "sort=reward" in response.url):
            page.locator(".tabulator-col[tabulator-field=reward]").click()
        page.wait_for_url(re.compile(f"order={direction}"))
        page.wait_for_selector(f".tabulator-col[tabulator-field=reward][aria-sort={direction}ending]")
    page.reload()
    wait_for_total(page, GROUPS * SIZE)
    page.wait_for_selector(".tabulator-cell[tabulator-field=reward]")
    rewards = [float(text) for text in column(page, "reward") if text[:1].isdecimal()]
    assert len(rewards) > 5
    assert rewards == sorted(rewards)


def test_filters_and_search_narrow_the_table(page: Page) -> None:
    open_view(page, "step/1")
    wait_for_total(page, GROUPS * SIZE)
    page.get_by_label("Lowest reward").fill("0.5")
    page.wait_for_url(re.compile("min_reward=0.5"))
    page.locator("section[aria-label=Samples] .total", has_text=re.compile("^(?!24$)")).wait_for()
    assert all(float(text) >= 0.5 for text in column(page, "reward"))
    page.get_by_label("Lowest reward").fill("")
    wait_for_total(page, GROUPS * SIZE)
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("no such words anywhere")
    wait_for_total(page, 0)
    page.wait_for_selector("text=No sample matches these filters.")


def test_a_component_or_a_length_has_a_range(page: Page) -> None:
    open_view(page, "step/1")
    wait_for_total(page, GROUPS * SIZE)
    page.get_by_label("Field of the range").select_option("acc")
    page.get_by_label("Highest acc").fill("0")
    page.wait_for_url(re.compile("max.components.acc=0"))
    page.locator("section[aria-label=Samples] .total", has_text=re.compile("^(?!24$)")).wait_for()
    assert set(column(page, "components.acc")) == {"no"}
    page.get_by_label("Field of the range").select_option("Tokens")
    page.get_by_label("Lowest Tokens").fill("100000")
    wait_for_total(page, 0)
    page.reload()
    wait_for_total(page, 0)
    page.get_by_role("button", name="response_length ≥ 100000").click()
    page.get_by_role("button", name="components.acc ≤ 0").click()
    wait_for_total(page, GROUPS * SIZE)


def test_a_group_narrows_the_table_and_is_marked(page: Page) -> None:
    open_view(page, "step/3")
    row = page.locator(".groups .tabulator-row", has_text="s3-p0")
    assert "equal" in row.inner_text()
    row.click()
    wait_for_total(page, SIZE)
    page.wait_for_selector(".groups .tabulator-row.chosen")
    page.get_by_title("Remove this filter").click()
    wait_for_total(page, GROUPS * SIZE)


def test_a_sample_shows_the_words_of_the_judge_with_its_verdict_marked(page: Page) -> None:
    open_first_sample(page, "step/4?sort=reward&order=desc")
    reply = page.locator(".exchange .reply")
    assert WORDS_OF_THE_JUDGE in reply.inner_text()
    assert "gave three points" in reply.inner_text()
    assert page.locator(".exchange .tag.verdict").inner_text().startswith("verdict ")
    assert "You are a strict teacher" in page.locator(".exchange .message").first.inner_text()
    assert "acc" in page.locator("aside").inner_text()
    page.get_by_text("Complete answer of the server").click()
    page.locator(".exchange details[open]", has_text='"choices"').wait_for()


def test_keys_go_through_the_samples_and_show_help(page: Page) -> None:
    first = open_first_sample(page, "step/2?sort=uid&order=asc")
    page.keyboard.press("j")
    page.locator("h1", has_not_text=first).wait_for()
    page.keyboard.press("k")
    page.locator("h1", has_text=first).wait_for()
    page.keyboard.press("?")
    assert "Next sample" in page.get_by_role("dialog").inner_text()
    page.keyboard.press("Escape")
    page.keyboard.press("u")
    page.wait_for_selector("h1:has-text('Step 2')")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.type") == "search"


def test_a_rollout_shows_its_turns_with_calls_beside_their_results(page: Page) -> None:
    open_view(page, f"step/{AGENT_STEP}?where.uid=large-3")
    page.get_by_role("link", name="large-3").click()
    page.wait_for_selector(".view.sample .tool")
    assert page.locator(".texts .role").all_inner_texts() == ["system", "user", "assistant", "assistant"]
    call, result = page.locator(".tool > .block").all()
    assert call.inner_text().startswith("call of run_code")
    assert result.locator("summary").inner_text() == "result · 93 lines"
    assert result.locator("pre").count() == 0
    result.locator("summary").click()
    assert f"stdout: 3 {ATTACK}" in result.locator("pre").inner_text()
    assert call.bounding_box()["x"] < result.bounding_box()["x"]  # type: ignore[index]
    assert page.locator(".block.reasoning").get_attribute("open") is None


def test_the_timeline_zooms(page: Page) -> None:
    open_view(page, "timeline/2")
    page.wait_for_selector("canvas")
    shown = page.locator("output")
    whole = shown.inner_text()
    assert whole.startswith("0 s to ")
    page.get_by_role("button", name="Zoom in").click()
    assert shown.inner_text() != whole
    page.keyboard.press("0")
    assert shown.inner_text() == whole
    box = page.locator("canvas").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 400, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 700, box["y"] + 60)
    page.mouse.up()
    assert shown.inner_text() != whole
    page.mouse.dblclick(box["x"] + 500, box["y"] + 10)
    assert shown.inner_text() == whole


def test_judges(page: Page) -> None:
    open_view(page, "judges")
    card = page.locator(".judge", has_text="judge-7b").first
    card.locator("canvas").nth(2).wait_for()
    assert float(page.locator("table.plain tbody tr").first.locator("td").last.inner_text().replace(",", "")) > 0
    page.locator("table.plain").get_by_role("link").first.click()
    page.locator(".view.sample h1").wait_for()


def test_a_sample_shows_its_calls_and_its_texts_among_the_components(page: Page) -> None:
    open_first_sample(page, f"step/{RETRIED_STEP}")
    page.get_by_text("a_note").click()
    page.locator(".part details[open]", has_text=EXPLANATION).wait_for()
    cards = page.locator("aside")
    assert "reason-1" not in cards.inner_text()
    assert "grade" in cards.inner_text()
    calls = page.locator(".card", has_text="Calls of the function").inner_text()
    assert calls.split("\n")[1:] == ["Attempt 1", "RewardModelError · 2.00 s", "Attempt 2, at 40.0 s", "2.00 s"]


def test_hostile_content_stays_text_on_dark_pages(page: Page) -> None:
    page.emulate_media(color_scheme="dark")
    open_view(page, "run")
    open_view(page, f"step/{HOSTILE_STEP}")
    wait_for_total(page, len(HOSTILE))
    assert ATTACK in page.locator(".groups .tabulator-row").first.inner_text()
    for words in ("html", "ansi", "surrogate"):
        open_view(page, f"step/{HOSTILE_STEP}")
        page.locator(".tabulator-row a", has_text=words).click()
        page.wait_for_selector(f".view.sample h1:has-text('{words}')")
        assert page.locator(".view :is(img, script, b)").count() == 0
        shown = page.locator(".texts").inner_text()
        assert EXPECTED[words] in shown


def test_a_text_of_5_mb_is_cut_with_buttons_for_the_rest(page: Page) -> None:
    open_view(page, f"step/{HOSTILE_STEP}")
    page.locator(".tabulator-row a", has_text="large").click()
    page.wait_for_selector("h1:has-text('large')")
    response = page.locator(".part", has_text="Response").locator("pre")
    assert len(response.inner_text()) == 20_000
    page.get_by_role("button", name="more").first.click()
    assert len(response.text_content() or "") == 220_000
    page.get_by_role("button", name="Show everything").first.click()
    assert response.evaluate("pre => pre.textContent.endsWith('THE END')")


def test_ten_thousand_groups_draw_only_what_is_in_view(page: Page) -> None:
    open_view(page, f"step/{MANY_STEP}")
    wait_for_total(page, MANY_GROUPS, "Groups")
    wait_for_total(page, 2 * MANY_GROUPS)
    rows = page.locator(".groups .tabulator-row")
    rows.nth(5).wait_for()
    assert rows.count() < 100
    with page.expect_response(lambda response: "api/groups" in response.url and "offset=100" in response.url):
        page.locator(".groups .tabulator-tableholder").evaluate("table => table.scrollTo(0, table.scrollHeight)")
    assert rows.count() < 100


def test_the_page_follows_a_run(page: Page, folder: Path) -> None:
    open_view(page, "run")
    assert page.get_by_role("link", name=str(LATER_STEP), exact=True).count() == 0
    in_a_thread(asyncio.run, score(folder, step_samples(LATER_STEP, groups=2, size=2, steps=LATER_STEP)))
    page.get_by_role("link", name=str(LATER_STEP), exact=True).wait_for()
    page.wait_for_selector("#status.live")


def test_a_view_or_a_sample_that_does_not_exist(page: Page) -> None:
    open_view(page, "run")
    page.goto("/#/nonsense")
    page.wait_for_selector("text=Unknown page")


def test_a_scored_file_has_an_overview(tmp_path: Path, chromium: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [made_up.row(f"line {i}", 0.0, 1.0 + i, step=None, reward=float(i % 3)) for i in range(9)]
    failed = {"outcome": "failed", "score": None, "reward": None, "error": f"sample x: raised {ATTACK}"}
    made_up.write(tmp_path / "scored", [], [*rows, made_up.row("line 9", 0.0, 0.5, step=None, **failed)])
    shutil.rmtree(tmp_path / "scored" / "events")
    problems: list[str] = []
    with server(tmp_path / "scored") as address:
        page = chromium.new_page(base_url=address)
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.goto("/#/run")
        page.get_by_role("heading", name="Causes of failures").wait_for()
        assert page.get_by_role("heading", name="Outcomes").count() == 1
        assert page.get_by_role("link", name="Timeline").count() == 0
        for cell in page.locator("td", has_text="raised").all():  # the cause, and the first error
            assert ATTACK in cell.inner_text()
        if target := os.environ.get("SCREENSHOT"):
            page.screenshot(path=target, full_page=True)
        page.locator("td a", has_text="raised").first.click()
        page.wait_for_selector(".view.sample h1")
        page.close()
    assert problems == []


def test_training_and_validation_are_apart_on_every_page(
    tmp_path: Path, chromium: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = []
    for i, verdict in enumerate([1, 2, 2, 4, 10]):
        judge = {"id": f"e{i}", "model": "grader", "url": "u", "seconds": 1.0, "score": verdict}
        silent = {"id": f"s{i}", "model": "silent", "url": "v", "seconds": 1.0, "unscored": "no verdict"}
        rows.append(made_up.row(f"a_{i}", 0.0, 1.0, step=1, reward=10.0, judges=[judge, silent]))
    rows.append(made_up.row("ahead_0", 0.0, 1.0, step=None, reward=10.0, judges=[{**rows[0]["judges"][0], "id": "e9"}]))
    rows += [made_up.row(f"v{i}_0", 0.0, 1.0, step=1, reward=0.5, validate=True) for i in range(3)]
    made_up.write(tmp_path / "run", [], rows)
    problems: list[str] = []

    def figure(name: str) -> str:
        return page.locator(".figures > *", has_text=re.compile(f"^{name}")).first.inner_text()

    with server(tmp_path / "run") as address:
        page = chromium.new_page(viewport={"width": 1366, "height": 1000}, base_url=address)
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto("/#/run")
        page.get_by_role("link", name="Validation").wait_for()
        assert re.search(r"\b6\b", figure("Samples"))
        assert "10.000" in figure("Reward, last step")
        page.get_by_role("link", name="Validation").click()
        page.locator(".figures", has_text="0.500").wait_for()  # the page is empty while its data is on the way
        assert re.search(r"\b3\b", figure("Samples"))

        page.goto("/#/samples")
        page.wait_for_selector("text=6 samples of all steps")
        page.wait_for_selector(".pane.groups .tabulator-row")
        assert page.locator(".pane.groups .tabulator-row").count() == 2
        page.get_by_role("link", name="Validation").click()
        page.wait_for_selector("text=3 samples of all steps")
        page.wait_for_selector("text=v0")
        assert page.locator(".pane.groups .tabulator-row").count() == 3
        if target := os.environ.get("SCREENSHOT"):
            page.screenshot(path=f"{target.removesuffix('.png')}-samples.png", full_page=True)
        page.locator(".pane.groups .tabulator-row", has_text="v0").click()
        page.wait_for_selector("h1:has-text('Step 1') .tag:has-text('validation')")
        page.wait_for_selector(".pane:not(.groups) .tabulator-row:has-text('v0_0')")

        page.goto("/#/judges")
        page.locator(".judge", has_text="grader").wait_for()
        without = page.locator(".judge", has_text="silent").locator("figure", has_text="Scores by step")
        assert "No values." in without.inner_text()
        assert without.locator("canvas").count() == 0
        # The samples that no step has trained on yet are not in the charts.
        assert "step 1" in page.locator(".judge", has_text="grader").locator("figure").first.inner_text()
        if target:
            page.screenshot(path=f"{target.removesuffix('.png')}-judges.png", full_page=True)
        page.get_by_role("link", name="Validation").click()
        page.wait_for_selector("text=No requests to judges")
        page.close()
    assert problems == []
