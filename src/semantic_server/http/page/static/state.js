// The page's knowledge of the server: the stream's events, and the listed agents.

import { Refused, agentPath, ask, events, isNameable, key, queryOf } from "./client.js";

const WINDOW = 600; // seconds of samples and spans that are kept
const LONGEST_WAIT = 15; // seconds between two attempts to connect
const FIRST_PAGE = 50; // agents listed at first, and then at once: each costs the server time
const PAGE = 200;
const MOST_AGENTS = 20000;
const REFRESH = 2000; // milliseconds between two looks at agents that have changed
const LONGEST_REFRESH = 60000;
const MOST_GONE = 1000;
const AT_ONCE = 4; // agents looked at in one go
const SHARE = 100; // pause after a look, in multiples of its duration: at most 1 % of a core

// A request that ended with an error; one that its client left did not.
export const failed = ({ status }) => status >= 400 && status !== 499;

// Seconds until the first token of a request, or null.
export function firstToken({ phases }) {
  const decoding = phases.find(([phase]) => phase === "decoding");
  return decoding ? decoding[1] - phases[0][1] : null;
}

class State extends EventTarget {
  overview = null;
  changes = null;
  samples = [];
  spans = new Map();
  agents = new Map();
  hasMore = false;
  tenant = "";
  model = ""; // of several models, the one whose agents are shown
  selected = null;
  #last = null;
  #generation = 0;
  #loading = false;
  #stale = new Set();
  #gone = new Set(); // a request that is not kept has an agent's name and no agent
  #timer = 0;

  tell(name) {
    this.dispatchEvent(new Event(name));
  }

  say(text) {
    this.status = text;
    this.tell("status");
  }

  get isOperator() {
    return this.overview?.role === "operator";
  }

  get models() {
    return this.changes?.models ?? null;
  }

  // Whose agents are shown.
  get scope() {
    return { tenant: this.tenant, model: this.model };
  }

