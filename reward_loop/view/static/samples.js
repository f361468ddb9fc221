/** The samples of a step, or all samples: groups on the left, the table of samples on the right. */

import { get } from "./api.js";
import { el, figures } from "./dom.js";
import { filters } from "./filters.js";
import { count, fixed, number, percent, plural, seconds } from "./format.js";
import { groupsTable } from "./groups_table.js";
import { link, open, replace } from "./router.js";
import { isValidation, toggle } from "./validation.js";
import { judgeHint, rewardRange, samplesTable, spreadText } from "./samples_table.js";

/** Shows the samples of the step that the route names, or all samples. */
export async function showSamples(view, route, run) {
  const step = route.name === "step" ? route.args[0] : null;
  const { validate, sort, order, focus, ...query } = route.query;
  const showsValidation = isValidation({ validate }, run);
  const { rows } = await get("steps", { validate: showsValidation });
  const row = rows.find((one) => String(one.step) === step);
  const range = rewardRange(row ? [row] : rows);
  const scope = { step, validate: "where.uid" in query ? null : showsValidation };
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
    ...(row ? [summary(row)] : []),
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
      range,
      onTotal: (total) => (totals.groups.textContent = count(total)),
      onGroup: ({ group, step: ofGroup }) =>
        step === null ? open("step", [ofGroup], { group }) : form.set("group", query.group === group ? null : group),
    }),
    samples: samplesTable(panes.samples, run, {
      steps: rows,
      query: () => ({ ...scope, ...query }),
      sort,
      order,
      range,
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
    shortcuts: step === null ? [] : stepShortcuts(step, run, validate),
    refresh: () => reload(false),
    close: () => Object.values(tables).forEach((table) => table.destroy()),
  };
}

function neighbours(step, run) {
  const place = run.steps.findIndex((one) => String(one) === step);
  return { previous: run.steps[place - 1], next: place < 0 ? undefined : run.steps[place + 1] };
}

function stepShortcuts(step, run, validate) {
  const go = (side) => () => {
    const target = neighbours(step, run)[side];
    if (target !== undefined) open("step", [target], { validate });
  };
  return [
    { keys: ["]"], label: "Next step", run: go("next") },
    { keys: ["["], label: "Previous step", run: go("previous") },
  ];
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
  const { previous, next } = neighbours(step, run);
  const query = validate ? { validate: 1 } : {};
  const go = (target, label, text) =>
    el(
      "a",
      { class: "button", "aria-label": label, href: target === undefined ? null : link("step", [target], query) },
      text,
    );
  return el(
    "div",
    { class: "title" },
    el("h1", {}, `Step ${step}`, validate ? el("span", { class: "tag" }, "validation") : null),
    el("span", { class: "buttons" }, go(previous, "Previous step", "←"), go(next, "Next step", "→")),
    run.validation
      ? el(
          "a",
          { class: "button", href: link("step", [step], validate ? {} : { validate: 1 }) },
          validate ? "Training" : "Validation",
        )
      : null,
    run.events ? el("a", { class: "button", href: link("timeline", [step]) }, "Timeline") : null,
    validate ? null : el("a", { class: "button", href: link("pairs", [step]) }, "Best and worst"),
    ...(row?.warnings ?? []).map((warning) => el("p", { class: "note warn" }, warning)),
  );
}

function summary(row) {
  return figures([
    [
      "Reward",
      spreadText(row.reward ?? {}),
      row.reward ? `${fixed(row.reward.min)} to ${fixed(row.reward.max)}` : null,
    ],
    ["Samples", count(row.count), plural(row.groups, "group")],
    [
      "Without a score",
      percent(row.count ? (row.count - row.scored) / row.count : null),
      `${count(row.unscored)} unscored, ${count(row.failed)} failed`,
    ],
    [
      "Groups without a signal",
      count(row.zero_variance_groups + row.all_failed_groups),
      `${count(row.zero_variance_groups)} equal, ${count(row.all_failed_groups)} failed`,
    ],
    ["Response length", number(row.response_length), "tokens, mean"],
    ["Judge time of a sample", seconds(row.judge_s?.p50), judgeHint(row, `95 %: ${seconds(row.judge_s?.p95)}`)],
  ]);
}
