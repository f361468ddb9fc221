/** Building the page. Text only ever becomes a text node: no function here, or elsewhere, parses HTML. */

/**
 * Returns a new element.
 * @param {string} tag
 * @param {Object} attributes: `on...` are event listeners; null, undefined and false are left out
 * @param {...(Node|string|number|null|Array)} children: strings and numbers become text; null is left out
 */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

/** Returns an element with a custom property of CSS, such as a colour. */
export function withProperty(element, name, value) {
  element.style.setProperty(name, value);
  return element;
}

/** Returns the value of a custom property of CSS, such as a colour of the theme. */
export function property(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Returns a table with a head. A cell is a node or a text; a column that starts with ">" is aligned right. */
export function table(columns, rows) {
  const right = columns.map((name) => (name.startsWith(">") ? "right" : null));
  const head = columns.map((name, i) => el("th", { scope: "col", class: right[i] }, name.replace(/^>/, "")));
  const body = rows.map((row) =>
    el(
      "tr",
      {},
      row.map((cell, i) => el("td", { class: right[i] }, cell)),
    ),
  );
  return el(
    "div",
    { class: "scroll" },
    el("table", { class: "plain" }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)),
  );
}

/** Returns figures in a row, each with its label: `[label, value, hint]`. */
export function figures(entries) {
  return el(
    "dl",
    { class: "figures" },
    entries
      .filter(Boolean)
      .map(([label, value, hint]) =>
        el("div", {}, el("dt", {}, label), el("dd", {}, value), hint && el("dd", { class: "hint" }, hint)),
      ),
  );
}

/** Returns the element that a view shows without data: a title, and the reason. */
export function empty(title, ...text) {
  return el(
    "div",
    { class: "empty" },
    el("h2", {}, title),
    text.map((line) => el("p", {}, line)),
  );
}
