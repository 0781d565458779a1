"use strict";
// What people do with the map of map.js, and what is said of the position they point at.

// -- what is said of a position ---------------------------------------------------------------------------

function inspect(q, k, spoken = false) {
  if (q < 0 || k < 0 || q >= data.qLen || k >= data.kvLen) return;
  at.q = q;
  at.k = k;
  const global = [data.origin.b + view.b, data.origin.h + view.h, q + originOf("q"), k + originOf("k")];
  const row = Math.floor(q / data.block[0]), column = Math.floor(k / data.block[1]), kind = kindOf(row, column);
  const said = explained(global, kind);
  $("q").value = global[2];
  $("k").value = global[3];
  $("verdict").textContent = said.verdict;
  $("verdict").className = said.verdict;
  $("because").textContent = said.because;
  $("tile").textContent = `${KINDS[kind]} tile, row ${number(row)}, column ${number(column)}`;
  $("swatch").className = `swatch ${KINDS[kind]}`;
  for (const part of $("text").querySelectorAll("span")) {
    const hit = part.dataset.nodes.split(" ").some((n) => said.clauses.includes(Number(n)));
    part.className = hit ? `decides ${said.verdict}` : "";
  }
  if (spoken) $("spoken").textContent = `query ${global[2]}, key ${global[3]}: ${said.verdict}. ${said.because}`;
  redraw();
}

function explained(position, kind) {
  if (!mask) {
    const verdict = kind === FULL ? "visible" : kind === EMPTY ? "hidden" : "unknown";
    return { verdict, clauses: [], because: `This page carries tiles only: ${data.mask.why}.` };
  }
  try {
    const { visible, because, clauses } = mask.explain(...position);
    return { verdict: visible ? "visible" : "hidden", because, clauses };
  } catch (error) {
    if (!(error instanceof NoValue)) throw error;
    return { verdict: "unknown", because: `The mask has no value here: ${error.message}.`, clauses: [] };
  }
}

// The mask's text, cut where a clause begins or ends.
function writeText() {
  $("text").replaceChildren();
  const { text, spans } = data.mask, edges = new Set([0, text.length]);
  for (const places of Object.values(spans)) for (const [start, stop] of places) edges.add(start).add(stop);
  const cuts = [...edges].sort((x, y) => x - y);
  const open = Object.entries(spans).flatMap(([node, places]) => places.map(([start, stop]) => [start, stop, node]));
  for (let i = 0; i + 1 < cuts.length; i++) {
    const inside = open.filter(([start, stop]) => start <= cuts[i] && cuts[i + 1] <= stop);
    const part = document.createElement("span");
    part.dataset.nodes = inside.map(([, , node]) => node).join(" ");
    part.textContent = text.slice(cuts[i], cuts[i + 1]);
    $("text").append(part);
  }
}

// -- moving about ---------------------------------------------------------------------------------------

function moveTo(q, k, scale) {
  if (!data) return;
  view.scale = clamp(scale, view.fit * 0.5, Math.max(64, view.fit));
  const wide = (view.width - LEFT) / sx(), high = (view.height - TOP) / sy();
  // a quarter of the window at least stays on the matrix; what fits whole keeps to the corner
  view.k = wide >= data.kvLen ? clamp(k, data.kvLen - wide, 0) : clamp(k, -wide / 4, data.kvLen - (3 * wide) / 4);
  view.q = high >= data.qLen ? clamp(q, data.qLen - high, 0) : clamp(q, -high / 4, data.qLen - (3 * high) / 4);
  redraw();
}

function zoom(factor, x = (LEFT + view.width) / 2, y = (TOP + view.height) / 2) {
  const k = keyAt(x), q = queryAt(y);
  view.scale = clamp(view.scale * factor, view.fit * 0.5, Math.max(64, view.fit));
  moveTo(q - (y - TOP) / sy(), k - (x - LEFT) / sx(), view.scale);
}

function fit() {
  refit(true);
}

// The scale that shows everything is another one: take it, or stay.
function refit(fitted) {
  view.fit = Math.min((view.width - LEFT - 12) / data.kvLen, (view.height - TOP - 12) / data.qLen);
  if (fitted) moveTo(0, 0, view.fit);
  else moveTo(view.q, view.k, view.scale);
}

// Close enough to see single tokens, around the position asked for or the middle of the window.
function toTokens() {
  const q = at.q < 0 ? queryAt((TOP + view.height) / 2) : at.q, k = at.k < 0 ? keyAt((LEFT + view.width) / 2) : at.k;
  view.scale = Math.max(16, view.fit);
  moveTo(q + 0.5 - (view.height - TOP) / 2 / sy(), k + 0.5 - (view.width - LEFT) / 2 / sx(), view.scale);
}

function resize() {
  const box = canvas.parentElement.getBoundingClientRect(), ratio = devicePixelRatio || 1;
  const fitted = view.width === 0 || view.scale === view.fit;
  view.width = box.width;
  view.height = box.height;
  canvas.width = Math.round(box.width * ratio);
  canvas.height = Math.round(box.height * ratio);
  if (data) refit(fitted);
}

const fingers = new Map();
let dragged = 0;
const inCanvas = (event) => {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
};

canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId);
  fingers.set(event.pointerId, inCanvas(event));
  dragged = 0;
});
canvas.addEventListener("pointermove", (event) => {
  const [x, y] = inCanvas(event), before = fingers.get(event.pointerId);
  if (!before) {
    if (!at.pinned && x >= LEFT && y >= TOP) inspect(Math.floor(queryAt(y)), Math.floor(keyAt(x)));
    return;
  }
  const other = [...fingers].find(([id]) => id !== event.pointerId);
  dragged += Math.abs(x - before[0]) + Math.abs(y - before[1]);
  if (other) {
    const far = ([x0, y0]) => Math.hypot(x0 - other[1][0], y0 - other[1][1]);
    zoom(far([x, y]) / Math.max(1, far(before)), (x + other[1][0]) / 2, (y + other[1][1]) / 2);
  }
  const share = other ? 0.5 : 1;
  moveTo(view.q - (share * (y - before[1])) / sy(), view.k - (share * (x - before[0])) / sx(), view.scale);
  fingers.set(event.pointerId, [x, y]);
});
const lifted = (event) => {
  fingers.delete(event.pointerId);
  if (event.type === "pointerup" && dragged < 4) {
    const [x, y] = inCanvas(event);
    pin(!at.pinned);
    inspect(Math.floor(queryAt(y)), Math.floor(keyAt(x)), true);
  }
};
canvas.addEventListener("pointerup", lifted);
canvas.addEventListener("pointercancel", lifted);
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const unit = event.deltaMode === 1 ? 16 : 1; // lines, or pixels
  if (event.shiftKey) return moveTo(view.q, view.k + ((event.deltaX + event.deltaY) * unit) / sx(), view.scale);
  return zoom(Math.exp(-event.deltaY * unit * (event.ctrlKey ? 0.01 : 0.002)), ...inCanvas(event));
}, { passive: false });

function pin(on) {
  at.pinned = on;
  $("pinned").textContent = on ? "held: click or Escape lets go" : "follows the pointer: click holds it";
}

canvas.addEventListener("keydown", (event) => {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  const known = { "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), 0: fit, f: fit, t: toTokens, Escape: () => pin(false) };
  if (event.ctrlKey || event.metaKey || event.altKey || !(step || known[event.key])) return;
  event.preventDefault();
  if (!step) return known[event.key]();
  if (!event.shiftKey) {
    const far = 80;
    return moveTo(view.q + (step[0] * far) / sy(), view.k + (step[1] * far) / sx(), view.scale);
  }
  const from = at.q < 0 ? [queryAt((TOP + view.height) / 2), keyAt((LEFT + view.width) / 2)].map(Math.floor) : [at.q, at.k];
  pin(true);
  return inspect(clamp(from[0] + step[0], 0, data.qLen - 1), clamp(from[1] + step[1], 0, data.kvLen - 1), true);
});

// -- the panel -------------------------------------------------------------------------------------------

function field(id, chosen) {
  const input = $(id);
  input.addEventListener("change", () => {
    input.value = clamp(Math.floor(Number(input.value)) || 0, Number(input.min), Number(input.max));
    chosen(Number(input.value) - Number(input.min));
  });
}

function ask() {
  pin(true);
  inspect(Number($("q").value) - originOf("q"), Number($("k").value) - originOf("k"), true);
  if (X(at.k) < LEFT || X(at.k) > view.width || Y(at.q) < TOP || Y(at.q) > view.height)
    moveTo(at.q - (view.height - TOP) / 2 / sy(), at.k - (view.width - LEFT) / 2 / sx(), view.scale);
}

function changeSlice(b, h) {
  Object.assign(view, { b, h });
  limits();
  if (at.q >= 0) inspect(at.q, at.k, true);
  redraw();
}

// What can be typed.
function limits() {
  const sides = { q: [originOf("q"), data.qLen], k: [originOf("k"), data.kvLen], b: [data.origin.b, data.batch], h: [data.origin.h, data.heads] };
  for (const [id, [min, count]] of Object.entries(sides)) Object.assign($(id), { min, max: min + count - 1 });
  $("b").value = data.origin.b + view.b;
  $("h").value = data.origin.h + view.h;
  if (at.q < 0) Object.assign($("q"), { value: originOf("q") });
  if (at.q < 0) Object.assign($("k"), { value: originOf("k") });
  $("slices").hidden = data.batch * data.heads === 1;
  $("tokens").disabled = !data.mask.program;
}

function wire() {
  field("q", ask);
  field("k", ask);
  field("b", (b) => changeSlice(b, view.h));
  field("h", (h) => changeSlice(view.b, h));
  $("position").addEventListener("submit", (event) => event.preventDefault());
  $("in").addEventListener("click", () => zoom(1.5));
  $("out").addEventListener("click", () => zoom(1 / 1.5));
  $("fit").addEventListener("click", fit);
  $("tokens").addEventListener("click", toTokens);
  $("slices").hidden = true;
  darkness.addEventListener("change", recolour);
  new ResizeObserver(resize).observe(canvas.parentElement);
  pin(false);
}

// -- a layout ----------------------------------------------------------------------------------------------

// Unpacked, before anything of the one on the page changes.
async function opened(next) {
  const arrays = Object.entries(next.runs).map(async ([name, array]) => [name, await unpacked(array)]);
  const program = next.mask.program && (await unpackedMask(next.mask.program));
  return { data: next, runs: Object.fromEntries(await Promise.all(arrays)), mask: program };
}

// On the page, in place of the one before: where its sides are as long, nothing moves.
function show(next) {
  const sides = (one) => one && JSON.stringify([one.qLen, one.kvLen, one.batch, one.heads, one.block, one.origin]);
  const first = !data, alike = sides(data) === sides(next.data), fitted = view.scale === view.fit;
  ({ data, runs, mask } = next);
  view.b = Math.min(view.b, data.batch - 1);
  view.h = Math.min(view.h, data.heads - 1);
  writeText();
  limits();
  if (first) {
    recolour();
    resize();
  }
  outdate(alike);
  if (!alike && !first) refit(fitted);
  if (at.q >= 0) inspect(Math.min(at.q, data.qLen - 1), Math.min(at.k, data.kvLen - 1));
  redraw();
}
