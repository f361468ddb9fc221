/** How outcomes look in tables and titles. */

import { el } from "./dom.js";

/** Returns the outcome of a sample as a mark with its word. */
export function outcomeMark({ outcome, masked }) {
  const mask = masked ? el("span", { class: "tag", title: "Excluded from training" }, "masked") : null;
  return el("span", { class: `outcome ${outcome}` }, el("i", { "aria-hidden": "true" }), outcome, mask);
}
