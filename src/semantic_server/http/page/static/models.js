// The models of a server that has several: the memory and the work of each.

import { bytes, count, duration, el, named, percent } from "./dom.js";
import { state } from "./state.js";

const HEADS = ["Model", "State", "Memory", "Weights", "Pool", "Agents", "Running", "Waiting", "tok/s", "Unloaded"];

function use({ state: now, idle_for: idle }) {
  return idle === null ? now : `idle for ${duration(idle)}`;
}

function unloaded({ pinned, expires_in: expires }) {
  if (expires !== null) return `in ${duration(expires)}`;
  return pinned ? "never" : "when needed";
}

const known = (figure) => (figure === null ? "" : count(figure));

const cells = (row) => [
  named(row.id),
  row.running ? "in use" : use(row),
  bytes(row.memory_bytes),
  row.weights_bytes === null ? "" : bytes(row.weights_bytes),
  row.pool ? percent(row.pool[0] / (row.pool[1] || 1)) : "",
  known(row.agents),
  known(row.running),
  known(row.waiting),
  row.tokens_per_second ? row.tokens_per_second.toFixed(row.tokens_per_second < 10 ? 1 : 0) : "",
  unloaded(row),
];

class Models extends HTMLElement {
  connectedCallback() {
    state.addEventListener("changes", () => this.show());
  }

  show() {
    this.closest("section").hidden = !state.models;
    if (!state.models) return;
    this.replaceChildren(el(
      "div", { class: "wide" },
      el("table", { "aria-labelledby": "models-title" },
        el("thead", {}, el("tr", {}, ...HEADS.map((head) => el("th", { scope: "col" }, head)))),
        el("tbody", {}, ...state.models.map((row) => {
          const [first, ...rest] = cells(row);
          return el("tr", {}, el("th", { scope: "row" }, first), ...rest.map((one) => el("td", {}, one)));
        }))),
    ));
  }
}

customElements.define("semantic-models", Models);
