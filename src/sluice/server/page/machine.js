// The machine, live: turns the server's running totals into rates, draws them, lists requests. Knows no transport.

import * as map from "./map.js";

const $ = (id) => document.getElementById(id);
const set = (id, text) => { const e = $(id); if (e.textContent !== text) e.textContent = text; };

const BIN_S = 0.5, BINS = 120; // a minute
const NAMES = ["tokens", "prompt", "compute", "wait", "host", "disk", "ram", "hits", "late", "misses"];

let model = null;
let before = null; // the totals last seen
let offset = 0; // this page's clock minus the server's, in seconds
let busy = 0; // requests that run
let known = 0; // until when what happened is known, by this page's clock: a step is told when it ends
const bins = new Map(); // bin number -> {tokens: …}

const now = () => performance.now() / 1000;

function total(state) {
  const { prefill, decode } = state.ledger;
  const sum = (name) => prefill[name] + decode[name];
  return {
    tokens: state.generated_tokens, prompt: prefill.tokens, compute: sum("compute_s"), wait: sum("wait_s"), host: sum("host_s"),
    disk: sum("bytes_read"), ram: (sum("hits") + sum("late_hits") + sum("misses")) * model.slot_bytes,
    hits: sum("hits"), late: sum("late_hits"), misses: sum("misses"), wall: sum("wall_s"),
  };
}

/** Lays what happened between two totals over the time it took: it ended at `end`. */
function spread(change, end) {
  const length = Math.max(change.wall, 0.05), begin = end - Math.min(length, BIN_S * BINS);
  for (let bin = Math.floor(begin / BIN_S); bin * BIN_S < end; bin++) {
    const share = (Math.min(end, (bin + 1) * BIN_S) - Math.max(begin, bin * BIN_S)) / length;
    if (share <= 0) continue;
    let into = bins.get(bin);
    if (!into) bins.set(bin, (into = Object.fromEntries(NAMES.map((name) => [name, 0]))));
    for (const name of NAMES) into[name] += change[name] * share;
  }
}

// --- numbers with units

function bytesPerSecond(x) {
  const units = ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"];
  let i = 0;
  while (x >= 999.5 && i < units.length - 1) { x /= 1000; i++; }
  return [i === 0 ? String(Math.round(x)) : x < 9.995 ? x.toFixed(2) : x < 99.95 ? x.toFixed(1) : x.toFixed(0), units[i]];
}

function size(x) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (x >= 1023.5 && i < units.length - 1) { x /= 1024; i++; }
  return `${x < 9.995 && i > 2 ? x.toFixed(2) : x < (i > 2 ? 99.95 : 9.95) && i > 1 ? x.toFixed(1) : x.toFixed(0)} ${units[i]}`;
}

const rate = (x) => (x === 0 ? "0" : x < 9.995 ? x.toFixed(2) : x < 99.95 ? x.toFixed(1) : x.toFixed(0));
const whole = (n) => n.toLocaleString("en");
const percent = (x) => (x > 0 && x < 0.01 ? "< 1 %" : `${Math.round(100 * x)} %`);
const seconds = (s) => (s < 10 ? `${s.toFixed(1)} s` : s < 120 ? `${Math.round(s)} s` : `${Math.round(s / 60)} min`);

