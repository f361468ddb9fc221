/** Training and validation are never shown together: the parameter `validate` of a page chooses one of them. */

import { el } from "./dom.js";
import { link } from "./router.js";

/** Returns whether a page shows validation: if its query says so, or if there are no samples of training. */
export function isValidation(query, run) {
  if (query.validate === undefined) return !run.training && Boolean(run.validation);
  return ["1", "true"].includes(query.validate);
}

/** Returns the links that show training or validation on a page. */
export function toggle(page, validate, query = {}) {
  const choices = [
    ["Training", 0, !validate],
    ["Validation", 1, validate],
  ];
  return el(
    "span",
    { class: "segments" },
    choices.map(([label, value, isChosen]) =>
      el("a", { href: link(page, [], { ...query, validate: value }), "aria-current": isChosen ? "true" : null }, label),
    ),
  );
}
