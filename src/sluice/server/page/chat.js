// The chat: a conversation in memory, sent to /v1/chat/completions and streamed back. Text enters the page as text only.

import { Refused, events, request } from "./wire.js";

const $ = (id) => document.getElementById(id);
const text = $("composer-text"), log = $("log"), list = $("messages");

let messages = []; // {role, content, reasoning, error, facts, element}
let running = null; // AbortController of the answer that is being written
let editing = false;
let onKeyNeeded = () => {};

// --- showing

function make(tag, className, content) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (content !== undefined) element.textContent = content;
  return element;
}

/** Text cut into paragraphs of prose and fenced code: [{code, text}]. Nothing else of Markdown is understood. */
export function pieces(source) {
  const result = [];
  let code = false, lines = [];
  const end = () => {
    const joined = code ? lines.join("\n") : lines.join("\n").replace(/^\n+|\n+$/g, "");
    if (joined) result.push({ code, text: joined });
    lines = [];
  };
  for (const line of source.split("\n")) {
    if (/^\s{0,3}```/.test(line)) { end(); code = !code; } else lines.push(line);
  }
  end();
  return result;
}

function setText(element, value) {
  const node = element.firstChild;
  if (node && value.startsWith(node.data)) node.appendData(value.slice(node.data.length)); // cheaper, keeps selections
  else element.textContent = value;
}

function showBody(body, source) {
  const wanted = pieces(source);
  wanted.forEach((piece, i) => {
    const tag = piece.code ? "PRE" : "P";
    let element = body.children[i];
    if (!element || element.tagName !== tag) {
      const fresh = make(tag);
      if (piece.code) fresh.tabIndex = 0; // it may scroll sideways
      element ? element.replaceWith(fresh) : body.append(fresh);
      element = fresh;
    }
    setText(element, piece.text);
  });
  while (body.children.length > wanted.length) body.lastElementChild.remove();
}

function action(name, label, run) {
  const button = make("button", "quiet", name);
  button.type = "button";
  if (label) button.setAttribute("aria-label", label);
  button.addEventListener("click", run);
  return button;
}

function show(message) {
  const busy = message.busy === true;
  if (!message.element) {
    message.element = make("li", `message ${message.role}`);
    message.element.append(make("span", "hidden", message.role === "user" ? "You:" : "The model:"));
    message.body = make("div", "body");
    if (message.role === "user") showBody(message.body, message.content);
    message.element.append(message.body, make("div", "meta"));
    list.append(message.element);
  }
  const element = message.element;
  if (message.role === "assistant") {
    if (busy) element.setAttribute("aria-busy", "true"); else element.removeAttribute("aria-busy");
    if (message.reasoning) {
      if (!message.thought) {
        message.thought = make("details", "thought");
        message.thought.append(make("summary"), make("p"));
        message.body.before(message.thought);
      }
      message.thought.firstChild.textContent = busy && !message.content ? "Thinking…" : "What it thought";
      setText(message.thought.lastChild, message.reasoning);
    }
    showBody(message.body, message.content);
    const waiting = element.querySelector(".waiting");
    if (!busy || message.content || message.reasoning) waiting?.remove();
    else if (!waiting) message.body.after(make("p", "waiting", "Reading the prompt"));
    element.querySelector(".error")?.remove();
    if (message.error) element.querySelector(".meta").before(make("p", "error", message.error));
  }
  const meta = element.querySelector(".meta");
  meta.replaceChildren();
  if (message.facts) meta.append(make("span", "facts", message.facts));
  if (running) return;
  const last = messages.findLast((m) => m.role === message.role) === message;
  if (message.role === "assistant") {
    if (message.content && navigator.clipboard) {
      meta.append(action("Copy", "Copy this answer", async (event) => {
        const button = event.currentTarget;
        try { await navigator.clipboard.writeText(message.content); button.textContent = "Copied"; }
        catch { button.textContent = "Not allowed"; }
      }));
    }
    if (last && messages.at(-1) === message) meta.append(action("Regenerate", "Regenerate this answer", regenerate));
  } else if (last) {
    meta.append(action("Edit", "Edit your last message", edit));
  }
}

const atEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 60;
const toEnd = () => { log.scrollTop = log.scrollHeight; };

function refresh() {
  $("empty").hidden = messages.length > 0;
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  $("new-chat").disabled = messages.length === 0 && running === null;
  messages.forEach(show);
}

const announce = (words) => { $("announce").textContent = words; };

// --- asking

function number(id) {
  const input = $(id);
  return input.value.trim() === "" || !input.checkValidity() ? undefined : Number(input.value);
}

function asked() {
  const system = $("set-system").value.trim();
  const body = {
    messages: [
      ...(system ? [{ role: "system", content: system }] : []),
      ...messages.filter((m) => m.role === "user" || m.content).map((m) => ({ role: m.role, content: m.content })),
    ],
    stream: true,
    stream_options: { include_usage: true },
  };
  const given = { temperature: number("set-temperature"), max_tokens: number("set-max"), seed: number("set-seed") };
  for (const [name, value] of Object.entries(given)) if (value !== undefined) body[name] = value;
  return body;
}

const ENDS = { length: "cut at the token limit", content_filter: "filtered", tool_calls: "wants a tool" };
const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;

function facts({ began, first, last, chunks, usage, finish, stopped, seed }) {
  const tokens = usage?.completion_tokens ?? chunks;
  const result = [];
  if (tokens) result.push(plural(tokens, "token"));
  if (tokens > 1 && last > first) result.push(`${(((tokens - 1) * 1000) / (last - first)).toPrecision(3)} tok/s`);
  if (first) result.push(`first after ${((first - began) / 1000).toPrecision(2)} s`);
  if (usage?.prompt_tokens) {
    const kept = usage.prompt_tokens_details?.cached_tokens;
    result.push(`prompt ${plural(usage.prompt_tokens, "token")}${kept ? `, ${kept.toLocaleString("en")} kept from before` : ""}`);
  }
  if (seed !== undefined && seed !== null) result.push(`seed ${seed}`);
  if (stopped) result.push("stopped");
  else if (ENDS[finish]) result.push(ENDS[finish]);
  return result.join(" · ");
}

function problem(error) {
  if (error instanceof Refused) {
    if (error.status === 401) { onKeyNeeded(); return "The server wants an API key, or another one."; }
    if (error.status === 429) return `The server is full. Try again in ${plural(error.retryAfter ?? 1, "second")}.`;
    return `Refused: ${error.message}`;
  }
  if (error.told) return error.message;
  return "The connection broke off. Is the server still running?";
}

async function answer() {
  const message = { role: "assistant", content: "", reasoning: "", busy: true };
  const body = asked();
  messages.push(message);
  const control = (running = new AbortController());
  refresh();
  toEnd();
  const seen = { began: performance.now(), chunks: 0 };
  let frame = 0;
  const soon = () => {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      const follow = atEnd();
      show(message);
      if (follow) toEnd();
    });
  };
  try {
    const response = await request("v1/chat/completions", { body, signal: control.signal });
    let complete = false;
    for await (const { event, data } of events(response)) {
      if (event === "") continue;
      if (data === "[DONE]") { complete = true; break; }
      const chunk = JSON.parse(data);
      if (chunk.error) throw Object.assign(new Error(chunk.error.message || "The server failed."), { told: true });
      if (chunk.usage) seen.usage = chunk.usage;
      seen.seed = chunk.sluice?.choices?.[0]?.seed ?? seen.seed;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      const { content, reasoning_content: reasoning } = choice.delta ?? {};
      if (content || reasoning) {
        seen.last = performance.now();
        seen.first ??= seen.last;
        seen.chunks++;
        message.content += content || "";
        message.reasoning += reasoning || "";
        soon();
      }
      if (choice.finish_reason) seen.finish = choice.finish_reason;
    }
    if (!complete && !seen.finish) throw new TypeError("cut off");
  } catch (error) {
    if (control.signal.aborted) seen.stopped = true;
    else message.error = problem(error);
  }
  cancelAnimationFrame(frame);
  message.busy = false;
  message.facts = facts(seen);
  if (!message.content && !message.error && !message.reasoning && !seen.stopped) message.error = "The answer was empty.";
  if (running !== control) return; // a new chat has begun meanwhile
  running = null;
  const follow = atEnd();
  refresh();
  if (follow) toEnd();
  announce(message.error || `${seen.stopped ? "Stopped. " : ""}${message.content}`);
}

function send(event) {
  event?.preventDefault();
  const content = text.value.trim();
  if (!content || running) return;
  const wrong = $("settings").querySelector(":invalid");
  if (wrong) { openSettings(true); wrong.reportValidity(); return; }
  if (editing) cut(messages.findLastIndex((m) => m.role === "user"));
  stopEditing();
  text.value = "";
  grow();
  messages.push({ role: "user", content });
  answer();
}

function cut(from) {
  for (const message of messages.splice(from)) message.element?.remove();
}

function regenerate() {
  if (running || messages.at(-1)?.role !== "assistant") return;
  stopEditing();
  cut(messages.length - 1);
  answer();
  text.focus();
}

function edit() {
  const message = messages.findLast((m) => m.role === "user");
  if (running || !message) return;
  editing = true;
  $("editing").hidden = false;
  text.value = message.content;
  grow();
  text.focus();
}

function stopEditing(clear = false) {
  if (editing && clear) { text.value = ""; grow(); }
  editing = false;
  $("editing").hidden = true;
}

function stop() {
  running?.abort();
  text.focus();
}

function newChat() {
  const control = running;
  running = null;
  control?.abort();
  stopEditing(true);
  cut(0);
  refresh();
  announce("New chat.");
  text.focus();
}

// --- the controls

function grow() {
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight}px`;
}

function openSettings(open) {
  $("settings").hidden = !open;
  $("settings-open").setAttribute("aria-expanded", String(open));
}

export function begin({ keyNeeded }) {
  onKeyNeeded = keyNeeded;
  $("composer").addEventListener("submit", send);
  $("settings").addEventListener("submit", (event) => event.preventDefault());
  $("stop").addEventListener("click", stop);
  $("new-chat").addEventListener("click", newChat);
  $("edit-cancel").addEventListener("click", () => { stopEditing(true); text.focus(); });
  $("settings-open").addEventListener("click", () => openSettings($("settings").hidden));
  text.addEventListener("input", grow);
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
    if (event.key === "ArrowUp" && !text.value && !running) { event.preventDefault(); edit(); }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.defaultPrevented || document.querySelector("dialog[open]")) return;
    if (running) stop();
    else if (editing) { stopEditing(true); text.focus(); }
  });
  refresh();
  if (matchMedia("(min-width: 940px)").matches) text.focus();
}
