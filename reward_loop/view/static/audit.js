/** Probes of the judge: shares by kind over the steps, and the probes that show its largest errors. */

import { get } from "./api.js";
import { Chart } from "./chart.js";
import { diff } from "./diff.js";
import { el, empty, table } from "./dom.js";
import { verdictTag } from "./exchange.js";
import { count, number, percent, UNKNOWN } from "./format.js";
import { link, open } from "./router.js";
import { conversation, textBlock, visible } from "./text.js";
import { markVerdict } from "./verdict.js";

const isCanary = ({ kind }) => kind.startsWith("canary/");
const family = (kind) => kind.split("/")[0];
const shortName = (kind) => kind.replace("canary/", "");
/** Whether a value is a share: neither a gap nor an effect nor kappa nor drift. */
const isShare = ({ kind, metric }) => !["reference", "ablation"].includes(family(kind)) && !/\/(kappa|drift)$/.test(metric);

/** The charts: which kinds they show, and how. A chart without a kind is left out. */
const CHARTS = [
  { title: "Accepted canaries", has: isCanary, range: [0, 1] },
  { title: "Scores that agree", has: ({ metric }) => metric.endsWith("/agreement"), range: [0, 1] },
  { title: "Accuracy on labelled answers", has: ({ metric }) => metric === "labelled/accuracy", range: [0, 1] },
  { title: "Kappa on labelled answers", has: ({ metric }) => metric === "labelled/kappa", format: number },
  { title: "Drift of labelled answers", has: ({ metric }) => metric === "labelled/drift", format: number },
  { title: "Score minus reference score, mean", has: ({ kind }) => family(kind) === "reference", format: number },
];

/** What the list shows, by the kind of its probes. */
const LISTS = {
  canary: "Accepted canaries with the highest scores",
  labelled: "Labelled answers with a wrong verdict",
  reference: "Answers that the judge scores above the reference judge",
  ablation: "Answers whose score rises most with a feature",
};

/** The names of both scores of a probe. */
const SCORES = {
  canary: ["score of the canary", "of the sample"],
  labelled: ["score", "label"],
  reference: ["score of the reference judge", "of the judge"],
  ablation: ["score without the feature", "with it"],
  again: ["second score", "first score"],
};

/** Shows the probes of the run. */
export async function showAudit(view, { query }) {
  const parts = { table: el("div"), charts: el("div", { class: "charts" }), worst: el("div", { class: "worst" }) };
  view.append(el("div", { class: "title" }, el("h1", {}, "Audit of the judge")), ...Object.values(parts));
  const charts = new Map();
  let newest = "";

  async function refresh() {
    const { rows, kind, worst } = await get("audit", query);
    if (!rows.length) {
      parts.table.replaceChildren(none());
      return;
    }
    parts.table.replaceChildren(kinds(rows, kind));
    showCharts(parts.charts, charts, rows);
    const texts = JSON.stringify([kind, worst]);
    // Texts that did not change stay as they are: the reader may have scrolled or opened them.
    if (texts !== newest) parts.worst.replaceChildren(...list(kind, worst));
    newest = texts;
  }

  await refresh();
  return { title: "Audit", refresh, close: () => charts.forEach((chart) => chart.close()) };
}

function none() {
  return empty("No probes", "The options reward_loop.audit turn on probes of the judge: answers with known scores.");
}

/** Returns the table of the kinds; the name of a kind lists its probes. */
function kinds(rows, chosen) {
  const body = rows.map((row) => {
    const { kind, metric, counted, without_score: unscored, value, interval } = row;
    const shown = isShare(row) ? percent : number;
    return [
      el("a", { href: link("audit", [], { kind }), "aria-current": kind === chosen ? "true" : null }, visible(metric)),
      count(counted),
      count(unscored),
      shown(value),
      interval ? `${shown(interval[0])} to ${shown(interval[1])}` : UNKNOWN,
    ];
  });
  return table(["Probe", ">Counted", ">No score", ">Value", ">95 % interval"], body, { isNarrow: true });
}

function showCharts(element, charts, rows) {
  for (const { title, has, range, format = percent } of CHARTS) {
    const chosen = rows.filter((row) => has(row) && row.by_step.length);
    if (!chosen.length) continue;
    if (!charts.has(title)) {
      charts.set(title, new Chart({ title, range, format, onStep: (step) => open("step", [step]) }));
      element.append(charts.get(title).node);
    }
    const steps = [...new Set(chosen.flatMap((row) => row.by_step.map((one) => one.step)))].sort((a, b) => a - b);
    const series = chosen.flatMap((row) => lines(row, steps));
    series.push(...limits(chosen, steps));
    charts.get(title).show(steps, series);
  }
}

