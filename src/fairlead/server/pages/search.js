// A search over the decisions that the scheduler still holds. It is repeated, because new decisions may match.

import { count } from "./format.js";
import { $, setText } from "./dom.js";

// Milliseconds between two searches, from the last key to a search, and until an answer.
const EVERY = 2000;
const TYPING = 200;
const PATIENCE = 10000;

const LATE = "The scheduler has not answered within 10 s. If more than five windows show this page, close one: browsers allow no more connections.";

export class Search {
  // Calls `show({ decisions, matches, searched })`, or `show({ problem })`, or `show(null)` if nothing is searched.
  constructor(show) {
    this.show = show;
    this.form = $("search");
    this.asked = 0;
    this.answered = 0;
    this.paused = false;
    this.typing = 0;
    const soon = () => {
      clearTimeout(this.typing);
      this.typing = setTimeout(() => this.ask(true), TYPING);
    };
    this.form.addEventListener("submit", (event) => event.preventDefault());
    for (const event of ["input", "reset"]) this.form.addEventListener(event, soon);
    setInterval(() => { if (this.query && !this.paused && !document.hidden && this.answered === this.asked) this.ask(); }, EVERY);
  }

  get query() {
    const given = [...new FormData(this.form)].map(([name, value]) => [name, value.trim()]);
    return new URLSearchParams(given.filter(([, value]) => value)).toString();
  }

  async ask(aloud = false) {
    const number = ++this.asked;
    const { query } = this;
    const found = query ? await ask(`decisions?${query}`) : null;
    if (number !== this.asked) return;
    this.answered = number;
    this.show(found);
    if (aloud) setText($("search-said"), found ? told(found) : "");
  }
}

export const told = ({ problem, matches, searched, decisions: shown }) => problem
  ?? `${count(matches)} of the last ${count(searched)} match${matches > shown.length ? `; the newest ${count(shown.length)} are shown` : ""}`;

// The address of a path that is relative to this file. It has no user and password: `fetch` refuses an address with them,
// and the browser sends those that the page was opened with.
export function locate(path) {
  const address = new URL(path, import.meta.url);
  address.username = address.password = "";
  return address.href;
}

// Returns the scheduler's answer, or { problem }.
export async function ask(path) {
  try {
    const answer = await fetch(locate(path), { signal: AbortSignal.timeout(PATIENCE), headers: { Accept: "application/json" } });
    return answer.ok ? await answer.json() : { problem: (await answer.text()).trim() || `status ${answer.status}` };
  } catch (error) {
    return { problem: error.name === "TimeoutError" ? LATE : "The scheduler does not answer." };
  }
}
