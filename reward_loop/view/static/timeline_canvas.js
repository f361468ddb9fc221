/** The drawing of a timeline, with zoom, a tip at the pointer, and links to samples. */

import { el, property } from "./dom.js";
import { seconds, short, value } from "./format.js";
import { layOut, ticks } from "./lanes.js";
import { visible } from "./text.js";

const LEFT = 168;
const AXIS = 26;
const SHORTEST_S = 0.001;
const OTHER_STEP_ALPHA = 0.65;
const COLOURS = { rollout: "--lane-rollout", judge: "--lane-judge", trainer: "--lane-trainer" };

/** A canvas with the lanes of a step. Times are seconds from its start. */
export class TimelineCanvas {
  /**
   * @param {Object} timeline: the answer of api/timeline
   * @param {function(string)} onSample: called with the ID of a clicked sample
   * @param {function(number, number)} onRange: called with the shown range
   */
  constructor(timeline, onSample, onRange) {
    this.step = timeline.step;
    this.end = Math.max(SHORTEST_S, timeline.end - timeline.start);
    this.onSample = onSample;
    this.onRange = onRange;
    const shift = (span) => ({ ...span, start: span.start - timeline.start, end: span.end - timeline.start });
    this.lanes = layOut(
      timeline.lanes.map((lane) => ({ ...lane, spans: lane.spans.map(shift) })),
      AXIS + 12,
    );
    this.height =
      this.lanes.reduce((most, lane) => Math.max(most, lane.top + lane.height), AXIS) + 10;
    this.canvas = el("canvas", {
      tabindex: "0",
      role: "img",
      "aria-label": "Timeline of the step",
    });
    this.tip = el("div", { class: "tip", hidden: true });
    this.node = el("div", { class: "timeline-canvas" }, this.canvas, this.tip);
    this.listen();
    this.sizes = new ResizeObserver(() => this.draw());
    this.sizes.observe(this.node);
    this.show(0, this.end);
  }

  close() {
    this.sizes.disconnect();
  }

  /** Shows a range, within the step. */
  show(from, to) {
    const length = Math.min(this.end, Math.max(SHORTEST_S, to - from));
    this.from = Math.min(Math.max(0, from), this.end - length);
    this.to = this.from + length;
    this.onRange(this.from, this.to);
    this.draw();
  }

  /** Shows a range that is shorter (factor below 1) or longer, around a time. */
  zoom(factor, around = (this.from + this.to) / 2) {
    this.show(around - (around - this.from) * factor, around + (this.to - around) * factor);
  }

  /** Moves the range by a part of its length. */
  pan(part) {
    const length = this.to - this.from;
    const from = Math.min(Math.max(0, this.from + part * length), this.end - length);
    this.show(from, from + length);
  }

  showAll() {
    this.show(0, this.end);
  }

  get width() {
    return this.node.clientWidth;
  }

  x(time) {
    return LEFT + ((time - this.from) / (this.to - this.from)) * (this.width - LEFT);
  }

  timeAt(x) {
    return this.from + ((x - LEFT) / (this.width - LEFT)) * (this.to - this.from);
  }

  listen() {
    const place = (event) => [event.offsetX, event.offsetY];
    this.canvas.addEventListener("mousedown", (event) => (this.pressed = event.offsetX < LEFT ? null : event.offsetX));
    this.canvas.addEventListener("mousemove", (event) => this.move(...place(event)));
    this.canvas.addEventListener("mouseup", (event) => this.release(...place(event)));
    this.canvas.addEventListener("mouseleave", () => ((this.tip.hidden = true), (this.pressed = null), this.draw()));
    this.canvas.addEventListener("dblclick", () => this.showAll());
    this.canvas.addEventListener("wheel", (event) => this.turn(event), { passive: false });
  }

  turn(event) {
    if (event.ctrlKey || event.metaKey) this.zoom(1.0015 ** event.deltaY, this.timeAt(event.offsetX));
    else if (event.deltaX) this.pan(event.deltaX / 800);
    else return;
    event.preventDefault();
  }

  move(x, y) {
    this.selected =
      this.pressed != null && Math.abs(x - this.pressed) > 4
        ? [this.pressed, Math.max(LEFT, x)].sort((a, b) => a - b)
        : null;
    this.draw();
    const found = this.selected ? null : this.spanAt(x, y);
    this.canvas.classList.toggle("clickable", Boolean(found?.span.id));
    this.showTip(found, x, y);
  }

  release(x, y) {
    const [selected, found] = [this.selected, this.spanAt(x, y)];
    this.pressed = null;
    this.selected = null;
    if (selected) this.show(...selected.map((edge) => this.timeAt(edge)));
    else if (found?.span.id) this.onSample(found.span.id);
  }

  spanAt(x, y) {
    const lane = this.lanes.find((one) => y >= one.top && y <= one.top + one.height);
    if (!lane || x < LEFT) return null;
    const row = Math.floor((y - lane.top) / lane.rowHeight);
    const span = lane.spans.find(
      (one) => one.row === row && x >= this.x(one.start) - 1 && x <= Math.max(this.x(one.end), this.x(one.start) + 2),
    );
    return span ? { lane, span } : null;
  }

