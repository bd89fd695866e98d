// Memory and disk against their budgets, as one row of meters.

import { bytes, count, el, percent } from "./dom.js";
import { state } from "./state.js";

const NAMES = { pool: "Pool", memory: "RAM tier", disk: "Disk", remote: "Object store", process: "Process", queue: "To write" };
const HIGH = 0.9; // of a budget

function wear({ today, total, since, max_a_day: most, held_back: held, rated_share: share }) {
  const limit = most ? ` of ${bytes(most)} a day` : "";
  const rated = share === null ? "" : `, ${(100 * share).toFixed(2)} % of the drive's rated life`;
  const limited = held ? " The limit is reached: until midnight only ends of turns are written." : "";
  return `Written to disk: ${bytes(today)} today${limit}, ${bytes(total)} since ${since}${rated}.${limited}`;
}

function meter(name, [used, most]) {
  const share = used / (most || 1);
  const words = `${bytes(used)} of ${bytes(most)}, ${used && share < 0.01 ? "under 1 %" : percent(share)}`;
  const filled = el("span", { class: share > HIGH ? "filled high" : "filled" });
  filled.style.inlineSize = `${Math.min(100, 100 * share)}%`;
  return el("div", { class: "meter", role: "img", "aria-label": `${name}: ${words}` },
    el("span", {}, name), el("span", { class: "bar" }, filled), el("span", { class: "soft" }, words));
}

class Budgets extends HTMLElement {
  connectedCallback() {
    state.addEventListener("changes", () => this.show());
  }

  show() {
    const last = state.samples.at(-1);
    if (state.changes.samples === null) {
      this.replaceChildren(el("p", { class: "soft" }, "The budgets are about all tenants: an operator's key shows them."));
      return;
    }
    if (!last) {
      this.replaceChildren(el("p", { class: "soft" }, "No figures yet."));
      return;
    }
    const { written } = state.changes;
    const tiers = Object.keys(NAMES).filter((tier) => tier in last.tiers && (tier !== "queue" || last.tiers.queue[0]));
    this.replaceChildren(
      el("div", { class: "meters" }, ...tiers.map((tier) => meter(NAMES[tier], last.tiers[tier]))),
      el("p", { class: "soft" }, `${last.running} running, ${last.waiting} waiting, ${count(last.preemptions)} preempted since the start.`),
      written ? el("p", { class: "soft" }, wear(written)) : "",
      written?.failed ? el("p", { class: "warn" }, `${count(written.failed)} writes failed: is the disk full? semantic doctor says.`) : "",
      last.pressure?.length ? el("p", { class: "warn" }, `Memory is short: ${last.pressure.join(", ")}.`) : "",
    );
  }
}

customElements.define("semantic-budgets", Budgets);
