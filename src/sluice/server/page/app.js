// Joins the page's parts: the live connection, the API key, the theme, what is shown. Draws nothing itself.

import * as chat from "./chat.js";
import * as machine from "./machine.js";
import { Refused, events, key, request, setKey, wait } from "./wire.js";

const $ = (id) => document.getElementById(id);
const SILENCE_S = 20; // the server says something at least every 5 s

// --- the live connection: kept while the page is seen, opened again when it breaks

let control = null; // AbortController of the connection, null while there is none

function link(state, words) {
  $("link").dataset.state = state;
  if ($("link-text").textContent !== words) $("link-text").textContent = words;
}

function notice(words) {
  $("offline").hidden = !words;
  $("offline").textContent = words;
}

async function follow() {
  const mine = (control = new AbortController());
  let pause = 0.5;
  while (control === mine) {
    let watchdog = 0, reason = "No connection to the server. The page tries again by itself.";
    const alive = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => attempt.abort(), SILENCE_S * 1000);
    };
    const attempt = new AbortController();
    const end = () => attempt.abort();
    mine.signal.addEventListener("abort", end, { once: true });
    try {
      alive();
      const response = await request("live", { signal: attempt.signal });
      for await (const { event, data } of events(response)) {
        alive();
        if (event === "model") {
          machine.setModel(JSON.parse(data));
          link("live", "live");
          notice("");
          pause = 0.5;
        } else if (event === "state") {
          const state = JSON.parse(data);
          machine.setState(state);
          if (state.draining) { link("lost", "shutting down"); notice("The server is shutting down and takes nothing new."); }
        } else if (event === "experts") machine.setCells(data);
      }
    } catch (error) {
      if (error instanceof Refused && error.status === 401) {
        machine.lost();
        link("key", "needs a key");
        notice("The server wants an API key before it shows anything.");
        $("key-open").hidden = false;
        control = null;
        askKey(key() !== "");
        return;
      }
      if (error instanceof Refused) {
        pause = Math.max(pause, error.retryAfter ?? 3);
        reason = `The server shows nothing: ${error.message}.`;
      }
    } finally {
      clearTimeout(watchdog);
      mine.signal.removeEventListener("abort", end);
    }
    if (control !== mine) return;
    machine.lost();
    link("lost", "not connected");
    notice(reason);
    await wait(pause);
    pause = Math.min(pause * 1.6, 5);
  }
}

function unfollow() {
  const old = control;
  control = null;
  old?.abort();
}

// --- the key

function askKey(wrong) {
  const dialog = $("key-dialog");
  if (dialog.open) return;
  $("key-why").textContent = wrong
    ? "The server did not accept that key. Another one stays in this tab and is forgotten when you close it."
    : "This server asks for a key. It stays in this tab and is forgotten when you close it.";
  $("key-input").value = "";
  dialog.showModal();
  $("key-input").focus();
}

$("key-form").addEventListener("submit", () => {
  setKey($("key-input").value.trim());
  $("key-input").value = "";
  unfollow();
  follow();
});
$("key-cancel").addEventListener("click", () => $("key-dialog").close());
$("key-open").addEventListener("click", () => askKey(false));
if (key()) $("key-open").hidden = false;

// --- colours and views

const THEMES = { auto: ["auto", "as the system"], light: ["light", "light"], dark: ["dark", "dark"] };

function setTheme(name) {
  const [label, words] = THEMES[name];
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  $("theme").textContent = label;
  $("theme").setAttribute("aria-label", `Colours: ${words}`);
  machine.redraw();
}

let theme = "auto";
try { theme = localStorage.getItem("sluice-theme") || "auto"; } catch { /* asked for anew each time */ }
if (!(theme in THEMES)) theme = "auto";
$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  theme = names[(names.indexOf(theme) + 1) % names.length];
  try { localStorage.setItem("sluice-theme", theme); } catch { /* holds until the page is left */ }
  setTheme(theme);
});

for (const button of document.querySelectorAll("[data-show]")) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.show;
    for (const each of document.querySelectorAll("[data-show]")) each.setAttribute("aria-pressed", String(each === button));
    machine.redraw();
  });
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) unfollow();
  else if (!control) follow();
});

chat.begin({ keyNeeded: () => { $("key-open").hidden = false; askKey(key() !== ""); } });
machine.begin();
setTheme(theme);
if (!document.hidden) follow();
