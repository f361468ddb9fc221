/** From a page of one step to those of the steps beside it. */

import { el } from "./dom.js";
import { link, open } from "./router.js";

function neighbour(step, run, direction) {
  const place = run.steps.findIndex((one) => String(one) === String(step));
  return place < 0 ? undefined : run.steps[place + direction];
}

/** Returns the links to the previous and the next step. */
export function stepButtons(page, step, run, query = {}) {
  const go = (direction, label, text) => {
    const target = neighbour(step, run, direction);
    const href = target === undefined ? null : link(page, [target], query);
    return el("a", { class: "button", "aria-label": label, href }, text);
  };
  return el("span", { class: "buttons" }, go(-1, "Previous step", "←"), go(1, "Next step", "→"));
}

/** Returns the keys for the same. */
export function stepShortcuts(page, step, run, query = {}) {
  const go = (direction) => () => {
    const target = neighbour(step, run, direction);
    if (target !== undefined) open(page, [target], query);
  };
  return [
    { keys: ["]"], label: "Next step", run: go(1) },
    { keys: ["["], label: "Previous step", run: go(-1) },
  ];
}
