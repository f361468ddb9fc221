/** Tables of any length: Tabulator draws only the rows in view, and asks the server for pages of rows. */

import { TabulatorFull } from "./vendor/tabulator-tables-6.5.3/tabulator_esm.min.mjs";
import { el } from "./dom.js";

const PAGE = 100;

/**
 * Returns a table that loads further rows while it is scrolled.
 * @param {HTMLElement} element
 * @param {Object} options
 * @param {string} options.label: for screen readers
 * @param {Object[]} options.columns: of Tabulator, with `cell`: a function of a row that returns a node or text
 * @param {function({offset, limit, sort, order}): Promise<{rows, total}>} options.load
 * @param {string} [options.sort], [options.order]: the first order
 * @param {function(Object)} [options.onRow]: called with the row that was clicked
 * @param {function(number)} options.onTotal: called with the number of rows, when they are drawn
 * @param {string} options.none: the text that is shown without rows
 * @param {number} options.rowHeight
 */
export function pagedTable(element, { label, columns, load, sort, order, onRow, onTotal, none, rowHeight }) {
  let total = 0;
  const table = new TabulatorFull(element, {
    columns: columns.map(column),
    index: "id",
    height: "100%",
    layout: "fitColumns",
    rowHeight,
    nestedFieldSeparator: false,
    headerSortClickElement: "header",
    placeholder: el("p", { class: "none" }, none),
    initialSort: sort ? [{ column: sort, dir: order === "desc" ? "desc" : "asc" }] : [],
    sortMode: "remote",
    filterMode: "remote",
    progressiveLoad: "scroll",
    progressiveLoadScrollMargin: 1500,
    paginationSize: PAGE,
    dataLoader: false,
    ajaxURL: "api",
    ajaxRequestFunc: async (_url, _config, { page, size, sort: sorters }) => {
      const sorter = sorters?.at(0);
      const found = await load({ offset: (page - 1) * size, limit: size, sort: sorter?.field, order: sorter?.dir });
      total = found.total;
      return { data: found.rows, last_page: Math.max(1, Math.ceil(total / size)) };
    },
  });
  element.setAttribute("aria-label", label);
  table.on("renderComplete", () => onTotal(total));
  if (onRow) {
    table.on("rowClick", (event, row) => {
      if (!event.target.closest("a")) onRow(row.getData());
    });
  }
  return table;
}

function column({ title, cell, ...options }) {
  return {
    title,
    titleFormatter: () => el("span", { title }, title),
    formatter: (shown) => el("span", { class: "cell" }, cell(shown.getData())),
    ...options,
  };
}
