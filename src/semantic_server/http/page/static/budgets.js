// Memory and disk against their budgets, over the last ten minutes.

import { bytes, count, el, percent, svg } from "./dom.js";
import { state } from "./state.js";

const NAMES = { process: "Process", pool: "Pool", memory: "RAM tier", disk: "Disk", queue: "To write" };
const LONGEST = 600; // seconds
const SHORTEST = 60;
const WIDTH = 600; // of the drawing
const HEIGHT = 40;

function wear({ today, total, since, max_a_day: most, held_back: held, failed, rated_share: share }) {
  const limit = most ? ` of ${bytes(most)} a day` : "";
  const rated = share === null ? "" : `, ${(100 * share).toFixed(2)} % of the drive's rated life`;
  const limited = held ? " The limit is reached: until midnight only ends of turns are written." : "";
  const lost = failed ? ` ${count(failed)} writes failed: is the disk full? semantic doctor says.` : "";
  const note = limited + lost;
  return `Written to disk: ${bytes(today)} today${limit}, ${bytes(total)} since ${since}${rated}.${note}`;
}

// A step line: between two samples nothing has changed.
function line(samples, tier, now) {
  const seconds = Math.min(LONGEST, Math.max(SHORTEST, now - samples[0].at));
  const points = [];
  for (const { at, tiers } of samples) {
    const [used, most] = tiers[tier] ?? [0, 1];
    const x = Math.max(0, WIDTH * (1 - (now - at) / seconds)).toFixed(1);
    const y = (HEIGHT * (1 - Math.min(1, used / (most || 1)))).toFixed(1);
    if (points.length) points.push([x, points.at(-1)[1]]);
    points.push([x, y]);
  }
  if (points.length) points.push([String(WIDTH), points.at(-1)[1]]);
  return points;
}

function graph(samples, tier, now, label) {
  const points = line(samples, tier, now);
  const path = points.map((point) => point.join(",")).join(" ");
  const area = points.length
    ? `${points[0][0]},${HEIGHT} ${path} ${WIDTH},${HEIGHT}` : "";
  return svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    svg("polygon", { class: "area", points: area }),
    svg("line", { class: "floor", x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT }),
    svg("polyline", { class: "edge", points: path }),
  );
}

class Budgets extends HTMLElement {
  connectedCallback() {
    state.addEventListener("changes", () => this.show());
  }

  show() {
    const { samples } = state;
    const last = samples.at(-1);
    if (state.changes.samples === null) {
      this.replaceChildren(el("p", { class: "soft" }, "The budgets are about all tenants: an operator's key shows them."));
      return;
    }
    if (!last) {
      this.replaceChildren(el("p", { class: "soft" }, "No figures yet."));
      return;
    }
    const tiers = Object.keys(NAMES).filter((tier) => tier in last.tiers && (tier !== "queue" || last.tiers.queue[0]));
    this.replaceChildren(
      ...tiers.map((tier) => this.#budget(tier, samples, last.tiers[tier])),
      el("p", { class: "soft" }, `${last.running} running, ${last.waiting} waiting, ` +
        `${count(last.preemptions)} preempted since the start. Of the last ten minutes at most.`),
      state.changes.written ? el("p", { class: "soft" }, wear(state.changes.written)) : "",
      ...(last.pressure?.length ? [el("p", {}, `Memory is short: ${last.pressure.join(", ")}.`)] : []),
    );
  }

  #budget(tier, samples, [used, most]) {
    const words = `${bytes(used)} of ${bytes(most)}, ${percent(used / (most || 1))}`;
    return el(
      "div",
      { class: "budget" },
      el("span", {}, NAMES[tier]),
      el("span", {}, words),
      graph(samples, tier, state.changes.now, `${NAMES[tier]}: ${words}`),
    );
  }
}

customElements.define("semantic-budgets", Budgets);
