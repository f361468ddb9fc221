/** The turns of a conversation: a role with its texts, reasoning, and calls of tools beside their results. */

import { parse } from "./api.js";
import { diff } from "./diff.js";
import { el } from "./dom.js";
import { plural } from "./format.js";
import { asText, SHOWN, textBlock, visible } from "./text.js";

/** Longer arguments and results are folded. */
const LINES = 12;
const CHARACTERS = 1200;

/**
 * @typedef {Object} Turn: as in the answer of api/sample
 * @property {string} role
 * @property {Array<{kind, text, name, result}>} parts
 */

/** Returns the turns of a sample's response; those of plain text are one turn. */
export function responseTurns({ texts, turns }) {
  if (!texts) return [];
  return turns.response ?? [{ role: "assistant", parts: [{ kind: "text", text: asText(texts.response ?? "") }] }];
}

/** Returns turns, one below the other. */
export function conversationOf(turns, options) {
  return el(
    "div",
    { class: "conversation" },
    turns.map((turn) => turnNode(turn, options)),
  );
}

/** Returns two turns, with the words that differ marked; either may be undefined. */
export function twoTurns(a, b) {
  const sides = [a, b].map((turn) => (turn ? turn.parts.flatMap(blocksOf) : []));
  const marks = [[], []];
  for (let i = 0; i < Math.max(sides[0].length, sides[1].length); i += 1) {
    const blocks = sides.map((side) => side[i]);
    const isComparable = blocks.every((block) => block?.kind === blocks[0]?.kind);
    const texts = blocks.map((block) => (isComparable ? visible(block.text.slice(0, SHOWN)) : ""));
    diff(...texts).forEach((runs, side) => marks[side].push({ runs, differs: !isComparable || texts[0] !== texts[1] }));
  }
  return [a, b].map((turn, side) =>
    el("div", { class: `side ${"ab"[side]}` }, turn ? turnNode(turn, { marks: marks[side] }) : null),
  );
}

function turnNode(turn, { isMarkdown = false, marks = [] } = {}) {
  const left = [...marks];
  const shown = (block) => blockNode(block, { isMarkdown, ...left.shift() });
  const parts = turn.parts.map((part) => {
    const nodes = blocksOf(part).map(shown);
    return part.kind === "call" ? el("div", { class: "tool" }, nodes) : nodes;
  });
  return el(
    "div",
    { class: "message" },
    el("span", { class: "role" }, visible(turn.role).slice(0, 40)),
    parts.length ? parts : el("p", { class: "hint" }, "(empty)"),
  );
}

/** Returns the texts of a part: those of a call are its arguments and its result. */
function blocksOf({ kind, text, name, result }) {
  if (kind === "text") return [{ kind, text, label: null }];
  if (kind === "reasoning") return [{ kind, text, label: "reasoning" }];
  if (kind === "result") return [{ kind, text, label: name ? `result of ${name}` : "result" }];
  const call = { kind, text: readable(text), label: name ? `call of ${name}` : "call that is not well-formed" };
  return result === null ? [call] : [call, { kind: "result", text: result, label: "result" }];
}

/** Returns the arguments of a call; if one has several lines, such as code, each as `name: text` instead of as JSON. */
function readable(text) {
  let given = null;
  try {
    given = parse(text);
  } catch {
    return text;
  }
  const entries = Object.entries(typeof given === "object" && !Array.isArray(given) ? (given ?? {}) : {});
  const hasLines = ([, value]) => typeof value === "string" && value.includes("\n");
  if (!entries.some(hasLines)) return text;
  return entries.map(([name, value]) => `${name}:${hasLines([name, value]) ? "\n" : " "}${asText(value)}`).join("\n");
}

/** Returns a block; reasoning, and what is long, is folded until it is opened. */
function blockNode({ kind, text, label }, { isMarkdown, runs, differs }) {
  const content = () =>
    textBlock(text, { isMarkdown: isMarkdown && kind === "text", mark: (shown) => marked(shown, runs, differs) });
  if (label === null) return content();
  const lines = text.split("\n").length;
  const title = [visible(label), differs ? el("span", { class: "tag warn" }, "differs") : null];
  if (kind !== "reasoning" && lines <= LINES && text.length <= CHARACTERS)
    return el("div", { class: `block ${kind}` }, el("h4", {}, title), content());
  const details = el(
    "details",
    { class: `block ${kind}`, ontoggle: () => details.open && details.children.length === 1 && details.append(content()) },
    el("summary", {}, title, ` · ${plural(lines, "line")}`),
  );
  return details;
}

/** Returns a shown text in parts: of the compared beginning, the words that differ are marked. */
function marked(shown, runs, differs) {
  const compared = runs?.map((run) => run.text).join("");
  if (!differs || !shown.startsWith(compared)) return [shown];
  if (!compared) return [el("mark", {}, shown)];
  return [...runs.map((run) => (run.isSame ? run.text : el("mark", {}, run.text))), shown.slice(compared.length)];
}
