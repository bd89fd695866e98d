// Agents as the tree of sessions and subagents. Only the rows in view are in the document.

import { bar, count, duration, el, named, percent, visible } from "./dom.js";
import { state } from "./state.js";

const ROW = 56; // pixels, as in the style sheet
const SPARE = 4; // rows above and below the view

export function stateOf(agent, requests) {
  const live = requests.find((one) => one.agent === agent.id);
  if (live === undefined) return ["idle", resting(agent)];
  if (live.state === "queued") {
    return live.preemptions ? ["preempted", "preempted, waiting"] : ["queued", "queued"];
  }
  if (live.state === "prefill") {
    return ["prefill", `prefill ${percent(live.read_tokens / (live.prompt_tokens || 1))}`];
  }
  const rate = live.tokens_per_second;
  return ["decode", rate === null ? "decoding" : `${rate.toFixed(rate < 10 ? 1 : 0)} tok/s`];
}

function resting({ blocks }) {
  if (blocks.pool) return "idle";
  if (blocks.memory) return "idle, in memory";
  if (blocks.disk) return "on disk";
  if (blocks.remote) return "in the object store";
  return blocks.missing ? "evicted" : "idle";
}

// The last turn in words, with a reason only where something was lost.
function why({ last_turn: turn, tokens }) {
  if (turn.prompt_tokens === null) return tokens ? `${count(tokens)} tokens` : "no turn yet";
  return `${percent(turn.cached_share)} of ${count(turn.prompt_tokens)} tokens cached. ${lost(turn)}`.trim();
}

const lost = (turn) => (turn.lost_tokens
  ? `${count(turn.lost_tokens)} recomputed in ${duration(turn.lost_seconds)}: ${turn.reason}` : "");

function lastTurn(agent) {
  const { last_turn: turn } = agent;
  if (turn.prompt_tokens === null) return [el("span", { class: "why" }, why(agent))];
  const reason = lost(turn);
  return [
    bar(turn.cached_share), el("span", {}, `of ${count(turn.prompt_tokens)} tokens`),
    reason ? el("span", { class: "why chip warn", title: reason }, reason) : el("span", { class: "why" }),
  ];
}

class Agents extends HTMLElement {
  #rows = [];
  #collapsed = new Set();
  #active = 0;
  #filter = "";

