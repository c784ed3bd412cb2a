// Tables that are updated in place: a row keeps its elements while its numbers change.
//
// A column: { id, title, hint, text, value(row), sort(row), fill(cell, row) }. `value` returns a text, or { text, kind }
// with a class of the style sheet as kind. `fill` fills the cell itself. `sort` makes the column sortable. The texts of
// columns with `name` or `long` are cut in the middle, each by itself if `text` is a list. The column with `name` is the
// title of a card. `keeps`: the focused row stays, as the last one, when it is not in the data any more.

import { make, setAttribute, setClass, setName, setText } from "./dom.js";

export class Table {
  constructor(container, { caption, columns, key, cards = true, keeps = false, sortBy = "", descending = false }) {
    this.columns = columns;
    this.key = key;
    this.keeps = keeps;
    this.sortBy = sortBy;
    this.descending = descending;
    this.limit = Infinity;
    this.rows = new Map();
    this.data = [];
    this.body = make("tbody");
    const head = make("tr");
    this.headings = columns.map((column) => this.heading(column));
    head.append(...this.headings);
    this.table = make("table", { class: cards ? "cards" : "" },
      make("caption", { class: "hidden" }, caption), make("thead", {}, head), this.body);
    // The style sheet may show rows as cards. The roles keep them a table for screen readers.
    for (const [element, role] of [[this.table, "table"], [head, "row"], [this.body, "rowgroup"]]) {
      element.setAttribute("role", role);
    }
    this.table.tHead.setAttribute("role", "rowgroup");
    container.append(this.table);
    container.tabIndex = 0;
    container.setAttribute("role", "group");
    container.setAttribute("aria-label", caption);
    this.markSorted();
  }

  heading(column) {
    const cell = make("th", { scope: "col", role: "columnheader", "data-column": column.id, class: column.text ? "text" : "" });
    if (column.hint) cell.title = column.hint;
    if (!column.sort) {
      cell.append(column.title);
      return cell;
    }
    const button = make("button", { type: "button" }, column.title);
    button.addEventListener("click", () => {
      this.descending = this.sortBy === column.id ? !this.descending : !column.text;
      this.sortBy = column.id;
      this.markSorted();
      this.draw();
    });
    cell.append(button);
    return cell;
  }

  markSorted() {
    this.columns.forEach((column, i) => {
      if (column.id === this.sortBy) {
        this.headings[i].setAttribute("aria-sort", this.descending ? "descending" : "ascending");
      } else {
        this.headings[i].removeAttribute("aria-sort");
      }
    });
  }

  show(data) {
    this.data = data;
    this.draw();
  }

  draw() {
    const shown = this.sorted().slice(0, this.limit);
    const left = new Set(this.rows.keys());
    const focused = this.body.contains(document.activeElement) ? document.activeElement : null;
    let before = null;
    for (const row of shown) {
      const key = this.key(row);
      left.delete(key);
      let line = this.rows.get(key);
      if (!line) {
        line = this.line();
        this.rows.set(key, line);
      }
      this.fill(line, row);
      const next = before ? before.nextSibling : this.body.firstChild;
      if (line !== next) this.body.insertBefore(line, next);
      before = line;
    }
    for (const key of left) {
      if (this.keeps && this.rows.get(key).contains(focused)) continue;
      this.rows.get(key).remove();
      this.rows.delete(key);
    }
    focused?.focus({ preventScroll: true }); // a row that moves loses the focus
  }

  sorted() {
    const column = this.columns.find((one) => one.id === this.sortBy);
    if (!column) return this.data;
    const sign = this.descending ? -1 : 1;
    return [...this.data].sort((a, b) => {
      const [x, y] = [column.sort(a), column.sort(b)];
      if (x == null || y == null) return (x == null) - (y == null); // unknown values come last
      return sign * (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y);
    });
  }

  line() {
    const line = make("tr", { role: "row" });
    for (const column of this.columns) {
      const kinds = [column.text ? "text" : "", column.name ? "name" : "", column.wide ? "wide-cell" : "", column.long ? "long" : ""];
      const cell = make("td", { role: "cell", "data-label": column.title, class: kinds.filter(Boolean).join(" ") });
      cell.dataset.column = column.id;
      cell.dataset.base = cell.className;
      line.append(cell);
    }
    return line;
  }

  fill(line, row) {
    setAttribute(line, "data-key", String(this.key(row)));
    this.columns.forEach((column, i) => {
      const cell = line.children[i];
      if (column.fill) {
        column.fill(cell, row);
        return;
      }
      const value = column.value(row);
      const { text, kind = "", title = "" } = typeof value === "string" ? { text: value } : value;
      const cut = column.name || column.long;
      if (cut) setName(cell, text, Array.isArray(text) ? 16 : column.long ? 22 : undefined);
      else setText(cell, text);
      setClass(cell, kind ? `${cell.dataset.base} ${kind}` : cell.dataset.base);
      if (title || cut) setAttribute(cell, "title", title || cell.textContent);
    });
  }
}

// A `fill` that shows a share between 0 and 1 as a bar and a number.
export function meter(share, text) {
  return (cell, row) => {
    let bar = cell.querySelector("i");
    if (!bar) {
      bar = make("i");
      cell.append(make("span", { class: "meter", "aria-hidden": "true" }, bar), make("span", { class: "num" }));
    }
    const value = share(row);
    const width = `${Math.round(Math.min(Math.max(value ?? 0, 0), 1) * 100)}%`;
    if (bar.style.width !== width) bar.style.width = width;
    setText(cell.lastChild, text(row));
  };
}
