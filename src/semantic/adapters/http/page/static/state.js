// What the page knows of the server: the stream's events, and agents as they are listed.

import { Refused, ask, events, key } from "./client.js";

const WINDOW = 600; // seconds of samples and spans that are kept
const LONGEST_WAIT = 15; // seconds between two attempts to connect
const PAGE = 200; // agents listed at once
const MOST_AGENTS = 20000;
const REFRESH = 2000; // milliseconds between two listings of what has changed

class State extends EventTarget {
  overview = null;
  changes = null;
  samples = [];
  spans = new Map();
  agents = new Map();
  hasMore = false;
  tenant = "";
  selected = null;
  #last = null;
  #generation = 0;
  #loading = false;
  #stale = false;
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

  // The stream, and again when it ends.

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
    this.#take(overview.changes);
    if (before === null) this.say("Connected.");
    else if (before === overview.started) this.say("Connected again.");
    else this.say("The server was restarted; connected again.");
    this.tell("overview");
    this.reload();
  }

  #take(changes) {
    this.changes = changes;
    this.samples = this.samples.concat(changes.samples ?? []);
    while (this.samples.length && this.samples[0].at < changes.now - WINDOW) this.samples.shift();
    let ended = false;
    for (const span of changes.spans) {
      this.spans.delete(span.id + span.phases[0][1]);
      this.spans.set(span.id + span.phases[0][1], span);
      ended ||= span.end !== null;
    }
    for (const [id, span] of this.spans) {
      if (span.end !== null && span.end < changes.now - WINDOW) this.spans.delete(id);
    }
    const isNew = this.requests.some((one) => !this.agents.has(one.agent));
    if (ended || isNew) this.refresh();
    this.tell("changes");
  }

  get requests() {
    const all = this.changes?.requests ?? [];
    return this.isOperator ? all.filter((one) => one.tenant === this.tenant) : all;
  }

  // Agents, page by page.

  async reload() {
    this.#generation += 1;
    this.agents.clear();
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
      const page = await this.#list({ limit: PAGE, after: this.#last });
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

  // Lists the newest again, at most once in REFRESH: they are those whose turn has ended.
  refresh() {
    if (this.#timer) {
      this.#stale = true;
      return;
    }
    this.#timer = setTimeout(() => {
      this.#timer = 0;
      if (this.#stale) this.refresh();
    }, REFRESH);
    this.#stale = false;
    this.#list({ limit: 50 }).then((page) => this.#merge(page.data), () => {});
  }

  forgotten(agent) {
    this.agents.delete(agent);
    this.tell("agents");
  }

  #merge(rows) {
    for (const row of rows) this.agents.set(row.id, row);
    this.tell("agents");
  }

  #list(fields) {
    if (this.tenant) fields.tenant = this.tenant;
    const query = new URLSearchParams();
    for (const [name, value] of Object.entries(fields)) if (value != null) query.set(name, value);
    if (this.isOperator && !this.tenant) return Promise.resolve({ data: [], has_more: false });
    return ask("GET", `/v1/agents?${query}`);
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