  // True if the page may ask for agents: asking for those of an unloaded model would load it.
  get #isLoaded() {
    return !this.models || this.models.some((one) => one.id === this.model && one.state === "loaded");
  }

  // Follows the stream, and again whenever it ends.

  async run() {
    let before = null;
    for (let wait = 1; ; wait = Math.min(wait * 2, LONGEST_WAIT)) {
      let isLoaded = false;
      try {
        for await (const [name, data] of events("/v1/overview/stream")) {
          const found = JSON.parse(data);
          if (name === "overview") {
            this.#begin(found, before);
            before = found.started;
            wait = 1;
          } else if (name === "changes") {
            isLoaded = this.changes.state === "loading" && found.state !== "loading";
            this.#take(found);
            if (isLoaded) break; // and ask again for what was not known before
          }
        }
      } catch (error) {
        if (error instanceof Refused && error.status === 401) {
          this.tell("locked");
          return;
        }
        if (error instanceof Refused) this.say(`The server refuses: ${error.message}.`);
      }
      if (isLoaded) continue;
      this.say(`No connection to the server; next attempt in ${wait} s.`);
      await new Promise((resolve) => setTimeout(resolve, wait * 1000));
    }
  }

  #begin(overview, before) {
    this.overview = overview;
    this.samples = [];
    this.spans.clear();
    if (overview.tenants && !overview.tenants.includes(this.tenant)) {
      this.tenant = overview.tenants[0] ?? "";
    }
    this.#take(overview.changes, true);
    if (!this.#isLoaded || !this.models) {
      this.model = this.models?.find((one) => one.state === "loaded")?.id ?? "";
    }
    if (before === null) this.say("Connected.");
    else if (before === overview.started) this.say("Connected again.");
    else this.say("The server was restarted; connected again.");
    this.tell("overview");
    this.reload();
  }

  #take(changes, isFirst = false) {
    this.changes = changes;
    this.samples = this.samples.concat(changes.samples ?? []);
    while (this.samples.length && this.samples[0].at < changes.now - WINDOW) this.samples.shift();
    for (const span of changes.spans) {
      this.spans.delete(span.id + span.phases[0][1]);
      this.spans.set(span.id + span.phases[0][1], span);
      const isShown = this.#isOfModel(span) && (!this.isOperator || span.tenant === this.tenant);
      if (span.end !== null && !span.route && isShown && !isFirst) this.refresh(span.agent);
    }
    for (const [id, span] of this.spans) {
      if (span.end !== null && span.end < changes.now - WINDOW) this.spans.delete(id);
    }
    for (const { agent } of this.requests) {
      if (!this.agents.has(agent) && !this.#gone.has(agent)) this.refresh(agent);
    }
    this.tell("changes");
  }

  get requests() {
    const all = (this.changes?.requests ?? []).filter((one) => this.#isOfModel(one));
    return this.isOperator ? all.filter((one) => one.tenant === this.tenant) : all;
  }

  #isOfModel({ model }) {
    return !this.models || model === this.model;
  }

  // Agents, page by page.

  async reload() {
    this.#generation += 1;
    this.agents.clear();
    this.#stale.clear();
    this.#gone.clear();
    this.#last = null;
    this.hasMore = true;
    this.#loading = false;
    await this.more();
  }

  async more() {
    if (this.#loading || !this.hasMore || this.agents.size >= MOST_AGENTS) return;
    this.#loading = true;
    const generation = this.#generation;
    try {
      const page = await this.#list({ limit: this.#last ? PAGE : FIRST_PAGE, after: this.#last });
      if (generation !== this.#generation) return;
      this.#last = page.last_id ?? this.#last;
      this.hasMore = page.has_more;
      this.#loading = false; // before the rows are drawn: they may ask for more
      this.#merge(page.data);
    } catch (error) {
      this.hasMore = false;
      if (error instanceof Refused && error.status !== 503) this.say(error.message);
    } finally {
      if (generation === this.#generation) this.#loading = false;
    }
  }

  async find(prefix) {
    if (prefix) this.#merge((await this.#list({ limit: PAGE, prefix })).data);
  }

  // Looks at an agent again soon: at a few agents at once, with pauses that limit the cost.
  refresh(agent) {
    if (isNameable(agent)) this.#stale.add(agent);
    this.#wait(0);
  }

  #wait(milliseconds) {
    if (!this.#timer && this.#stale.size) this.#timer = setTimeout(() => this.#look(), milliseconds);
  }

  async #look() {
    const generation = this.#generation;
    const begun = performance.now();
    const found = [];
    if (!this.#isLoaded) this.#stale.clear();
    for (const name of [...this.#stale].slice(0, AT_ONCE)) {
      this.#stale.delete(name);
      try {
        const { chain, ...row } = await ask("GET", agentPath(name, "", this.scope));
        found.push(row);
      } catch (error) {
        if (error instanceof Refused && error.status === 404) this.#gone.add(name);
      }
    }
    if (this.#gone.size > MOST_GONE) this.#gone.clear();
    if (generation === this.#generation) {
      for (const name of this.#gone) this.agents.delete(name);
      this.#merge(found);
    }
    const pause = Math.min(LONGEST_REFRESH, Math.max(REFRESH, SHARE * (performance.now() - begun)));
    setTimeout(() => {
      this.#timer = 0;
      this.#wait(0);
    }, pause);
  }

  // An action's reply is the agent's new state.
  changed(row) {
    this.#merge([row]);
  }

  forgotten(agent) {
    this.agents.delete(agent);
    this.tell("agents");
  }

  #merge(rows) {
    for (const row of rows) {
      this.agents.set(row.id, row);
      this.#gone.delete(row.id);
    }
    this.tell("agents");
  }

  #list(fields) {
    const isNone = (this.isOperator && !this.tenant) || (this.models && !this.model);
    if (isNone) return Promise.resolve({ data: [], has_more: false });
    return ask("GET", `/v1/agents${queryOf({ ...fields, ...this.scope })}`);
  }

  select(agent) {
    this.selected = agent;
    this.tell("selected");
  }

  unlock(value) {
    key.set(value);
    this.run();
  }
}

export const state = new State();
