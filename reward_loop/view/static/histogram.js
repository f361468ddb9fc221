/** Histograms, drawn as SVG. */

import { el, svg } from "./dom.js";
import { count, number } from "./format.js";

const [WIDTH, HEIGHT, AXIS] = [320, 110, 18];

/**
 * Returns a figure with the histogram.
 * @param {string} title
 * @param {{edges: number[], counts: number[]}} histogram
 * @param {function(number): string} format: an edge as text
 */
export function histogram(title, { edges, counts }, format = number) {
  const most = Math.max(1, ...counts);
  const width = WIDTH / Math.max(1, counts.length);
  const bars = counts.map((amount, i) => {
    const height = (HEIGHT * amount) / most;
    const name = `${format(edges[i])} to ${format(edges[i + 1])}: ${count(amount)}`;
    return svg(
      "rect",
      { x: i * width + 0.5, y: HEIGHT - height, width: Math.max(0.5, width - 1), height, rx: 1.5 },
      svg("title", {}, name),
    );
  });
  const label = (index, x, anchor) =>
    svg("text", { x, y: HEIGHT + AXIS - 3, "text-anchor": anchor }, format(edges[index]));
  const middle = Math.floor((edges.length - 1) / 2);
  const labels = edges.length
    ? [label(0, 0, "start"), label(middle, middle * width, "middle"), label(edges.length - 1, WIDTH, "end")]
    : [];
  return el(
    "figure",
    { class: "histogram" },
    el("figcaption", {}, el("h3", {}, title)),
    counts.length
      ? svg(
          "svg",
          { viewBox: `0 0 ${WIDTH} ${HEIGHT + AXIS}`, role: "img", "aria-label": title },
          svg("line", { x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT }),
          bars,
          labels,
        )
      : el("p", { class: "hint" }, "No values."),
  );
}
