// Four figures of now, each with its last five minutes.

import { count, duration, el, percent, svg } from "./dom.js";
import { failed, firstToken, state } from "./state.js";

const SECONDS = 300;
const BUCKETS = 60;
const WIDTH = SECONDS / BUCKETS; // seconds of a bucket
const HEIGHT = 24; // of a drawing

const empty = () => new Array(BUCKETS).fill(0);

// The bucket of a time, or -1 outside the last five minutes.
function bucketOf(at, now) {
  const bucket = BUCKETS - 1 - Math.floor((now - at) / WIDTH);
  return bucket >= 0 && bucket < BUCKETS ? bucket : -1;
}

// Adds `amount`, spread evenly over the time from `from` to `to`.
function spread(buckets, amount, from, to, now) {
  const seconds = Math.max(to - from, 0.001);
  for (let at = 0; at < BUCKETS; at += 1) {
    const begin = now - (BUCKETS - at) * WIDTH;
    const both = Math.min(to, begin + WIDTH) - Math.max(from, begin);
    if (both > 0) buckets[at] += (amount * both) / seconds / WIDTH;
  }
}

function quantile(sorted, share) {
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}

function bars(values, most, kind = "") {
  return values.map((value, at) => {
    const height = most && value ? Math.max(1, (HEIGHT * value) / most) : 0;
    return svg("rect", { class: kind, x: at + 0.1, y: HEIGHT - height, width: 0.8, height });
  });
}

function spark(label, ...rows) {
  return svg("svg", { viewBox: `0 0 ${BUCKETS} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    svg("line", { class: "floor", x1: 0, x2: BUCKETS, y1: HEIGHT, y2: HEIGHT }), ...rows.flat());
}

function tile(name, value, note, drawing, kind = "") {
  return el("div", { class: "tile" },
    el("span", { class: "soft" }, name), el("span", { class: "figure" }, value),
    el("span", { class: `soft ${kind}` }, note), drawing);
}

// What the requests of the last five minutes add up to.
function measured(now) {
  const found = { tokens: empty(), good: empty(), bad: empty(), asked: empty(), cached: empty(), firsts: [], slowest: empty(), minute: 0 };
  const live = new Map(state.changes.requests.map((one) => [one.id, one]));
  for (const span of state.spans.values()) {
    const begun = span.phases[0][1];
    if (now - begun < 60) found.minute += 1;
    const decoded = span.phases.findLast(([phase]) => phase === "decoding");
    const generated = span.end === null ? (live.get(span.id)?.generated_tokens ?? 0) : span.generated_tokens;
    if (decoded && generated) spread(found.tokens, generated, decoded[1], span.end ?? now, now);
    const first = firstToken(span);
    const at = bucketOf(first === null ? begun : begun + first, now);
    if (first !== null && at >= 0) {
      found.firsts.push(first);
      found.slowest[at] = Math.max(found.slowest[at], first);
    }
    const end = span.end === null ? -1 : bucketOf(span.end, now);
    if (end < 0) continue;
    (failed(span) ? found.bad : found.good)[end] += 1;
    if (span.finish === "cancelled" || failed(span)) continue;
    found.asked[end] += span.prompt_tokens;
    found.cached[end] += span.cached_tokens;
  }
  return found;
}

const sum = (values) => values.reduce((total, one) => total + one, 0);
const fixed = (rate) => rate.toFixed(rate > 0 && rate < 10 ? 1 : 0);

function speed({ tokens }) {
  const now = sum(state.changes.requests.map((one) => one.tokens_per_second ?? 0));
  const most = Math.max(...tokens);
  const note = most ? `at most ${fixed(Math.max(most, now))} in 5 min` : "no token in 5 min";
  return tile("Tokens per second", fixed(now), note, spark(note, bars(tokens, most)));
}

function latency({ firsts, slowest }) {
  firsts.sort((a, b) => a - b);
  if (!firsts.length) return tile("First token", "–", "no answer in 5 min", spark("no answer"));
  const note = `95 % within ${duration(quantile(firsts, 0.95))}`;
  return tile("First token, median", duration(quantile(firsts, 0.5)), note, spark(note, bars(slowest, Math.max(...slowest))));
}

function traffic({ good, bad, minute }) {
  const failures = sum(bad);
  const all = good.map((one, at) => one + bad[at]);
  const most = Math.max(...all);
  const note = failures ? `${count(failures)} failed in 5 min` : "none failed in 5 min";
  return tile("Requests per minute", count(minute), note, spark(note, bars(all, most), bars(bad, most, "bad")), failures ? "warn" : "");
}

function share({ asked, cached }) {
  const total = sum(asked);
  const note = total ? `of ${count(total)} prompt tokens in 5 min` : "no prompt in 5 min";
  const shares = cached.map((one, at) => one / (asked[at] || 1));
  return tile("Prompt tokens cached", total ? percent(sum(cached) / total) : "–", note, spark(note, bars(shares, 1, "good")));
}

class Tiles extends HTMLElement {
  connectedCallback() {
    state.addEventListener("changes", () => this.show());
  }

  show() {
    const found = measured(state.changes.now);
    this.replaceChildren(speed(found), latency(found), traffic(found), share(found));
  }
}

customElements.define("semantic-tiles", Tiles);
