/** The location's hash names the view: `#/NAME/ARGUMENT/...?query`. */

/** Returns the view that a hash names. */
export function parse(hash) {
  const [path, query] = split(hash.replace(/^#\/?/, ""));
  const [name, ...args] = path.split("/").map(decoded);
  return { name: name || "run", args, query: Object.fromEntries(new URLSearchParams(query)) };
}

/** Returns the hash of a view; parameters without a value are left out. */
export function link(name, args = [], query = {}) {
  const parameters = new URLSearchParams(
    Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== ""),
  );
  const path = [name, ...args].map(encodeURIComponent).join("/");
  return `#/${path}${parameters.size ? `?${parameters}` : ""}`;
}

/** Opens a view. */
export function open(name, args, query) {
  location.hash = link(name, args, query);
}

/** Changes the hash without opening the view again: the view already shows it. */
export function replace(name, args, query) {
  history.replaceState(null, "", link(name, args, query));
}

function split(text) {
  const place = text.indexOf("?");
  return place < 0 ? [text, ""] : [text.slice(0, place), text.slice(place + 1)];
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
