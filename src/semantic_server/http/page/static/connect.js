// How a client connects to this server: lines to copy.

import { el } from "./dom.js";
import { state } from "./state.js";

const quoted = (text) => JSON.stringify(text);

function ways(origin, model, hasKeys) {
  const key = hasKeys ? 'os.environ["SEMANTIC_API_KEY"]' : '"none"';
  const os = hasKeys ? "import os\n" : "";
  const header = hasKeys ? ' \\\n  -H "Authorization: Bearer $SEMANTIC_API_KEY"' : "";
  const body = JSON.stringify({ model, messages: [{ role: "user", content: "Hello" }] }).replaceAll("'", "'\\''");
  const ask = `model=${quoted(model)}, messages=[{"role": "user", "content": "Hello"}]`;
  return {
    "Coding agents": `semantic launch opencode --url ${origin}   # or claude, codex`,
    curl: `curl ${origin}/v1/chat/completions${header} \\\n  -H "Content-Type: application/json" \\\n  -d '${body}'`,
    OpenAI: `${os}from openai import OpenAI  # pip install openai\n\n` +
      `client = OpenAI(base_url="${origin}/v1", api_key=${key})\n` +
      `reply = client.chat.completions.create(${ask})\nprint(reply.choices[0].message.content)`,
    Anthropic: `${os}from anthropic import Anthropic  # pip install anthropic\n\n` +
      `client = Anthropic(base_url="${origin}", api_key=${key})\n` +
      `reply = client.messages.create(max_tokens=500, ${ask})\nprint(reply.content[0].text)`,
  };
}

function copied(text) {
  const button = el("button", {
    type: "button",
    onclick: async () => {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    },
  }, "Copy");
  button.hidden = !navigator.clipboard; // only pages of this machine or with TLS have one
  return button;
}

const fact = (name, value) => el("div", { class: "row" }, el("span", { class: "soft" }, name), el("code", {}, value), copied(value));

class Connect extends HTMLElement {
  connectedCallback() {
    state.addEventListener("overview", () => this.show());
  }

  show() {
    const { model, role } = state.overview;
    if (model === null) return;
    const { origin } = location;
    this.replaceChildren(
      el("div", { class: "facts-row" }, fact("Address", `${origin}/v1`), fact("Model", model)),
      ...Object.entries(ways(origin, model, role !== "local")).map(([name, text], at) =>
        el("details", { open: at === 0, name: "connect" }, el("summary", {}, name),
          el("div", { class: "code" }, el("pre", {}, text), copied(text)))));
  }
}

customElements.define("semantic-connect", Connect);
