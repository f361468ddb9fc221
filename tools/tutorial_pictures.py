"""Takes the pictures of the tutorials in docs/images: the viewer, with records that the code of the tutorials writes.

python -m tools.tutorial_pictures
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reward_loop import NaiveRewardLoopManager, RewardLoopConfig, RewardSample, load_function
from reward_loop.records import records
from reward_loop.testing import FakeJudge, Status
from tools.browser import browser, server
from tools.screenshots import IMAGES, save, show

if TYPE_CHECKING:
    from playwright.sync_api import Page

DOCS = Path(__file__).parents[1] / "docs"
QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart" / "rollouts.jsonl"
WORST = "step/10?sort=reward&order=asc"
"""The last step of the run with a hacked reward, the lowest rewards first."""


def code(page: str, has: str) -> str:
    """Return the Python block of a page that contains a text."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)
    return next(block for block in blocks if has in block)


def hacked(folder: Path) -> None:
    """Run the script of the tutorial, which writes the records of a run."""
    (folder / "hacked.py").write_text(code("tutorial-reward-hacking.md", "I have verified this"))
    subprocess.run([sys.executable, "hacked.py"], cwd=folder, check=True)


def first(folder: Path) -> None:
    """Score the file of the tutorial with its function."""
    (folder / "reward.py").write_text(code("tutorial.md", "# reward.py"))
    command = [sys.executable, "-m", "reward_loop", "score", "reward.py:compute_score", str(QUICKSTART)]
    subprocess.run([*command, "-o", "rewards"], cwd=folder, check=True)


def with_api(folder: Path) -> None:
    """Score a sample with the judge on an API, which refuses the first request."""
    os.environ.setdefault("OPENAI_API_KEY", "a key for this picture")
    (folder / "api_judge.py").write_text(code("tutorial.md", "# api_judge.py"))
    sample = RewardSample("It is 4.", extra_info={"question": "What is 2 + 2?"}, uid="a", prompt="What is 2 + 2?")
    with FakeJudge("The sum is right, and the answer is short.\n\nScore: 9", model="gpt-5-mini", latency=0.2) as judge:
        judge.script(Status(429, retry_after=1))
        asyncio.run(score(folder / "api_judge.py", [sample], {"service": judge.base_url}, folder / "rewards"))


def served(folder: Path) -> None:
    """Score a wrong and a right answer with the judge that is served in the run."""
    (folder / "judge.py").write_text(code("model-servers.md", "# judge.py"))
    question = "A tank holds 500 litres. A fifth leaks out. How much is left?"
    answers = ("A fifth of 500 is 100, so 400 litres are left.", "A fifth is 20, so 480 litres are left.")
    samples = [
        RewardSample(text, ground_truth="400", uid=f"answer-{i}", group="tank", prompt=question)
        for i, text in enumerate(answers)
    ]
    with FakeJudge(verdict, model="judge", latency=0.2) as judge:
        asyncio.run(score(folder / "judge.py", samples, {}, folder / "rewards", judge.address))


def verdict(body: Any) -> str:
    """Return the reply of the fake judge to the served judge's prompt."""
    if "400 litres" in body["messages"][-1]["content"].partition("solution:")[2]:
        return "A fifth of 500 is 100, and 500 - 100 = 400, which is the reference answer.\n\nVerdict: correct"
    return "The student takes 20 for a fifth of 500. The reference answer is 400.\n\nVerdict: incorrect"


async def score(
    function: Path, samples: Sequence[RewardSample], kwargs: dict[str, Any], folder: Path, address: str | None = None
) -> None:
    """Score samples with the function ``compute_score`` of a file, and record them."""
    manager = NaiveRewardLoopManager(
        RewardLoopConfig(log_dir=str(folder), retry={"max_attempts": 5}),
        compute_score=partial(load_function(f"{function}:compute_score"), **kwargs),
        reward_router_address=address,
    )
    for sample in samples:
        await manager.run_single(sample)
    await asyncio.to_thread(records(folder).flush)
    manager.close()


def open_first(page: Page, view: str) -> None:
    """Open the first sample of a table."""
    show(page, view, ".pane:not(.groups) .tabulator-row a")
    page.locator(".pane:not(.groups) .tabulator-row a").first.click()
    page.locator(".exchange").first.wait_for()


Shot = tuple[int, Callable[["Page"], None]]
"""The height of a picture, and what opens its page."""

PICTURES: dict[Callable[[Path], None], dict[str, Shot]] = {
    hacked: {
        "tutorial-hacked-run": (505, lambda page: show(page, "run", ".chart canvas")),
        "tutorial-hacked-step": (600, lambda page: show(page, WORST, ".tabulator-row")),
    },
    first: {"tutorial-first": (600, lambda page: show(page, "samples", ".tabulator-row"))},
    with_api: {"tutorial-api": (1000, lambda page: open_first(page, "samples"))},
    served: {"tutorial-served": (1180, lambda page: open_first(page, "samples"))},
}


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for write, pictures in PICTURES.items():
        with tempfile.TemporaryDirectory() as temporary:
            write(Path(temporary))
            with server(Path(temporary) / "rewards") as address, browser() as chromium:
                for name, (height, prepare) in pictures.items():
                    page = chromium.new_page(viewport={"width": 1280, "height": height}, base_url=address)
                    prepare(page)
                    page.mouse.move(0, 0)
                    page.wait_for_timeout(500)  # the last drawing
                    save(page.screenshot(animations="disabled"), IMAGES / f"{name}.png")
                    page.close()


if __name__ == "__main__":
    main()
