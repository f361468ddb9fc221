/** An exchange with a judge or model server, word for word. */

import { el } from "./dom.js";
import { count, plural, seconds, time, value } from "./format.js";
import { conversation, textBlock, visible } from "./text.js";

/** Returns the card of an exchange. @param {Object} exchange: as in docs/records.md */
export function exchangeCard(exchange, index) {
  const { messages, request, response, reply } = exchange;
  const hasTexts = messages !== undefined || request !== undefined || response !== undefined;
  return el(
    "article",
    { class: "exchange", "aria-label": `Exchange ${index + 1}` },
    el(
      "header",
      {},
      el("h3", {}, exchange.model ?? "model server"),
      verdictTag(exchange),
      el("p", { class: "about" }, about(exchange)),
    ),
    problem(exchange),
    hasTexts ? null : el("p", { class: "hint" }, "The texts of this exchange were not recorded, or have been deleted."),
    messages === undefined || messages === null ? null : part("Request", conversation(messages)),
    reply === undefined || reply === null ? null : part("Reply", textBlock(reply), "reply"),
    raw("Other fields of the request", request),
    raw("Complete answer of the server", response),
  );
}

function about(exchange) {
  const tokens =
    exchange.prompt_tokens == null
      ? null
      : `${count(exchange.prompt_tokens)} + ${plural(exchange.completion_tokens ?? 0, "token")}`;
  return [
    seconds(exchange.seconds),
    exchange.status == null ? "no status" : `status ${exchange.status}`,
    tokens,
    exchange.finish_reason && `finish reason ${exchange.finish_reason}`,
    `attempt ${exchange.attempt ?? 1}`,
    time(exchange.time),
    exchange.backend,
    exchange.url,
  ]
    .filter(Boolean)
    .map((text) => visible(String(text)))
    .join(" · ");
}

function verdictTag({ verdict, score, unscored, error }) {
  if (error) return el("span", { class: "tag bad" }, "error");
  if (unscored) return el("span", { class: "tag warn" }, "no verdict");
  const shown = verdict ?? score;
  return shown === null || shown === undefined ? null : el("span", { class: "tag verdict" }, `verdict ${value(shown)}`);
}

function problem({ error, unscored }) {
  const text = error ?? unscored;
  return text ? el("p", { class: error ? "note bad" : "note warn" }, visible(String(text))) : null;
}

function part(title, content, name = "") {
  return el("div", { class: `part ${name}` }, el("h4", {}, title), content);
}

/** Returns a value of JSON that is shown when it is opened. */
export function raw(title, value) {
  if (value === null || value === undefined || (typeof value === "object" && !Object.keys(value).length)) return null;
  const details = el(
    "details",
    { ontoggle: () => details.open && details.children.length === 1 && details.append(textBlock(value)) },
    el("summary", {}, title),
  );
  return details;
}
