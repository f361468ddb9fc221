/** How outcomes and rewards look in tables and titles. */

import { el, withProperty } from "./dom.js";
import { fixed } from "./format.js";

/** Returns the outcome of a sample as a mark with its word. */
export function outcomeMark({ outcome, masked }) {
  const mask = masked ? el("span", { class: "tag", title: "Excluded from training" }, "masked") : null;
  return el("span", { class: `outcome ${outcome}` }, el("i", { "aria-hidden": "true" }), outcome, mask);
}

/** Returns a reward with a bar that shows its place between the lowest and the highest. */
export function rewardCell(reward, { min, max }) {
  if (reward === null || reward === undefined) return el("span", { class: "muted" }, "–");
  const place = max > min ? (reward - min) / (max - min) : 0;
  return el(
    "span",
    { class: "reward" },
    fixed(reward),
    withProperty(el("i", { "aria-hidden": "true" }), "--share", Math.max(0, Math.min(1, place))),
  );
}
