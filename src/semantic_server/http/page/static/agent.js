// One agent: its blocks as cells, facts about it, and actions on it.

import { agentPath, ask, isNameable } from "./client.js";
import { confirmed } from "./confirm.js";
import { bytes, count, duration, el, named, percent, svg, visible } from "./dom.js";
import { state } from "./state.js";
import { stateOf } from "./agents.js";

const MOST_CELLS = 1024;
const PLACES = { pool: "in the pool", memory: "in the RAM tier", disk: "on disk",
  remote: "in the object store", missing: "evicted" };
const SLOWEST = Object.keys(PLACES);

function cell({ place, shared, checkpoint, title }) {
  return svg(
    "svg",
    { viewBox: "0 0 14 14", "aria-hidden": "true" },
    title ? svg("title", {}, title) : null,
    svg("rect", { class: place, x: 0.5, y: 0.5, width: 13, height: 13, rx: 2 }),
    shared ? svg("path", { class: "shared", d: "M2 12 12 2" }) : null,
    checkpoint ? svg("circle", { class: "checkpoint", cx: 10, cy: 10, r: 2.5 }) : null,
  );
}

// Groups blocks into at most MOST_CELLS cells: a cell of several shows their slowest place.
function cells(chain) {
  const size = Math.max(1, Math.ceil(chain.length / MOST_CELLS));
  const made = [];
  for (let at = 0; at < chain.length; at += size) {
    const group = chain.slice(at, at + size);
    const place = SLOWEST[Math.max(...group.map((one) => SLOWEST.indexOf(one.place)))];
    const shared = group.some((one) => one.shared);
    const checkpoint = group.some((one) => one.checkpoint);
    const title = `Tokens ${count(group[0].start)} to ${count(group.at(-1).stop)}, ${PLACES[place]}` +
      `${shared ? ", shared" : ""}${checkpoint ? ", checkpoint" : ""}`;
    made.push(cell({ place, shared, checkpoint, title }));
  }
  return [made, size];
}

function summary(chain) {
  const counts = SLOWEST.map((place) => [place, chain.filter((one) => one.place === place).length]);
  const places = counts.filter(([, n]) => n).map(([place, n]) => `${count(n)} ${PLACES[place]}`);
  const shared = chain.filter((one) => one.shared).length;
  const points = chain.filter((one) => one.checkpoint).length;
  return `${count(chain.length)} blocks: ${places.join(", ") || "none"}; ${count(shared)} shared with ` +
    `other agents; ${count(points)} with a checkpoint.`;
}

const legend = () => el(
  "ul", { class: "legend" },
  ...SLOWEST.map((place) => el("li", {}, cell({ place }), PLACES[place])),
  el("li", {}, cell({ place: "pool", shared: true }), "shared"),
  el("li", {}, cell({ place: "pool", checkpoint: true }), "checkpoint"),
  el("li", {}, "frame: pinned"),
);

class Agent extends HTMLElement {
  #shown = null;

