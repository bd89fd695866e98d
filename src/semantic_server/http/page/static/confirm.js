// Asks before an action, and shows why it failed.

import { el, named } from "./dom.js";

let number = 0;

// Opens a dialog about `agent`; `act` gets the entered text if there is a `label`.
export function confirmed({ title, agent, text, label, act }) {
  const id = `dialog-${(number += 1)}`;
  const before = document.activeElement;
  const input = label && el("input", { required: true, maxlength: 256, autocomplete: "off", spellcheck: "false" });
  const problem = el("p", { class: "warn", role: "alert" });
  const go = el("button", { class: "primary", value: "go" }, title);
  const dialog = el(
    "dialog",
    { "aria-labelledby": id },
    el(
      "form",
      {
        onsubmit: async (event) => {
          event.preventDefault();
          go.disabled = true;
          problem.textContent = "";
          try {
            await act(input?.value);
            dialog.close();
          } catch (error) {
            problem.textContent = error.message;
            go.disabled = false;
          }
        },
      },
      el("h2", { id }, `${title}: `, named(agent)),
      el("p", {}, text),
      label ? el("label", {}, label, input) : null,
      problem,
      el("div", { class: "row" }, go, el("button", { type: "button", onclick: () => dialog.close() }, "Cancel")),
    ),
  );
  dialog.addEventListener("close", () => {
    dialog.remove();
    if (before?.isConnected && document.activeElement === document.body) before.focus();
  });
  document.body.append(dialog);
  dialog.showModal();
}
