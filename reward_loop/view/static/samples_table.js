/** The table of samples. */

import { get } from "./api.js";
import { numbersOnly } from "./components.js";
import { el } from "./dom.js";
import { count, fixed, seconds, value } from "./format.js";
import { outcomeMark } from "./outcome.js";
import { link, open } from "./router.js";
import { pagedTable } from "./table.js";
import { visible } from "./text.js";

/**
 * Returns the table of samples.
 * @param {HTMLElement} element
 * @param {Object} run: the answer of api/run
 * @param {Object} options
 * @param {Object[]} options.steps: their summaries
 * @param {function(): Object} options.query: the parameters of api/samples for the filters, without the order
 * @param {function(number)} options.onTotal: called with the number of samples
 * @param {function(string, string)} options.onSort: called with field and direction
 */
export function samplesTable(element, run, { steps, query, sort, order, onTotal, onSort }) {
  let latest = {};
  const href = (row) => link("sample", [row.id], latest);
  return pagedTable(element, {
    label: "Samples",
    columns: columns(run, steps, query(), href, element.clientWidth),
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

/** Returns the columns: of components and data sources, those that fit into the room, so that none is cut. */
function columns(run, steps, query, href, room) {
  const right = { hozAlign: "right", cssClass: "number" };
  const component = (name, options) => ({
    title: name,
    field: `components.${name}`,
    cell: (row) => visible(value(row[`components.${name}`])),
    ...options,
  });
  const numbers = numbersOnly(run.components, steps);
  const texts = run.components.filter((name) => !numbers.includes(name));
  const widthOf = (name) => Math.min(150, Math.max(72, 30 + 7 * name.length));
  const sample = [
    {
      title: "Sample",
      field: "uid",
      minWidth: 104,
      widthGrow: 2,
      cell: (row) => el("a", { href: href(row) }, visible(row.uid ?? row.id)),
    },
    ...(query.step ? [] : [{ title: "Step", field: "step", cell: (row) => row.step ?? "–", width: 64, ...right }]),
    {
      title: "Reward",
      field: "reward",
      cell: (row) => fixed(row.reward),
      width: 84,
      headerSortStartingDir: "desc",
      ...right,
    },
    { title: "Outcome", field: "outcome", cell: outcomeMark, width: 152 },
  ];
  const times = [
    { title: "Tokens", field: "response_length", cell: (row) => count(row.response_length), width: 76, ...right },
    { title: "Time", field: "total_s", cell: (row) => seconds(row.total_s), width: 80, ...right },
    { title: "Judges", field: "judge_s", cell: (row) => judgesText(row), width: 96, ...right },
  ];
  const sources = { title: "Data source", field: "data_source", cell: (row) => visible(row.data_source ?? ""), width: 130 };
  let left = [...sample, ...times].reduce((rest, column) => rest - (column.width ?? column.minWidth), room - 16);
  const fits = ({ width }) => width <= left && ((left -= width), true);
  return [
    ...sample,
    ...numbers.map((name) => component(name, { width: widthOf(name), ...right })).filter(fits),
    ...times,
    ...(run.data_sources.length > 1 ? [sources] : []).filter(fits),
    ...texts.map((name) => component(name, { width: 130 })).filter(fits),
  ];
}

/** Returns the seconds of a sample's requests to judges, with their number if there are several. */
function judgesText({ judges, judge_s: total }) {
  if (!judges) return "–";
  return judges > 1 ? `${judges} · ${seconds(total)}` : seconds(total);
}
