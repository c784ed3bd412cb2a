// The page's tables, with their columns and cells, and the strip of bars.

import { bytes, count, DASH, date, decimal, hourOf, milliseconds, percent, rate, seconds, timeOfDay } from "./format.js";
import { $, make, setAttribute, setClass, setHidden, setName, setText } from "./dom.js";
import { addressOf, Page } from "./page.js";
import { explain } from "./explain.js";
import { Search, told } from "./search.js";
import { meter, Table } from "./tables.js";

const FIRST = 16;
// Pixels: a bar shows its name if it is at least this wide; the height of the highest bar.
const LABEL = 38;
const BAR = 74;

const STATES = {
  serving: { rank: 0, kind: "good", bar: "", text: () => "serving" },
  unread: { rank: 1, kind: "watch", bar: "is-stale", text: (row) => `metrics not read${row.reason ? `: ${row.reason}` : ""}` },
  suspect: { rank: 2, kind: "watch", bar: "is-stale", text: () => "may hang" },
  out: { rank: 3, kind: "bad", bar: "is-out", text: (row) => `out since ${hourOf(row.since)}: ${row.reason}` },
};
const state = (row) => ({ text: STATES[row.state].text(row), kind: `state ${STATES[row.state].kind}` });
const about = (row) => (row.fresh ? "" : "≈ ");

const SOURCES = { learned: "learned", either: "events, unproven", most: "events, catching up", exact: "events" };

const ENDPOINTS = [
  { id: "id", title: "Endpoint", text: true, name: true, sort: (row) => row.id, fill: page },
  { id: "state", title: "State", text: true, wide: true, value: state, sort: (row) => STATES[row.state].rank,
    hint: "Whether requests are sent there; if not, why and since when" },
  { id: "role", title: "Role", text: true, sort: (row) => row.role, value: (row) => row.role || DASH },
  { id: "queue", title: "Waiting", sort: (row) => row.queue, value: (row) => about(row) + count(row.queue),
    hint: "Requests before their first token: the last scrape, corrected by our own requests since" },
  { id: "active", title: "Running", sort: (row) => row.active, value: (row) => about(row) + count(row.active),
    hint: "Requests past their first token, corrected in the same way" },
  { id: "kv", title: "KV cache", sort: (row) => row.kv, value: (row) => about(row) + percent(row.kv),
    fill: meter((row) => row.kv, (row) => about(row) + percent(row.kv)), hint: "Blocks in use: as the engine reported, or estimated while it is silent" },
  { id: "leases", title: "Ours in flight", sort: (row) => row.leases, value: (row) => count(row.leases), hint: "Requests that we sent and that have not ended" },
  { id: "sent", title: "Sent /min", sort: (row) => row.sent, value: (row) => count(row.sent),
    hint: "Under much load estimated from a shorter time, until somebody has looked for a minute" },
  { id: "failed", title: "Failed /min", sort: (row) => row.failed, value: (row) => ({ text: count(row.failed), kind: row.failed ? "bad" : "" }),
    hint: "Not reached, overdue, broken off or answered with 5xx; most are then answered by another endpoint" },
  { id: "hits", title: "Prefix hits", sort: (row) => row.hit_rate, value: (row) => percent(row.hit_rate), hint: "Share of prompt tokens predicted to be cached, last minute" },
  { id: "predicted", title: "TTFT predicted", sort: (row) => row.predicted_ms, value: (row) => milliseconds(row.predicted_ms), hint: "Mean of streamed answers of the last minute; a request whose prompt another endpoint computes has none" },
  { id: "actual", title: "TTFT actual", sort: (row) => row.actual_ms, value: (row) => milliseconds(row.actual_ms), hint: "Mean of streamed answers of the last minute" },
  { id: "inside", title: "In 90 % band", sort: (row) => row.inside, value: (row) => percent(row.inside), hint: "Share of first tokens within the forecast's band; 90 % is promised" },
  { id: "trust", title: "Trust in index", wide: true, sort: (row) => row.trust,
    value: (row) => ({ text: `${SOURCES[row.source] ?? row.source} ${percent(row.trust)}`, title: "Where knowledge of its cache comes from, and how far predicted cached tokens came true" }) },
];

