/** The filters of the table of samples. */

import { el } from "./dom.js";

const WAIT_MS = 250;

/**
 * Returns a form of filters.
 * @param {Object} run: the answer of api/run
 * @param {Object} query: the parameters of api/samples; changed in place
 * @param {function()} changed: called after a change
 * @returns {{node, search, show}}: `search` focuses the field for text; `show` shows the query again
 */
export function filters(run, query, changed) {
  const set = (name, given) => {
    if (given === "" || given === null) delete query[name];
    else query[name] = given;
    showChips();
    changed();
  };
  const text = field(query, set, "text", {
    type: "search",
    placeholder: "Search prompts, responses, judges",
    "aria-label": "Search",
    class: "wide",
  });
  const chips = el("span", { class: "chips" });
  const node = el(
    "form",
    { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
    text,
    choice(query, set, "outcome", "Outcome", "All outcomes", Object.keys(run.outcomes)),
    run.data_sources.length > 1
      ? choice(query, set, "data_source", "Data source", "All data sources", run.data_sources)
      : null,
    el(
      "span",
      { class: "range" },
      el("span", {}, "Reward"),
      field(query, set, "min_reward", {
        type: "number",
        step: "any",
        placeholder: "min",
        "aria-label": "Lowest reward",
      }),
      "–",
      field(query, set, "max_reward", {
        type: "number",
        step: "any",
        placeholder: "max",
        "aria-label": "Highest reward",
      }),
    ),
    chips,
  );

  function showChips() {
    const names = Object.keys(query).filter((name) => name === "group" || name.startsWith("where."));
    const nodes = names.map((name) =>
      el(
        "button",
        { type: "button", class: "chip", title: "Remove this filter", onclick: () => set(name, null) },
        `${name.replace("where.", "")}: ${query[name]}`,
        el("span", { "aria-hidden": "true" }, " ×"),
      ),
    );
    chips.replaceChildren(...nodes);
  }

  showChips();
  return { node, set, search: () => (text.focus(), true) };
}

function field(query, set, name, attributes) {
  let timer = 0;
  const input = el("input", {
    ...attributes,
    value: query[name] ?? "",
    oninput: () => {
      clearTimeout(timer);
      timer = setTimeout(() => set(name, input.value.trim()), WAIT_MS);
    },
    onkeydown: (event) => event.key === "Escape" && input.blur(),
  });
  return input;
}

function choice(query, set, name, label, all, values) {
  const options = values.map((given) => el("option", { value: given, selected: query[name] === given }, given));
  return el(
    "select",
    { "aria-label": label, onchange: (event) => set(name, event.target.value) },
    el("option", { value: "" }, all),
    options,
  );
}
