// The page's main module: receives the stream, keeps the points of the charts, and reports when the stream is lost.

import { count, decimal, DASH, hourOf, milliseconds, percent, rate, seconds } from "./format.js";
import { $, make, setAttribute, setClass, setHidden, setText } from "./dom.js";
import { Chart } from "./charts.js";
import { Panels } from "./panels.js";
import { locate } from "./search.js";

// Milliseconds after which a silent stream counts as lost, and after which it is closed and opened anew; milliseconds that
// a notice stays at least.
const SILENCE = 4000;
const PATIENCE = 10000;
// Milliseconds after which a hidden page closes its stream. Browsers allow six connections to a host, for all its pages.
const HIDDEN = 5000;
const NOTICE = 4000;
const RETRY = [1000, 2000, 5000];
const KEPT_S = 3600;

const panels = new Panels();
let points = [];
let files = ""; // the tag of the page's files, when they were loaded
let about = null;
let now = null;
let stream = null;
let heard = 0; // when what is shown was made
let nearest = Infinity; // the least age in seconds of a snapshot by this page's clock, which may be wrong
let spoke = 0; // when the stream was opened, or said something
let seen = -Infinity; // when this page was last visible
let failures = 0;
let retry = 0;
let problem = "";

// ---- charts ----

const quantiles = (of) => [
  { title: "p50", color: "blue", dash: "solid", width: 2.5, value: (point) => point[of][0] },
  { title: "p95", color: "orange", dash: "dashed", value: (point) => point[of][1] },
  { title: "p99", color: "violet", dash: "dotted", value: (point) => point[of][2] },
];
const LATENCY = {
  ttft: [...quantiles("ttft"), { title: "p50 predicted", color: "teal", dash: "mixed", value: (point) => point.predicted }],
  answer: quantiles("answer"),
};
const chart = (name, title, unit, least, lines, show, axis) =>
  new Chart({ chart: $(`${name}-chart`), legend: $(`${name}-legend`), lines, show, axis, name: title, unit, least });
const perSecond = (value) => (value === null || value === undefined ? DASH : `${rate(value)} /s`);
const charts = {
  latency: chart("latency", "Latency", "time", 10, LATENCY.ttft, milliseconds, (value) => (value ? milliseconds(value).replace(".0 ", " ") : "0")),
  traffic: chart("traffic", "Requests per second", "requests per second", 4, [
    { title: "arrived", color: "blue", dash: "solid", width: 2.5, fill: true, value: (point) => point.arrived_per_s },
    { title: "decided", color: "teal", dash: "mixed", value: (point) => point.per_s },
    { title: "failed, 4xx", color: "orange", dash: "dashed", value: (point) => point.client_errors_per_s },
    { title: "failed, 5xx", color: "bad", dash: "dotted", width: 3, value: (point) => point.server_errors_per_s },
  ], perSecond, (value) => (Number.isInteger(value) ? count(value) : decimal(value))),
  load: chart("load", "Requests that wait and run", "requests", 4, [
    { title: "running", color: "blue", dash: "solid", width: 2.5, fill: true, value: (point) => point.engines_running },
    { title: "waiting", color: "orange", dash: "dashed", value: (point) => point.engines_waiting },
    { title: "in our queue", color: "violet", dash: "dotted", value: (point) => point.waiting },
  ], count, (value) => (Number.isInteger(value) ? count(value) : "")),
};
const EMPTY = {
  latency: "No streamed answer in this time. Choose “whole answer” to see the others.",
  traffic: "No request in this time.",
  load: "No numbers yet.",
};

function draw() {
  const shown = now && (!points.length || now.point.at > points[points.length - 1].at) ? [...points, now.point] : points;
  for (const [name, one] of Object.entries(charts)) {
    one.draw(shown, about.point_s);
    setHidden($(`${name}-empty`), !one.empty);
    setText($(`${name}-empty`), EMPTY[name]);
  }
}

// ---- one snapshot ----

const figure = (name, text) => setText(document.querySelector(`[data-figure="${name}"]`), text);