/** Returns a line at each limit of the health monitors. */
function limits(rows, steps) {
  const known = rows.filter(({ limit }) => typeof limit === "number");
  return [...new Set(known.map(({ limit }) => limit))].map((limit) => {
    const kinds = known.filter((row) => row.limit === limit).map(({ kind }) => kind);
    const name = kinds.length === rows.length ? "limit of the monitor" : `limit of ${kinds.map(visible).join(", ")}`;
    return { label: name, values: steps.map(() => limit), isDashed: true };
  });
}

/** Returns the line of a kind; that of the reference judge has the band of its interval. */
function lines({ kind, by_step: found }, steps) {
  const known = new Map(found.map((one) => [one.step, one]));
  const each = (read) => steps.map((step) => (known.has(step) ? (read(known.get(step)) ?? null) : null));
  const line = { label: shortName(kind).replace("reference/", ""), values: each((one) => one.value) };
  if (kind !== "reference") return [line];
  const edge = (label, end) => ({ label, values: each((one) => one.interval?.[end]), isEdge: true });
  return [{ ...line, label: "gap" }, edge("95 % from", 0), edge("to", 1)];
}

function list(kind, worst) {
  const title = LISTS[family(kind)] ?? "The same answers with the largest differences of scores";
  return [
    el("h2", {}, `${title}: ${visible(shortName(kind))}`),
    ...(worst.length ? worst.map((one) => card(kind, one)) : [el("p", { class: "hint" }, "There are none.")]),
  ];
}

/** Returns a probe: question, answer and the judge's words beside each other; of an ablation, both answers. */
function card(kind, probe) {
  const { id, uid, step, function: judge, score, probe_score: probed, answer, prompt, ground_truth: truth } = probe;
  const name = visible(uid ?? "without uid");
  const replies = probe.exchanges.filter(({ reply }) => reply !== null && reply !== undefined);
  const words = replies.map(({ reply, verdict }) => textBlock(reply, { mark: (text) => markVerdict(text, verdict) }));
  const [first, second] = SCORES[family(kind)] ?? SCORES.again;
  const about = `${first} ${number(probed)} · ${second} ${number(score)} · step ${step ?? UNKNOWN}`;
  const pair = family(kind) === "ablation" && probe.response !== null ? sides(probe) : null;
  return el(
    "article",
    { class: "card" },
    el("header", {}, id ? el("a", { href: link("sample", [id]) }, name) : name, el("p", { class: "about" }, about)),
    el(
      "div",
      { class: "three" },
      el(
        "div",
        {},
        part("Question", prompt === null ? hint("It was not recorded.") : conversation(prompt)),
        truth === null ? null : part("Ground truth", textBlock(typeof truth === "string" ? truth : JSON.stringify(truth))),
      ),
      pair ?? part("Answer", answer ? textBlock(answer) : hint(answer === "" ? "(empty)" : "It was not recorded.")),
      pair ? null : part(visible(judge ?? "Judge"), words.length ? words : withoutReply(probe)),
    ),
  );
}

/** Returns the answer with and without a feature, as two columns; what differs is marked. */
function sides({ answer, response, positive, score, probe_score: probed }) {
  const [having, without] = positive ? [answer, response] : [response, answer];
  return [
    part(`With the feature: ${number(score)}`, textBlock(having, { mark: (text) => marked(text, without) })),
    part(`Without: ${number(probed)}`, textBlock(without, { mark: (text) => marked(text, having) })),
  ];
}

/** Returns a text in parts; the words that another text lacks are marked. */
function marked(text, other) {
  return diff(text, visible(other))[0].map((run) => (run.isSame ? run.text : el("mark", {}, run.text)));
}

/** Returns the verdicts of a judge whose texts were not recorded, or of a model that replies by a number. */
function withoutReply({ exchanges }) {
  const verdicts = exchanges.map(verdictTag).filter(Boolean);
  return verdicts.length ? verdicts : hint("No reply was recorded.");
}

function part(title, content) {
  return el("div", { class: "part" }, el("h4", {}, title), content);
}

function hint(text) {
  return el("p", { class: "hint" }, text);
}
