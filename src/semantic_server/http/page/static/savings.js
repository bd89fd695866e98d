// One line: what the cache has saved.

import { clock, duration, el, percent, rounded } from "./dom.js";
import { state } from "./state.js";

function sentence({ since, prompt_tokens: asked, cached_tokens: cached, seconds }, name) {
  if (!asked) return `No prompt ${name}.`;
  const share = `${percent(cached / asked)} of ${rounded(asked)} prompt tokens`;
  return `${duration(seconds)} of prefill saved ${name} since ${clock(since)}; the cache had ${share}.`;
}

class Savings extends HTMLElement {
  connectedCallback() {
    state.addEventListener("changes", () => this.show());
  }

  show() {
    const { today, start } = state.changes.saved;
    const started = new Date(start.since * 1000).toLocaleString("en-GB");
    const title = `Since the start, ${started}: ${duration(start.seconds)}. An estimate, from measured prefills of about the same length.`;
    this.replaceChildren(el("p", { class: "sentence", title }, sentence(today, "today")));
  }
}

customElements.define("semantic-savings", Savings);
