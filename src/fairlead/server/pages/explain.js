// The dialog of one decision in full, which is fetched from the scheduler when the user opens it.

import { count, decimal, DASH, milliseconds, MOST_DIGITS, percent } from "./format.js";
import { $, make, setName } from "./dom.js";
import { ask } from "./search.js";

const SHOWN = 25;
let asked = 0;

export async function explain(id) {
  const dialog = $("why");
  const body = $("why-body");
  const number = ++asked;
  $("why-title").textContent = `Decision ${id}`;
  body.replaceChildren(make("p", { class: "empty" }, "Asking the scheduler …"));
  if (!dialog.open) dialog.showModal();
  const answer = await ask(`../debug/decisions/${encodeURIComponent(id)}`);
  if (number !== asked) return; // another decision has been opened
  body.replaceChildren(...(answer.problem ? [make("p", { class: "empty" }, `This decision cannot be shown: ${answer.problem}`)] : parts(answer)));
}

function parts(found) {
  const made = [facts(found)];
  const explanation = found.explanation;
  if (explanation) {
    made.push(make("h3", {}, found.endpoint ? `Why ${found.endpoint}` : "Why no endpoint"));
    made.push(make("ul", { class: "why" }, ...explanation.why.map((line) => make("li", {}, line))));
    if (!explanation.reproduced) {
      made.push(make("p", { class: "empty" },
        "This policy has a memory, uses random numbers or was changed since, so its ratings cannot be repeated. Totals are the recorded ones."));
    }
    made.push(candidates(explanation));
  } else {
    const why = [...(found.split?.why ?? []), ...(found.waiting?.why ?? [])];
    if (why.length) made.push(make("ul", { class: "why" }, ...why.map((line) => make("li", {}, line))));
    made.push(make("p", { class: "empty" }, `No reasons in numbers: ${found.unexplained ?? "not recorded"}.`));
    if (found.trace) made.push(traced(found.trace));
  }
  return made;
}

function facts(found) {
  const { prediction, result } = found;
  const rows = [
    ["Went to", found.endpoint ?? `nowhere (${found.outcome}${found.status ? `, status ${found.status}` : ""})`],
    ...(found.answered_by ? [["Answered by", `${found.answered_by}, because ${found.endpoint} could not be reached, failed or was overdue`]] : []),
    ...(found.prefill_endpoint ? [["Prompt computed by", found.prefill_endpoint]] : []),
    ["Decided by", found.policy],
    ["Model", found.target_model === found.model ? found.model || DASH : `${found.model} → ${found.target_model}`],
    ["Band, tenant", `${found.priority}, ${found.fairness_id || "none named"}`],
    ["Request", `${found.api}${found.stream ? ", streamed" : ""}, ${count(found.prompt_tokens)} prompt tokens`],
    ["Decided", found.waited_ms < 0.05 ? "at once"
      : `after ${milliseconds(found.waited_ms)}${found.queued_ms ? `, ${milliseconds(found.queued_ms)} queued` : ""}${
        found.asked_ms ? `, ${milliseconds(found.asked_ms)} asking another process` : ""}`],
  ];
  if (prediction) {
    const { ttft_ms: ttft, cached_tokens: cached } = prediction;
    const queued = found.queued_ms || found.asked_ms ? ", from when it was sent" : "";
    const verdict = ttft.within === null ? "" : ttft.within ? " (within the band)" : " (outside the band)";
    rows.push(
      ["First token predicted", `${milliseconds(ttft.predicted)} (90 %: ${ttft.band.map(milliseconds).join(" to ")})`],
      ["First token came after", `${milliseconds(ttft.actual)}${queued}${verdict}`],
      ["Cached tokens predicted", count(cached.predicted)],
      ["Cached tokens reported", cached.actual === null ? "not reported" : count(cached.actual)],
    );
  }
  rows.push(["Ended", result
    ? result.cause === "evicted" && !result.status ? "evicted for a more important request; its answer had begun and was cut off"
      : `${result.cause}, status ${result.status ?? DASH}, after ${milliseconds(result.duration_ms)}`
    : found.endpoint ? "not yet" : "never began"]);
  if (found.external_id) rows.push(["x-request-id", found.external_id]);
  return make("dl", { class: "facts" }, ...rows.map(([name, value]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, String(value)))));
}

