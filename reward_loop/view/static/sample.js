/** A sample: its texts, its reward with components and times, and its exchanges with judges. */

import { get } from "./api.js";
import { isLong, shortComponents } from "./components.js";
import { el, figures } from "./dom.js";
import { exchangeCard, raw } from "./exchange.js";
import { count, fixed, plural, seconds, time, value } from "./format.js";
import { outcomeMark } from "./outcome.js";
import { link, open } from "./router.js";
import { asText, conversation, textBlock, visible } from "./text.js";
import { conversationOf } from "./turns.js";

/** Shows the sample that the route names. Previous and next follow the order of the table that it was opened from. */
export async function showSample(view, { args: [id], query }, run) {
  const sample = await get(`sample/${encodeURIComponent(id)}`, query);
  const { row, exchanges } = sample;
  view.append(
    head(sample, query),
    ...(row.error ? [el("p", { class: "note bad" }, visible(row.error))] : []),
    el(
      "div",
      { class: "sample-parts" },
      el("div", {}, el("div", { class: "texts" }, textParts(sample)), judges(exchanges)),
      el(
        "aside",
        { "aria-label": "Reward and times" },
        card("Components", shortComponents(row).map(([name, given]) => [name, value(given)])),
        times(row),
        calls(row),
        groupOf(sample, query),
        fields(row, run),
      ),
    ),
  );
  const go = (target) => () => target && open("sample", [target], query);
  return {
    title: `Sample ${row.uid ?? row.id}`,
    shortcuts: [
      { keys: ["j", "ArrowRight"], label: "Next sample", run: go(sample.next) },
      { keys: ["k", "ArrowLeft"], label: "Previous sample", run: go(sample.previous) },
      { keys: ["u"], label: "Up to the table", run: () => open(...above(row, query)) },
    ],
  };
}

function textParts({ row, texts: recorded, turns }) {
  const part = (title, content) => el("section", { class: "part" }, el("h2", {}, title), content);
  const long = longComponents(row, recorded);
  if (!recorded)
    return [el("p", { class: "note" }, "The texts of this sample were not recorded, or have been deleted."), ...long];
  const of = (title, field, show = textBlock) => (recorded[field] == null ? null : part(title, show(recorded[field])));
  const spoken = (title, field, show) =>
    turns[field] ? part(title, conversationOf(turns[field])) : of(title, field, show);
  return [
    spoken("Prompt", "prompt", conversation),
    spoken("Response", "response"),
    of("Response as the function received it", "solution_str"),
    of("Ground truth", "ground_truth"),
    Object.keys(recorded.extra_info ?? {}).length ? of("Extra info", "extra_info") : null,
    ...long,
  ];
}

/** Returns the view above a sample: the arguments of `open`. */
function above(row, query) {
  const { step, validate, ...filters } = query;
  if (step === undefined && Object.keys(query).length) return ["samples", [], query];
  return row.step === null || row.step === undefined
    ? ["samples", [], filters]
    : ["step", [row.step], { ...filters, validate: row.validate ? 1 : null }];
}

function groupLink({ group, step, validate }) {
  if (step === null || step === undefined) return link("samples", [], { group, validate: validate ? 1 : null });
  return link("step", [step], { group, validate: validate ? 1 : null });
}

