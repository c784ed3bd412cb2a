// Line charts over up to an hour, drawn by uPlot. Lines differ in colour, dashes and place in the legend.

import { make, setAttribute, setText } from "./dom.js";
import { seconds } from "./format.js";

const DASHES = { solid: [], dashed: [7, 4], dotted: [2, 3], mixed: [9, 3, 2, 3] };
const WINDOWS = [60, 120, 300, 900, 3600];
// If more than this many points are missing, the line has a gap.
const GAP = 4;

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

export class Chart {
  // `lines`: [{ title, color, dash, fill, dots, value(point) }]; `show` formats a value with its unit, `axis` formats a
  // value at the axis; `unit`: the label of the axis; `least`: the maximum of the axis is at least this value.
  constructor({ chart, legend, lines, show, axis, name, unit, least }) {
    Object.assign(this, { chart, legend, lines, show, axis, name, unit, least });
    this.longest = 900;
    this.plot = null;
    this.data = [[], ...lines.map(() => [])];
    this.at = null;
    this.values = [];
    this.makeLegend();
    new ResizeObserver(() => this.resize()).observe(chart);
  }

  makeLegend() {
    this.legend.replaceChildren();
    this.values = this.lines.map((line) => {
      const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      setAttribute(svg, "width", "26");
      setAttribute(svg, "height", "8");
      setAttribute(svg, "aria-hidden", "true");
      const stroke = document.createElementNS("http://www.w3.org/2000/svg", "line");
      const attributes = {
        x1: 0, x2: 26, y1: 4, y2: 4, stroke: `var(--${line.color})`, "stroke-width": line.width ?? 2,
        "stroke-dasharray": DASHES[line.dash].join(" "),
      };
      for (const [key, value] of Object.entries(attributes)) stroke.setAttribute(key, value);
      svg.append(stroke);
      const value = make("b", {}, "–");
      this.legend.append(make("li", {}, svg, `${line.title} `, value));
      return value;
    });
  }

  use(lines) {
    this.lines = lines;
    this.makeLegend();
    this.redraw();
  }

  draw(points, step) {
    const data = [[], ...this.lines.map(() => [])];
    let before = null;
    for (const point of points) {
      if (before !== null && point.at - before > GAP * step) {
        data[0].push(before + step);
        this.lines.forEach((_, i) => data[i + 1].push(null));
      }
      data[0].push(point.at);
      this.lines.forEach((line, i) => data[i + 1].push(line.value(point) ?? null));
      before = point.at;
    }
    this.data = data;
    if (!this.plot) this.build();
    else this.plot.setData(data);
    this.tell();
  }

  get empty() {
    return !this.data.slice(1).some((values) => values.some((value) => value !== null));
  }

  range() {
    const times = this.data[0];
    const end = times[times.length - 1] ?? Date.now() / 1000;
    const seen = end - (times[0] ?? end);
    return [end - Math.min(WINDOWS.find((width) => width >= seen) ?? this.longest, this.longest), end];
  }

  build() {
    const width = this.chart.clientWidth;
    if (!width) return;
    const font = "12px system-ui, sans-serif";
    const line = { stroke: color("soft"), grid: { stroke: color("grid"), width: 1 }, ticks: { show: false }, font, labelFont: font, labelSize: 18, labelGap: 0 };
    this.plot = new uPlot({
      width,
      height: this.chart.clientHeight,
      legend: { show: false },
      cursor: { y: false, drag: { setScale: false, x: false, y: false }, points: { size: 6 } },
      scales: {
        x: { time: true, range: () => this.range() },
        y: { range: (_, low, high) => [0, Math.max(high ?? 0, this.least) * 1.08] },
      },
      axes: [
        { ...line, label: "time of day", size: 24, space: 70, values: (_, splits) => splits.map((at) => shortTime(at)) },
        { ...line, label: this.unit, size: 58, space: 32, values: (_, splits) => splits.map((value) => (this.empty ? "" : this.axis(value))) },
      ],
      series: [{}, ...this.lines.map((one) => ({
        label: one.title, stroke: color(one.color), width: one.width ?? 2, dash: DASHES[one.dash],
        points: one.dots ? { show: true, size: 5, fill: color(one.color) } : { show: false }, spanGaps: false,
        fill: one.fill ? `${color(one.color)}22` : undefined,
      }))],
      hooks: { setCursor: [(plot) => { this.at = plot.cursor.idx ?? null; this.tell(); }] },
    }, this.data, this.chart);
  }

  // Shows the values at the cursor, or the newest values if there is no cursor.
  tell() {
    const last = this.data[0].length - 1;
    const at = this.at === null || this.at > last ? last : this.at;
    const words = this.lines.map((line, i) => {
      const text = this.show(at < 0 ? null : this.data[i + 1][at]);
      setText(this.values[i], text);
      return `${line.title} ${text}`;
    });
    const [from, to] = this.range();
    setAttribute(this.chart, "aria-label", `${this.name} over the last ${seconds(to - from)}. Now: ${words.join(", ")}.`);
  }

  resize() {
    const [width, height] = [this.chart.clientWidth, this.chart.clientHeight];
    if (!width) return;
    if (this.plot) this.plot.setSize({ width, height });
    else if (this.data[0].length) this.build();
  }

  redraw() {
    if (this.plot) this.plot.destroy();
    this.plot = null;
    this.at = null;
    if (this.data[0].length) this.build();
  }
}

const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const shortTime = (at) => clock.format(new Date(at * 1000));
