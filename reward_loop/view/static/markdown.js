/**
 * A small safe part of Markdown: headings, lists, code, emphasis, and mathematics as text. It builds nodes itself;
 * links, images and HTML stay text.
 */

import { el } from "./dom.js";

/** The time to find emphasis can grow with the square of the length. */
const LONGEST_PARAGRAPH = 4000;
const FENCE = /^\s*(```|~~~)/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^\s*([-*+]|\d+[.)])\s+(.*)$/;
const INLINE =
  /(`+)(.+?)\1|\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|\$([^\s$](?:[^$]*[^\s$])?)\$|\*\*(.+?)\*\*|\*([^\s*](?:[^*]*[^\s*])?)\*/g;

/** Returns a text as nodes. */
export function markdown(text) {
  const lines = text.split("\n");
  const root = el("div", { class: "markdown" });
  for (let at = 0; at < lines.length;) at = block(root, lines, at);
  return root;
}

/** Appends the block that starts at a line, and returns the line after it. */
function block(root, lines, at) {
  const line = lines[at];
  if (FENCE.test(line)) return fence(root, lines, at);
  if (line.trim() === "") return at + 1;
  const heading = HEADING.exec(line);
  if (heading) {
    root.append(
      el("p", { class: "heading", role: "heading", "aria-level": heading[1].length + 2 }, inline(heading[2])),
    );
    return at + 1;
  }
  return ITEM.test(line) ? list(root, lines, at) : paragraph(root, lines, at);
}

function fence(root, lines, at) {
  const mark = FENCE.exec(lines[at])[1];
  let end = at + 1;
  while (end < lines.length && !lines[end].trimStart().startsWith(mark)) end += 1;
  root.append(el("pre", { class: "code" }, lines.slice(at + 1, end).join("\n")));
  return end + 1;
}

function list(root, lines, at) {
  const isOrdered = /\d/.test(ITEM.exec(lines[at])[1]);
  const items = el(isOrdered ? "ol" : "ul", isOrdered ? { start: parseInt(ITEM.exec(lines[at])[1], 10) } : {});
  let end = at;
  for (; end < lines.length && ITEM.test(lines[end]); end += 1)
    items.append(el("li", {}, inline(ITEM.exec(lines[end])[2])));
  root.append(items);
  return end;
}

function paragraph(root, lines, at) {
  let end = at + 1;
  const ends = (line) => line.trim() === "" || FENCE.test(line) || HEADING.test(line) || ITEM.test(line);
  while (end < lines.length && !ends(lines[end])) end += 1;
  root.append(el("p", {}, inline(lines.slice(at, end).join("\n"))));
  return end;
}

/** Returns a text in parts: code, mathematics and emphasis are elements. Very long paragraphs stay text. */
function inline(text) {
  if (text.length > LONGEST_PARAGRAPH) return [text];
  const parts = [];
  let from = 0;
  for (const found of text.matchAll(INLINE)) {
    parts.push(text.slice(from, found.index), element(found));
    from = found.index + found[0].length;
  }
  parts.push(text.slice(from));
  return parts;
}

function element([all, , code, , , , , strong, emphasis]) {
  if (code !== undefined) return el("code", {}, code);
  if (strong !== undefined) return el("strong", {}, strong);
  if (emphasis !== undefined) return el("em", {}, emphasis);
  return el("code", { class: "math" }, all);
}
