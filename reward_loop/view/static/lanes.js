/** The layout of a timeline: spans of a lane that overlap get rows below each other. */

const HEIGHTS = [
  [4, 22],
  [10, 15],
  [24, 9],
  [64, 5],
  [140, 3],
];
const MOST_HEIGHT = 260;
const GAP = 14;

/**
 * Returns the lanes with their place: `{name, kind, top, height, rowHeight, spans}`, each span with its `row`.
 * @param {Object[]} lanes: of api/timeline
 * @param {number} top: of the first lane, in pixels
 */
export function layOut(lanes, top) {
  return lanes.map((lane) => {
    const { spans, rows } = packed(lane.spans);
    const rowHeight = HEIGHTS.find(([most]) => rows <= most)?.[1] ?? MOST_HEIGHT / rows;
    const found = { ...lane, spans, top, rowHeight, height: Math.max(22, rows * rowHeight) };
    top += found.height + GAP;
    return found;
  });
}

/** Returns the spans with the first row that is free at their start, and the number of rows. */
function packed(spans) {
  const ends = [];
  const sorted = [...spans].sort((a, b) => a.start - b.start || b.end - a.end);
  const placed = sorted.map((span) => {
    let row = ends.findIndex((end) => end <= span.start);
    if (row < 0) row = ends.length;
    ends[row] = span.end;
    return { ...span, row };
  });
  return { spans: placed, rows: Math.max(1, ends.length) };
}

/** Returns the times of the ticks between two times, at most about `most`. */
export function ticks(from, to, most) {
  const rough = (to - from) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let i = Math.ceil(from / step); i * step <= to; i += 1) found.push(Number((i * step).toPrecision(12)));
  return found;
}
