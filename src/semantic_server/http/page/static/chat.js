// A chat to try the model: under each answer what was cached and when the first token came.

import { events } from "./client.js";
import { count, duration, el, visible } from "./dom.js";
import { markdown } from "./markdown.js";
import { state } from "./state.js";

class Chat extends HTMLElement {
  #messages = [];
  #running = null;

  connectedCallback() {
    this.agent = el("input", { maxlength: 256, "aria-label": "Agent's name", placeholder: "Agent (any)", autocomplete: "off" });
    this.text = el("textarea", { rows: 3, "aria-label": "Message", placeholder: "Message", required: true,
      onkeydown: (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.form.requestSubmit(); } } });
    this.model = el("select", { "aria-label": "Model", hidden: true, onchange: () => this.#begin() });
    this.stop = el("button", { type: "button", hidden: true, onclick: () => this.#running?.abort() }, "Stop");
    this.list = el("div", { class: "messages", role: "log", "aria-label": "Conversation", tabindex: 0 });
    this.form = el("form", { onsubmit: (event) => { event.preventDefault(); this.#send(); } },
      this.text,
      el("div", { class: "row" }, el("button", { class: "primary" }, "Send"), this.stop, this.model, this.agent,
        el("button", { type: "button", onclick: () => this.#begin() }, "New conversation")));
    this.replaceChildren(this.list, this.form);
    state.addEventListener("overview", () => this.#models());
  }

  #models() {
    const chosen = this.model.value || state.overview.model;
    this.model.hidden = !state.models;
    this.model.replaceChildren(...(state.models ?? []).map(({ id }) =>
      el("option", { value: id, selected: id === chosen }, visible(id))));
  }

  #begin() {
    this.#running?.abort();
    this.#messages = [];
    this.list.replaceChildren();
    this.text.focus();
  }

  #add(role, text) {
    const node = el("div", { class: `message ${role}` }, text);
    this.list.append(node);
    this.list.scrollTop = this.list.scrollHeight;
    return node;
  }

  async #send() {
    const text = this.text.value;
    if (!text.trim() || this.#running) return;
    this.text.value = "";
    this.#add("user", text);
    const messages = this.#messages;
    messages.push({ role: "user", content: text });
    const answer = this.#add("assistant", "");
    const note = el("p", { class: "soft" }, "waiting");
    this.list.append(note);
    this.#running = new AbortController();
    this.stop.hidden = false;
    try {
      const content = await this.#answer(messages, answer, note);
      messages.push({ role: "assistant", content });
    } catch (error) {
      messages.pop();
      note.className = "warn";
      note.textContent = error.name === "AbortError" ? "Stopped; not part of the conversation." : error.message;
    } finally {
      this.#running = null;
      this.stop.hidden = true;
      this.list.scrollTop = this.list.scrollHeight;
    }
  }

  async #answer(messages, answer, note) {
    const body = { model: this.model.value || state.overview.model, messages, stream: true, stream_options: { include_usage: true } };
    if (this.agent.value) body.agent_id = this.agent.value;
    const asked = performance.now();
    let [content, first, usage] = ["", null, null];
    const options = { method: "POST", body, signal: this.#running.signal };
    for await (const [, data] of events("/v1/chat/completions", options)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const delta = chunk.choices?.[0]?.delta ?? {};
      const said = delta.content ?? "";
      if (first === null && (said || delta.reasoning)) first = performance.now();
      if (said) {
        content += said;
        this.#draw(answer, content);
      } else if (delta.reasoning && !content) note.textContent = "thinking";
    }
    note.textContent = this.#note(usage, first, asked);
    return content;
  }

  // Draws once a frame, not once a token.
  #draw(answer, content) {
    const isFirst = answer.said === undefined;
    answer.said = content;
    if (isFirst) this.#frame(answer);
  }

  #frame(answer) {
    requestAnimationFrame(() => {
      const isAtEnd = this.list.scrollTop + this.list.clientHeight >= this.list.scrollHeight - 40;
      answer.replaceChildren(...markdown(answer.said));
      answer.said = undefined;
      if (isAtEnd) this.list.scrollTop = this.list.scrollHeight;
    });
  }

  #note(usage, first, asked) {
    if (!usage || first === null) return "The answer is empty.";
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const decoding = (performance.now() - first) / 1000;
    const isMeasured = usage.completion_tokens >= 16 && decoding > 0.1; // fewer come at once
    const rate = isMeasured
      ? `, then ${((usage.completion_tokens - 1) / decoding).toFixed(0)} tok/s` : "";
    const lost = usage.semantic?.lost;
    const why = lost ? ` ${count(lost.tokens)} cached tokens were computed again: ${lost.reason}` : "";
    return `${count(cached)} of ${count(usage.prompt_tokens)} prompt tokens cached; first token after ` +
      `${duration((first - asked) / 1000)}${rate}.${why}`;
  }
}

customElements.define("semantic-chat", Chat);
