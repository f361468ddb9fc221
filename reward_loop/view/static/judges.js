/** Judges by model and function: latency, failures, tokens, cost, verdicts over the steps. */

import { get } from "./api.js";
import { Chart } from "./chart.js";
import { el, empty, figures, table } from "./dom.js";
import { count, fixed, number, percent, seconds, UNKNOWN } from "./format.js";
import { histogram } from "./histogram.js";
import { link, open } from "./router.js";
import { visible } from "./text.js";
import { isValidation, toggle } from "./validation.js";

const MOST_CARDS = 12;

/** Shows the judges of the run. */
export async function showJudges(view, { query }, run) {
  const validate = isValidation(query, run);
  const parts = {
    head: el(
      "div",
      { class: "title" },
      el("h1", {}, "Judges"),
      run.validation ? toggle("judges", validate, query) : null,
    ),
    table: el("div"),
    cards: el("div", { class: "cards" }),
    slowest: el("div"),
  };
  view.append(parts.head, parts.table, parts.cards, parts.slowest);
  let charts = [];

  async function refresh() {
    const { rows, slowest } = await get("judges", { ...query, validate });
    rows.sort((a, b) => b.calls - a.calls);
    charts.forEach((chart) => chart.close());
    charts = [];
    parts.table.replaceChildren(rows.length > 1 ? overview(rows) : "");
    parts.cards.replaceChildren(
      ...(rows.length ? rows.slice(0, MOST_CARDS).map((row) => card(row, charts)) : [none()]),
    );
    charts.forEach((chart) => chart.draw());
    parts.slowest.replaceChildren(...slowestRequests(slowest));
  }

  await refresh();
  return { title: "Judges", refresh, close: () => charts.forEach((chart) => chart.close()) };
}

function none() {
  return empty(
    "No requests to judges",
    "No request through reward_loop.client was recorded. Requests by other clients are not recorded.",
  );
}

function name({ model, backend, function: asked }) {
  return [model ?? "model server", backend, asked].filter(Boolean).map(visible).join(" · ");
}

const rate = (row, amount) => percent(row.calls ? amount / row.calls : null);

function overview(rows) {
  const hasCost = rows.some((row) => row.cost !== null);
  const body = rows.map((row) => [
    name(row),
    count(row.calls),
    rate(row, row.errors),
    rate(row, row.unscored),
    seconds(row.seconds.p50),
    seconds(row.seconds.p95),
    count(row.prompt_tokens + row.completion_tokens),
    ...(hasCost ? [number(row.cost)] : []),
  ]);
  const columns = ["Judge", ">Requests", ">Errors", ">No verdict", ">p50", ">p95", ">Tokens"];
  return table([...columns, ...(hasCost ? [">Cost"] : [])], body);
}

/** Returns the time of the longest request, with a link to its sample. */
function longest({ seconds: { max }, slowest }) {
  const text = `longest ${seconds(max)}`;
  return slowest === null ? text : el("a", { href: link("sample", [slowest]) }, text);
}

/** Returns the table of the slowest requests, each with a link to its sample. */
function slowestRequests(slowest) {
  if (!slowest.length) return [];
  const body = slowest.map((one) => [
    seconds(one.seconds),
    el("a", { href: link("sample", [one.id]) }, visible(one.uid ?? one.id)),
    one.step ?? UNKNOWN,
    name(one),
    result(one),
  ]);
  const columns = [">Time", "Sample", ">Step", "Judge", "Result"];
  return [
    el("section", { "aria-label": "Slowest requests" }, el("h2", {}, "Slowest requests"), table(columns, body)),
  ];
}

function result({ error, unscored, score }) {
  if (error) return "error";
  if (unscored) return "no verdict";
  return score === null ? "answered" : `verdict ${number(score)}`;
}

function card(row, charts) {
  const onStep = (step) => open("step", [step]);
  const steps = row.by_step.map((one) => one.step);
  const each = (read) => row.by_step.map((one) => read(one) ?? null);
  const add = (options, series) => {
    const chart = new Chart({ ...options, onStep });
    charts.push({ draw: () => chart.show(steps, series), close: () => chart.close() });
    return chart.node;
  };
  const share = (field) => each((one) => (one.calls ? one[field] / one.calls : null));
  const latency = [
    { label: "median", values: each((one) => one.p50) },
    { label: "95 %", values: each((one) => one.p95) },
  ];
  const failures = [
    { label: "errors", values: share("errors") },
    { label: "no verdict", values: share("unscored") },
  ];
  const hasSteps = steps.some((step) => step !== null);
  return el(
    "section",
    { class: "card judge" },
    el("h2", {}, visible(row.model ?? "model server")),
    el("p", { class: "about" }, [row.backend, row.function].filter(Boolean).map(visible).join(" · ")),
    figures([
      ["Requests", count(row.calls)],
      ["Errors", rate(row, row.errors), count(row.errors)],
      ["No verdict", rate(row, row.unscored), count(row.unscored)],
      ["Latency", seconds(row.seconds.p50), `mean ${seconds(row.seconds.mean)}`],
      ["95 %", seconds(row.seconds.p95), longest(row)],
      ["Tokens", count(row.prompt_tokens + row.completion_tokens), `${count(row.completion_tokens)} written`],
      row.cost !== null && ["Cost", number(row.cost), "at the prices of --price"],
    ]),
    el(
      "div",
      { class: "charts" },
      histogram("Latency", row.seconds.histogram, seconds),
      histogram("Scores of the verdicts", row.verdicts),
      hasSteps
        ? add({ title: "Scores by step", format: (given) => fixed(given, 2) }, [
            { label: "mean", values: each((one) => one.mean_score) },
            { label: "10 %", values: each((one) => one.scores.p10), isEdge: true },
            { label: "90 %", values: each((one) => one.scores.p90), isEdge: true },
          ])
        : null,
      hasSteps ? add({ title: "Latency by step", format: seconds }, latency) : null,
      hasSteps ? add({ title: "Failures by step", format: percent }, failures) : null,
    ),
  );
}
