// One endpoint: what is known of it now, its last hour, and what it was sent last. The page's address names it.

import { count, DASH, milliseconds, percent } from "./format.js";
import { $, make, setHidden, setText } from "./dom.js";
import { Chart } from "./charts.js";
import { ask } from "./search.js";

const EVERY = 15000;
const SHOWN = 20;
const NAME = "#endpoint=";

export const addressOf = (id) => NAME + encodeURIComponent(id);

const chart = (name, title, unit, least, lines, show) => {
  const made = new Chart({
    chart: $(`endpoint-${name}`), legend: $(`endpoint-${name}-legend`), lines, show, name: title, unit, least,
    axis: (value) => (value || name !== "ttft" ? show(value) : "0"),
  });
  made.longest = 3600;
  return made;
};

export class EndpointPage {
  // `columns`: of the table of endpoints; `table`: of its decisions.
  constructor(columns, table) {
    this.columns = columns;
    this.table = table;
    this.dialog = $("endpoint");
    this.rows = [];
    this.facts = new Map();
    this.id = "";
    this.charts = [
      chart("load", "Requests there", "requests", 4, [
        { title: "running", color: "blue", dash: "solid", width: 2.5, fill: true, value: (point) => point.active },
        { title: "waiting", color: "orange", dash: "dashed", value: (point) => point.queue },
      ], count),
      chart("kv", "KV cache in use", "share of blocks", 1, [
        { title: "in use", color: "teal", dash: "solid", width: 2.5, fill: true, value: (point) => point.kv },
      ], percent),
      chart("ttft", "Time to first token", "time", 10, [
        { title: "mean", color: "violet", dash: "solid", dots: true, value: (point) => point.ttft_ms },
      ], milliseconds),
    ];
    this.dialog.addEventListener("close", () => {
      if (location.hash.startsWith(NAME)) history.replaceState(null, "", location.pathname);
      this.id = "";
    });
    addEventListener("hashchange", () => this.follow());
    setInterval(() => { if (this.id && !document.hidden) this.ask(); }, EVERY);
    this.follow();
  }

  follow() {
    const id = location.hash.startsWith(NAME) ? decodeURIComponent(location.hash.slice(NAME.length)) : "";
    if (!id) {
      this.dialog.close();
      return;
    }
    this.id = id;
    setText($("endpoint-title"), id);
    this.describe();
    if (!this.dialog.open) this.dialog.showModal();
    this.ask();
  }

  show(rows) {
    this.rows = rows;
    if (this.id) this.describe();
  }

  describe() {
    const row = this.rows.find((one) => one.id === this.id);
    setHidden($("endpoint-facts"), !row);
    if (!row) return;
    const facts = [["Address", row.address], ["Model", row.model || DASH], ["Role", row.role || DASH],
      ...this.columns.filter((column) => !column.name).map((column) => [column.title, column.value(row)])];
    for (const [name, value] of facts) {
      if (!this.facts.has(name)) {
        this.facts.set(name, make("dd"));
        $("endpoint-facts").append(make("div", {}, make("dt", {}, name), this.facts.get(name)));
      }
      setText(this.facts.get(name), typeof value === "string" ? value : value.text);
    }
  }

  async ask() {
    const { id } = this;
    const name = encodeURIComponent(id);
    const [past, sent] = await Promise.all([ask(`endpoint?id=${name}`), ask(`decisions?endpoint=${name}`)]);
    if (id !== this.id) return;
    const problem = past.problem ?? sent.problem ?? (past.points.length ? "" : "Nothing has been recorded yet; a point comes every 15 seconds.");
    setText($("endpoint-problem"), problem);
    setHidden($("endpoint-problem"), !problem);
    setHidden($("endpoint-charts"), !past.points?.length);
    for (const one of this.charts) one.draw((past.points ?? []).map((point) => ({ ...point, at: point.time })), past.point_s);
    this.table.show((sent.decisions ?? []).slice(0, SHOWN));
    setHidden($("endpoint-decisions"), !sent.decisions?.length);
    setHidden($("endpoint-empty"), Boolean(sent.decisions?.length));
  }
}
