/** The note on a sample: a text that is kept with the records. */

import { post } from "./api.js";
import { el } from "./dom.js";

/** Returns the card of the note on a sample. */
export function noteCard({ row, note }) {
  const status = el("span", { class: "hint", role: "status" });
  const text = el("textarea", { rows: 3, maxlength: 10000, "aria-label": "Note on this sample" });
  text.value = note ?? "";
  async function save() {
    try {
      await post(`note/${encodeURIComponent(row.id)}`, { text: text.value });
      status.textContent = "Saved with the records.";
    } catch (error) {
      status.textContent = error.message;
    }
  }
  text.addEventListener("input", () => (status.textContent = "Not saved."));
  const button = el("button", { type: "button", onclick: save }, "Save note");
  return el("section", { class: "card note-card" }, el("h2", {}, "Note"), text, button, status);
}