function page(cell, row) {
  if (!cell.firstChild) cell.append(linkTo("endpoint", row.id));
  setAttribute(cell, "title", [row.id, row.address, row.model, row.role].filter(Boolean).join(" · "));
}

const OTHER = "other";
const nameOf = (model) => (model === OTHER ? "(names without metrics of their own)" : model || "(none named)");

function modelPage(cell, row) {
  if (cell.firstChild) return;
  cell.append(row.model === OTHER ? nameOf(row.model) : linkTo("model", row.model, nameOf(row.model)));
  cell.title = row.model;
}

function linkTo(kind, id, name = id) {
  const made = make("a", { href: addressOf(kind, id) });
  setName(made, name);
  return made;
}

const MODELS = [
  { id: "model", title: "Model", text: true, name: true, sort: (row) => row.model, fill: modelPage },
  { id: "targets", title: "Goes to", text: true, wide: true, hint: "Where its requests were sent since the start",
    value: (row) => (row.targets.length === 1 && row.targets[0].name === row.model ? DASH : row.targets.map((one) => `${one.name} ${percent(one.share)}`).join(", ")) },
  { id: "served", title: "Served by", text: true, wide: true, value: (row) => row.targets.map((one) => servedBy(one, row)).join(", "), hint: "Endpoints that say they serve it: by their label, or as an adapter" },
  { id: "rate", title: "Requests /s", sort: (row) => row.per_s, value: (row) => rate(row.per_s) },
  { id: "running", title: "In flight", sort: (row) => row.running, value: (row) => count(row.running) },
  { id: "requests", title: "Requests", sort: (row) => row.requests, value: (row) => count(row.requests) },
  { id: "error_rate", title: "Error rate", sort: (row) => row.error_rate, value: (row) => ({ text: percent(row.error_rate, 1), kind: row.error_rate ? "bad" : "" }) },
  { id: "errors", title: "Errors", sort: (row) => row.errors, value: (row) => count(row.errors) },
  { id: "p50", title: "TTFT p50", sort: (row) => row.ttft_p50_ms, value: (row) => milliseconds(row.ttft_p50_ms) },
  { id: "p95", title: "TTFT p95", sort: (row) => row.ttft_p95_ms, value: (row) => milliseconds(row.ttft_p95_ms) },
  { id: "hits", title: "Prefix hits", sort: (row) => row.hit_rate, value: (row) => percent(row.hit_rate) },
];

function servedBy({ name, endpoints, adapter }, row) {
  const which = row.targets.length > 1 ? `${name}: ` : "";
  if (!endpoints) return `${which}${DASH}`;
  return `${which}${adapter ? "adapter on " : ""}${count(endpoints)} endpoint${endpoints === 1 ? "" : "s"}`;
}

const TRAFFIC = [
  { id: "model", title: "Model", text: true, name: true, value: (row) => ({ text: row.target ? [nameOf(row.model), " → ", row.target] : nameOf(row.model) }) },
  { id: "band", title: "Band", value: (row) => row.priority, hint: "Priority; higher goes first" },
  { id: "rate", title: "Requests /s", value: (row) => rate(row.per_s) },
  { id: "running", title: "In flight", value: (row) => count(row.running) },
  { id: "requests", title: "Requests", value: (row) => count(row.requests) },
  { id: "errors", title: "Errors", value: (row) => ({ text: count(row.errors), kind: row.errors ? "bad" : "" }) },
  { id: "hits", title: "Prefix hits", value: (row) => percent(row.hit_rate) },
];

const QUEUES = [
  { id: "band", title: "Band, tenant", text: true, name: true,
    value: (row) => (row.flow ? { text: [row.tenant || "no tenant", " · ", row.model || "no model"], kind: "inner" } : `band ${row.priority}`) },
  { id: "waiting", title: "Waiting", value: (row) => count(row.waiting) },
  { id: "flows", title: "Flows", value: (row) => (row.flow ? "" : count(row.flows)), hint: "Tenants and models that wait; the five with the most are listed" },
  { id: "oldest", title: "Longest wait", value: (row) => (row.waiting ? seconds(row.oldest_s) : DASH) },
  { id: "delay", title: "Until served", value: (row) => (row.flow ? "" : row.waiting ? seconds(row.delay_s) : DASH), hint: "At the present pace; requests with a shorter time limit are refused before" },
  { id: "bytes", title: "Bodies", value: (row) => bytes(row.bytes) },
  { id: "used", title: "Of its limit", value: (row) => (row.flow ? "" : percent(row.used)) },
];

