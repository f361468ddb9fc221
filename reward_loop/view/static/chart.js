/** Charts over the training steps, drawn by uPlot. */

import uPlot from "./vendor/uplot-1.6.32/uPlot.esm.js";
import { el, property, withProperty } from "./dom.js";
import { count, number, short } from "./format.js";

/**
 * @typedef {Object} Series
 * @property {string} label
 * @property {Array<number|null>} values: one for each step
 * @property {boolean} [isDashed]: it may lie on another line
 * @property {boolean} [isEdge]: an edge of the band: no line of its own
 */

const HEIGHT = 176;
/** The smallest width of a vertical axis in pixels, so that the lines of most charts begin at the same place. */
const AXIS_WIDTH = 52;
const POINTS_UP_TO = 40;
const COLOURS = 8;
/** The distances of the labels of steps: whole numbers. */
const WHOLE = Array.from({ length: 12 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();

/**
 * A chart: a figure with its title, a legend with the values at the pointer or of the last step, and the lines.
 */
export class Chart {
  /**
   * @param {Object} options
   * @param {string} options.title
   * @param {function(number): string} [options.format]: a value as text
   * @param {boolean} [options.isStacked]: draw the series as areas on top of each other
   * @param {boolean} [options.isWide]: take two columns of the page
   * @param {number[]} [options.range]: the fixed range of the vertical axis
   * @param {function(number)} [options.onStep]: called with the step that was clicked
   */
  constructor({ title, format = number, isStacked = false, isWide = false, range = null, onStep = null }) {
    Object.assign(this, { format, isStacked, range, onStep, marks: [], shape: "" });
    this.legend = el("div", { class: "legend" });
    this.at = el("span", { class: "at" });
    this.canvas = el("div", { class: "canvas", role: "img", "aria-label": title });
    this.node = el(
      "figure",
      { class: isWide ? "chart wide" : "chart" },
      el("figcaption", {}, el("h3", {}, title), this.at),
      this.legend,
      this.canvas,
    );
    this.sizes = new ResizeObserver(() => this.plot?.setSize({ width: this.width, height: HEIGHT }));
    this.sizes.observe(this.canvas);
  }

  get width() {
    return Math.max(200, Math.floor(this.canvas.clientWidth));
  }

  /**
   * Shows data. The figure must be in the page.
   * @param {number[]} steps
   * @param {Series[]} series
   * @param {number[]} marks: steps to mark on the axis by a triangle
   */
  show(steps, series, marks = []) {
    this.steps = steps;
    this.series = series;
    this.marks = marks;
    const shape = JSON.stringify([steps.length > POINTS_UP_TO, ...series.map((one) => one.label)]);
    if (!series.some((one) => one.values.some((value) => value !== null))) {
      this.shape = "";
      this.plot?.destroy();
      this.plot = null;
      this.canvas.replaceChildren(el("p", { class: "hint" }, "No values."));
      this.showValues(null);
      return;
    }
    if (!this.plot) this.canvas.replaceChildren();
    const data = [steps, ...(this.isStacked ? stacked(series) : series.map((one) => one.values))];
    if (shape === this.shape) {
      const [[known], { min, max }] = [this.plot.data, this.plot.scales.x];
      this.plot.setData(data, min <= known[0] && max >= known.at(-1)); // a zoomed chart stays as it is
    } else {
      this.shape = shape;
      this.plot?.destroy();
      this.plot = new uPlot(this.options(), data, this.canvas);
    }
    this.showValues(null);
  }

  close() {
    this.sizes.disconnect();
    this.plot?.destroy();
  }

  options() {
    const hasPoints = this.steps.length <= POINTS_UP_TO;
    return {
      width: this.width,
      height: HEIGHT,
      padding: [8, 14, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "steps" }, y: false, points: { size: 7 }, drag: { x: true, y: false } },
      scales: { x: { time: false, range: padded }, y: { range: this.range ? () => this.range : vertical } },
      axes: [
        axis({ size: 30, incrs: WHOLE }),
        axis({
          size: axisWidth,
          values: (_, ticks) => ticks.map((tick) => short(this.format(tick))),
          ...(this.format === count ? { incrs: WHOLE } : {}),
        }),
      ],
      series: [{}, ...this.series.map((one, i) => line(one, i, hasPoints, this.isStacked))],
      bands: bands(this.series),
      hooks: {
        draw: [(plot) => drawMarks(plot, this.marks)],
        setCursor: [(plot) => this.showValues(plot.cursor.idx)],
        ready: [(plot) => this.listen(plot)],
      },
    };
  }

  listen(plot) {
    if (!this.onStep) return;
    let pressed = 0;
    plot.over.classList.add("clickable");
    plot.over.addEventListener("mousedown", (event) => (pressed = event.clientX));
    plot.over.addEventListener("click", (event) => {
      if (Math.abs(event.clientX - pressed) < 4 && plot.cursor.idx !== null) this.onStep(this.steps[plot.cursor.idx]);
    });
  }

  showValues(index) {
    const at = index ?? this.steps.length - 1;
    this.at.textContent = this.steps.length ? `step ${this.steps[at]}` : "";
    const entries = this.series.map((one, i) =>
      el(
        "span",
        { class: one.isEdge ? "entry edge" : "entry" },
        withProperty(el("i", {}), "--colour", colour(one, i)),
        one.label,
        el("b", {}, this.format(one.values[at] ?? null)),
      ),
    );
    this.legend.replaceChildren(...entries);
  }
}

/** Returns the colour of a series of a chart. */
function colour(series, index) {
  return property(series.isEdge ? "--edge" : `--series-${(index % COLOURS) + 1}`);
}

/** Returns the running sums of the series, the highest first, so that lower areas are drawn over it. */
function stacked(series) {
  return series.map((_, i) => series[i].values.map((_, at) => sum(series.slice(i).map((one) => one.values[at]))));
}

function sum(values) {
  return values.reduce((total, value) => total + (value ?? 0), 0);
}

function line(series, index, hasPoints, isStacked) {
  const stroke = colour(series, index);
  return {
    stroke: isStacked ? "transparent" : stroke,
    fill: isStacked ? stroke : undefined,
    width: series.isEdge || isStacked ? 0 : 1.75,
    points: { show: hasPoints && !series.isEdge && !isStacked, size: 4, fill: stroke },
    dash: series.isDashed ? [4, 5] : undefined,
    spanGaps: true,
  };
}

/** Returns the band between the two edges. */
function bands(series) {
  const edges = series.flatMap((one, i) => (one.isEdge ? [i + 1] : []));
  return edges.length === 2 ? [{ series: [edges[1], edges[0]], fill: property("--band") }] : [];
}

function axis(options) {
  return {
    stroke: property("--muted"),
    font: "11px system-ui, sans-serif",
    grid: { stroke: property("--grid"), width: 1 },
    ticks: { show: false },
    gap: 6,
    ...options,
  };
}

/** Returns the range of the steps; a single step is in the middle. */
function padded(_, min, max) {
  return min === max ? [min - 1, max + 1] : [min, max];
}

/** Returns the range of the vertical axis. If all values are 0, it is 0 to 1: uPlot's own range is 0 to 100. */
function vertical(_, min, max) {
  if (min === null) return [null, null];
  return min === 0 && max === 0 ? [0, 1] : uPlot.rangeNum(min, max, 0.1, true);
}

/** Returns the width of the vertical axis: its labels and the gap to the lines fit into it. */
function axisWidth(plot, labels, index) {
  const { font, gap } = plot.axes[index];
  plot.ctx.font = font[0];
  const widths = (labels ?? []).map((label) => plot.ctx.measureText(label).width / devicePixelRatio);
  return Math.ceil(Math.max(AXIS_WIDTH, gap + Math.max(0, ...widths)));
}

function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  const size = 5 * devicePixelRatio;
  ctx.save();
  ctx.fillStyle = property("--warn");
  for (const step of marks) {
    const x = plot.valToPos(step, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    const y = bbox.top + bbox.height;
    ctx.beginPath();
    ctx.moveTo(x, y - 1.6 * size);
    ctx.lineTo(x + size, y);
    ctx.lineTo(x - size, y);
    ctx.fill();
  }
  ctx.restore();
}
