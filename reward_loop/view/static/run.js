/** The run: its figures and charts over the steps, warnings, and a table of the steps. */

import { get } from "./api.js";
import { Chart } from "./chart.js";
import { numbersOnly } from "./components.js";
import { el, empty, figures, table } from "./dom.js";
import { count, fixed, number, percent, plural, seconds, time } from "./format.js";
import { link, open } from "./router.js";
import { visible } from "./text.js";
import { isValidation, toggle } from "./validation.js";

const MOST_COMPONENTS = 8;
/** The largest number of components in the table of the steps. */
const MOST_COLUMNS = 4;
/** Components with larger means get a chart of their own: their scale would hide the other components. */
const SMALL_COMPONENT = 1.5;
const MOST_NAMES = 3;
const NEWEST_STEPS = 50;
const NEWEST_WARNINGS = 8;

const each = (rows, read) => rows.map((row) => read(row) ?? null);
const share = (row, amount) => (row.samples ? amount / row.samples : null);

/** The charts: their options, and their series for the rows of the steps. A chart without a value is left out. */
const CHARTS = [
  {
    title: "Reward",
    isWide: true,
    series: (rows) => [
      { label: "mean", values: each(rows, (row) => row.reward?.mean) },
      { label: "median", values: each(rows, (row) => row.reward?.p50) },
      { label: "10 %", values: each(rows, (row) => row.reward?.p10), isEdge: true },
      { label: "90 %", values: each(rows, (row) => row.reward?.p90), isEdge: true },
    ],
  },
  {
    title: "Components, mean",
    series: (rows, run) => components(rows, run, (most) => most <= SMALL_COMPONENT),
  },
  {
    title: "Components on larger scales, mean",
    series: (rows, run) => components(rows, run, (most) => most > SMALL_COMPONENT),
  },
  {
    title: "Samples without a score",
    format: percent,
    series: (rows) => [
      { label: "unscored", values: each(rows, (row) => share(row, row.outcomes.unscored)) },
      { label: "failed", values: each(rows, (row) => share(row, row.outcomes.failed)) },
      { label: "masked", values: each(rows, (row) => share(row, row.masked)), isDashed: true },
    ],
  },
  {
    title: "Groups without a signal",
    series: (rows) => [
      { label: "all rewards equal", values: each(rows, (row) => row.zero_variance) },
      { label: "all failed", values: each(rows, (row) => row.all_failed) },
    ],
  },
  {
    title: "Live numbers: shares",
    format: percent,
    range: [0, 1],
    series: (rows) => [
      { label: "groups without variance", values: each(rows, (row) => row.live.zero_variance_groups) },
      { label: "masked", values: each(rows, (row) => row.live.masked_share) },
      { label: "no verdict", values: each(rows, (row) => row.live.no_verdict) },
      { label: "repetitive", values: each(rows, (row) => row.live.repetition) },
    ],
  },
  {
    title: "Live numbers: length against reward, correlation",
    series: (rows) => [{ label: "correlation", values: each(rows, (row) => row.live.length_correlation) }],
  },
  {
    title: "Live numbers: judge's p95",
    format: seconds,
    series: (rows) => [{ label: "95 % of requests", values: each(rows, (row) => row.live.judge_p95_s) }],
  },
  {
    title: "Response length, mean tokens",
    series: (rows) => [{ label: "tokens", values: each(rows, (row) => row.response_length) }],
  },
  {
    title: "Judge time of a sample",
    format: seconds,
    series: (rows) => [
      { label: "median", values: each(rows, (row) => row.judge_s?.p50) },
      { label: "95 %", values: each(rows, (row) => row.judge_s?.p95) },
    ],
  },
  {
    title: "Time of a step by phase",
    format: seconds,
    isStacked: true,
    series: (rows) => phases(rows).map((name) => ({ label: name, values: each(rows, (row) => row.phases?.[name]) })),
  },
  {
    title: "Judging hidden behind generation and training",
    format: percent,
    range: [0, 1],
    series: (rows) => [{ label: "hidden share", values: each(rows, (row) => row.hidden_share) }],
  },
];

