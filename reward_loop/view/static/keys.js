/** Keyboard shortcuts: those of the page, and those of the present view. */

import { el } from "./dom.js";

/**
 * @typedef {Object} Shortcut
 * @property {string[]} keys: values of KeyboardEvent.key
 * @property {string} label: its effect, for the list of shortcuts
 * @property {function()} run
 */

let ofPage = [];
let ofView = [];

/** Listens for keys. @param {Shortcut[]} shortcuts: those of every view */
export function listen(shortcuts) {
  ofPage = [...shortcuts, { keys: ["?"], label: "Show these shortcuts", run: showHelp }];
  document.addEventListener("keydown", (event) => {
    if (
      event.ctrlKey ||
      event.metaKey ||
      event.altKey ||
      isTyping(event.target) ||
      document.querySelector("dialog[open]")
    )
      return;
    const found = [...ofView, ...ofPage].find((shortcut) => shortcut.keys.includes(event.key));
    if (!found) return;
    event.preventDefault();
    found.run();
  });
}

/** Replaces the shortcuts of the view. @param {Shortcut[]} shortcuts */
export function useShortcuts(shortcuts = []) {
  ofView = shortcuts;
}

/** Shows all shortcuts in a dialog. */
export function showHelp() {
  const rows = (shortcuts) =>
    shortcuts.map(({ keys, label }) =>
      el(
        "div",
        {},
        el(
          "dt",
          {},
          keys.map((key) => el("kbd", {}, key === " " ? "Space" : key)),
        ),
        el("dd", {}, label),
      ),
    );
  const dialog = el(
    "dialog",
    { class: "help", "aria-label": "Keyboard shortcuts", onclose: () => dialog.remove() },
    el("h2", {}, "Keyboard shortcuts"),
    ofView.length ? [el("h3", {}, "This view"), el("dl", {}, rows(ofView))] : null,
    el("h3", {}, "On every page"),
    el("dl", {}, rows(ofPage)),
    el("button", { type: "button", onclick: () => dialog.close() }, "Close"),
  );
  document.body.append(dialog);
  dialog.showModal();
}

function isTyping(target) {
  return (
    target instanceof HTMLElement &&
    (target.isContentEditable || ["INPUT", "TEXTAREA", "SELECT"].includes(target.tagName))
  );
}
