/** A sample: its texts, its reward with components and times, and its exchanges with judges. */

import { get } from "./api.js";
import { isLong, shortComponents } from "./components.js";
import { el, figures, withProperty } from "./dom.js";
import { exchangeCard, raw, verdictTag } from "./exchange.js";
import { count, fixed, number, plural, seconds, time, value } from "./format.js";
import { outcomeMark } from "./outcome.js";
import { link, open } from "./router.js";
import { asText, conversation, textBlock, visible } from "./text.js";
import { conversationOf } from "./turns.js";

let isMarkdown = false;

/** Shows the sample that the route names. Previous and next follow the order of the table that it was opened from. */
export async function showSample(view, { args: [id], query }, run) {
  const sample = await get(`sample/${encodeURIComponent(id)}`, query);
  const { row, exchanges } = sample;
  const texts = el("div", { class: "texts" });
  const showTexts = () => texts.replaceChildren(...textParts(sample));
  showTexts();
  view.append(
    head(sample, query),
    ...(row.error ? [el("p", { class: "note bad" }, visible(row.error))] : []),
    el(
      "div",
      { class: "sample-parts" },
      el("div", {}, texts, judges(exchanges)),
      el(
        "aside",
        { "aria-label": "Reward and times" },
        components(row),
        verdicts(exchanges),
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
      { keys: ["m"], label: "Plain text or Markdown", run: () => ((isMarkdown = !isMarkdown), showTexts()) },
      { keys: ["u"], label: "Up to the table", run: () => open(...above(row, query)) },
      { keys: ["d"], label: "Compare with the next sample of the group", run: () => compareWithNext(sample) },
    ],
  };

  function textParts({ row, texts: recorded, turns }) {
    const part = (title, content, extra) => el("section", { class: "part" }, el("h2", {}, title, extra), content);
    const long = longComponents(row, recorded);
    if (!recorded)
      return [el("p", { class: "note" }, "The texts of this sample were not recorded, or have been deleted."), ...long];
    const shown = (field, show) =>
      turns[field] ? conversationOf(turns[field], { isMarkdown }) : show(recorded[field], { isMarkdown });
    const has = (field) => recorded[field] !== null && recorded[field] !== undefined;
    return [
      has("prompt") ? part("Prompt", shown("prompt", conversation), modes()) : null,
      has("response") ? part("Response", shown("response", textBlock), has("prompt") ? null : modes()) : null,
      has("solution_str") ? part("Response as the function received it", textBlock(recorded.solution_str)) : null,
      has("ground_truth") ? part("Ground truth", textBlock(recorded.ground_truth)) : null,
      Object.keys(recorded.extra_info ?? {}).length ? part("Extra info", textBlock(recorded.extra_info)) : null,
      ...long,
    ].filter(Boolean);
  }

  function modes() {
    const mode = (label, chosen) =>
      el(
        "button",
        {
          type: "button",
          "aria-pressed": String(isMarkdown === chosen),
          onclick: () => ((isMarkdown = chosen), showTexts()),
        },
        label,
      );
    return el("span", { class: "segments" }, mode("Plain", false), mode("Markdown", true));
  }
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

function head({ row, cost, previous, next }, query) {
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
      cost !== null && ["Cost", number(cost), "of its requests"],
    ]),
  );
}

/** Returns bars: `[label, number for the bar or null, text]`. */
function bars(entries, most) {
  return el(
    "dl",
    { class: "bars" },
    entries.map(([label, amount, text]) =>
      el(
        "div",
        {},
        el("dt", {}, label),
        el("dd", {}, text),
        amount === null
          ? null
          : withProperty(
              el("dd", { class: amount < 0 ? "bar negative" : "bar", "aria-hidden": "true" }),
              "--share",
              most ? Math.min(1, Math.abs(amount) / most) : 0,
            ),
      ),
    ),
  );
}

/** Returns the components with longer texts, in full if the texts were recorded; a click opens each. */
function longComponents(row, recorded) {
  const found = Object.entries({ ...row.components, ...recorded?.components }).filter(([, given]) => isLong(given));
  if (!found.length) return [];
  const items = found.map(([name, given]) => raw(visible(name), given));
  return [el("section", { class: "part" }, el("h2", {}, "Components with texts"), items)];
}

