/** The table of samples. */

import { get } from "./api.js";
import { numbersOnly } from "./components.js";
import { el } from "./dom.js";
import { count, fixed, seconds, value } from "./format.js";
import { outcomeMark, rewardCell } from "./outcome.js";
import { link, open } from "./router.js";
import { pagedTable } from "./table.js";
import { visible } from "./text.js";

const MOST_COMPONENTS = 6;
const MOST_TEXTS = 4;

/**
 * Returns the table of samples.
 * @param {HTMLElement} element
 * @param {Object} run: the answer of api/run
 * @param {Object} options
 * @param {Object[]} options.steps: their summaries
 * @param {function(): Object} options.query: the parameters of api/samples for the filters, without the order
 * @param {{min, max}} options.range: of the rewards, for their bars
 * @param {function(number)} options.onTotal: called with the number of samples
 * @param {function(string, string)} options.onSort: called with field and direction
 */
export function samplesTable(element, run, { steps, query, sort, order, range, onTotal, onSort }) {
  let latest = {};
  const href = (row) => link("sample", [row.id], latest);
  return pagedTable(element, {
    label: "Samples",
    columns: columns(run, steps, query(), range, href),
    rowHeight: 34,
    sort,
    order,
    none: "No sample matches these filters.",
    onTotal,
    onRow: (row) => open("sample", [row.id], latest),
    load: async (page) => {
      latest = { ...query(), sort: page.sort, order: page.order };
      const answer = await get("samples", { ...latest, offset: page.offset, limit: page.limit });
      onSort(page.sort, page.order);
      return { total: answer.total, rows: answer.rows.map(flat) };
    },
  });
}

/** Returns a row whose components are fields of their own. */
function flat(row) {
  const components = Object.entries(row.components ?? {}).map(([name, given]) => [`components.${name}`, given]);
  return { ...row, ...Object.fromEntries(components) };
}

function columns(run, steps, query, range, href) {
  const right = { hozAlign: "right", cssClass: "number" };
  const component = (name) => ({
    title: name,
    field: `components.${name}`,
    cell: (row) => visible(value(row[`components.${name}`])),
  });
  const numbers = numbersOnly(run.components, steps);
  const texts = run.components.filter((name) => !numbers.includes(name));
  const widthOf = (name) => Math.min(150, Math.max(80, 30 + 7 * name.length));
  return [
    {
      title: "Sample",
      field: "uid",
      minWidth: 104,
      widthGrow: 2,
      cell: (row) => [
        el("a", { href: href(row) }, visible(row.uid ?? row.id)),
      ],
    },
    ...(query.step ? [] : [{ title: "Step", field: "step", cell: (row) => row.step ?? "–", width: 70, ...right }]),
    {
      title: "Reward",
      field: "reward",
      cell: (row) => rewardCell(row.reward, range),
      width: 104,
      headerSortStartingDir: "desc",
      ...right,
    },
    { title: "Outcome", field: "outcome", cell: outcomeMark, width: 168 },
    ...numbers.slice(0, MOST_COMPONENTS).map((name) => ({ ...component(name), width: widthOf(name), ...right })),
    { title: "Tokens", field: "response_length", cell: (row) => count(row.response_length), width: 76, ...right },
    { title: "Time", field: "total_s", cell: (row) => seconds(row.total_s), width: 84, ...right },
    { title: "Judges", field: "judge_s", cell: (row) => judgesText(row), width: 96, ...right },
    ...(run.data_sources.length > 1
      ? [
          {
            title: "Data source",
            field: "data_source",
            cell: (row) => visible(row.data_source ?? ""),
            minWidth: 96,
            widthGrow: 1,
          },
        ]
      : []),
    ...texts.slice(0, MOST_TEXTS).map((name) => ({ ...component(name), width: 130 })),
  ];
}

/** Returns the seconds of a sample's requests to judges, with their number if there are several. */
function judgesText({ judges, judge_s: total }) {
  if (!judges) return "–";
  return judges > 1 ? `${judges} · ${seconds(total)}` : seconds(total);
}

/** Returns a text about the judge time of samples: `known`, or why there is none. */
export function judgeHint({ judge_s: times }, known) {
  return (times?.p95 ?? null) === null ? "no requests by reward_loop.client" : known;
}

/** Returns the range of the rewards of steps. */
export function rewardRange(steps) {
  const known = steps.map((row) => row.reward).filter(Boolean);
  return { min: Math.min(0, ...known.map((one) => one.min)), max: Math.max(...known.map((one) => one.max), 0) };
}

/** Returns the mean and its spread as text. */
export function spreadText({ mean, std }) {
  return std === null || std === undefined ? fixed(mean) : `${fixed(mean)} ± ${fixed(std)}`;
}