const SHADOWS = [
  { id: "name", title: "Policy", text: true, name: true, value: (row) => row.name },
  { id: "agrees", title: "Agrees", fill: meter((row) => share(row), (row) => percent(share(row))) },
  { id: "decisions", title: "Decisions", value: (row) => count(total(row)) },
  { id: "refused", title: "Would refuse", value: (row) => count(row.refuse) },
  { id: "errors", title: "Errors", value: (row) => ({ text: count(row.error), kind: row.error ? "bad" : "" }) },
  { id: "regret", title: "Regret", value: (row) => milliseconds(row.regret_ms), hint: "Forecast cost above the lowest possible, in the mean per decision" },
  { id: "primary", title: "Regret of ours", value: (row) => milliseconds(row.primary_regret_ms), hint: "The same for the choices that were made" },
  { id: "state", title: "State", text: true, value: (row) => (row.cut ? { text: "cut off", kind: "state bad", title: row.cut } : { text: "on trial", kind: "state good" }) },
];
const total = (row) => row.agree + row.differ + row.refuse + row.error;
const share = (row) => (total(row) ? row.agree / total(row) : null);

const DECISIONS = [
  { id: "why", title: "Decision", text: true, name: true, fill: link },
  { id: "at", title: "Time", text: true, wide: true, value: (row) => ({ text: timeOfDay(row.at), title: date(row.at) }) },
  { id: "model", title: "Model", text: true, wide: true, long: true, value: (row) => row.model || DASH },
  { id: "tenant", title: "Tenant", text: true, wide: true, long: true, value: (row) => row.tenant || DASH },
  { id: "band", title: "Band", value: (row) => String(row.priority) },
  { id: "endpoint", title: "Went to", text: true, wide: true, long: true, value: wentTo, hint: "← the endpoint that computes its prompt; → the one that answered instead" },
  { id: "prompt", title: "Prompt", value: (row) => `${count(row.prompt_tokens)} tok` },
  { id: "cached", title: "Cached", value: (row) => percent(row.prompt_tokens ? row.hit_tokens / row.prompt_tokens : null), hint: "Share of the prompt predicted to be cached there" },
  { id: "queued", title: "Queued", value: (row) => (row.queued_ms ? milliseconds(row.queued_ms) : DASH) },
  { id: "predicted", title: "TTFT predicted", value: (row) => milliseconds(row.predicted_ms) },
  { id: "actual", title: "TTFT actual", value: (row) => milliseconds(row.ttft_ms) },
  { id: "ended", title: "Answer", text: true, wide: true, value: ended },
];

const CLOSED = "rejected-context-cancelled"; // nobody received the status

function wentTo({ endpoint, prefill, answered_by: by, outcome }) {
  if (!endpoint) return { text: outcome, kind: "bad" };
  const text = [endpoint, ...(prefill ? [" ← ", prefill] : []), ...(by ? [" → ", by] : [])];
  return { text: text.length > 1 ? text : endpoint };
}

function ended(row) {
  if (row.outcome === CLOSED) return { text: "the gateway closed it", kind: "watch" };
  if (!row.endpoint) return { text: `refused ${row.status}`, kind: "bad" };
  if (!row.cause) return { text: "in flight" };
  const took = row.duration_ms === null ? "" : ` in ${milliseconds(row.duration_ms)}`;
  if (row.cause !== "natural") return { text: `${row.cause}${took}`, kind: row.cause === "upstream-reset" ? "bad" : "watch" };
  return { text: `${row.ended}${took}`, kind: row.ended >= 400 ? "bad" : "" };
}

