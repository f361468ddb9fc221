/** The groups of some steps whose best and worst answer have the most different rewards, each a pair to open. */

import { get } from "./api.js";
import { el, empty, table } from "./dom.js";
import { fixed } from "./format.js";
import { link } from "./router.js";
import { visible } from "./text.js";

const SHOWN = 10;

/** Shows the pairs of the steps that the route names. */
export async function showPairs(view, { args: [first, last = first] }) {
  const order = { sort: "gap", order: "desc", limit: SHOWN };
  const { rows } = await get("groups", { validate: false, "min.step": first, "max.step": last, ...order });
  const found = rows.filter(({ gap }) => gap > 0);
  const body = found.map((row) => [
    el("a", { href: link("pair", [row.best, row.worst]) }, fixed(row.gap)),
    fixed(row.max),
    fixed(row.min),
    row.step,
    visible(row.group),
    visible((row.prompt ?? "").slice(0, 120)),
  ]);
  const steps = first === last ? `step ${first}` : `steps ${first} to ${last}`;
  view.append(
    el("div", { class: "title" }, el("h1", {}, `Best and worst answers, ${steps}`)),
    found.length
      ? table(["Difference", ">Best", ">Worst", ">Step", "Group", "Prompt"], body)
      : empty("No pairs", "No group of these steps has two different rewards and recorded texts."),
  );
  return { title: `Pairs of ${steps}` };
}