/** Shows the run. */
export async function showRun(view, route, run) {
  const validate = isValidation(route.query, run);
  const parts = { head: el("div"), warnings: el("div"), charts: el("div", { class: "charts" }), steps: el("div") };
  view.append(parts.head, parts.warnings, parts.charts, parts.steps);
  const charts = new Map();

  async function refresh() {
    const requests = [get("steps", { validate }), get("health")];
    const [{ rows: all }, { warnings }] = await Promise.all(requests);
    const rows = all.filter((row) => row.step !== null);
    const part = (validate ? run.validation : run.training) ?? { samples: 0, outcomes: {} };
    parts.head.replaceChildren(...head(run, part, rows, validate, rows.length ? null : all[0]));
    parts.warnings.replaceChildren(...warningList(warnings));
    showCharts(parts.charts, charts, rows, run, warnings, validate);
    parts.steps.replaceChildren(rows.length ? stepTable(rows, run, validate) : await noSteps(run, part, validate));
  }

  await refresh();
  return { title: "Run", refresh, close: () => charts.forEach((chart) => chart.close()) };
}

/** Returns the title and the figures; `alone` is the summary of samples without a step, if there are no others. */
function head(run, part, rows, validate, alone) {
  const scored = rows.filter((row) => row.samples);
  const last = scored.at(-1);
  const overlapped = rows.findLast((row) => row.hidden_share !== null);
  const unscored = part.samples - (part.outcomes.scored ?? 0);
  const about = [
    names(run.functions),
    run.models.length ? `judges: ${names(run.models)}` : "",
    `${time(run.first_time)} to ${time(run.last_time)}`,
  ];
  return [
    el(
      "div",
      { class: "title" },
      el("h1", {}, "Run"),
      run.validation ? toggle("run", validate) : null,
      el("p", { class: "about" }, about.filter(Boolean).join(" · ")),
    ),
    figures([
      ["Samples", count(part.samples), run.incomplete ? `${plural(run.incomplete, "line")} incomplete` : null],
      ["Steps", count(rows.length), rows.length ? `${rows[0].step} to ${rows.at(-1).step}` : null],
      alone && ["Reward", fixed(alone.reward?.mean), `standard deviation ${fixed(alone.reward?.std)}`],
      last && ["Reward, last step", fixed(last.reward?.mean), change(scored)],
      ["Without a score", percent(part.samples ? unscored / part.samples : null), plural(unscored, "sample")],
      last && [
        "Judge time, last step",
        seconds(last.judge_s?.p95),
        last.judge_s?.p95 == null ? "no requests by reward_loop.client" : "95 % of samples: less",
      ],
      overlapped && [
        "Judging hidden, last step",
        percent(overlapped.hidden_share),
        `${seconds(overlapped.waiting_s)} waited`,
      ],
    ]),
    ...run.notes.map((note) => el("p", { class: "note" }, note)),
  ];
}

function names(list) {
  const shown = list.slice(0, MOST_NAMES).map(visible).join(", ");
  return list.length > MOST_NAMES ? `${shown} and ${count(list.length - MOST_NAMES)} more` : shown;
}

/** Returns how the mean reward has changed since the first step. */
function change(rows) {
  const [first, last] = [rows[0].reward?.mean, rows.at(-1).reward?.mean];
  if (rows.length < 2 || first == null || last == null) return null;
  return `${last >= first ? "+" : "−"}${fixed(Math.abs(last - first))} since step ${rows[0].step}`;
}

function warningList(warnings) {
  if (!warnings.length) return [];
  const newest = warnings.slice(-NEWEST_WARNINGS).reverse();
  const items = newest.map((warning) =>
    el(
      "li",
      {},
      el("a", { href: link("step", [warning.step]) }, `step ${warning.step}`),
      el("span", { class: "monitor" }, warning.monitor),
      el("span", {}, warning.message),
    ),
  );
  const more = warnings.length - newest.length;
  return [
    el(
      "section",
      { class: "warnings", "aria-label": "Warnings" },
      el("h2", {}, plural(warnings.length, "warning")),
      el("ul", {}, items),
      more > 0
        ? el("p", { class: "hint" }, `${plural(more, "earlier warning")} not shown. ▲ marks the step in each chart.`)
        : null,
    ),
  ];
}