function head({ row, previous, next }, query) {
  const go = (target, label, text) =>
    el("a", { class: "button", "aria-label": label, href: target ? link("sample", [target], query) : null }, text);
  const [name, args, filters] = above(row, query);
  return el(
    "div",
    { class: "title" },
    el(
      "nav",
      { class: "path", "aria-label": "Path" },
      el("a", { href: link(name, args, filters) }, name === "step" ? `Step ${row.step}` : "Samples"),
      row.group ? [" / ", el("a", { href: groupLink(row) }, visible(row.group))] : null,
    ),
    el("h1", {}, visible(row.uid ?? row.id)),
    outcomeMark(row),
    el("span", { class: "buttons" }, go(previous, "Previous sample", "←"), go(next, "Next sample", "→")),
    figures([
      ["Reward", fixed(row.reward), row.score !== row.reward ? `score ${fixed(row.score)}` : null],
      row.advantage != null && ["Advantage", fixed(row.advantage), "mean of its tokens"],
      ["Response", count(row.response_length), "tokens"],
      ["Time", seconds(row.total_s), plural(row.attempts ?? 0, "attempt")],
      [
        "Judges",
        plural((row.judges ?? []).length, "request"),
        `${count((row.prompt_tokens ?? 0) + (row.completion_tokens ?? 0))} tokens`,
      ],
    ]),
  );
}

/** Returns a card with a list of names and texts; null without entries. */
function card(title, entries) {
  if (!entries.length) return null;
  const items = entries.map(([label, given]) => [el("dt", {}, visible(label)), el("dd", {}, visible(given))]);
  return el("section", { class: "card" }, el("h2", {}, title), el("dl", { class: "fields" }, items));
}

/** Returns the components with longer texts, in full if the texts were recorded; a click opens each. */
function longComponents(row, recorded) {
  const found = Object.entries({ ...row.components, ...recorded?.components }).filter(([, given]) => isLong(given));
  if (!found.length) return [];
  const items = found.map(([name, given]) => raw(visible(name), given));
  return [el("section", { class: "part" }, el("h2", {}, "Components with texts"), items)];
}

function times(row) {
  const judged = (row.judges ?? []).reduce((total, judge) => total + (judge.seconds ?? 0), 0);
  const entries = [
    ["Waiting for the batch", row.batch_s],
    ["Waiting for a worker", row.queue_s],
    ["Waiting for limits, retries", row.wait_s],
    ["Running the function", row.work_s],
    ["Judges", judged],
  ];
  return card("Time", entries.filter(([, given]) => given).map(([label, given]) => [label, seconds(given)]));
}

/** Returns the calls of the function: attempts. A single call is not listed. */
function calls(row) {
  const found = row.calls ?? [];
  if (found.length < 2) return null;
  const hasNames = found.some((call) => call.function !== found[0].function);
  const entries = found.map((call, i) => [
    (hasNames ? call.function : `Attempt ${i + 1}`) + (i ? `, at ${seconds(call.start_s)}` : ""),
    [call.error, seconds(call.work_s)].filter(Boolean).join(" · "),
  ]);
  return card("Calls of the function", entries);
}

function groupOf({ row, group }, query) {
  if (!row.group || group.length < 2) return null;
  const items = group.map((one) =>
    el(
      "li",
      { "aria-current": one.id === row.id ? "true" : null },
      el("a", { href: link("sample", [one.id], query) }, visible(one.uid ?? one.id)),
      el("span", { class: "right" }, one.reward === null ? one.outcome : fixed(one.reward)),
    ),
  );
  return el("section", { class: "card" }, el("h2", {}, "Group"), el("ul", { class: "group-list" }, items));
}

function fields(row, run) {
  const entries = [
    ["Step", row.generated_step == null || row.generated_step === row.step ? row.step : `${row.step}, generated in step ${row.generated_step}`],
    ["Data source", row.data_source],
    ["Function", run.functions.length > 1 || row.function ? row.function : null],
    ["Scored at", time(row.time)],
    ["Batch", row.batch],
    ["Record", row.id],
  ].filter(([, given]) => given !== null && given !== undefined && given !== "");
  return card("Record", entries.map(([label, given]) => [label, asText(given)]));
}

function judges(exchanges) {
  if (!exchanges.length)
    return el("p", { class: "hint" }, "No request to a judge or model server was recorded for this sample.");
  return el(
    "section",
    { class: "exchanges", "aria-label": "Judges" },
    el("h2", {}, "Judges", el("span", { class: "total" }, exchanges.length)),
    exchanges.map(exchangeCard),
  );
}