function link(cell, row) {
  let button = cell.firstChild;
  if (!button) {
    button = make("button", { type: "button", class: "link" });
    button.addEventListener("click", () => explain(button.dataset.id));
    cell.append(button);
  }
  if (button.dataset.id === String(row.id)) return;
  button.dataset.id = String(row.id);
  button.textContent = `why ${row.id}`;
}

export class Panels {
  constructor() {
    this.endpoints = new Table($("endpoint-rows"), { caption: "Endpoints", columns: ENDPOINTS, key: (row) => row.id, sortBy: "id" });
    this.traffic = new Table($("traffic-rows"), { caption: "Traffic by model and band", columns: TRAFFIC, key: (row) => `${row.model}\n${row.target}\n${row.priority}` });
    this.models = new Table($("model-rows"), { caption: "Models", columns: MODELS, key: (row) => row.model });
    this.queues = new Table($("queue-rows"), { caption: "Queues by band and tenant", columns: QUEUES, key: (row) => (row.flow ? `${row.priority}\n${row.tenant}\n${row.model}` : String(row.priority)) });
    this.shadows = new Table($("shadow-rows"), { caption: "Shadow policies", columns: SHADOWS, key: (row) => row.name });
    this.decisions = new Table($("decision-rows"), { caption: "Last decisions", columns: DECISIONS, keeps: true, key: (row) => row.id });
    this.pages = [["endpoint", ENDPOINTS], ["model", MODELS]].map(([kind, columns]) => new Page(kind, columns,
      new Table($(`${kind}-decisions`), { caption: `Last decisions for this ${kind}`, columns: DECISIONS.filter(({ id }) => id !== "model" || kind !== id), key: (row) => row.id })));
    this.search = new Search((found) => this.showDecisions(found));
    this.newest = [];
    this.found = null;
    this.endpoints.limit = FIRST;
    this.paused = false;
    this.rows = [];
    $("filter").addEventListener("input", () => this.showEndpoints());
    $("endpoints-more").addEventListener("click", () => {
      this.endpoints.limit = this.endpoints.limit === FIRST ? Infinity : FIRST;
      this.showEndpoints();
    });
    $("pause").addEventListener("click", () => this.pause(!this.paused));
  }

  pause(paused) {
    this.paused = this.search.paused = paused;
    setAttribute($("pause"), "aria-pressed", String(paused));
    setText($("pause"), paused ? "Resume the list" : "Pause the list");
    this.showDecisions(this.found);
  }

  // `found`: the result of a search; without a search the newest decisions are shown.
  showDecisions(found) {
    const rows = found ? found.decisions ?? [] : this.newest;
    if (found || this.found || !this.paused) this.decisions.show(rows);
    this.found = found;
    const order = this.paused ? "paused; newer ones are not shown" : "newest first";
    setText($("decisions-sub"), found ? `${told(found)}; ${order}` : order);
    empty("decisions", rows.length, found ? found.problem ?? "No decision that is still held matches. Older ones are in the journal, if one is kept."
      : "No decision has been made yet. Send a request through the gateway, and it appears here with the reasons.");
  }

  show(now) {
    this.rows = now.endpoints;
    $("endpoint-rows").classList.toggle("roles", this.rows.some((row) => row.role));
    this.showEndpoints();
    this.strip(now.endpoints);
    this.models.show(now.models);
    empty("served", now.models.length, "No endpoint says which model it serves, and no request has named one.");
    more("served", now.models_left_out);
    this.traffic.show(now.traffic);
    more("models", now.traffic_left_out);
    empty("models", now.traffic.length, "No request has arrived since the start.");
    this.showQueues(now.queues);
    this.shadows.show(now.shadows);
    empty("shadows", now.shadows.length, "No policy is on trial, or none has judged a decision yet. They are set under “shadows” in the configuration.");
    this.newest = now.decisions;
    if (!this.search.query) this.showDecisions(null);
    this.pages[0].show(now.endpoints);
    this.pages[1].show(now.models);
  }

