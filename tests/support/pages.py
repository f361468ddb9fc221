"""The pages of the documentation: their order, and the blocks of code in them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.support.gsm8k import ROOT

_NAVIGATION = re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)

CHINESE = {"README.zh.md": "README.md", "docs/zh/verl.md": "docs/verl.md"}
"""The pages in Chinese, each with the English page that it translates. Only the code of the latter runs."""

PAGES = {
    page: (ROOT / page).read_text()
    for page in ("README.md", *(f"docs/{name}" for name in _NAVIGATION))
    if page not in CHINESE
}
"""The text of each page, in the order of the navigation of the site."""


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The name of the file that a reader saves the block in: the comment in its first line."""
        named = re.match(r"# ([\w/]+\.\w+)\n", self.text)
        return named[1] if named and self.language in ("python", "yaml") else None

    @property
    def commands(self) -> list[tuple[str, list[str]]]:
        """The commands of the block, each with the lines that it prints according to the page.

        In a ``console`` block commands follow ``$``; in a ``bash`` block every line is a command.
        """
        found: list[tuple[str, list[str]]] = []
        if self.language in ("console", "bash"):
            prompt = "$ " if self.language == "console" else ""
            for line in re.sub(r" *\\\n *", " ", self.text).splitlines():
                if line.startswith(prompt) and line.strip():
                    found.append((line.removeprefix(prompt), []))
                elif found:
                    found[-1][1].append(line)
        return found


def blocks(page: str) -> list[Block]:
    """Return the blocks of code of a page, in order."""
    found = re.findall(r"^( *)```([\w-]*)\n(.*?)^\1```$", PAGES[page], flags=re.DOTALL | re.MULTILINE)
    return [Block(language, text) for _, language, text in found]
