// The dialog of one endpoint or model: its present state, its last hour, and its last decisions. It is named in the
// fragment of the page's address.

import { count, DASH, decimal, milliseconds, percent } from "./format.js";
import { $, make, setHidden, setText } from "./dom.js";
import { Chart } from "./charts.js";
import { ask } from "./search.js";

const EVERY = 15000;
const SHOWN = 20;
const NAMES = 6;
const TTFT = { name: "ttft", title: "Time to first token", unit: "time", least: 10, show: milliseconds };

// Settings by kind. `key`: the field that identifies a row; `ask`: the parameter that names it when its history is
// requested, `sought` the one for its decisions; `facts`: values that are not columns of the table; `unlisted`: what to say
// if the table does not have it.
const KINDS = {
  endpoint: {
    key: "id", ask: "id", sought: "endpoint", facts: (row) => [["Address", row.address], ["Model", few(row.model)]],
    charts: [
      { name: "load", title: "Requests there", unit: "requests", least: 4, show: count, lines: [
        { title: "running", color: "blue", dash: "solid", width: 2.5, fill: true, value: (point) => point.active },
        { title: "waiting", color: "orange", dash: "dashed", value: (point) => point.queue },
      ] },
      { name: "kv", title: "KV cache in use", unit: "share of blocks", least: 1, show: percent, lines: [
        { title: "in use", color: "teal", dash: "solid", width: 2.5, fill: true, value: (point) => point.kv },
      ] },
      { ...TTFT, lines: [{ title: "mean", color: "violet", dash: "solid", dots: true, value: (point) => point.ttft_ms }] },
    ],
  },
  model: {
    key: "model", ask: "name", sought: "requested", facts: () => [], unlisted: "It is not in the list of models, so its figures are not shown.",
    charts: [
      { name: "traffic", title: "Requests per second", unit: "requests per second", least: 0.2, show: (value) => decimal(value, 2), lines: [
        { title: "decided", color: "blue", dash: "solid", width: 2.5, fill: true, value: (point) => point.per_s },
        { title: "failed", color: "bad", dash: "dotted", width: 3, value: (point) => point.errors_per_s },
      ] },
      { ...TTFT, lines: [
        { title: "p50", color: "blue", dash: "solid", width: 2.5, dots: true, value: (point) => point.ttft_p50_ms },
        { title: "p95", color: "orange", dash: "dashed", dots: true, value: (point) => point.ttft_p95_ms },
      ] },
    ],
  },
};

// A server may have hundreds of names, which would push the charts out of sight.
function few(model) {
  const names = model.split(", ");
  const more = names.length > NAMES ? ` and ${count(names.length - NAMES)} more` : "";
  return `${names.slice(0, NAMES).join(", ")}${more}` || DASH;
}

export const addressOf = (kind, id) => `#${kind}=${encodeURIComponent(id)}`;

export class Page {
  // `columns`: the columns of the table of all endpoints or models; `table`: the table of decisions in this dialog.
  constructor(kind, columns, table) {
    this.kind = kind;
    this.of = KINDS[kind];
    this.prefix = `#${kind}=`;
    this.columns = columns;
    this.table = table;
    this.dialog = $(kind);
    this.rows = null;
    this.facts = new Map();
    this.id = null;
    this.problem = "";
    this.charts = this.of.charts.map((one) => this.chart(one));
    this.dialog.addEventListener("close", () => {
      if (location.hash.startsWith(this.prefix)) history.replaceState(null, "", location.pathname);
      this.id = null;
    });
    addEventListener("hashchange", () => this.follow());
    setInterval(() => { if (this.id !== null && !document.hidden) this.ask(); }, EVERY);
    this.follow();
  }

  chart({ name, title, ...rest }) {
    const id = `${this.kind}-${name}`;
    const chart = make("div", { class: "chart", id, role: "img", "aria-label": `${title} over the last hour` });
    const legend = make("ul", { class: "legend", id: `${id}-legend`, role: "list" });
    const head = make("h3", { id: `${id}-title` }, title);
    $(`${this.kind}-charts`).append(make("section", { "aria-labelledby": head.id }, head, legend, make("div", { class: "canvas" }, chart)));
    const made = new Chart({ ...rest, name: title, chart, legend, axis: (value) => (value || name !== "ttft" ? rest.show(value) : "0") });
    made.longest = 3600;
    return made;
  }

  follow() {
    $("why").close(); // it was opened from the page before
    if (!location.hash.startsWith(this.prefix)) {
      this.dialog.close();
      return;
    }
    this.id = location.hash.slice(this.prefix.length);
    try {
      this.id = decodeURIComponent(this.id);
    } catch {
      // The address was cut off somewhere. Use it as it is: there will be no endpoint or model of that name.
    }
    this.problem = "";
    for (const part of ["charts", "sent", "decisions", "empty"]) setHidden($(`${this.kind}-${part}`), true); // those of the page before
    setText($(`${this.kind}-title`), this.id || "(none named)");
    this.describe();
    if (!this.dialog.open) this.dialog.showModal();
    this.ask();
  }

  show(rows) {
    this.rows = rows;
    if (this.id !== null) this.describe();
  }

  describe() {
    const row = this.rows?.find((one) => one[this.of.key] === this.id);
    const problem = this.problem || (this.rows && !row && this.of.unlisted) || "";
    setText($(`${this.kind}-problem`), problem);
    setHidden($(`${this.kind}-problem`), !problem);
    const list = $(`${this.kind}-facts`);
    setHidden(list, !row);
    if (!row) return;
    const facts = [...this.of.facts(row), ...this.columns.filter((column) => !column.name).map((column) => [column.title, column.value(row)])];
    for (const [name, value] of facts) {
      if (!this.facts.has(name)) {
        this.facts.set(name, make("dd"));
        list.append(make("div", {}, make("dt", {}, name), this.facts.get(name)));
      }
      setText(this.facts.get(name), typeof value === "string" ? value : value.text);
    }
  }

  async ask() {
    const { id, kind } = this;
    const name = encodeURIComponent(id);
    const [past, sent] = await Promise.all([ask(`${kind}?${this.of.ask}=${name}`), ask(`decisions?${this.of.sought}=${name}`)]);
    if (id !== this.id) return;
    const part = (what) => $(`${kind}-${what}`);
    this.problem = past.problem ?? sent.problem ?? (past.points.length ? "" : "Nothing has been recorded yet; a point comes every 15 seconds.");
    this.describe();
    setHidden(part("charts"), !past.points?.length);
    for (const one of this.charts) one.draw((past.points ?? []).map((point) => ({ ...point, at: point.time })), past.point_s);
    this.table.show((sent.decisions ?? []).slice(0, SHOWN));
    setHidden(part("sent"), !sent.decisions);
    setHidden(part("decisions"), !sent.decisions?.length);
    setHidden(part("empty"), sent.decisions?.length !== 0);
  }
}
