// Formats numbers with their units. Unknown values become a dash.

export const DASH = "–";
const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
export const MOST_DIGITS = 9;
const fixed = Array.from({ length: MOST_DIGITS + 1 }, (_, digits) => new Intl.NumberFormat("en-US", {
  minimumFractionDigits: digits, maximumFractionDigits: digits,
}));

const known = (value) => typeof value === "number" && Number.isFinite(value);

export const count = (value) => (known(value) ? whole.format(value) : DASH);
export const decimal = (value, digits = 1) => (known(value) ? fixed[digits].format(value) : DASH);
export const percent = (share, digits = 0) => (known(share) ? `${fixed[digits].format(share * 100)} %` : DASH);

export function rate(value) {
  if (!known(value)) return DASH;
  return fixed[value < 10 && value > 0 ? 1 : 0].format(value);
}

export function milliseconds(value) {
  if (!known(value)) return DASH;
  if (value < 10) return `${fixed[1].format(value)} ms`;
  if (value < 1000) return `${whole.format(value)} ms`;
  return `${fixed[value < 10000 ? 2 : 1].format(value / 1000)} s`;
}

export function microseconds(value) {
  if (!known(value)) return DASH;
  return value < 1000 ? `${whole.format(value)} µs` : milliseconds(value / 1000);
}

export function seconds(value) {
  if (!known(value)) return DASH;
  if (value < 10) return `${fixed[1].format(value)} s`;
  if (value < 120) return `${whole.format(value)} s`;
  if (value < 7200) return `${whole.format(value / 60)} min`;
  if (value < 172800) return `${whole.format(value / 3600)} h`;
  return `${whole.format(value / 86400)} days`;
}

export function bytes(value) {
  if (!known(value)) return DASH;
  if (value < 1e3) return `${whole.format(value)} B`;
  if (value < 1e6) return `${fixed[1].format(value / 1e3)} kB`;
  return `${fixed[1].format(value / 1e6)} MB`;
}

const clock = new Intl.DateTimeFormat("en-GB", {
  hour: "2-digit", minute: "2-digit", second: "2-digit", fractionalSecondDigits: 1,
});
const minute = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
const dated = new Intl.DateTimeFormat("en-GB", { dateStyle: "full", timeStyle: "long" });
// Seconds since 1970 as a time; of one that is half a day ago, also the day.
const timed = (value, today) => (Date.now() / 1000 - value < 43200 ? today : day).format(new Date(value * 1000));
export const hourOf = (value) => timed(value, minute);
export const timeOfDay = (value) => timed(value, clock);
export const date = (value) => dated.format(new Date(value * 1000));
