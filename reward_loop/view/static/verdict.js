/** Finds the verdict in a judge's reply, to highlight it. */

import { el } from "./dom.js";

/** Returns a text in parts, with the last place of the verdict as a `mark`. */
export function markVerdict(text, verdict) {
  const place = findVerdict(text, verdict);
  if (!place) return [text];
  const [start, end] = place;
  return [
    text.slice(0, start),
    el("mark", { title: "The verdict that was read" }, text.slice(start, end)),
    text.slice(end),
  ];
}

/**
 * Returns start and end of the last place where a reply has the verdict, or null. The library reads the last verdict in a
 * reply, too.
 */
function findVerdict(text, verdict) {
  if (verdict === null || verdict === undefined || verdict === "") return null;
  if (typeof verdict === "object") return findObject(text);
  const pattern = typeof verdict === "number" ? numberPattern(verdict) : wordPattern(String(verdict));
  const last = [...text.matchAll(pattern)].at(-1);
  return last ? [last.index, last.index + last[0].length] : null;
}

/** Matches a number as a judge may write it: 7 and 7.0, and its denominator. A name before it is part of the place. */
function numberPattern(verdict) {
  const written = Number.isInteger(verdict) ? `${verdict}(?:\\.0+)?` : `${escaped(String(verdict))}0*`;
  return new RegExp(
    `(?:\\b\\w+:[\\s*_]*)?(?<![\\w.])${written.replace("-", "[-−]")}(?![\\w]|\\.\\d)(?:\\s*/\\s*\\d+)?`,
    "g",
  );
}

function wordPattern(verdict) {
  const words = verdict.split(/\s+/).map(escaped).join("\\s+");
  return new RegExp(`(?:\\b\\w+:[\\s*_]*)?(?<!\\w)${words}(?!\\w)`, "gi");
}

/** Returns the place of the last object of JSON that is not within another. */
function findObject(text) {
  let found = null;
  let depth = 0;
  let start = 0;
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] === "{" && depth++ === 0) start = at;
    else if (text[at] === "}" && depth > 0 && --depth === 0) found = [start, at + 1];
  }
  return found;
}

function escaped(text) {
  return text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
}
