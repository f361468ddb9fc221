/** The table of groups: the responses to one prompt, with the spread of their rewards. */

import { get } from "./api.js";
import { el } from "./dom.js";
import { fixed, UNKNOWN } from "./format.js";
import { pagedTable } from "./table.js";
import { visible } from "./text.js";

/**
 * Returns the table of groups.
 * @param {HTMLElement} element
 * @param {Object} options
 * @param {Object} options.query: step and validate
 * @param {function(Object)} options.onGroup: called with the row that was clicked
 * @param {function(number)} options.onTotal: called with the number of groups
 */
export function groupsTable(element, { query, onGroup, onTotal }) {
  return pagedTable(element, {
    label: "Groups",
    rowHeight: 52,
    none: "No groups: the step has no samples, or their records do not name the prompts.",
    columns: [
      { title: "Group", field: "group", minWidth: 120, cell: name },
      {
        title: "Mean",
        field: "mean",
        width: 72,
        cell: (row) => fixed(row.mean, 2),
        hozAlign: "right",
        cssClass: "number",
      },
      { title: "Std", field: "std", width: 72, cell: (row) => fixed(row.std, 2), hozAlign: "right", cssClass: "number" },
    ],
    onRow: onGroup,
    onTotal,
    load: async (page) => {
      const answer = await get("groups", { ...query, ...page });
      return {
        total: answer.total,
        rows: answer.rows.map((row) => ({ ...row, id: `${row.step}/${row.validate}/${row.group}` })),
      };
    },
  });
}

function name(row) {
  return el(
    "span",
    { class: "group-name" },
    el("b", {}, visible(row.group ?? UNKNOWN)),
    ` ${row.scored} of ${row.count}`,
    row.zero_variance
      ? el("span", { class: "tag warn", title: "All rewards are equal: the group has no advantage" }, "equal")
      : null,
    row.all_failed ? el("span", { class: "tag bad", title: "No sample has a reward" }, "all failed") : null,
    el("small", {}, visible((row.prompt ?? "").slice(0, 200))),
  );
}
