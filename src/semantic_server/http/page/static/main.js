// The page: what is shown when, and the key of a server that has keys.

import { key } from "./client.js";
import { state } from "./state.js";
import "./tiles.js";
import "./savings.js";
import "./timeline.js";
import "./agents.js";
import "./agent.js";
import "./requests.js";
import "./budgets.js";
import "./models.js";
import "./connect.js";
import "./chat.js";

const at = (id) => document.getElementById(id);

state.addEventListener("status", () => {
  at("status").textContent = state.status;
});

state.addEventListener("overview", () => {
  const { model, version, role } = state.overview;
  const who = { local: "", tenant: "; your own agents", operator: "; as an operator" }[role];
  const several = state.models ? `${state.models.length} models` : model;
  at("server").textContent = `${several ?? "loading a model"}, version ${version}${who}`;
  at("key-form").hidden = true;
  at("content").hidden = false;
  at("chat-section").hidden = state.isOperator || model === null;
  at("connect-section").hidden = model === null;
});

// A new server shows first how to connect.
for (const event of ["agents", "changes"]) {
  state.addEventListener(event, () => at("content").classList.toggle("empty", !state.agents.size && !state.spans.size));
}

state.addEventListener("locked", () => {
  at("key-problem").textContent = key.get() ? "The server does not know this key." : "";
  key.drop();
  at("status").textContent = "A key is needed.";
  at("content").hidden = true;
  at("key-form").hidden = false;
  at("key").value = "";
  at("key").focus();
});

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  state.unlock(at("key").value);
});

state.run();
