"""Draws a training step with and without overlap, from the figures of a benchmark.

python -m benchmarks.pipeline --only verl | tail -n 1 > figures.json
python tools/draw_overlap.py figures.json docs/overlap.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.sax.saxutils import escape

LEFT, WIDTH, BAR = 150, 640, 26
COLOURS = {"generation": "#4c78a8", "training": "#54a24b", "judging": "#f58518"}
TEXT = "#6e7781"  # readable on a light and on a dark page


def draw(figures: dict) -> str:
    """Return the drawing as SVG: two steps of each trainer, with the seconds of each phase, and of judging beside them.

    Args:
        figures: the JSON line of the benchmark.
    """
    phases, judging = figures["verl_phases_s"], figures["verl_judging_s"]
    verl, ours = phases["verl"], phases["both"]
    verl_step, our_step = figures["verl_step_s"]["verl"], figures["verl_step_s"]["both"]
    alone = ours["generation"]  # verl's own figure contains the judging
    seconds = 2 * verl_step
    shapes: list[str] = []

    def bar(row: int, start: float, length: float, phase: str) -> None:
        x, width, y = LEFT + start / seconds * WIDTH, length / seconds * WIDTH, 34 + row * (BAR + 8)
        shapes.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" rx="3" fill="{COLOURS[phase]}"/>'
            f'<text x="{x + width / 2:.1f}" y="{y + 17}" text-anchor="middle" fill="white">{length:.1f}</text>'
        )

    def label(row: float, text: str, x: float = 0, anchor: str = "start") -> None:
        y = 34 + row * (BAR + 8) + 17
        shapes.append(f'<text x="{x}" y="{y:.0f}" text-anchor="{anchor}" fill="{TEXT}">{escape(text)}</text>')

    label(0, "verl, sync")
    label(2, "reward_loop")
    label(3, "  judges, meanwhile")
    for step in (0, 1):
        start = step * verl_step
        bar(0, start, alone, "generation")
        bar(0, start + alone, verl["generation"] - alone, "judging")
        bar(0, start + verl["generation"], verl["training"], "training")
        start = step * our_step
        bar(2, start, ours["generation"], "generation")
        bar(2, start + ours["generation"], ours["training"], "training")
        bar(3, start, judging, "judging")
    for row, step in ((1, verl_step), (4, our_step)):
        label(row - 0.1, f"2 steps: {2 * step:.1f} s", LEFT + 2 * step / seconds * WIDTH, "end")
    x = LEFT
    for phase in ("generation", "judging", "training"):
        shapes.append(f'<rect x="{x}" y="6" width="14" height="14" rx="2" fill="{COLOURS[phase]}"/>')
        shapes.append(f'<text x="{x + 20}" y="18" fill="{TEXT}">{phase}</text>')
        x += 110
    height = 34 + 5 * (BAR + 8)
    title = "Two training steps: verl's mode sync, and reward_loop with both overlaps"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 10} {height}" '
        f'font-family="sans-serif" font-size="13" role="img">'
        f"<title>{title}</title>{''.join(shapes)}</svg>\n"
    )


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(draw(json.loads(source.read_text())))