  connectedCallback() {
    state.addEventListener("selected", () => this.open());
    state.addEventListener("changes", () => this.#live());
  }

  async open() {
    const id = state.selected;
    const section = this.closest("section");
    section.hidden = id === null;
    this.#shown = null;
    if (id === null) return;
    const title = el("h2", { id: "agent-title", tabindex: -1 }, "Agent ", named(id));
    this.replaceChildren(title);
    title.focus();
    if (!isNameable(id)) {
      this.append(el("p", {}, "A browser cannot ask for an agent of this name; semantic agents show can."));
      return;
    }
    try {
      const shown = await ask("GET", agentPath(id, "", state.scope));
      if (state.selected === id && title.isConnected) this.#show(shown);
    } catch (error) {
      if (state.selected !== id) return;
      this.append(el("p", { class: "warn", role: "alert" }, error.message));
      if (error.status === 404) state.forgotten(id);
    }
  }

  #show(shown) {
    this.#shown = shown;
    const turn = shown.last_turn;
    const [made, size] = cells(shown.chain);
    const words = summary(shown.chain);
    const facts = [
      ["State", this.stateText = el("span", { class: "state" })],
      ["Tokens", `${count(shown.tokens)} after ${count(shown.turns)} ${shown.turns === 1 ? "turn" : "turns"}`],
      ["Stored", `${bytes(shown.bytes)}, ${bytes(shown.shared_bytes)} of them shared; ${bytes(shown.pool_bytes)} in the pool`],
      shown.parent && ["Parent", named(shown.parent)],
      shown.children.length && ["Children", count(shown.children.length)],
      shown.client && ["Client", visible(shown.client)],
      turn.prompt_tokens !== null && ["Last prompt", `${percent(turn.cached_share)} of ${count(turn.prompt_tokens)} tokens cached, ${duration(turn.seconds)} of prefill`],
      turn.reason && ["Why", turn.reason],
      turn.lost_tokens > 0 && ["Cost", `${count(turn.lost_tokens)} tokens computed again, ${duration(turn.lost_seconds)}`],
    ].filter(Boolean);
    this.append(
      el("div", { class: shown.pinned ? "cells pinned" : "cells", role: "img", "aria-label": words }, ...made),
      el("p", { class: "soft" }, words, size > 1 ? ` One cell is ${size} blocks and has the slowest place of them.` : ""),
      legend(),
      el("dl", { class: "facts" }, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
      el("div", { class: "row" }, ...this.#actions(shown)),
    );
    this.#live();
  }

  #close() {
    state.select(null);
    document.querySelector("[role=tree]").focus();
  }

  #live() {
    if (!this.#shown) return;
    const [kind, words] = stateOf(this.#shown, state.requests);
    this.stateText.textContent = words;
    this.stateText.className = `state ${kind}`;
    this.cancel.hidden = !state.requests.some((one) => one.agent === this.#shown.id);
  }

  #actions(shown) {
    const { id } = shown;
    const path = (action) => agentPath(id, action, state.scope);
    const change = async (work) => { state.changed(await work()); if (state.selected === id) await this.open(); };
    const pin = () => confirmed({
      title: shown.pinned ? "Unpin" : "Pin", agent: id,
      text: shown.pinned ? "Its blocks may be evicted again." : "Its blocks are not evicted until it is unpinned.",
      act: () => change(() => ask("POST", path("/pin"), { pinned: !shown.pinned })),
    });
    const fork = () => confirmed({
      title: "Fork", agent: id, text: "The new agent begins with this one's state after its last turn; nothing is copied.",
      label: "Name of the new agent",
      act: (name) => change(() => ask("POST", path("/fork"), { new_id: name })),
    });
    const forget = () => confirmed({
      title: "Forget", agent: id, text: "The agent is deleted. Its blocks are evicted when space is needed.",
      act: async () => { await ask("DELETE", path("")); state.select(null); state.forgotten(id); },
    });
    const cancel = () => confirmed({
      title: "End its requests", agent: id, text: "They end at the next step, and their clients get an error. What they computed is kept.",
      act: async () => {
        for (const one of state.requests.filter((request) => request.agent === id)) {
          await ask("DELETE", `/v1/requests/${encodeURIComponent(one.id)}`);
        }
      },
    });
    const button = (title, act, hidden = false) => el("button", { type: "button", onclick: act, hidden }, `${title} …`);
    this.cancel = button("End requests", cancel, true);
    return [
      button(shown.pinned ? "Unpin" : "Pin", pin), button("Fork", fork, state.isOperator),
      button("Forget", forget), this.cancel,
      el("button", { type: "button", onclick: () => this.open() }, "Reload"),
      el("button", { type: "button", onclick: () => this.#close() }, "Close"),
    ];
  }
}

customElements.define("semantic-agent", Agent);
