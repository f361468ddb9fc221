/** Starts the page: shows the view that the location names, and follows the records. */

import { ApiError, follow, get } from "./api.js";
import { el, empty } from "./dom.js";
import { plural } from "./format.js";
import { showJudges } from "./judges.js";
import { listen, showHelp, useShortcuts } from "./keys.js";
import { link, open, parse } from "./router.js";
import { showRun } from "./run.js";
import { showSample } from "./sample.js";
import { showSamples } from "./samples.js";
import { showTimeline } from "./timeline.js";

/**
 * A view: an async function of its element, the route and the answer of api/run. It returns
 * `{title, shortcuts, refresh, close}`; all but the title are optional.
 */
const VIEWS = {
  run: showRun,
  step: showSamples,
  samples: showSamples,
  sample: showSample,
  timeline: showTimeline,
  judges: showJudges,
};
const LINKS = { run: "Run", samples: "Samples", timeline: "Timeline", judges: "Judges" };
/** The fields of the run that tell whether it has the records of a view. */
const NEEDS = { timeline: "events" };
const PARENTS = { step: "samples", sample: "samples" };

const main = document.getElementById("main");
let run = null;
let view = {};
let shown = 0;

async function show() {
  const route = parse(location.hash);
  const number = ++shown;
  view.close?.();
  view = {};
  useShortcuts();
  mark(PARENTS[route.name] ?? route.name);
  const element = el("div", { class: `view ${route.name in VIEWS ? route.name : "unknown"}` });
  main.replaceChildren(element);
  const opened = await opening(element, route);
  if (number !== shown) {
    opened.close?.();
    return;
  }
  view = opened;
  document.title = `${view.title} · reward_loop`;
  useShortcuts(view.shortcuts);
}

async function opening(element, route) {
  if (!(route.name in VIEWS)) {
    element.append(empty("Unknown page", "The address contains the name of a page that does not exist."));
    return { title: "Not found" };
  }
  try {
    return await VIEWS[route.name](element, route, run);
  } catch (error) {
    element.replaceChildren(empty("The page cannot be shown", error.message));
    report(error);
    return { title: "Error" };
  }
}

/** Logs an error of the page; those of the server are shown. */
function report(error) {
  if (!(error instanceof ApiError)) console.error(error);
}

function mark(name) {
  const links = Object.entries(LINKS)
    .filter(([target]) => !(target in NEEDS) || run[NEEDS[target]] || name === target)
    .map(([target, label]) => el("a", { href: link(target), "aria-current": target === name ? "page" : null }, label));
  document.getElementById("nav").replaceChildren(...links);
}

function showStatus(isConnected) {
  const status = document.getElementById("status");
  const state = !isConnected ? "lost" : run.following ? "live" : "still";
  const label = { lost: "not connected", live: "following", still: "" }[state];
  status.className = `status ${state}`;
  status.replaceChildren(`${plural(run.samples, "sample")}${label ? ` · ${label}` : ""}`);
}

/** Fetches the run again, and refreshes the view. Changes during this cause one more round. */
function refresher() {
  let isRunning = false;
  let isWanted = false;
  return async function refresh() {
    isWanted = true;
    if (isRunning) return;
    isRunning = true;
    while (isWanted) {
      isWanted = false;
      try {
        Object.assign(run, await get("run"));
        showStatus(true);
        await view.refresh?.();
      } catch (error) {
        showStatus(false);
        report(error);
      }
    }
    isRunning = false;
  };
}

function followRecords() {
  const refresh = refresher();
  follow(
    (change) => {
      if (change.revision !== run.revision) refresh();
    },
    (isConnected) => showStatus(isConnected),
  );
  // The server sends nothing when a run has stopped writing.
  setInterval(() => run.following && refresh(), 30_000);
}

/** Returns the last two parts of a path. */
function shortened(path) {
  const parts = path.split("/");
  return parts.length > 3 ? `…/${parts.slice(-2).join("/")}` : path;
}

async function start() {
  document.getElementById("help").addEventListener("click", showHelp);
  listen([
    { keys: ["/"], label: "Search the samples", run: () => view.search?.() ?? open("samples", [], { focus: 1 }) },
  ]);
  try {
    run = await get("run");
  } catch (error) {
    main.replaceChildren(empty("The records cannot be read", error.message));
    return;
  }
  const folder = document.getElementById("folder");
  folder.textContent = shortened(run.folder);
  folder.title = run.folder;
  showStatus(true);
  addEventListener("hashchange", show);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  await show();
  followRecords();
}

start();
