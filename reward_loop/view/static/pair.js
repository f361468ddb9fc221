/** Two samples side by side, with the differences of their responses. */

import { get } from "./api.js";
import { isLong, shortComponents } from "./components.js";
import { el, table } from "./dom.js";
import { exchangeCard } from "./exchange.js";
import { count, fixed, seconds, value } from "./format.js";
import { outcomeMark } from "./outcome.js";
import { link, open } from "./router.js";
import { bestAndWorst } from "./sample.js";
import { asText, conversation, visible } from "./text.js";
import { conversationOf, responseTurns, twoTurns } from "./turns.js";

/** Shows the two samples that the route names. */
export async function showPair(view, { args: [first, second] }) {
  const samples = await Promise.all([first, second].map((id) => get(`sample/${encodeURIComponent(id)}`)));
  const [a, b] = samples;
  const isWhole = isSamePrompt(a, b) && bestAndWorst(a.group);
  const [best, worst] = isWhole ? isWhole.map((id) => a.group.find((one) => one.id === id).reward) : [];
  const title = isWhole && a.row.reward === best && b.row.reward === worst ? "Best and worst answer" : "Two samples";
  view.append(
    el(
      "div",
      { class: "title" },
      el("h1", {}, title),
      el("a", { class: "button", href: link("pair", [second, first]) }, "Swap"),
      isSamePrompt(a, b) ? el("p", { class: "about" }, "Both answer the same prompt.") : null,
    ),
    facts(
      samples.map(({ row }) => row),
      samples.map(({ row }) => visible(row.uid ?? row.id)),
    ),
    ...prompts(a, b),
    el("h2", {}, "Responses"),
    ...responses(samples),
    ...judges(samples),
  );
  return {
    title,
    shortcuts: [
      { keys: ["j", "ArrowRight"], label: "Compare with the next sample of the group", run: () => next(a, b, 1) },
      { keys: ["k", "ArrowLeft"], label: "Compare with the previous sample of the group", run: () => next(a, b, -1) },
    ],
  };
}

function isSamePrompt(a, b) {
  return a.row.group === b.row.group && asText(a.texts?.prompt) === asText(b.texts?.prompt);
}

/** Returns a table of two rows with their names: what differs is marked. Long texts are left out. */
function facts([a, b], names) {
  const short = shortComponents({ components: { ...a.components, ...b.components } }).map(([name]) => name);
  const components = short.filter((name) => !isLong(a.components?.[name] ?? null));
  const rows = [
    ["Reward", fixed(a.reward), fixed(b.reward)],
    ...([a, b].some((row) => row.score !== row.reward) ? [["Score", fixed(a.score), fixed(b.score)]] : []),
    ["Outcome", a.outcome, b.outcome],
    ...components.map((name) => [name, value(a.components?.[name]), value(b.components?.[name])]),
    ["Tokens", count(a.response_length), count(b.response_length)],
    ["Time", seconds(a.total_s), seconds(b.total_s)],
  ];
  const body = rows.map(([label, left, right]) => {
    const cell = (text) => el("span", { class: left === right ? "right" : "right differs" }, visible(text));
    return [el("b", {}, visible(label)), cell(left), cell(right)];
  });
  return table(["", ...names.map((name) => `>${name}`)], body, { isNarrow: true });
}

function prompts(a, b) {
  if (isSamePrompt(a, b)) return a.texts?.prompt == null ? [] : [el("h2", {}, "Prompt"), promptOf(a)];
  return [
    el("h2", {}, "Prompts"),
    el(
      "div",
      { class: "two" },
      [a, b].map((sample) => el("div", {}, sample.texts?.prompt == null ? missing() : promptOf(sample))),
    ),
  ];
}

function promptOf({ texts, turns }) {
  return turns.prompt ? conversationOf(turns.prompt) : conversation(texts.prompt);
}

function missing() {
  return el("p", { class: "hint" }, "The texts of this sample were not recorded, or have been deleted.");
}

/** Returns both responses, turn by turn, with the words that differ marked. Of long texts, the beginnings are compared. */
function responses(samples) {
  const [a, b] = samples.map(responseTurns);
  const names = samples.map(({ row, texts }) =>
    el(
      "div",
      { class: "side-name" },
      outcomeMark(row),
      el("b", {}, fixed(row.reward)),
      el("a", { href: link("sample", [row.id]) }, visible(row.uid ?? row.id)),
      texts ? null : missing(),
    ),
  );
  const rows = Array.from({ length: Math.max(a.length, b.length) }, (_, i) => twoTurns(a[i], b[i]));
  return [names, ...rows].map((row) => el("div", { class: "two" }, row));
}

/** Returns the exchanges of two samples with judges, side by side. */
function judges(samples) {
  const side = ({ exchanges }) =>
    el(
      "div",
      {},
      exchanges.length ? exchanges.map(exchangeCard) : el("p", { class: "hint" }, "No request was recorded."),
    );
  return [el("h2", {}, "Judges"), el("div", { class: "two" }, samples.map(side))];
}

function next(a, b, direction) {
  const others = a.group.filter((one) => one.id !== a.row.id);
  const place = others.findIndex((one) => one.id === b.row.id);
  const other = others[(place + direction + others.length) % others.length];
  if (other) open("pair", [a.row.id, other.id]);
}
