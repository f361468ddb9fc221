/** Judges by model and function: requests, failures, latency, tokens, and verdicts over the steps. */

import { get } from "./api.js";
import { Chart } from "./chart.js";
import { el, empty, table } from "./dom.js";
import { count, fixed, percent, seconds } from "./format.js";
import { link, open } from "./router.js";
import { visible } from "./text.js";
import { isValidation, toggle } from "./validation.js";

const MOST_CARDS = 12;

/** Shows the judges of the run. */
export async function showJudges(view, { query }, run) {
  const validate = isValidation(query, run);
  const shown = el("div");
  view.append(
    el(
      "div",
      { class: "title" },
      el("h1", {}, "Judges"),
      run.validation ? toggle("judges", validate, query) : null,
    ),
    shown,
  );
  let charts = [];

  async function refresh() {
    const { rows } = await get("judges", { ...query, validate });
    charts.forEach((chart) => chart.close());
    charts = [];
    const cards = rows.slice(0, MOST_CARDS).map((row) => card(row, charts));
    shown.replaceChildren(rows.length ? overview(rows) : none(), el("div", { class: "cards" }, cards));
    charts.forEach((chart) => chart.draw());
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

function overview(rows) {
  const rate = (row, amount) => percent(row.requests ? amount / row.requests : null);
  const body = rows.map((row) => [
    name(row),
    count(row.requests),
    rate(row, row.errors),
    rate(row, row.no_verdict),
    rate(row, row.asked_again),
    seconds(row.seconds.p50),
    seconds(row.seconds.p95),
    longest(row),
    count(row.prompt_tokens),
    count(row.completion_tokens),
  ]);
  const columns = ["Judge", ">Requests", ">Errors", ">No verdict", ">Asked again", ">p50", ">p95", ">Longest"];
  return table([...columns, ">Tokens read", ">written"], body);
}

/** Returns the time of the longest request, with a link to its sample. */
function longest({ seconds: { max }, slowest }) {
  return slowest === null ? seconds(max) : el("a", { href: link("sample", [slowest]) }, seconds(max));
}

function card(row, charts) {
  const known = row.by_step.filter((one) => one.step !== null); // a chart has no place for the others
  if (!known.length) return null;
  const steps = known.map((one) => one.step);
  const each = (read) => known.map((one) => read(one) ?? null);
  const add = (options, series) => {
    const chart = new Chart({ ...options, onStep: (step) => open("step", [step]) });
    charts.push({ draw: () => chart.show(steps, series), close: () => chart.close() });
    return chart.node;
  };
  const share = (field) => each((one) => (one.requests ? one[field] / one.requests : null));
  return el(
    "section",
    { class: "card judge" },
    el("h2", {}, name(row)),
    el(
      "div",
      { class: "charts" },
      add({ title: "Scores by step", format: (given) => fixed(given, 2) }, [
        { label: "mean", values: each((one) => one.mean_score) },
        { label: "10 %", values: each((one) => one.scores.p10), isEdge: true },
        { label: "90 %", values: each((one) => one.scores.p90), isEdge: true },
      ]),
      add({ title: "Latency by step", format: seconds }, [
        { label: "median", values: each((one) => one.seconds.p50) },
        { label: "95 %", values: each((one) => one.seconds.p95) },
      ]),
      add({ title: "Failures by step", format: percent }, [
        { label: "errors", values: share("errors") },
        { label: "no verdict", values: share("no_verdict") },
      ]),
    ),
  );
}
