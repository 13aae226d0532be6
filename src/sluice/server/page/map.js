// The map of all experts: a canvas of layers × experts, coloured by residency and heat. Knows no server.

const $ = (id) => document.getElementById(id);
const canvas = $("map-canvas"), box = $("map");
const HEAT_TOP = Math.log1p(4096); // as live.py encodes it
const RESIDENT = 128;
const LEVELS = 128; // of heat
const POWER = 0.7; // of heat to colour: between even steps, where all but the hottest is pale, and logarithmic ones

/** The demands of a cell, those of long ago counting less. */
const heatOf = (cell) => Math.expm1(((cell & (LEVELS - 1)) / (LEVELS - 1)) * HEAT_TOP);

/** The heat that all but a fiftieth of the warm cells stay below, and at least 1. */
function hottest() {
  const counts = new Array(LEVELS).fill(0);
  for (const cell of cells) counts[cell & (LEVELS - 1)]++;
  const warm = cells.length - counts[0];
  if (!warm) return 1;
  let level = LEVELS - 1, above = counts[level];
  while (level > 0 && above * 50 < warm) above += counts[--level];
  return Math.max(1, heatOf(level));
}

let model = null; // {layers, n_expert}
let cells = null; // Uint8Array [layers × experts]: 128 = in memory, 0..127 = heat on a logarithmic scale
let shape = null; // where cells are drawn
let cursor = null; // {row, expert}
let pointed = false; // the cursor follows the pointer, not the keys
let top = 1; // the heat that gets the hottest colour; falls slowly, so that one token doesn't recolour all

// --- colours: even steps of lightness in OKLCH, so that equal differences of heat look equal

function srgb(lightness, chroma, hue) {
  const a = chroma * Math.cos((hue * Math.PI) / 180), b = chroma * Math.sin((hue * Math.PI) / 180);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ].map((x) => Math.round(255 * Math.min(1, Math.max(0, x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055))));
}

// [lightness, chroma, hue] of the coldest and the hottest cell
const RAMPS = {
  light: { resident: [[0.88, 0.045, 248], [0.36, 0.13, 262]], absent: [[0.965, 0.005, 80], [0.72, 0.155, 57]] },
  dark: { resident: [[0.37, 0.07, 258], [0.88, 0.09, 232]], absent: [[0.26, 0.008, 60], [0.74, 0.14, 60]] },
};

function ramp([[l0, c0, h0], [l1, c1, h1]]) {
  return Array.from({ length: LEVELS }, (_, i) => {
    const x = i / (LEVELS - 1);
    return srgb(l0 + (l1 - l0) * x, c0 + (c1 - c0) * x, h0 + (h1 - h0) * x);
  });
}

let colours = null, theme = "";

function prepare() {
  const dark = getComputedStyle(document.documentElement).getPropertyValue("color-scheme").trim();
  const wanted = dark === "dark" || (dark !== "light" && matchMedia("(prefers-color-scheme: dark)").matches) ? "dark" : "light";
  if (wanted === theme) return;
  theme = wanted;
  colours = { resident: ramp(RAMPS[theme].resident), absent: ramp(RAMPS[theme].absent) };
  for (const name of ["resident", "absent"]) {
    const stops = [0, 32, 64, 96, 127].map((i) => `rgb(${colours[name][i].join(" ")})`);
    document.querySelector(`.ramp.${name}`).style.backgroundImage = `linear-gradient(to right, ${stops.join(", ")})`;
  }
}

// --- geometry, in device pixels