  showTip(found, x, y) {
    this.tip.hidden = !found;
    if (!found) return;
    const { lane, span } = found;
    const details = Object.entries(span.detail ?? {}).map(([name, given]) =>
      el("div", {}, `${name}: ${visible(value(given))}`),
    );
    this.tip.replaceChildren(
      el("b", {}, visible(span.name)),
      el("div", {}, `${lane.name} · ${seconds(span.end - span.start)}`),
      el("div", { class: "muted" }, `${seconds(span.start)} to ${seconds(span.end)}`),
      ...details,
    );
    this.tip.style.left = `${Math.min(x + 14, this.width - this.tip.offsetWidth - 4)}px`;
    this.tip.style.top = `${y + 16}px`;
  }

  draw() {
    const { width, height } = this;
    if (!width) return;
    const scale = devicePixelRatio;
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
      this.canvas.style.height = `${height}px`;
    }
    const ctx = this.canvas.getContext("2d");
    const colours = theme();
    ctx.setTransform(scale, 0, 0, scale, 0, 0);
    ctx.clearRect(0, 0, width, height);
    ctx.font = "12px system-ui, sans-serif";
    ctx.textBaseline = "middle";
    this.drawAxis(ctx, colours);
    this.drawNames(ctx, colours);
    ctx.save();
    ctx.beginPath();
    ctx.rect(LEFT, 0, width - LEFT, height);
    ctx.clip();
    for (const lane of this.lanes) this.drawLane(ctx, colours, lane);
    if (this.selected) {
      ctx.fillStyle = colours.selection;
      ctx.fillRect(this.selected[0], AXIS, this.selected[1] - this.selected[0], height - AXIS);
    }
    ctx.restore();
  }

  drawAxis(ctx, colours) {
    ctx.textAlign = "center";
    for (const time of ticks(this.from, this.to, (this.width - LEFT) / 110)) {
      const x = Math.round(this.x(time)) + 0.5;
      ctx.strokeStyle = colours.grid;
      ctx.beginPath();
      ctx.moveTo(x, AXIS - 4);
      ctx.lineTo(x, this.height);
      ctx.stroke();
      ctx.fillStyle = colours.muted;
      ctx.fillText(short(seconds(time)), Math.min(Math.max(x, LEFT + 14), this.width - 24), 10);
    }
  }

  drawNames(ctx, colours) {
    ctx.textAlign = "left";
    const name = (text, y, colour) => {
      ctx.fillStyle = colour;
      ctx.fillText(shortened(ctx, visible(text), LEFT - 16), 0, y);
    };
    for (const lane of this.lanes) {
      name(lane.name, lane.top + 11, colours.text);
      if (lane.height > 34) name(`${lane.spans.length} spans`, lane.top + 27, colours.muted);
    }
  }

  drawLane(ctx, colours, lane) {
    const gap = lane.rowHeight > 6 ? 2 : lane.rowHeight > 3 ? 1 : 0;
    const height = Math.max(0.75, lane.rowHeight - gap);
    for (const span of lane.spans) {
      if (span.end < this.from || span.start > this.to) continue;
      const [x, width] = this.extent(span);
      const y = lane.top + span.row * lane.rowHeight;
      ctx.fillStyle = isFailed(span) ? colours.bad : (colours[lane.kind] ?? colours.trainer);
      const isOther = !isOfStep(span, this.step);
      ctx.globalAlpha = isOther ? OTHER_STEP_ALPHA : 1;
      if (height > 8 && width > 4) box(ctx, x, y, width, height);
      else ctx.fillRect(x, y, width, height);
      ctx.globalAlpha = 1;
      if (isOther && height > 1.5 && width > 3) outline(ctx, x, y, width, height);
      if (lane.rowHeight >= 15) label(ctx, span.name, x, width, y + height / 2, colours.onLane);
    }
  }

  /** Returns the left edge of a span and its width, at least one pixel, within the canvas. */
  extent({ start, end }) {
    const x = Math.max(LEFT - 10, this.x(start));
    return [x, Math.max(1, Math.min(this.width + 10, this.x(end)) - x - 0.5)];
  }
}

/** Returns whether a span belongs to the step: samples of the next steps may be generated at the same time. */
function isOfStep({ detail }, step) {
  return detail?.step === undefined || detail.step === null || detail.step === step;
}

function isFailed({ detail }) {
  return Boolean(detail?.error) || detail?.status >= 400;
}

function theme() {
  const names = {
    grid: "--grid",
    muted: "--muted",
    text: "--text",
    bad: "--bad",
    onLane: "--on-lane",
    selection: "--selection",
    ...COLOURS,
  };
  return Object.fromEntries(Object.entries(names).map(([name, variable]) => [name, property(variable)]));
}

function box(ctx, x, y, width, height) {
  ctx.beginPath();
  ctx.roundRect(x, y, width, height, Math.min(3, width / 2, height / 2));
  ctx.fill();
}

/** Draws the border of a pale span in its full colour, so that it stands out from the background. */
function outline(ctx, x, y, width, height) {
  ctx.strokeStyle = ctx.fillStyle;
  ctx.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
}

function label(ctx, text, x, width, y, colour) {
  const left = Math.max(x, LEFT);
  const room = x + width - left - 10;
  if (room < 22) return;
  ctx.fillStyle = colour;
  ctx.textAlign = "left";
  ctx.fillText(shortened(ctx, visible(text), room), left + 5, y + 0.5);
}

function shortened(ctx, text, room) {
  if (ctx.measureText(text).width <= room) return text;
  let length = Math.min(text.length, Math.ceil(room / 4));
  while (length > 1 && ctx.measureText(`${text.slice(0, length)}…`).width > room) length -= 1;
  return `${text.slice(0, length)}…`;
}