/** Returns the series of the components whose largest mean is chosen. */
function components(rows, run, isChosen) {
  return run.components
    .map((name) => ({ label: name, values: each(rows, (row) => row.components[name]?.mean) }))
    .filter(({ values }) => values.some((value) => value !== null) && isChosen(Math.max(...values.map(Math.abs))))
    .slice(0, MOST_COMPONENTS);
}

function phases(rows) {
  return [...new Set(rows.flatMap((row) => Object.keys(row.phases ?? {})))];
}

function showCharts(element, charts, rows, run, warnings, validate) {
  const steps = rows.map((row) => row.step);
  const marks = [
    ...new Set([
      ...warnings.map((warning) => warning.step),
      ...rows.filter((row) => row.warnings?.length).map((row) => row.step),
    ]),
  ];
  const onStep = (step) => open("step", [step], { validate: validate ? 1 : null });
  for (const { title, series, ...options } of CHARTS) {
    const lines = series(rows, run);
    if (!lines.some((line) => line.values.some((value) => value !== null))) continue;
    if (!charts.has(title)) {
      charts.set(title, new Chart({ title, ...options, onStep }));
      element.append(charts.get(title).node);
    }
    charts.get(title).show(steps, lines, marks);
  }
}

function stepTable(rows, run, validate) {
  const components = numbersOnly(run.components, rows).slice(0, MOST_COLUMNS);
  const newest = rows.slice(-NEWEST_STEPS).reverse();
  const query = { validate: validate ? 1 : null };
  const hasJudges = newest.some((row) => (row.judge_s?.p95 ?? null) !== null);
  const body = newest.map((row) => [
    el("a", { href: link("step", [row.step], query) }, row.step),
    count(row.samples),
    count(row.groups),
    fixed(row.reward?.mean),
    fixed(row.reward?.std),
    ...components.map((name) => number(row.components[name]?.mean ?? null)),
    count(row.samples - row.outcomes.scored),
    count(row.zero_variance),
    number(row.response_length),
    ...(hasJudges ? [seconds(row.judge_s?.p50), seconds(row.judge_s?.p95)] : []),
    run.events ? el("a", { href: link("timeline", [row.step]) }, "timeline") : "",
  ]);
  const columns = ["Step", ">Samples", ">Groups", ">Reward", ">Std", ...components.map((name) => `>${name}`)];
  columns.push(">No score", ">Equal groups", ">Tokens", ...(hasJudges ? [">Judge p50", ">Judge p95"] : []), "");
  const title = rows.length > NEWEST_STEPS ? `The last ${NEWEST_STEPS} of ${count(rows.length)} steps` : "Steps";
  return el("section", {}, el("h2", {}, title), table(columns, body));
}

/** Returns what samples without a training step have in common. */
async function noSteps(run, part, validate) {
  if (!run.samples)
    return empty(
      "No samples yet",
      "The folder has no complete row. This page shows samples as soon as they are written.",
    );
  const { causes } = await get("overview", { validate });
  return el(
    "div",
    {},
    el(
      "p",
      { class: "hint" },
      run.events ? "No training step has ended. " : "These samples were scored outside of a training run. ",
      el("a", { href: link("samples", [], { validate: validate ? 1 : null }) }, `Show the ${plural(part.samples, "sample")}`),
      run.models.length ? [" · ", el("a", { href: link("judges") }, "Show the judges")] : "",
    ),
    section(
      "Outcomes",
      ["Outcome", ">Samples"],
      Object.entries(part.outcomes).map(([outcome, amount]) => [
        el("a", { href: link("samples", [], { validate: validate ? 1 : null, outcome }) }, outcome),
        count(amount),
      ]),
    ),
    section(
      "Causes of failures",
      [">Samples", "Outcome", "Cause", "First error"],
      causes.map((row) => [
        count(row.count),
        row.outcome,
        visible(row.cause),
        el("a", { href: link("sample", [row.id]) }, visible(row.example)),
      ]),
    ),
  );
}

function section(title, columns, rows) {
  return rows.length ? el("section", {}, el("h2", {}, title), table(columns, rows)) : "";
}
