/** Options of the configuration: what changed when a run was resumed, and how two runs differ. */

import { el, table } from "./dom.js";
import { plural, time } from "./format.js";
import { visible } from "./text.js";

const MOST_STARTS = 20;

/**
 * Returns the changes of the options at each start of the run after the first.
 * @param {Object[]} starts: of api/config
 */
export function startList(starts) {
  if (starts.length < 2) return [];
  const later = starts.slice(1).reverse();
  const more = later.length - MOST_STARTS;
  return [
    el(
      "section",
      { class: "starts", "aria-label": "Configuration" },
      el("h2", {}, `Configuration, over ${plural(starts.length, "start")}`),
      later.slice(0, MOST_STARTS).map(startPart),
      more > 0 ? el("p", { class: "hint" }, `${plural(more, "earlier start")} not shown.`) : null,
    ),
  ];
}

/** Returns the steps at which options have changed. */
export function changedSteps(starts) {
  return starts.filter(({ changes }) => changes.length).map(({ step }) => step);
}

/** Returns a table of options with two values. */
export function optionTable(rows, before, after) {
  const body = rows.map((row) => [visible(row.option), shown(row.before), shown(row.after)]);
  return el("div", { class: "options" }, table(["Option", before, after], body));
}

function startPart({ step, time: started, changes }) {
  const title = `From step ${step}, ${time(started)}`;
  if (!changes.length) return el("p", { class: "hint" }, `${title}: no option changed.`);
  return el(
    "div",
    {},
    el("p", { class: "about" }, `${title}: ${plural(changes.length, "option")} changed`),
    optionTable(changes, "Before", "After"),
  );
}

function shown(value) {
  if (value === null || value === undefined) return el("span", { class: "hint" }, "unset");
  return visible(typeof value === "string" ? value : JSON.stringify(value));
}