function plan() {
  const scale = window.devicePixelRatio || 1;
  const width = Math.floor(box.clientWidth * scale);
  const layers = model.layers.length, experts = model.n_expert;
  const left = Math.ceil(26 * scale), above = Math.ceil(3 * scale), bottom = Math.ceil(17 * scale);
  const fits = (columns, rows, highest) => {
    const exact = Math.min((width - left) / columns, 30 * scale);
    const widest = exact < 3 ? Math.floor(exact) : exact; // thin columns of unlike widths would make patterns of their own
    if (widest < 1) return null;
    const most = Math.max(1, Math.floor((highest * scale) / rows));
    const h = Math.max(1, Math.min(most, widest >= 8 * scale ? Math.round(widest) : Math.max(Math.round(widest), Math.round(4 * scale))));
    const w = Math.min(widest, Math.max(3 * h, 6 * scale));
    return { w, h, columns, rows, area: w * columns * Math.min(h * rows, 300 * scale) };
  };
  const wide = fits(experts, layers, 300), high = fits(layers, experts, 300) ?? fits(layers, experts, 1200);
  const across = wide && (!high || wide.area >= high.area); // experts run along the x axis
  const chosen = across ? wide : high;
  if (!chosen) return null;
  const gap = Math.min(chosen.w, chosen.h) >= 5 * scale ? Math.max(1, Math.round(scale)) : 0;
  return { ...chosen, across, gap, scale, left, above, width, height: above + chosen.h * chosen.rows + bottom };
}

function ticks(count, size, room) {
  const step = [1, 2, 4, 8, 16, 32, 64, 128, 256].find((n) => n * size >= room) ?? 512;
  return Array.from({ length: Math.ceil(count / step) }, (_, i) => i * step);
}

const buffer = document.createElement("canvas");

function draw() {
  prepare();
  if (!model || !cells || !box.clientWidth) return;
  shape = plan();
  if (!shape) return;
  const { w, h, columns, rows, across, gap, scale, left, above, width, height } = shape;
  if (canvas.width !== width || canvas.height !== height) {
    canvas.width = width;
    canvas.height = height;
    canvas.style.height = `${height / scale}px`;
  }
  if (buffer.width !== columns || buffer.height !== rows) { buffer.width = columns; buffer.height = rows; }
  const image = new ImageData(columns, rows);
  const shade = (name) => Array.from({ length: LEVELS }, (_, level) =>
    colours[name][Math.round((LEVELS - 1) * Math.min(1, heatOf(level) / top) ** POWER)]);
  const resident = shade("resident"), absent = shade("absent");
  for (let layer = 0, i = 0; layer < model.layers.length; layer++) {
    for (let expert = 0; expert < model.n_expert; expert++, i++) {
      const cell = cells[i];
      const [r, g, b] = (cell & RESIDENT ? resident : absent)[cell & (LEVELS - 1)];
      const at = 4 * (across ? i : expert * columns + layer);
      image.data[at] = r; image.data[at + 1] = g; image.data[at + 2] = b; image.data[at + 3] = 255;
    }
  }
  buffer.getContext("2d").putImageData(image, 0, 0);
  const pen = canvas.getContext("2d");
  const style = getComputedStyle(box);
  pen.clearRect(0, 0, width, height);
  pen.imageSmoothingEnabled = false;
  const atX = (x) => left + Math.round(x * w), wide = atX(columns) - left;
  pen.drawImage(buffer, left, above, wide, h * rows);
  if (gap) {
    for (let x = 1; x <= columns; x++) pen.clearRect(atX(x) - gap, above, gap, h * rows);
    for (let y = 1; y <= rows; y++) pen.clearRect(left, above + y * h - gap, wide, gap);
  }
  pen.fillStyle = getComputedStyle($("map-read")).color;
  pen.font = `${Math.round(10.5 * scale)}px ${style.fontFamily}`;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  const nameX = across ? (i) => i : (i) => model.layers[i], nameY = across ? (i) => model.layers[i] : (i) => i;
  for (const y of ticks(rows, h, 13 * scale)) pen.fillText(nameY(y), left - 5 * scale, above + y * h + (h - gap) / 2);
  pen.textBaseline = "alphabetic";
  const word = across ? "expert" : "layer";
  const room = pen.measureText(`${word} `).width;
  pen.textAlign = "center";
  for (const x of ticks(columns, w, 26 * scale)) {
    const middle = atX(x) + (w - gap) / 2;
    if (middle < left + wide - room - 12 * scale) pen.fillText(nameX(x), middle, height - 3 * scale);
  }
  pen.textAlign = "right";
  pen.fillText(word, left + wide - gap, height - 3 * scale);
  if (cursor) {
    const [x, y] = across ? [cursor.expert, cursor.row] : [cursor.row, cursor.expert];
    pen.strokeStyle = style.color;
    pen.lineWidth = Math.max(1, Math.round(1.5 * scale));
    const half = pen.lineWidth / 2, long = Math.max(atX(x + 1) - atX(x) - gap, 3 * scale), high = Math.max(h - gap, 3 * scale);
    pen.strokeRect(atX(x) - half, above + y * h - half, long + 2 * half, high + 2 * half);
  }
}

