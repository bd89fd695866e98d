// Requests to the server of this page, with the key of this tab; server-sent events come by fetch,
// because EventSource sends no headers.

const STORED = "semantic-key";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(STORED) ?? "",
  set: (value) => sessionStorage.setItem(STORED, value),
  drop: () => sessionStorage.removeItem(STORED),
};

async function send(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  if (options.body !== undefined) headers["content-type"] = "application/json";
  const response = await fetch(path, {
    ...options,
    headers,
    body: options.body === undefined ? undefined : JSON.stringify(options.body),
    credentials: "omit",
    cache: "no-store",
  });
  if (response.ok) return response;
  const problem = await response.json().catch(() => null);
  throw new Refused(response.status, problem?.error?.message ?? `status ${response.status}`);
}

export const ask = async (method, path, body) => (await send(path, { method, body })).json();

// Yields [event, data] until the server ends the stream or `signal` aborts it.
export async function* events(path, { signal, ...options } = {}) {
  const response = await send(path, { ...options, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        let name = "message";
        const data = [];
        for (const line of part.split("\n")) {
          if (line.startsWith("event:")) name = line.slice(6).trim();
          else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
        }
        if (data.length) yield [name, data.join("\n")];
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// A browser resolves these two names as parts of a path, however they are encoded.
export const isNameable = (agent) => agent !== "." && agent !== "..";

// A query of the fields that have a value.
export function queryOf(fields) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(fields)) if (value != null && value !== "") query.set(name, value);
  return query.size ? `?${query}` : "";
}

export const agentPath = (agent, action = "", scope = {}) =>
  `/v1/agents/${encodeURIComponent(agent)}${action}${queryOf(scope)}`;
