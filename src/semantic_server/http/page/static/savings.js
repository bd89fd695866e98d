// The sentence: what the cache has saved.

import { clock, count, duration, el, percent, rounded } from "./dom.js";
import { state } from "./state.js";

function sentence({ prompt_tokens: asked, cached_tokens: cached, seconds }, since) {
  if (!asked) return `No prompt ${since}.`;
  const share = `${percent(cached / asked)} of ${rounded(asked)} prompt tokens`;
  return `${duration(seconds)} of prefill saved ${since}; the cache had ${share}.`;
}

class Savings extends HTMLElement {
  connectedCallback() {
    state.addEventListener("changes", () => this.show());
  }

  show() {
    const { saved } = state.changes;
    const started = new Date(saved.start.since * 1000).toLocaleString("en-GB");
    const isShort = saved.today.since === saved.start.since; // it has not run since midnight
    const since = isShort ? `today since ${clock(saved.today.since)}` : "today";
    this.replaceChildren(
      el("p", { class: "sentence" }, sentence(saved.today, since)),
      el("p", { class: "soft" }, `Since the start, ${started}: ` +
        `${count(saved.start.cached_tokens)} of ${count(saved.start.prompt_tokens)} tokens were ` +
        `cached, ${duration(saved.start.seconds)} of prefill. The time is an estimate: cached ` +
        "tokens times the mean time of a computed one."),
    );
  }
}

customElements.define("semantic-savings", Savings);