function figures() {
  const { totals, latency, queues, endpoints } = now;
  figure("per_s", rate(totals.arrived_per_s));
  figure("requests", count(totals.requests));
  figure("leases", count(now.leases));
  figure("ready", count(endpoints.filter((row) => row.state !== "out").length));
  figure("endpoints", count(endpoints.length));
  figure("waiting", queues ? count(queues.waiting) : DASH);
  figure("queue_note", queues ? `saturation ${decimal(queues.saturation, 2)}; 1 = endpoints are full on average` : "flow control is off; requests are sent immediately");
  figure("ttft_p50", milliseconds(latency.ttft.p50));
  figure("ttft_p95", milliseconds(latency.ttft.p95));
  figure("hit_rate", percent(totals.prompt_tokens ? totals.hit_tokens / totals.prompt_tokens : null, 1));
  figure("inside", percent(totals.forecasts ? totals.inside / totals.forecasts : null, 1));
  figure("error_rate", percent(totals.error_rate, 1));
  figure("server_errors", perSecond(totals.server_errors_per_s));
  figure("client_errors", perSecond(totals.client_errors_per_s));
  figure("errors", count(totals.errors));
  setClass($("errors"), totals.error_rate ? "bad" : "");
  figure("refused", count(totals.refused));
  setText($("share"), `Numbers of this scheduler, one of ${now.schedulers}; requests in flight and at the endpoints: those of all.`);
  setHidden($("share"), now.schedulers === 1);
  setText($("policy"), now.policy);
  setText($("replicas"), now.replicas);
  setHidden($("replicas").parentElement, !now.replicas);
  setText($("uptime"), seconds(now.running_s));
}

