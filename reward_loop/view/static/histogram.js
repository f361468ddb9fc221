/** Histograms, drawn as SVG. */

import { el, svg } from "./dom.js";
import { count, number } from "./format.js";

const [WIDTH, HEIGHT, AXIS] = [320, 110, 18];

/**
 * Returns a figure with the histogram.
 * @param {string} title
 * @param {{edges: number[], counts: number[], centers: ?number[]}} histogram: with centers, each bar is one value
 * @param {function(number): string} format: an edge as text
 */
export function histogram(title, { edges, counts, centers }, format = number) {
  const most = Math.max(1, ...counts);
  const width = WIDTH / Math.max(1, counts.length);
  const bars = counts.map((amount, i) => {
    const height = (HEIGHT * amount) / most;
    const range = centers ? format(centers[i]) : `${format(edges[i])} to ${format(edges[i + 1])}`;
    const name = `${range}: ${count(amount)}`;
    return svg(
      "rect",
      { x: i * width + 0.5, y: HEIGHT - height, width: Math.max(0.5, width - 1), height, rx: 1.5 },
      svg("title", {}, name),
    );
  });
  const marks = centers ?? edges;
  const first = centers ? width / 2 : 0;
  const places = [...new Set([0, Math.floor((marks.length - 1) / 2), marks.length - 1])].filter((at) => at in marks);
  const anchor = (at) => (centers ? "middle" : at === 0 ? "start" : at === marks.length - 1 ? "end" : "middle");
  const labels = places.map((at) =>
    svg("text", { x: first + at * width, y: HEIGHT + AXIS - 3, "text-anchor": anchor(at) }, format(marks[at])),
  );
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