function components(row) {
  const entries = shortComponents(row).map(([name, given]) => {
    const amount = typeof given === "boolean" ? Number(given) : given;
    return [visible(name), typeof amount === "number" ? amount : null, visible(value(given))];
  });
  if (!entries.length) return null;
  // A bar is relative to 1, or to the power of ten above the component: ratings up to 10 and shares have a full bar.
  const scaled = entries.map(([name, amount, text]) => [name, amount === null ? null : amount / scale(amount), text]);
  return el("section", { class: "card" }, el("h2", {}, "Components"), bars(scaled, 1));
}

function scale(amount) {
  return Math.abs(amount) <= 1 ? 1 : 10 ** Math.ceil(Math.log10(Math.abs(amount)));
}

/** Returns the list of the exchanges: a click shows the words of the judge, which are below the texts. */
function verdicts(exchanges) {
  if (!exchanges.length) return null;
  const show = (index) => document.querySelectorAll(".exchange")[index]?.scrollIntoView({ block: "start" });
  const items = exchanges.map((one, i) =>
    el(
      "li",
      {},
      el(
        "button",
        { type: "button", class: "link", title: visible(one.model ?? ""), onclick: () => show(i) },
        visible(one.model ?? "model server"),
      ),
      el("span", { class: "right" }, verdictTag(one)),
      el("span", { class: "small" }, seconds(one.seconds)),
    ),
  );
  return el("section", { class: "card" }, el("h2", {}, "Judges"), el("ul", { class: "group-list" }, items));
}

function times(row) {
  const entries = [
    ["Waiting for the batch", row.batch_s],
    ["Waiting for a worker", row.queue_s],
    ["Waiting for limits, retries", row.wait_s],
    ["Running the function", row.work_s],
    ["Judges", (row.judges ?? []).reduce((total, judge) => total + (judge.seconds ?? 0), 0) || null],
  ].filter(([, given]) => given);
  if (!entries.length) return null;
  const most = Math.max(row.total_s ?? 0, ...entries.map(([, given]) => given));
  return el(
    "section",
    { class: "card" },
    el("h2", {}, "Time"),
    bars(
      entries.map(([label, given]) => [label, given, seconds(given)]),
      most,
    ),
  );
}

/** Returns the calls of the function: attempts. A single call is not listed. */
function calls(row) {
  const found = row.calls ?? [];
  if (found.length < 2) return null;
  const hasNames = found.some((call) => call.function !== found[0].function);
  const most = Math.max(...found.map((call) => call.work_s ?? 0));
  const entries = found.map((call, i) => [
    visible(hasNames ? call.function : `Attempt ${i + 1}`) + (i ? `, at ${seconds(call.start_s)}` : ""),
    call.work_s ?? 0,
    [call.error, seconds(call.work_s)].filter(Boolean).map(visible).join(" · "),
  ]);
  return el("section", { class: "card" }, el("h2", {}, "Calls of the function"), bars(entries, most));
}

function groupOf({ row, group }, query) {
  if (!row.group || group.length < 2) return null;
  const items = group.map((one) =>
    el(
      "li",
      { "aria-current": one.id === row.id ? "true" : null },
      el("a", { href: link("sample", [one.id], query) }, visible(one.uid ?? one.id)),
      el("span", { class: "right" }, one.reward === null ? one.outcome : fixed(one.reward)),
      one.id === row.id
        ? el("span")
        : el(
            "a",
            { class: "small", href: link("pair", [row.id, one.id]), "aria-label": `Compare with ${one.uid ?? one.id}` },
            "compare",
          ),
    ),
  );
  const ends = bestAndWorst(group);
  return el(
    "section",
    { class: "card" },
    el("h2", {}, "Group", ends && el("a", { class: "small", href: link("pair", ends) }, "best and worst")),
    el("ul", { class: "group-list" }, items),
  );
}

/** Returns the IDs of the samples with the highest and the lowest reward; null if no rewards differ. */
export function bestAndWorst(group) {
  const known = group.filter(({ reward }) => reward !== null).sort((a, b) => b.reward - a.reward);
  return known.length && known[0].reward > known.at(-1).reward ? [known[0].id, known.at(-1).id] : null;
}

function compareWithNext({ row, group }) {
  const place = group.findIndex((one) => one.id === row.id);
  const other = group[(place + 1) % group.length];
  if (other && other.id !== row.id) open("pair", [row.id, other.id]);
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
  return el(
    "section",
    { class: "card" },
    el("h2", {}, "Record"),
    el(
      "dl",
      { class: "fields" },
      entries.map(([label, given]) => [el("dt", {}, label), el("dd", {}, visible(asText(given)))]),
    ),
  );
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
