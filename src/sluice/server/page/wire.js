// Requests to the server that the page came from: adds the API key, reads event streams. Knows nothing of what they say.

const STORE = "sluice-api-key";

export function key() {
  try { return sessionStorage.getItem(STORE) || ""; } catch { return ""; }
}

export function setKey(value) {
  try { value ? sessionStorage.setItem(STORE, value) : sessionStorage.removeItem(STORE); } catch { /* none is kept then */ }
}

/** An answer that is no success; `status` is HTTP's, `retryAfter` in seconds or null. */
export class Refused extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** fetch() of a path below this page, with the key; throws Refused with the server's own words. */
export async function request(path, { body, signal } = {}) {
  const headers = {};
  if (key()) headers.Authorization = `Bearer ${key()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(path, {
    method: body === undefined ? "GET" : "POST", headers, signal, cache: "no-store", credentials: "omit",
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (response.ok) return response;
  let message = `the server answered ${response.status}`;
  try { message = (await response.json()).error.message || message; } catch { /* no JSON: the number must do */ }
  throw new Refused(response.status, message, Number(response.headers.get("Retry-After")) || null);
}

/** The events of an event-stream response: {event, data}, comments as event "" so that a reader can tell life. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", event = "message", data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line === "") {
          if (data.length) yield { event, data: data.join("\n") };
          event = "message";
          data = [];
        } else if (line.startsWith(":")) {
          yield { event: "", data: "" };
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        } else if (line.startsWith("event:")) {
          event = line.slice(6).trim();
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export const wait = (seconds) => new Promise((resolve) => setTimeout(resolve, seconds * 1000));