function candidates(explanation) {
  const costs = explanation.unit !== "points";
  const sign = costs ? -1 : 1;
  const digits = digitsOf(explanation.candidates);
  const names = Object.keys(explanation.candidates[0]?.terms ?? {});
  const terms = names.length === 1 && names[0] === "cost" ? [] : names; // the total says it
  const unit = explanation.unit === "cost" ? "" : `, ${explanation.unit}`;
  const heads = ["Endpoint", "Cached tokens", "Queued tokens", "Running", "KV cache",
    ...terms.map((term) => `${term}${unit}`), `${costs ? "Cost" : "Total"}${unit}`, `Behind${unit}`, "Needed to tie"];
  const rows = explanation.candidates.slice(0, SHOWN).map((one) => row(one.chosen ? "chosen" : one.removed_by.length ? "removed" : "", [
    (one.chosen ? "● " : "") + one.endpoint,
    count(one.cached_tokens), count(one.queued_tokens), count(one.running_requests), percent(one.kv_usage),
    ...terms.map((term) => decimal(sign * (one.terms[term] ?? 0), digits)),
    one.total === null ? DASH : decimal(sign * one.total, digits),
    one.behind === null ? DASH : decimal(one.behind, digits),
    tie(one),
  ]));
  const left = explanation.candidates.length - rows.length;
  return make("div", {}, table("What each endpoint was rated", heads, rows),
    ...(left > 0 ? [make("p", { class: "empty" }, `And ${left} more endpoints.`)] : []));
}

// As `digits_of` of core/explain.py.
function digitsOf(rows) {
  const size = Math.abs(rows[0]?.total ?? 0) || Math.min(...rows.map((one) => Math.abs(one.behind ?? 0) || Infinity));
  return size < Infinity ? Math.min(Math.max(3 - Math.ceil(Math.log10(size)), 1), MOST_DIGITS) : 1;
}

function traced(trace) {
  const filters = Object.keys(trace.candidates[0]?.filters ?? {});
  const scores = Object.keys(trace.candidates[0]?.scores ?? {});
  const heads = ["Endpoint", ...filters.map((name) => `${name}?`), ...scores, "Total"];
  const word = (kept) => (kept === null ? DASH : kept ? "kept" : "out");
  const rows = trace.candidates.slice(0, SHOWN).map((one) => row(one.chosen ? "chosen" : one.kept ? "" : "removed", [
    (one.chosen ? "● " : "") + one.endpoint,
    ...filters.map((name) => word(one.filters[name])),
    ...scores.map((name) => decimal(one.scores[name], 2)),
    decimal(one.total, 2),
  ]));
  return table("How each endpoint was scored", heads, rows);
}

function tie(one) {
  if (one.part) return one.part;
  if (one.removed_by.length) return `was filtered out by ${one.removed_by.join(", ")}`;
  if (one.chosen) return "was chosen";
  if (one.behind === null || one.behind <= 0) return "";
  const ways = [];
  if (one.more_cached_tokens !== null) ways.push(`${count(one.more_cached_tokens)} more cached tokens`);
  if (one.fewer_queued_tokens !== null) ways.push(`${count(one.fewer_queued_tokens)} fewer queued tokens`);
  return ways.join(", or ") || "more cache or a shorter queue is not enough";
}

function row(kind, [name, ...values]) {
  const first = make("td", { class: "text", title: name });
  setName(first, name);
  return make("tr", { class: kind }, first, ...values.map((value, i) => make("td", { class: i === values.length - 1 ? "text" : "" }, value)));
}

function table(caption, heads, rows) {
  const head = make("tr", {}, ...heads.map((text, i) =>
    make("th", { scope: "col", class: i === 0 || i === heads.length - 1 ? "text" : "" }, text)));
  return make("div", { class: "wide", tabindex: "0", role: "region", "aria-label": caption },
    make("table", {}, make("caption", { class: "hidden" }, caption), make("thead", {}, head), make("tbody", {}, ...rows)));
}