// Notices stay at least `NOTICE` milliseconds, so that they do not flicker while numbers change. But all that are sent are
// shown, at most `MOST` in all, and `more` counts only what is left out now.
const MOST = 6;
const noticed = new Map();
function notices() {
  const time = performance.now();
  const wanted = now.notices.map(({ level, key, text, since, detail, runbook }, place) => {
    const words = `${text}${since ? ` since ${hourOf(since)}` : ""}${detail}`;
    if (noticed.get(key)?.text !== text) announce(words, level);
    return { level, key, text, words, runbook, place, time };
  });
  for (const notice of wanted) noticed.set(notice.key, notice);
  for (const [key, { time: seen }] of noticed) {
    if (time - seen > NOTICE && noticed.delete(key) && !noticed.size) announce(calm());
  }
  const ended = [...noticed.values()].filter((notice) => notice.key !== "more" && !wanted.includes(notice));
  wanted.push(...ended.slice(0, MOST - wanted.length));
  wanted.sort((a, b) => (a.level > b.level) - (a.level < b.level) || a.place - b.place);
  if (!wanted.length) wanted.push({ level: now.totals.error_rate ? "watch" : "calm", words: calm(), runbook: "" });
  const list = $("notices");
  while (list.children.length > wanted.length) list.lastChild.remove();
  while (list.children.length < wanted.length) list.append(make("li", {}, make("span"), " ", make("a", { target: "runbook" })));
  wanted.forEach(({ level, words, runbook }, i) => {
    const [sentence, link] = list.children[i].children;
    setAttribute(list.children[i], "class", level);
    setText(sentence, words);
    setHidden(link, !runbook);
    setText(link, `What to do: ${runbook}`);
    setAttribute(link, "href", `dashboard/runbook.md#:~:text=${encodeURIComponent(`## ${runbook}`)}`);
  });
}

// Screen readers read out only new notices and new texts. Otherwise they would talk every second, because details change.
// What is announced at one moment is one text, because a text replaces the one before.
const unsaid = [];
function announce(text, level = "") {
  if (unsaid.push({ text, level }) > 1) return;
  queueMicrotask(() => {
    setAttribute($("announce"), "role", unsaid.some((one) => one.level === "bad") ? "alert" : "status");
    $("announce").replaceChildren(unsaid.splice(0).map((one) => one.text).join(" ")); // also the same text again
  });
}

function calm() {
  if (!now.totals.requests) return "Ready and waiting: no request has arrived yet.";
  const rate = now.totals.error_rate;
  const failing = rate < 0.0005 ? "less than 0.1 %" : percent(rate, 1);
  if (rate) return `Every endpoint answers, but ${failing} of the requests get 4xx: mistakes of clients, or refused here.`;
  return "All is well: every endpoint answers, and no request fails.";
}

function show() {
  figures();
  notices();
  panels.show(now);
  draw();
}

// ---- the stream ----

function begin(told) {
  about = told.about;
  points = told.history;
  nearest = Infinity;
  noticed.clear();
  setText($("pool"), about.pool);
  setText($("version"), about.version);
  document.title = `Fairlead · ${about.pool}`;
}

function take(told) {
  now = told;
  const age = Date.now() / 1000 - now.at;
  nearest = Math.min(nearest, age);
  const late = (age - nearest) * 1000;
  heard = performance.now() - late;
  failures = 0;
  const newest = points.length ? points[points.length - 1].at : -Infinity;
  if (now.point.at - newest >= about.point_s) {
    points.push(now.point);
    while (points[0].at < now.at - KEPT_S) points.shift();
  }
  state("live");
  if (!document.hidden) show();
  if (late > PATIENCE) tryAgain(1); // a slow link fell behind: leave what it still holds
}

function state(name) {
  if (document.body.dataset.state !== "lost" && name === "lost") announce("The connection to the scheduler is lost.");
  if (document.body.dataset.state === "lost" && name === "live") announce("The scheduler answers again.");
  setAttribute(document.body, "data-state", name);
  setText($("connection-text"), { live: "live", lost: "connection lost", connecting: "connecting" }[name]);
  if (name !== "lost") setHidden($("lost"), true);
}

function lost() {
  if (!heard && !problem) return;
  state("lost");
  const since = heard ? ` The numbers below are ${seconds((performance.now() - heard) / 1000).replace(/\.\d/, "")} old.` : "";
  setText($("lost"), `${problem || "The connection to the scheduler is lost."}${since} Trying again …`);
  setHidden($("lost"), false);
}

function connect() {
  rest();
  stream = new EventSource(locate("stream"));
  const listen = (name, action) => stream.addEventListener(name, (event) => { spoke = performance.now(); action(event); });
  spoke = performance.now();
  listen("beginning", (event) => {
    files ||= event.lastEventId;
    setHidden($("changed"), files === event.lastEventId);
    begin(JSON.parse(event.data));
  });
  listen("now", (event) => { problem = ""; take(JSON.parse(event.data)); });
  listen("broken", () => { problem = "The scheduler could not make this page; its log says why."; lost(); });
  stream.addEventListener("error", () => tryAgain(1));
}

function rest() {
  clearTimeout(retry);
  stream?.close();
  stream = null;
}

function tryAgain(requests) {
  rest();
  lost();
  retry = setTimeout(() => again(requests), RETRY[Math.min(failures++, RETRY.length - 1)]);
}

// An EventSource does not say why it failed, so send a plain request to the same address: its answer says why.
// After a silence the idle connections may be dead too. So send one request for each that a browser has, and close them all.
async function again(requests) {
  const leave = new AbortController();
  const late = setTimeout(() => leave.abort(), SILENCE);
  try {
    const asked = { signal: leave.signal, cache: "no-store", headers: { Accept: "text/event-stream" } }; // a cache sends one at a time
    const answer = await Promise.any(Array.from({ length: requests }, () => fetch(locate("stream"), asked)));
    problem = answer.ok ? "" : `The scheduler refuses: ${(await answer.text()).trim()}.`;
    if (answer.status === 401) problem += " Reload this page to give one.";
  } catch {
    problem = heard ? "" : "The scheduler does not answer.";
    lost();
  }
  clearTimeout(late);
  leave.abort();
  connect();
}

// A connection that a network dropped without a word stays open here, and only its silence shows that it is gone.
setInterval(() => {
  const time = performance.now();
  const silent = time - spoke;
  if (!document.hidden) seen = time;
  if (time - seen > HIDDEN) {
    rest();
    state("connecting");
  } else if (stream && silent > PATIENCE) tryAgain(6);
  else if (heard && (silent > SILENCE || document.body.dataset.state === "lost")) lost();
}, 500);
$("reload").addEventListener("click", () => location.reload());
addEventListener("online", connect);
document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  if (!stream) connect();
  else if (now) show();
});
addEventListener("pagehide", rest);
addEventListener("pageshow", (event) => { if (event.persisted) connect(); });

// ---- choices ----

$("latency-of").addEventListener("change", (event) => {
  charts.latency.use(LATENCY[event.target.value]);
  if (now) draw();
});

$("window").addEventListener("change", (event) => {
  for (const one of Object.values(charts)) one.longest = Number(event.target.value);
  if (now) draw();
});

const theme = $("theme");
const stored = (() => { try { return localStorage.getItem("fairlead-theme"); } catch { return null; } })();
function dress(name) {
  document.documentElement.dataset.theme = name;
  for (const one of [...Object.values(charts), ...panels.pages.flatMap((page) => page.charts)]) one.redraw();
}
theme.value = ["light", "dark"].includes(stored) ? stored : "auto";
dress(theme.value);
theme.addEventListener("change", () => {
  try { localStorage.setItem("fairlead-theme", theme.value); } catch { /* the choice is not stored then */ }
  dress(theme.value);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dress(theme.value));

if (!document.hidden) connect();