// --- words

function amount(heat) {
  if (heat < 0.05) return "not asked for lately";
  return `asked for ${heat < 9.95 ? heat.toFixed(1) : Math.round(heat).toLocaleString("en")} times lately`;
}

function tell() {
  if (!cursor || !cells) return;
  const cell = cells[cursor.row * model.n_expert + cursor.expert];
  const words = `Layer ${model.layers[cursor.row]}, expert ${cursor.expert}: ${cell & RESIDENT ? "in memory" : "on disk"}, ${amount(heatOf(cell))}`;
  if ($("map-read").textContent !== words) $("map-read").textContent = words;
}

let summed = 0;

function summarise() {
  const now = performance.now();
  if (now - summed < 2000) return;
  summed = now;
  let resident = 0, best = 0;
  const perLayer = new Array(model.layers.length).fill(0);
  cells.forEach((cell, i) => {
    if (cell & RESIDENT) { resident++; perLayer[Math.floor(i / model.n_expert)]++; }
    if ((cell & (LEVELS - 1)) > (cells[best] & (LEVELS - 1))) best = i;
  });
  const most = perLayer.indexOf(Math.max(...perLayer)), least = perLayer.indexOf(Math.min(...perLayer));
  const words = heatOf(cells[best]) < 0.05 ? "No expert was asked for lately." :
    `The hottest is expert ${best % model.n_expert} of layer ${model.layers[Math.floor(best / model.n_expert)]}.`;
  $("map-summary").textContent =
    `${resident} of ${cells.length} experts are in memory: most of layer ${model.layers[most]} (${perLayer[most]}), ` +
    `fewest of layer ${model.layers[least]} (${perLayer[least]}) of ${model.n_expert} each. ${words}`;
}

// --- the outside

export function setModel(value) {
  model = value;
  cells = null;
  cursor = null;
  canvas.getContext("2d").clearRect(0, 0, canvas.width, canvas.height);
}

export function setCells(base64) {
  const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  if (!model || bytes.length !== model.layers.length * model.n_expert) return;
  cells = bytes;
  top = Math.max(hottest(), 0.97 * top);
  draw();
  tell();
  summarise();
}

function place(event) {
  if (!shape || !model) return;
  const at = canvas.getBoundingClientRect();
  const x = Math.floor(((event.clientX - at.left) * shape.scale - shape.left) / shape.w);
  const y = Math.floor(((event.clientY - at.top) * shape.scale - shape.above) / shape.h);
  if (x < 0 || y < 0 || x >= shape.columns || y >= shape.rows) return;
  cursor = shape.across ? { row: y, expert: x } : { row: x, expert: y };
  pointed = true;
  draw();
  tell();
}

function leave() {
  cursor = null;
  draw();
  $("map-read").textContent = "Point at a cell, or use the arrow keys.";
}

export function begin() {
  canvas.addEventListener("pointermove", place);
  canvas.addEventListener("pointerdown", place);
  canvas.addEventListener("pointerleave", (event) => { if (pointed && event.pointerType === "mouse") leave(); });
  box.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-1e9, 0], End: [1e9, 0], PageUp: [0, -8], PageDown: [0, 8] };
    const step = steps[event.key];
    if (event.key === "Escape" && cursor) { event.preventDefault(); leave(); return; }
    if (!step || !model || !shape || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    pointed = false;
    const [dx, dy] = shape.across ? step : [step[1], step[0]];
    cursor ??= { row: dy > 0 ? -dy : 0, expert: dx > 0 ? -dx : 0 };
    cursor = {
      row: Math.min(model.layers.length - 1, Math.max(0, cursor.row + dy)),
      expert: Math.min(model.n_expert - 1, Math.max(0, cursor.expert + dx)),
    };
    draw();
    tell();
  });
  new ResizeObserver(draw).observe(box);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

export { draw as redraw };
