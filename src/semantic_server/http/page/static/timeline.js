// The time line: who waited, read, decoded and was preempted.

import { count, duration, el, named, svg } from "./dom.js";
import { state } from "./state.js";

const LONGEST = 300; // seconds
const SHORTEST = 30;
const WIDTH = 300; // of the drawing
const MOST_LANES = 6; // of the first look
const MOST_SHOWN = 100;
const NAMES = { waiting: "waited", reading: "prefilled", decoding: "decoded", preempted: "was preempted" };

function parts(span, now) {
  return span.phases.map(([phase, from], at) => {
    const to = span.phases[at + 1]?.[1] ?? span.end ?? now;
    return { phase, from, to };
  });
}

function words(all) {
  const sums = new Map();
  for (const { phase, from, to } of all) sums.set(phase, (sums.get(phase) ?? 0) + to - from);
  return [...sums].map(([phase, seconds]) => `${NAMES[phase]} ${duration(seconds)}`).join(", ");
}

class Timeline extends HTMLElement {
  #isWhole = false;

  connectedCallback() {
    this.button = el("button", { type: "button", class: "quiet", onclick: () => { this.#isWhole = !this.#isWhole; this.show(); } });
    state.addEventListener("changes", () => this.show());
  }

  show() {
    const { now } = state.changes;
    const lanes = new Map();
    for (const span of [...state.spans.values()].reverse()) {
      if (span.route || (span.end ?? now) < now - LONGEST) continue;
      const name = JSON.stringify([span.tenant ?? "", span.model, span.agent]);
      if (!lanes.has(name)) lanes.set(name, []);
      lanes.get(name).push(span);
    }
    if (!lanes.size) {
      this.replaceChildren(el("p", { class: "soft" }, "No request in the last five minutes."));
      return;
    }
    const first = Math.min(...[...lanes.values()].flat().map((span) => span.phases[0][1]));
    const seconds = Math.min(LONGEST, Math.max(SHORTEST, Math.ceil((now - first) / 10) * 10));
    const shown = [...lanes.values()].slice(0, this.#isWhole ? MOST_SHOWN : MOST_LANES);
    const more = lanes.size - shown.length;
    this.button.textContent = this.#isWhole ? "Show fewer" : `Show ${count(more)} more agents`;
    const hasFocus = document.activeElement === this.button;
    this.replaceChildren(
      el("ul", { class: "legend" }, ...Object.entries(NAMES).map(([phase, name]) =>
        el("li", {}, svg("svg", { viewBox: "0 0 14 14", "aria-hidden": "true" },
          svg("rect", { class: phase, width: 14, height: 14, rx: 2 })), name))),
      ...shown.map((spans) => this.#lane(spans, now, seconds)),
      el("div", { class: "scale soft", "aria-hidden": "true" }, el("span", {}, `${duration(seconds)} ago`), el("span", {}, "now")),
      more || this.#isWhole ? this.button : "",
    );
    if (hasFocus) this.button.focus();
  }

  #lane(spans, now, seconds) {
    const all = spans.flatMap((span) => parts(span, now));
    const x = (at) => Math.max(0, WIDTH * (1 - (now - at) / seconds));
    const rects = all.filter(({ to }) => to > now - seconds).map(({ phase, from, to }) =>
      svg("rect", { class: phase, x: x(from).toFixed(2), y: 3, width: Math.max(0.6, x(to) - x(from)).toFixed(2), height: 12 },
        svg("title", {}, `${NAMES[phase]} ${duration(to - from)}`)));
    return el(
      "div",
      { class: "lane" },
      named(state.models ? `${spans[0].agent}, ${spans[0].model}` : spans[0].agent),
      svg("svg", { viewBox: `0 0 ${WIDTH} 18`, preserveAspectRatio: "none", role: "img",
        "aria-label": `${count(spans.length)} ${spans.length === 1 ? "request" : "requests"}: ${words(all)}` },
        svg("line", { class: "base", x1: 0, x2: WIDTH, y1: 17, y2: 17 }), ...rects),
    );
  }
}

customElements.define("semantic-timeline", Timeline);
