/** The timeline of a step: lanes of generation, judges and training. */

import { get } from "./api.js";
import { el, empty } from "./dom.js";
import { plural, seconds, time } from "./format.js";
import { link, open } from "./router.js";
import { stepButtons, stepShortcuts } from "./steps.js";
import { visible } from "./text.js";
import { TimelineCanvas } from "./timeline_canvas.js";

/** Shows the timeline of the step that the route names, otherwise of the last step. */
export async function showTimeline(view, { args }, run) {
  const step = args[0] ?? run.steps.at(-1);
  if (step === undefined || !run.events) {
    view.append(
      el("div", { class: "title" }, el("h1", {}, "Timeline")),
      empty(
        "No step to draw",
        "The folder has no events of a trainer. Runs of verl with reward_loop record them beside the samples.",
      ),
    );
    return { title: "Timeline" };
  }
  const timeline = await get("timeline", { step });
  const spans = timeline.lanes.reduce((total, lane) => total + lane.spans.length, 0);
  const range = el("output", { class: "about" });
  view.append(head(step, run, timeline));
  if (!spans) {
    view.append(
      empty("Nothing was recorded for this step", "A timeline needs the times of samples, judges or the trainer."),
    );
    return { title: `Timeline of step ${step}`, shortcuts: stepShortcuts("timeline", step, run) };
  }
  const showRange = (from, to) =>
    (range.textContent = `${seconds(from)} to ${seconds(to)} of ${seconds(timeline.end - timeline.start)}`);
  const drawing = new TimelineCanvas(timeline, (id) => open("sample", [id]), showRange);
  view.append(...longestPhase(timeline), controls(drawing, range), drawing.node, ...notes(timeline));
  drawing.draw();
  return {
    title: `Timeline of step ${step}`,
    shortcuts: [...zoomShortcuts(drawing), ...stepShortcuts("timeline", step, run)],
    close: () => drawing.close(),
  };
}

function head(step, run, timeline) {
  return el(
    "div",
    { class: "title" },
    el("h1", {}, `Timeline of step ${step}`),
    stepButtons("timeline", step, run),
    el("a", { class: "button", href: link("step", [step]) }, "Samples"),
    el("p", { class: "about" }, `${seconds(timeline.end - timeline.start)} · from ${time(timeline.start)}`),
  );
}

function longestPhase(timeline) {
  return timeline.longest ? [el("p", { class: "bound" }, visible(timeline.longest))] : [];
}

function controls(drawing, range) {
  const button = (text, label, onclick) => el("button", { type: "button", "aria-label": label, onclick }, text);
  const keys = [
    ["rollout", "generation"],
    ["judge", "judges"],
    ["trainer", "training"],
    ["failed", "failed"],
  ];
  return el(
    "div",
    { class: "controls" },
    el(
      "span",
      { class: "buttons" },
      button("+", "Zoom in", () => drawing.zoom(0.5)),
      button("−", "Zoom out", () => drawing.zoom(2)),
      button("All", "Show the whole step", () => drawing.showAll()),
    ),
    range,
    el(
      "span",
      { class: "lane-keys" },
      keys.map(([name, label]) => el("span", { class: `of-${name}` }, el("i"), label)),
    ),
    el(
      "span",
      { class: "hint" },
      "Outlined: samples of other steps. Drag or Ctrl + wheel: zoom. Double-click: the whole step.",
    ),
  );
}

function zoomShortcuts(drawing) {
  return [
    { keys: ["+", "="], label: "Zoom in", run: () => drawing.zoom(0.5) },
    { keys: ["-"], label: "Zoom out", run: () => drawing.zoom(2) },
    { keys: ["0"], label: "Show the whole step", run: () => drawing.showAll() },
    { keys: ["ArrowLeft"], label: "Earlier", run: () => drawing.pan(-0.25) },
    { keys: ["ArrowRight"], label: "Later", run: () => drawing.pan(0.25) },
  ];
}

function notes({ truncated }) {
  return truncated
    ? [el("p", { class: "note" }, `${plural(truncated, "span")} not shown: the shortest ones of large lanes.`)]
    : [];
}
