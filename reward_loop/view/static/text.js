/** Texts from records: shown as they are, with invisible characters made visible, and large ones cut. */

import { el } from "./dom.js";
import { count } from "./format.js";

const SHOWN = 20_000;
const MORE = 200_000;

// Control characters except tab and line feed, and those that change the direction of text.
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;

/** Returns a text whose control characters are symbols, such as ␛ for escape. */
export function visible(text) {
  return text.replaceAll("\r\n", "\n").replace(CONTROLS, (character) => {
    const code = character.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    return code === 0x7f ? "\u2421" : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

/** Returns a value of a record as text: text as it is, anything else as indented JSON. */
export function asText(value) {
  return typeof value === "string" ? value : (JSON.stringify(value, null, 2) ?? "");
}

/** Returns a block with a text; above `SHOWN` characters, it is cut, with buttons for the rest. */
export function textBlock(value) {
  const text = asText(value);
  const block = el("div", { class: "text" });
  show(SHOWN);
  return block;

  function show(length) {
    const shown = el("pre", {}, chunks(visible(cutAt(text, length))));
    block.replaceChildren(shown, ...(text.length > length ? [rest(length)] : []));
  }

  function rest(length) {
    const button = (label, upTo) => el("button", { type: "button", onclick: () => show(upTo) }, label);
    return el(
      "p",
      { class: "rest" },
      `${count(length)} of ${text.length.toLocaleString("en")} characters are shown. `,
      length + MORE < text.length ? button(`Show ${count(MORE)} more`, length + MORE) : null,
      button("Show everything", text.length),
    );
  }
}

/**
 * Returns a long text in blocks, of which the browser lays out only those in view. They end at the ends of lines; in a
 * line that is longer than a block, at a word.
 */
function chunks(part) {
  if (part.length <= SHOWN) return [part];
  const found = [];
  for (let from = 0; from < part.length;) {
    const next = part.slice(from, from + SHOWN);
    const ends = [next.lastIndexOf("\n") + 1, next.lastIndexOf(" ") + 1, next.length];
    const length = from + SHOWN >= part.length ? next.length : ends.find((end) => end > 0);
    found.push(el("div", { class: "chunk" }, next.slice(0, length)));
    from += length;
  }
  return found;
}

/** Returns the beginning of a text; never half of a surrogate pair. */
function cutAt(text, length) {
  const code = text.charCodeAt(length - 1);
  return text.slice(0, code >= 0xd800 && code < 0xdc00 ? length - 1 : length);
}

/** Returns a prompt or the request of a judge: chat messages with their roles, or text. */
export function conversation(value) {
  if (!Array.isArray(value) || !value.every((one) => one && typeof one === "object" && "content" in one))
    return textBlock(value);
  return el(
    "div",
    { class: "conversation" },
    value.map((message) =>
      el(
        "div",
        { class: "message" },
        el("span", { class: "role" }, visible(String(message.role ?? "?")).slice(0, 40)),
        textBlock(contentOf(message)),
      ),
    ),
  );
}

/** Returns the content of a message; the texts of a content of parts. */
function contentOf({ content }) {
  if (!Array.isArray(content)) return content;
  return content.map((part) => (typeof part?.text === "string" ? part.text : asText(part))).join("\n");
}
