/** The components of rewards: numbers, whose means are compared, and texts. */

import { asText } from "./text.js";

const SHORT_TEXT = 40;

/**
 * Returns the names of the components that are numbers.
 * @param {string[]} names
 * @param {Object[]} steps: summaries of steps; a component of numbers has a mean in one
 */
export function numbersOnly(names, steps) {
  return names.filter((name) => steps.some((step) => name in step.components));
}

/** Returns the components that fit into a line, without the score, which is shown elsewhere. */
export function shortComponents(row) {
  return Object.entries(row.components ?? {}).filter(([name, given]) => name !== "score" && !isLong(given));
}

/** Whether a component is shown as a text of its own. */
export function isLong(component) {
  if (component === null || typeof component === "number") return false;
  return asText(component).length > SHORT_TEXT;
}
