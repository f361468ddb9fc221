/** A sample in two scorings: in this folder, a, and in another one, b. */

import { get } from "./api.js";
import { el } from "./dom.js";
import { facts, judges } from "./pair.js";
import { link, open } from "./router.js";
import { conversation, textBlock, visible } from "./text.js";

/** Shows the sample that the route names. */
export async function showScorings(view, { args: [sample], query: { other, ...options } }, run) {
  const { a, b } = await get("compare/sample", { sample, other, on: options.on });
  const comparison = ["compare", [], { other, ...options }];
  view.append(
    el(
      "div",
      { class: "title" },
      el("nav", { class: "path", "aria-label": "Path" }, el("a", { href: link(...comparison) }, "Compare")),
      el("h1", {}, visible(sample)),
      a.row.id ? el("a", { class: "button", href: link("sample", [a.row.id]) }, "Sample in a") : null,
      el("p", { class: "about" }, `a: ${visible(run.folder)}`, el("br"), `b: ${visible(other)}`),
    ),
    facts([a.row, b.row], ["a", "b"]),
    ...judges([a, b]),
    ...texts(a.texts ?? b.texts),
  );
  return {
    title: sample,
    shortcuts: [{ keys: ["u"], label: "Up to the comparison", run: () => open(...comparison) }],
  };
}

/** Returns prompt and response, which both scorings have. */
function texts(recorded) {
  if (!recorded)
    return [el("p", { class: "note" }, "The texts of this sample were not recorded, or have been deleted.")];
  const part = (title, content) => el("section", { class: "part" }, el("h2", {}, title), content);
  return [
    recorded.prompt == null ? null : part("Prompt", conversation(recorded.prompt)),
    recorded.response == null ? null : part("Response", textBlock(recorded.response)),
    recorded.ground_truth == null ? null : part("Ground truth", textBlock(recorded.ground_truth)),
  ].filter(Boolean);
}
