/** The turns of a conversation: a role with its texts, reasoning, and calls of tools beside their results. */

import { parse } from "./api.js";
import { el } from "./dom.js";
import { plural } from "./format.js";
import { asText, textBlock, visible } from "./text.js";

/** Longer arguments and results are folded. */
const LINES = 12;
const CHARACTERS = 1200;

/**
 * @typedef {Object} Turn: as in the answer of api/sample
 * @property {string} role
 * @property {Array<{kind, text, name, result}>} parts
 */

/** Returns turns, one below the other. */
export function conversationOf(turns) {
  return el("div", { class: "conversation" }, turns.map(turnNode));
}

function turnNode(turn) {
  const parts = turn.parts.map((part) => {
    const nodes = blocksOf(part).map(blockNode);
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
function blockNode({ kind, text, label }) {
  if (label === null) return textBlock(text);
  const lines = text.split("\n").length;
  if (kind !== "reasoning" && lines <= LINES && text.length <= CHARACTERS)
    return el("div", { class: `block ${kind}` }, el("h4", {}, visible(label)), textBlock(text));
  const details = el(
    "details",
    { class: `block ${kind}`, ontoggle: () => details.open && details.children.length === 1 && details.append(textBlock(text)) },
    el("summary", {}, visible(label), ` · ${plural(lines, "line")}`),
  );
  return details;
}
