// The newest requests, the refused ones too: how each ended, and the error's text.

import { bar, count, duration, el, named, visible } from "./dom.js";
import { failed, firstToken, state } from "./state.js";

const MOST = 50;
const HEADS = ["Time", "Status", "Agent", "Prompt", "Cached", "Answer", "First token", "All"];
const TIME = { hour: "2-digit", minute: "2-digit", second: "2-digit" };

const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB", TIME);

function status(span) {
  if (span.end === null) return ["soft", span.phases.at(-1)[0] === "decoding" ? "decoding" : "running"];
  if (failed(span)) return ["warn", String(span.status)];
  return ["soft", span.finish ?? "ended"];
}

function cells(span, now) {
  const [kind, words] = status(span);
  const first = firstToken(span);
  const chip = el("span", { class: `chip ${kind}` }, words);
  const who = span.route ? el("span", {}, visible(span.route)) : named(state.models ? `${span.agent}, ${span.model}` : span.agent);
  const has = !span.route;
  return [
    clock(span.phases[0][1]), chip, who,
    has ? count(span.prompt_tokens) : "",
    has && span.end !== null && !failed(span) ? bar(span.cached_tokens / (span.prompt_tokens || 1)) : "",
    has && span.generated_tokens ? count(span.generated_tokens) : "",
    first === null ? "" : duration(first),
    has ? duration((span.end ?? now) - span.phases[0][1]) : "",
  ];
}

class Requests extends HTMLElement {
  #onlyFailed = false;

  connectedCallback() {
    const box = el("input", { type: "checkbox", onchange: () => { this.#onlyFailed = box.checked; this.show(); } });
    this.body = el("tbody");
    this.note = el("p", { class: "soft", role: "status" });
    this.replaceChildren(
      el("label", { class: "soft" }, box, " Only failed ones"),
      el("div", { class: "wide" }, el("table", { "aria-labelledby": "requests-title" },
        el("thead", {}, el("tr", {}, ...HEADS.map((head) => el("th", { scope: "col" }, head)))), this.body)),
      this.note);
    state.addEventListener("changes", () => this.show());
  }

  show() {
    if (!state.changes) return;
    const all = [...state.spans.values()].filter((one) => !this.#onlyFailed || failed(one));
    all.sort((a, b) => b.phases[0][1] - a.phases[0][1]);
    const shown = all.slice(0, MOST);
    this.body.replaceChildren(...shown.flatMap((span) => this.#rows(span)));
    const words = all.length > MOST ? `The newest ${MOST} of ${count(all.length)} of the last ten minutes.` : "";
    this.note.textContent = all.length ? words : "None in the last ten minutes.";
  }

  #rows(span) {
    const row = el("tr", {}, ...cells(span, state.changes.now).map((one) => el("td", {}, one)));
    if (!span.error) return [row];
    row.className = "failed";
    return [row, el("tr", { class: "error" }, el("td", { colspan: HEADS.length }, visible(span.error)))];
  }
}

customElements.define("semantic-requests", Requests);
