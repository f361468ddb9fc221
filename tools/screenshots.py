"""Takes the pictures of the viewer in docs/images, of an example run, in a headless Chromium.

python -m tools.screenshots [NAME...]
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from tools.browser import browser, server
from tools.example_run import write_run

if TYPE_CHECKING:
    from playwright.sync_api import Page

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SIZE = {"width": 1280, "height": 800}
TALL = {"width": 1280, "height": 1280}
STEP = 14
BEST = f"step/{STEP}?sort=reward&order=desc"


def show(page: Page, view: str, ready: str) -> None:
    page.goto(f"/#/{view}")
    page.locator(ready).first.wait_for()


def open_sample(page: Page) -> None:
    page.set_viewport_size(TALL)
    show(page, BEST, ".pane:not(.groups) .tabulator-row a")
    page.locator(".pane:not(.groups) .tabulator-row a").first.click()
    page.locator(".exchange").first.wait_for()


PICTURES = {
    "viewer-run": ("light", lambda page: show(page, "run", ".chart canvas")),
    "viewer-step": ("light", lambda page: show(page, BEST, ".tabulator-row")),
    "viewer-sample": ("light", open_sample),
    "viewer-timeline": ("light", lambda page: show(page, f"timeline/{STEP}", "canvas")),
    "viewer-judges": ("dark", lambda page: show(page, "judges", ".judge canvas")),
}


def save(picture: bytes, path: Path) -> None:
    """Save a picture with 256 colours, which takes a third of the size."""
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_run(Path(temporary) / "checkpoints" / "rewards", steps=20, groups=12, size=8)
        with server(folder) as address, browser() as chromium:
            for name in sys.argv[1:] or PICTURES:
                scheme, prepare = PICTURES[name]
                page = chromium.new_page(viewport=SIZE, base_url=address, color_scheme=scheme)
                prepare(page)
                page.mouse.move(0, 0)
                page.wait_for_timeout(500)  # the last drawing
                save(page.screenshot(animations="disabled"), IMAGES / f"{name}.png")
                print(f"{name}.png: {(IMAGES / f'{name}.png').stat().st_size / 1000:.0f} kB")
                page.close()


if __name__ == "__main__":
    main()
