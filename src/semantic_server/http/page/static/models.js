// The models: their size, context and memory, the work of each, and loading and unloading.

import { ask } from "./client.js";
import { bytes, count, duration, el, named, percent, rounded } from "./dom.js";
import { state } from "./state.js";

const HEADS = ["Model", "State", "Parameters", "Weights", "Context", "Exact batch", "Memory", "Pool", "Agents", "Running", "Waiting", "tok/s", "Unloaded", ""];

function use({ state: now, idle_for: idle, running }) {
  if (running) return "in use";
  return idle === null ? now : `idle for ${duration(idle)}`;
}

function unloaded({ pinned, expires_in: expires }) {
  if (expires !== null) return `in ${duration(expires)}`;
  return pinned ? "never" : "when needed";
}

const known = (figure, show = count) => (figure === null ? "" : show(figure));

const cells = ({ facts, ...row }) => [
  named(row.id),
  use(row),
  known(facts.parameters, rounded),
  facts.stored_as ?? "",
  count(facts.context_tokens),
  facts.lane ? (facts.lane.problem ? "no" : "yes") : "",
  bytes(row.memory_bytes),
  row.pool ? percent(row.pool[0] / (row.pool[1] || 1)) : "",
  known(row.agents),
  known(row.running),
  known(row.waiting),
  row.tokens_per_second ? row.tokens_per_second.toFixed(row.tokens_per_second < 10 ? 1 : 0) : "",
  unloaded(row),
];

class Models extends HTMLElement {
  connectedCallback() {
    this.problem = el("p", { class: "warn", role: "alert" });
    state.addEventListener("changes", () => this.show());
  }

  show() {
    const { only, models } = state.changes;
    const rows = models ?? (only ? [only] : []);
    this.closest("section").hidden = !rows.length;
    if (this.contains(document.activeElement)) return; // a button keeps its focus
    this.replaceChildren(el(
      "div", { class: "wide" },
      el("table", { "aria-labelledby": "models-title" },
        el("thead", {}, el("tr", {}, ...HEADS.map((head) => el("th", { scope: "col" }, head)))),
        el("tbody", {}, ...rows.map((row) => {
          const [first, ...rest] = cells(row);
          return el("tr", {}, el("th", { scope: "row" }, first), ...rest.map((one) => el("td", {}, one)), el("td", {}, this.#button(row)));
        }))),
    ), this.problem);
  }

  #button(row) {
    const action = { loaded: "unload", unloaded: "load" }[row.state];
    if (!state.models || state.overview.role === "tenant" || !action) return "";
    const button = el("button", { type: "button", onclick: async () => {
      button.disabled = true; // which takes the focus away
      this.problem.textContent = "";
      try {
        await ask("POST", `/v1/models/${row.id.split("/").map(encodeURIComponent).join("/")}/${action}`);
      } catch (error) {
        this.problem.textContent = error.message;
      }
    } }, action === "load" ? "Load" : "Unload");
    return button;
  }
}

customElements.define("semantic-models", Models);