/** A round number at or a little above x: where a scale ends. */
function ceiling(x) {
  if (!(x > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(x));
  return [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].find((n) => n * unit >= x * 0.999) * unit;
}

// --- charts: paths in a box of 120 × 40, one unit a bin

function series(name, last) {
  return Array.from({ length: BINS }, (_, i) => (bins.get(last - BINS + 1 + i)?.[name] ?? 0) / BIN_S);
}

/** A line through `values` but for the last `skip`, of which not all is known yet. */
function lineChart(id, values, skip) {
  const most = Math.max(...values), top = ceiling(most);
  let line = "";
  for (let i = 0; i < BINS - skip; i++) line += `${i ? "L" : "M"}${i + 0.5} ${(40 - 40 * Math.min(1, values[i] / top)).toFixed(2)}`;
  const [area, stroke] = $(id).children;
  area.setAttribute("d", `${line}L${BINS - skip - 0.5} 40L0.5 40Z`);
  stroke.setAttribute("d", line);
  return most > 0 ? top : 0;
}

function stackChart(id, layers, skip) {
  const floor = new Array(BINS).fill(0);
  layers.forEach((values, n) => {
    let shape = "";
    for (let i = 0; i < BINS - skip; i++) {
      const low = Math.min(1, floor[i]), high = Math.min(1, floor[i] + values[i]);
      if (high - low > 0.002) shape += `M${i} ${(40 - 40 * low).toFixed(2)}V${(40 - 40 * high).toFixed(2)}h1V${(40 - 40 * low).toFixed(2)}Z`;
      floor[i] += values[i];
    }
    $(id).children[n].setAttribute("d", shape);
  });
}

function drawCharts() {
  const last = Math.floor(now() / BIN_S);
  // the mean of three seconds, of the last that are known while something runs
  const skip = 1 + (busy ? Math.min(BINS / 2, Math.max(0, last - Math.floor(known / BIN_S))) : 0);
  const recent = (values) => values.slice(BINS - 6 - skip, BINS - skip).reduce((a, b) => a + b, 0) / 6;
  for (const bin of bins.keys()) if (bin < last - BINS) bins.delete(bin);
  const all = Object.fromEntries(NAMES.map((name) => [name, series(name, last)]));
  const top = lineChart("c-tok", all.tokens, skip);
  set("tok-top", top ? `${Number(top.toPrecision(3))} tok/s` : "");
  set("tok", rate(recent(all.tokens)));
  const prompt = recent(all.prompt);
  set("tok-more", prompt > 0.5 ? `and ${rate(prompt)} of prompts` : busy > 1 ? `${whole(busy)} requests together` : "");

  stackChart("c-time", [all.compute, all.wait, all.host], skip);
  const shares = ["compute", "wait", "host"].map((name) => recent(all[name]));
  set("t-compute", percent(shares[0]));
  set("t-wait", percent(shares[1]));
  set("t-host", percent(shares[2]));
  set("t-idle", percent(Math.max(0, 1 - shares[0] - shares[1] - shares[2])));

  for (const name of ["disk", "ram"]) {
    const scale = lineChart(`c-${name}`, all[name], skip);
    set(`${name}-top`, scale ? bytesPerSecond(scale).map((x, i) => (i ? x : Number(x))).join(" ") : "");
    const [value, unit] = bytesPerSecond(recent(all[name]));
    set(name, value);
    set(`${name}-unit`, unit);
  }

  const count = (name) => all[name].reduce((a, b) => a + b, 0) * BIN_S;
  const asked = { hit: count("hits"), late: count("late"), miss: count("misses") };
  const sum = asked.hit + asked.late + asked.miss;
  for (const [name, n] of Object.entries(asked)) {
    $(`s-${name}`).style.width = `${sum ? (100 * n) / sum : 0}%`;
    set(`n-${name}`, sum >= 0.5 ? `${((100 * n) / sum).toFixed(1)} %` : "–");
  }
  set("share-of", sum >= 0.5 ? `${whole(Math.round(sum))} in the last minute` : "none in the last minute");
}

// --- requests

const rows = new Map(); // ticket -> element

function requestRow(ticket) {
  const row = document.createElement("li");
  row.className = "request";
  for (const part of ["id", "track", "said", "age"]) {
    const element = document.createElement(part === "track" ? "div" : "span");
    element.className = part;
    if (part === "track") element.append(document.createElement("i"), document.createElement("i"));
    row.append(element);
  }
  row.children[0].textContent = `№ ${ticket}`;
  row.children[1].setAttribute("aria-hidden", "true");
  return row;
}

function showRequests(state) {
  const present = new Set();
  const list = $("requests");
  [...state.running, ...state.queue].forEach((job, at) => {
    present.add(job.ticket);
    let row = rows.get(job.ticket);
    if (!row) rows.set(job.ticket, (row = requestRow(job.ticket)));
    if (list.children[at] !== row) list.insertBefore(row, list.children[at] ?? null);
    row.classList.toggle("waits", job.phase === "queued");
    const [prompt, answer] = row.children[1].children;
    prompt.className = "fed";
    answer.className = "ram";
    // the prompt counts for a quarter of the track: what is left to see is the answer
    prompt.style.width = `${25 * Math.min(1, job.prompt_tokens ? job.fed / job.prompt_tokens : 0)}%`;
    const most = job.max_tokens ?? Math.max(1, model.n_ctx - job.prompt_tokens);
    answer.style.width = `${75 * Math.min(1, job.generated / Math.max(1, most))}%`;
    const words = {
      queued: `waits, prompt ${whole(job.prompt_tokens)}`,
      prefill: `prompt ${whole(job.fed)} of ${whole(job.prompt_tokens)}`,
      decode: `token ${whole(job.generated)} of ${job.max_tokens === null ? "at most " : ""}${whole(most)}`,
    };
    const said = words[job.phase] ?? job.phase;
    if (row.children[2].textContent !== said) row.children[2].textContent = said;
    row.children[3].textContent = seconds(job.age_s);
  });
  for (const [ticket, row] of rows) if (!present.has(ticket)) { row.remove(); rows.delete(ticket); }
  const more = state.n_running + state.n_queued - present.size;
  $("req-none").hidden = state.n_running + state.n_queued > 0;
  const parts = [`${state.n_running} of ${state.streams} streams`, `queue ${state.n_queued} of ${state.max_queue}`];
  if (state.n_queued) parts.push(`longest wait ${seconds(state.longest_wait_s)}`);
  if (state.kept_tokens) parts.push(`${whole(state.kept_tokens)} tokens kept for reuse`);
  if (more > 0) parts.push(`${whole(more)} not listed`);
  set("req-count", parts.join(" · "));
}

// --- the outside

export function setModel(value) {
  model = value;
  before = null;
  set("model", value.name);
  $("model").title = value.name;
  $("mode").hidden = false;
  $("mode").classList.toggle("lossy", value.mode.startsWith("lossy"));
  set("mode", value.mode);
  map.setModel(value);
}

export function setState(state) {
  if (!model) return;
  if (!before) offset = now() - state.at_s;
  const totals = total(state), end = state.at_s + offset;
  if (before && NAMES.every((name) => totals[name] >= before[name] - 1e-6) && totals.wall > before.wall) {
    spread(Object.fromEntries([...NAMES, "wall"].map((name) => [name, totals[name] - before[name]])), end);
    known = end;
  }
  before = totals;
  busy = state.n_running;
  showRequests(state);
  const used = state.budget_bytes ? `${size(state.rss_bytes)} of ${size(state.budget_bytes)}` : size(state.rss_bytes);
  set("memory", `memory ${used}`);
  const all = model.layers.length * model.n_expert;
  set("map-count", `${whole(state.slots_resident)} of ${whole(all)} in memory, room for ${whole(state.slots)}, ${size(model.slot_bytes)} each`);
}

export const setCells = map.setCells;

/** Nothing is known any more: say so where numbers would be stale. */
export function lost() {
  before = null;
  for (const id of ["tok", "disk", "ram", "t-compute", "t-wait", "t-host", "t-idle"]) set(id, "–");
  set("tok-more", "");
  set("req-count", "");
  showGone();
}

function showGone() {
  for (const [ticket, row] of rows) { row.remove(); rows.delete(ticket); }
  $("req-none").hidden = true;
}

export function begin() {
  map.begin();
  setInterval(() => { if (before && !document.hidden) drawCharts(); }, 1000 * BIN_S);
}

export const redraw = map.redraw;
