/** The samples of a step, or all samples: groups on the left, the table of samples on the right. */

import { get } from "./api.js";
import { el } from "./dom.js";
import { filters } from "./filters.js";
import { count, plural } from "./format.js";
import { groupsTable } from "./groups_table.js";
import { link, open, replace } from "./router.js";
import { isValidation, toggle } from "./validation.js";
import { samplesTable } from "./samples_table.js";
import { stepButtons, stepShortcuts } from "./steps.js";

/** Shows the samples of the step that the route names, or all samples. */
export async function showSamples(view, route, run) {
  const step = route.name === "step" ? route.args[0] : null;
  const { validate, sort, order, focus, ...query } = route.query;
  const showsValidation = isValidation({ validate }, run);
  const { rows } = await get("steps", { validate: showsValidation });
  const row = rows.find((one) => String(one.step) === step);
  const scope = { step, validate: showsValidation };
  const order_ = { sort, order };

  const totals = { groups: el("span", { class: "total" }), samples: el("span", { class: "total" }) };
  const newer = el(
    "button",
    { type: "button", class: "chip accent", hidden: true, onclick: () => reload() },
    "New records: show them",
  );
  const panes = { groups: el("div", { class: "table" }), samples: el("div", { class: "table" }) };
  const form = filters(run, query, () => (remember(), markGroup(), tables.samples.setData()));
  view.append(
    head(step, showsValidation, run, row),
    el(
      "div",
      { class: "panes" },
      el(
        "section",
        { class: "pane groups", "aria-label": "Groups" },
        el("h2", {}, "Groups", totals.groups),
        panes.groups,
      ),
      el(
        "section",
        { class: "pane", "aria-label": "Samples" },
        el("h2", {}, "Samples", totals.samples, newer),
        form.node,
        panes.samples,
      ),
    ),
  );
  const tables = {
    groups: groupsTable(panes.groups, {
      query: scope,
      onTotal: (total) => (totals.groups.textContent = count(total)),
      onGroup: ({ group, step: ofGroup }) =>
        step === null && ofGroup !== null
          ? open("step", [ofGroup], { group, validate: showsValidation ? 1 : null })
          : form.set("group", query.group === group ? null : group),
    }),
    samples: samplesTable(panes.samples, run, {
      steps: rows,
      query: () => ({ ...scope, ...query }),
      ...order_,
      onTotal: (total) => (totals.samples.textContent = count(total)),
      onSort: (field, direction) => (Object.assign(order_, { sort: field, order: direction }), remember()),
    }),
  };
  tables.groups.on("renderComplete", markGroup);

  function remember() {
    replace(route.name, route.args, { validate, ...query, ...order_ });
  }

  function markGroup() {
    for (const one of tables.groups.getRows("visible")) {
      one.getElement().classList.toggle("chosen", query.group === one.getData().group);
    }
  }

  /** Loads the tables again; a table that was scrolled stays as it is until the user asks for it. */
  function reload(isAsked = true) {
    const isAtTop = (pane) => (pane.querySelector(".tabulator-tableholder")?.scrollTop ?? 0) < 4;
    if (isAsked || isAtTop(panes.groups)) tables.groups.setData();
    newer.hidden = isAsked || isAtTop(panes.samples);
    if (newer.hidden) tables.samples.setData();
  }

  if (focus) form.search();
  return {
    title: step === null ? "Samples" : `Step ${step}`,
    search: form.search,
    shortcuts: step === null ? [] : stepShortcuts("step", step, run, { validate }),
    refresh: () => reload(false),
    close: () => Object.values(tables).forEach((table) => table.destroy()),
  };
}

function head(step, validate, run, row) {
  if (step === null) {
    return el(
      "div",
      { class: "title" },
      el("h1", {}, "Samples"),
      run.validation ? toggle("samples", validate) : null,
      el(
        "p",
        { class: "about" },
        `${plural((validate ? run.validation : run.training)?.samples ?? 0, "sample")} of all steps`,
      ),
    );
  }
  return el(
    "div",
    { class: "title" },
    el("h1", {}, `Step ${step}`, validate ? el("span", { class: "tag" }, "validation") : null),
    stepButtons("step", step, run, validate ? { validate: 1 } : {}),
    run.validation
      ? el(
          "a",
          { class: "button", href: link("step", [step], validate ? {} : { validate: 1 }) },
          validate ? "Training" : "Validation",
        )
      : null,
    run.events ? el("a", { class: "button", href: link("timeline", [step]) }, "Timeline") : null,
    ...(row?.warnings ?? []).map((warning) => el("p", { class: "note warn" }, warning)),
  );
}
