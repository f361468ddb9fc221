/** Requests to the server of the records. */

/** An answer with an error: its message is the server's sentence. */
export class ApiError extends Error {}

/**
 * Returns the JSON of an address below `api/`.
 * @param {string} path
 * @param {Object} parameters: empty, null and undefined ones are left out
 */
export async function get(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  return request(`api/${path}${query.size ? `?${query}` : ""}`);
}

async function request(address) {
  let response;
  try {
    response = await fetch(address);
  } catch {
    throw new ApiError("The server does not answer. Does the command reward-loop view still run?");
  }
  const answer = await response
    .text()
    .then(parse)
    .catch(() => null);
  if (response.ok && answer !== null) return answer;
  throw new ApiError(
    typeof answer?.error === "string" ? answer.error : `The server answered with status ${response.status}.`,
  );
}

const LONG_INTEGERS = /"(?:[^"\\]|\\.)*"|(?<![\d.eE+-])-?\d{16,}(?![\d.eE])/g;

/** Parses JSON. Integers of 16 digits and more become text, because a number of JavaScript would round them. */
export function parse(text) {
  if (!/\d{16}/.test(text)) return JSON.parse(text);
  return JSON.parse(text.replace(LONG_INTEGERS, (found) => (found.startsWith('"') ? found : `"${found}"`)));
}

/**
 * Calls a function after every change of the index.
 * @param {function(Object)} changed: gets the event: revision, samples, last_step
 * @param {function(boolean)} connected: gets whether the server is connected
 */
export function follow(changed, connected) {
  const source = new EventSource("api/changes");
  source.addEventListener("message", (event) => changed(JSON.parse(event.data)));
  source.addEventListener("open", () => connected(true));
  source.addEventListener("error", () => connected(false));
  addEventListener("pagehide", () => source.close());
}