  connectedCallback() {
    this.filter = el("input", { type: "search", "aria-label": "Agents whose name has", placeholder: "Find by name", oninput: () => this.#find() });
    this.tenants = el("select", { "aria-label": "Tenant", hidden: true, onchange: () => this.#choose() });
    this.models = el("select", { "aria-label": "Model", hidden: true, onchange: () => this.#choose() });
    this.summary = el("span", { class: "soft", role: "status" });
    this.space = el("div", { role: "none" });
    this.view = el("div", {
      class: "viewport", role: "tree", tabindex: 0, "aria-labelledby": "agents-title",
      onscroll: () => this.#draw(), onkeydown: (event) => this.#key(event),
    }, this.space);
    this.replaceChildren(el("div", { class: "row" }, this.filter, this.models, this.tenants, this.summary), this.view);
    state.addEventListener("agents", () => this.#arrange());
    state.addEventListener("changes", () => this.#draw());
    state.addEventListener("overview", () => this.#tenants());
    state.addEventListener("overview", () => this.#ofModels());
    new ResizeObserver(() => this.#draw()).observe(this.view);
  }

  #tenants() {
    const ids = state.overview.tenants;
    this.tenants.hidden = !ids;
    this.tenants.replaceChildren(...(ids ?? []).map((id) => el("option", { value: id, selected: id === state.tenant }, id)));
  }

  // Choosing a model that is not loaded loads it.
  #ofModels() {
    const ids = (state.models ?? []).map((one) => one.id);
    this.models.hidden = !state.models;
    this.models.replaceChildren(
      ...(state.model ? [] : [el("option", { value: "", selected: true }, "Load a model")]),
      ...ids.map((id) => el("option", { value: id, selected: id === state.model }, visible(id))),
    );
  }

  #choose() {
    state.tenant = this.tenants.value;
    state.model = this.models.value;
    state.select(null);
    state.reload();
  }

  #find() {
    this.#filter = this.filter.value;
    this.#active = 0;
    this.view.scrollTop = 0;
    this.#arrange();
    state.find(this.#filter).catch(() => {});
  }

  // The rows of the tree in order: an agent, its level, whether it has children.
  #arrange() {
    const chosen = [...state.agents.values()].filter((one) => one.id.includes(this.#filter));
    chosen.sort((a, b) => (b.last_used ?? Infinity) - (a.last_used ?? Infinity) || 0);
    const ids = new Set(chosen.map((one) => one.id));
    const children = Map.groupBy(chosen, (one) => (ids.has(one.parent) && one.parent !== one.id ? one.parent : null));
    this.#rows = [];
    const seen = new Set();
    const stack = [...(children.get(null) ?? [])].reverse().map((agent) => [agent, 1]);
    // Agents that are each other's parents have no root: they come last.
    for (;;) {
      const next = stack.pop() ?? this.#unseen(chosen, seen);
      if (!next) break;
      const [agent, level] = next;
      if (seen.has(agent.id)) continue;
      seen.add(agent.id);
      const own = children.get(agent.id) ?? [];
      const isFolded = this.#collapsed.has(agent.id);
      this.#rows.push({ agent, level, folds: own.length, isFolded });
      if (isFolded) this.#skip(own, children, seen);
      else for (const child of [...own].reverse()) stack.push([child, level + 1]);
    }
    this.#active = Math.max(0, Math.min(this.#active, this.#rows.length - 1));
    const more = state.hasMore ? "; more as you scroll" : "";
    const all = state.agents.size === this.#rows.length ? "" : `${count(this.#rows.length)} of `;
    const words = state.agents.size ? `${all}${count(state.agents.size)} agents${more}` : "none yet";
    if (this.summary.textContent !== words) this.summary.textContent = words;
    this.space.style.height = `${this.#rows.length * ROW}px`;
    this.#draw();
  }

  #unseen(chosen, seen) {
    const found = seen.size < chosen.length && chosen.find((one) => !seen.has(one.id));
    return found ? [found, 1] : null;
  }

  #skip(agents, children, seen) {
    const left = [...agents];
    while (left.length) {
      const one = left.pop();
      if (seen.has(one.id)) continue;
      seen.add(one.id);
      left.push(...(children.get(one.id) ?? []));
    }
  }

  #draw() {
    const { scrollTop, clientHeight } = this.view;
    const first = Math.max(0, Math.floor(scrollTop / ROW) - SPARE);
    const last = Math.min(this.#rows.length, Math.ceil((scrollTop + clientHeight) / ROW) + SPARE);
    const drawn = [];
    for (let at = first; at < last; at += 1) drawn.push(this.#row(at));
    if (this.#rows.length && (this.#active < first || this.#active >= last)) drawn.push(this.#row(this.#active));
    this.space.replaceChildren(...drawn);
    if (this.#rows.length) this.view.setAttribute("aria-activedescendant", `agent-${this.#active}`);
    else this.view.removeAttribute("aria-activedescendant");
    if (last + SPARE >= this.#rows.length && state.hasMore && state.overview) state.more();
  }

  #row(at) {
    const { agent, level, folds, isFolded } = this.#rows[at];
    const [kind, words] = stateOf(agent, state.requests);
    const row = el(
      "div",
      {
        id: `agent-${at}`, role: "treeitem", class: at === this.#active ? "agent active" : "agent",
        "aria-level": level, "aria-setsize": state.hasMore ? -1 : this.#rows.length, "aria-posinset": at + 1,
        "aria-expanded": folds ? String(!isFolded) : null, "aria-selected": String(state.selected === agent.id),
        "aria-label": `${visible(agent.id)}, ${words}. ${why(agent)}${agent.pinned ? " Pinned." : ""}`,
        onclick: (event) => this.#click(at, event),
      },
      el("div", { class: "line" },
        el("span", { class: "fold", "aria-hidden": "true" }, folds ? (isFolded ? "▸" : "▾") : ""),
        named(agent.id),
        agent.pinned ? el("span", { class: "soft" }, "pinned") : null,
        el("span", { class: `state ${kind}` }, words)),
      el("div", { class: "line soft" }, el("span", { class: "fold" }), ...lastTurn(agent)),
    );
    row.style.top = `${at * ROW}px`;
    row.style.paddingInlineStart = `${0.4 + Math.min(level - 1, 8) * 1.1}rem`;
    return row;
  }

  #click(at, event) {
    this.#active = at;
    if (event.target.classList.contains("fold") && this.#rows[at].folds) this.#fold(at, !this.#rows[at].isFolded);
    else this.#open(at);
  }

  #open(at) {
    state.select(this.#rows[at].agent.id);
    this.#draw();
  }

  #fold(at, isFolded) {
    const { id } = this.#rows[at].agent;
    if (isFolded) this.#collapsed.add(id);
    else this.#collapsed.delete(id);
    this.#arrange();
  }

  #key(event) {
    const row = this.#rows[this.#active];
    if (!row) return;
    const jump = Math.max(1, Math.floor(this.view.clientHeight / ROW) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: jump, PageUp: -jump, Home: -Infinity, End: Infinity };
    if (event.key in moves) this.#move(this.#active + moves[event.key]);
    else if (event.key === "Enter" || event.key === " ") this.#open(this.#active);
    else if (event.key === "ArrowRight" && row.folds && row.isFolded) this.#fold(this.#active, false);
    else if (event.key === "ArrowRight" && row.folds) this.#move(this.#active + 1);
    else if (event.key === "ArrowLeft" && row.folds && !row.isFolded) this.#fold(this.#active, true);
    else if (event.key === "ArrowLeft") this.#move(this.#parent());
    else return;
    event.preventDefault();
  }

  #parent() {
    const { level } = this.#rows[this.#active];
    let at = this.#active;
    while (at > 0 && this.#rows[at].level >= level && level > 1) at -= 1;
    return at;
  }

  #move(to) {
    this.#active = Math.max(0, Math.min(to, this.#rows.length - 1));
    const top = this.#active * ROW;
    const { scrollTop, clientHeight } = this.view;
    if (top < scrollTop) this.view.scrollTop = top;
    else if (top + ROW > scrollTop + clientHeight) this.view.scrollTop = top + ROW - clientHeight;
    this.#draw();
  }
}

customElements.define("semantic-agents", Agents);