  showEndpoints() {
    const words = $("filter").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const text = (row) => `${row.id} ${row.address} ${row.model} ${row.role} ${state(row).text} ${row.source}`.toLowerCase();
    const found = this.rows.filter((row) => words.every((word) => text(row).includes(word)));
    this.endpoints.show(found);
    const all = this.rows.length;
    const used = this.rows.filter((row) => row.state !== "out").length;
    setText($("endpoints-count"), all ? `${count(used)} of ${count(all)} in use${words.length ? `, ${count(found.length)} found` : ""}` : "");
    const more = $("endpoints-more");
    setHidden(more, found.length <= FIRST);
    setText(more, this.endpoints.limit === FIRST ? `Show all ${count(found.length)}` : `Show the first ${FIRST} only`);
    if (!all) {
      empty("endpoints", 0, "No endpoint is known yet, so nothing can be routed. Endpoints come from the configuration, a file or Kubernetes; they appear here as soon as they are known.");
    } else {
      empty("endpoints", found.length, "No endpoint matches the search.");
    }
  }

  strip(rows) {
    const strip = $("strip");
    while (strip.children.length > rows.length) strip.lastChild.remove();
    while (strip.children.length < rows.length) {
      strip.append(make("span", {}, make("b"), make("i", { class: "queue" }), make("i", { class: "running" }), make("em")));
    }
    const most = Math.max(8, ...rows.map((row) => row.queue + row.active));
    const height = (value) => `${Math.round((value / most) * BAR * 10) / 10}px`;
    const short = shortNames(rows.map((row) => row.id));
    rows.forEach((row, i) => {
      const bar = strip.children[i];
      const [number, queue, running, label] = bar.children;
      setClass(bar, STATES[row.state].bar);
      for (const [part, value] of [[queue, row.queue], [running, row.active]]) {
        const wanted = height(value);
        if (part.style.height !== wanted) part.style.height = wanted;
      }
      setText(number, row.state === "out" ? "×" : about(row) + count(row.queue + row.active));
      setText(label, short[i]);
      setAttribute(bar, "title", `${row.id}: ${count(row.active)} running, ${count(row.queue)} waiting`);
    });
    strip.classList.toggle("many", rows.length * LABEL > strip.clientWidth);
    setHidden(strip, !rows.length);
    setHidden($("strip-key"), !rows.length);
    const sum = (of) => rows.reduce((all, row) => all + of(row), 0);
    setText($("strip-scale"), `requests at each endpoint; full height = ${count(most)}`);
    setAttribute(strip, "aria-label", `Load of ${rows.length} endpoints: ${count(sum((row) => row.active))} requests running, ${count(sum((row) => row.queue))} waiting for their first token.`);
  }

  showQueues(queues) {
    this.queues.show(queues ? queues.bands.flatMap((band) => [band, ...band.longest.map((flow) => ({ ...flow, priority: band.priority, flow: true }))]) : []);
    if (!queues) {
      setText($("queues-sub"), "flow control is off");
      empty("queues", 0, "Nothing waits here: every request is sent immediately, and waits at its endpoint if necessary.");
      return;
    }
    const wanted = queues.waiting ? `, ${count(queues.wanted_endpoints)} endpoints wanted` : "";
    setText($("queues-sub"), `saturation ${decimal(queues.saturation, 2)}, ${count(queues.waiting)} waiting${wanted}`);
    empty("queues", queues.bands.length, "No request has had to wait since the start.");
  }
}

// The names without their common beginning, which is cut after a separator.
function shortNames(names) {
  let cut = 0;
  const [first = ""] = names;
  for (let i = 0; i < first.length && names.every((name) => name[i] === first[i]); i++) if ("/:.-".includes(first[i])) cut = i + 1;
  return names.map((name) => name.slice(cut) || name);
}

function more(name, left) {
  const place = $(`${name}-more`);
  setHidden(place, !left);
  setText(place, `And ${count(left)} more.`);
}

function empty(name, rows, text) {
  const place = $(`${name}-empty`);
  setHidden(place, rows > 0);
  setText(place, text);
  const table = { models: "traffic", served: "model", queues: "queue", shadows: "shadow", decisions: "decision", endpoints: "endpoint" }[name];
  setHidden($(`${table}-rows`), rows === 0);
}
