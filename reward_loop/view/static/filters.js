/** The filters of the table of samples. */

import { el } from "./dom.js";
import { visible } from "./text.js";

const WAIT_MS = 250;
/** The fields with a range, before the components: the field of a sample, and its name on the page. */
const RANGES = [
  ["reward", "Reward"],
  ["response_length", "Tokens"],
  ["total_s", "Time in s"],
  ["judge_s", "Judges in s"],
];
const BOUND = /^(min|max)\.(.+)$/;

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
    range.show();
    showChips();
    changed();
  };
  const text = field(query, set, () => "text", {
    type: "search",
    placeholder: "Search texts",
    title: "Prompts, responses and replies of judges",
    "aria-label": "Search",
    class: "wide",
  });
  const range = rangeFilter(run, query, set);
  const chips = el("span", { class: "chips" });
  const node = el(
    "form",
    { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
    text,
    choice(query, set, "outcome", "Outcome", "All outcomes", ["scored", "unscored", "failed"]),
    run.data_sources.length > 1
      ? choice(query, set, "data_source", "Data source", "All data sources", run.data_sources)
      : null,
    range.node,
    chips,
  );

  function showChips() {
    const isChip = (name) => name === "group" || name.startsWith("where.") || BOUND.test(name);
    const names = Object.keys(query).filter(isChip);
    const nodes = names.map((name) =>
      el(
        "button",
        { type: "button", class: "chip", title: "Remove this filter", onclick: () => set(name, null) },
        chipText(name, query[name]),
        el("span", { "aria-hidden": "true" }, " ×"),
      ),
    );
    chips.replaceChildren(...nodes);
  }

  showChips();
  return { node, set, search: () => (text.focus(), true) };
}

function chipText(name, given) {
  const [, bound, field] = name.match(BOUND) ?? [];
  return field ? `${field} ${bound === "min" ? "≥" : "≤"} ${given}` : `${name.replace("where.", "")}: ${given}`;
}

/** Returns the smallest and the largest value of a field, which is chosen in a list; `show` shows the query again. */
function rangeFilter(run, query, set) {
  const fields = [...RANGES, ...run.components.map((name) => [`components.${name}`, name])];
  const bounded = Object.keys(query).map((name) => name.match(BOUND)?.[2]);
  let chosen = fields.map(([field]) => field).find((field) => bounded.includes(field)) ?? "reward";
  const parameter = (bound) => (chosen === "reward" ? `${bound}_reward` : `${bound}.${chosen}`);
  const inputs = ["min", "max"].map((bound) => {
    const attributes = { type: "number", step: "any", placeholder: bound };
    return [bound, field(query, set, () => parameter(bound), attributes)];
  });
  const show = () => {
    const label = fields.find(([field]) => field === chosen)[1];
    for (const [bound, input] of inputs) {
      input.setAttribute("aria-label", `${bound === "min" ? "Lowest" : "Highest"} ${label}`);
      if (document.activeElement !== input) input.value = query[parameter(bound)] ?? "";
    }
  };
  const list = el(
    "select",
    { "aria-label": "Field of the range", onchange: (event) => ((chosen = event.target.value), show()) },
    fields.map(([field, label]) => el("option", { value: field, selected: field === chosen }, visible(label))),
  );
  show();
  return { node: el("span", { class: "range" }, list, inputs[0][1], "–", inputs[1][1]), show };
}

/** Returns an input for a parameter, whose name `name` returns. */
function field(query, set, name, attributes) {
  let timer = 0;
  const input = el("input", {
    ...attributes,
    value: query[name()] ?? "",
    oninput: () => {
      clearTimeout(timer);
      const typed = name();
      timer = setTimeout(() => set(typed, input.value.trim()), WAIT_MS);
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
