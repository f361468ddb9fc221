/** Two runs, or two scorings of the same rollouts. */

import { get } from "./api.js";
import { el, empty, figures, table } from "./dom.js";
import { count, fixed, plural } from "./format.js";
import { optionTable } from "./options.js";
import { link, open } from "./router.js";
import { visible } from "./text.js";

/** Shows the comparison of this folder, a, with the one that the route names, b. */
export async function showCompare(view, { query: { other } }, run) {
  view.append(el("div", { class: "title" }, el("h1", {}, "Compare")), form(other));
  if (!other) {
    view.append(
      empty(
        "Compare with another scoring",
        "Enter the folder of another run, or of another scoring of the same rollouts. Samples are matched by their uid.",
      ),
    );
    return { title: "Compare" };
  }
  const requests = [get("compare", { other }), get("config/compare", { other })];
  const [found, options] = await Promise.all(requests.map((request) => request.catch((error) => error)));
  view.append(
    el("p", { class: "about" }, `a: ${visible(run.folder)}`, el("br"), `b: ${visible(other)}`),
    ...(found instanceof Error ? [el("p", { class: "note bad" }, found.message)] : result(found)),
    ...(options instanceof Error ? [] : configuration(options)),
  );
  return { title: "Compare" };
}

function form(other) {
  const input = el("input", {
    class: "wide",
    value: other ?? "",
    placeholder: "DIR",
    "aria-label": "Folder to compare with",
    spellcheck: "false",
  });
  const submit = (event) => {
    event.preventDefault();
    open("compare", [], { other: input.value.trim() });
  };
  return el("form", { class: "filters", onsubmit: submit }, input, el("button", {}, "Compare"));
}

function result(found) {
  const alone = [
    found.only_a && `${plural(found.only_a, "sample")} only in a`,
    found.only_b && `${plural(found.only_b, "sample")} only in b`,
  ];
  return [
    figures([
      ["Samples in both", count(found.both), alone.filter(Boolean).join(", ")],
      ["Changed", count(found.changed), "outcome or score"],
      ["Mean score of a", fixed(found.mean_a)],
      ["Mean score of b", fixed(found.mean_b), "of samples scored in both"],
    ]),
    el("div", { class: "two" }, agreements(found), outcomes(found)),
    ...largest(found),
  ];
}

/** Returns the options that differ, of the last start of each run. */
function configuration({ a, b, differences }) {
  const missing = [a ? null : "a", b ? null : "b"].filter(Boolean).join(" and ");
  if (!a && !b) return [];
  const content = missing
    ? el("p", { class: "hint" }, `The configuration of ${missing} was not recorded.`)
    : differences.length
      ? optionTable(differences, "a", "b")
      : el("p", { class: "hint" }, "The recorded options are equal.");
  return [el("section", { "aria-label": "Configuration" }, el("h2", {}, "Configuration"), content)];
}

function agreements({ agreement, label_a: labelA, label_b: labelB }) {
  const columns = [
    ["a and b", agreement],
    ["a and the label", labelA],
    ["b and the label", labelB],
  ].filter(([, one]) => one);
  const names = [
    ["Samples", "pairs", count],
    ["Equal", "equal", fixed],
    ["Cohen's kappa", "kappa", fixed],
    ["Pearson", "pearson", fixed],
    ["Spearman", "spearman", fixed],
  ];
  const rows = names
    .filter(([, field]) => columns.some(([, one]) => field in one))
    .map(([label, field, format]) => [label, ...columns.map(([, one]) => format(one[field]))]);
  return el("section", {}, el("h2", {}, "Agreement"), table(["", ...columns.map(([label]) => `>${label}`)], rows));
}

function outcomes(found) {
  const rows = found.outcomes.map(({ a, b, samples }) => [
    a,
    a === b ? b : el("span", { class: "differs" }, b),
    count(samples),
  ]);
  return el("section", {}, el("h2", {}, "Outcomes"), table(["a", "b", ">Samples"], rows));
}

function largest(found) {
  if (!found.largest.length) return [];
  const rows = found.largest.map(({ sample, a, b }) => [
    el("a", { href: link("samples", [], { "where.uid": sample }) }, visible(String(sample))),
    fixed(a),
    fixed(b),
    fixed(b - a),
  ]);
  return [el("section", {}, el("h2", {}, "Largest differences"), table(["Sample", ">a", ">b", ">Difference"], rows))];
}
