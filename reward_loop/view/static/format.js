/** Numbers, durations and times as text. Unknown values are an en dash. */

export const UNKNOWN = "–";

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** Returns a number with a fixed number of decimals, so that numbers in a column are aligned. */
export function fixed(value, digits = 3) {
  if (!isNumber(value)) return UNKNOWN;
  // "negative": a value that rounds to zero has no sign.
  const options = { minimumFractionDigits: digits, maximumFractionDigits: digits, signDisplay: "negative" };
  return value.toLocaleString("en", options);
}

/** Returns a number with at most four significant digits. */
export function number(value) {
  if (!isNumber(value)) return UNKNOWN;
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return value.toLocaleString("en", { maximumSignificantDigits: 4 });
}

/** Returns a count, short for large ones: 12,345 or 1.23M. */
export function count(value) {
  if (!isNumber(value)) return UNKNOWN;
  if (value < 1e6) return Math.round(value).toLocaleString("en");
  return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });
}

/** Returns a share as a percentage. */
export function percent(value) {
  return isNumber(value) ? `${fixed(100 * value, value > 0 && value < 0.1 ? 1 : 0)} %` : UNKNOWN;
}

/** Returns a duration: 180 ms, 4.21 s, 2 min 5 s. */
export function seconds(value) {
  if (!isNumber(value)) return UNKNOWN;
  if (value === 0) return "0 s";
  if (Math.abs(value) < 0.9995) return `${number(Number((1000 * value).toPrecision(3)))} ms`;
  if (Math.abs(value) < 99.95) return `${value.toPrecision(3)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
}

/** Returns a time of day with its date, in the zone of the browser. */
export function time(value) {
  return isNumber(value) ? new Date(1000 * value).toLocaleString("sv") : UNKNOWN;
}

/** Returns a component or another value of JSON as short text. */
export function value(given) {
  if (given === null || given === undefined) return UNKNOWN;
  if (typeof given === "number") return number(given);
  if (typeof given === "boolean") return given ? "yes" : "no";
  const text = typeof given === "string" ? given : JSON.stringify(given);
  return text.length > 120 ? `${text.slice(0, 120)}…` : text;
}

/** Returns "1 sample", "2 samples". */
export function plural(amount, noun) {
  return `${count(amount)} ${noun}${amount === 1 ? "" : "s"}`;
}

/** Returns a formatted number without trailing zeros, for an axis: 20 s instead of 20.0 s. */
export function short(text) {
  return text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");
}
