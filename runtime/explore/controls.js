"use strict";
// Sliders for parameters and lengths, and the picture of a score mod.

// name: label, and the slider's ends as powers of two; a tile has a field for each side
const SIZES = { q_len: ["queries", 4, 22], kv_len: ["keys", 4, 22], tile: ["tile", 0, 12], documents: ["documents", 0, 10] };
const FIELDS = ["batch", "heads"];

// -- sliders -----------------------------------------------------------------------------------------------------

// A row: its name, a slider, and a field to type in. `chosen` hears of both.
function slider(name, label, named, chosen) {
  const range = Object.assign(document.createElement("input"), { type: "range", id: `slide-${name}` });
  const typed = Object.assign(document.createElement("input"), { type: "number", id: `set-${name}`, step: "any" });
  const text = Object.assign(document.createElement("label"), { htmlFor: typed.id, textContent: label, className: named ? "name" : "" });
  range.setAttribute("aria-label", `${label}, slider`);
  range.addEventListener("input", (event) => chosen(range.valueAsNumber, true, event.timeStamp));
  typed.addEventListener("input", (event) => Number.isFinite(typed.valueAsNumber) && chosen(typed.valueAsNumber, false, event.timeStamp));
  return [text, range, typed];
}

function place(name, { low, high, step, at, value }) {
  const range = $(`slide-${name}`), typed = $(`set-${name}`);
  Object.assign(range, { min: low, max: high, step });
  if (document.activeElement !== range || Math.abs(range.valueAsNumber - at) > step) range.value = at;
  range.setAttribute("aria-valuetext", value);
  if (document.activeElement !== typed) typed.value = value;
}

let known = "";
function scalars(list) {
  const key = list.map((s) => `${s.name}:${s.type}`).join();
  if (key !== known) {
    known = key;
    const focused = document.activeElement?.id;
    $("scalars").replaceChildren(...list.flatMap(({ name, type }) => (type === "Bool" ? check(name) : slider(`v-${name}`, name, true, (x, _, when) => {
      change(`v-${name}`, { values: { ...state.values, [name]: type === "Int" ? Math.round(x) : x } }, when);
    }))));
    $(focused)?.focus();
  }
  for (const { name, type, value, low, high, step } of list) {
    if (type === "Bool") $(`set-v-${name}`).checked = value;
    else place(`v-${name}`, { low, high, step, at: value, value });
  }
}

function check(name) {
  const box = Object.assign(document.createElement("input"), { type: "checkbox", id: `set-v-${name}` });
  const label = Object.assign(document.createElement("label"), { htmlFor: box.id, textContent: name, className: "name" });
  box.addEventListener("change", (event) => change(`v-${name}`, { values: { ...state.values, [name]: box.checked } }, event.timeStamp));
  return [label, box, document.createElement("span")];
}

function tables({ made }) {
  const read = Object.entries(found.data.mask.program?.tables ?? {}), rows = [];
  for (const [name, note] of Object.entries(made)) rows.push([name, `made up: ${note}`]);
  for (const [name] of read) if (!(name in made)) rows.push([name, begun.files[name]]);
  $("parameters").hidden = !rows.length && !found.scalars.length;
  $("tables").replaceChildren(...rows.map(([name, note]) => {
    const row = document.createElement("tr");
    row.append(...[["th", name], ["td", note]].map(([tag, textContent]) => Object.assign(document.createElement(tag), { textContent })));
    return row;
  }));
}

// -- lengths ---------------------------------------------------------------------------------------------

function wireSizes() {
  for (const [name, [label]] of Object.entries(SIZES)) {
    const parts = slider(name, label, false, (x, sliding, when) => resized(name, sliding ? 2 ** x : x, when));
    if (name === "tile") parts[2] = sides(parts[2]);
    $("sizes").append(...parts);
  }
  for (const name of FIELDS) {
    const [label, , typed] = slider(name, name, false, (x, _, when) => resized(name, x, when));
    Object.assign(typed, { min: 1, step: 1 });
    label.append(typed);
    $("counts").append(label);
  }
}

// Two fields in the place of one: the queries and the keys of a tile.
function sides(typed) {
  const pair = Object.assign(document.createElement("span"), { className: "pair" }), fields = [typed.cloneNode(), typed.cloneNode()];
  fields.forEach((field, axis) => {
    Object.assign(field, { id: `set-tile-${axis}`, ariaLabel: axis ? "tile, keys" : "tile, queries" });
    field.addEventListener("input", (event) => field.valueAsNumber >= 1 && change("tile", { block: state.block.with(axis, Math.round(field.valueAsNumber)) }, event.timeStamp));
  });
  pair.append(...fields);
  return pair;
}

function resized(name, n, when) {
  n = clamp(Math.round(n), 1, begun.longest);
  const square = name === "q_len" && state.q_len === state.kv_len; // keys go along while they are as many
  change(name, name === "tile" ? { block: [n, n] } : { [name]: n, ...(square ? { kv_len: n } : {}) }, when);
  sizes();
}

function sizes() {
  const unless = (field, value) => { if (document.activeElement !== field) field.value = value; };
  for (const [name, [, low, high]] of Object.entries(SIZES)) {
    const value = name === "tile" ? state.block[0] : state[name], range = $(`slide-${name}`);
    Object.assign(range, { min: low, max: high, step: 1, value: Math.round(Math.log2(value)) });
    range.setAttribute("aria-valuetext", name === "tile" ? state.block.join(" by ") : value);
    if (name !== "tile") unless($(`set-${name}`), value);
  }
  state.block.forEach((n, axis) => unless($(`set-tile-${axis}`), n));
  for (const name of FIELDS) unless($(`set-${name}`), state[name]);
  const shown = Object.keys(found?.made ?? {}).length > 0;
  for (const part of [$("slide-documents"), $("set-documents"), $("set-documents").labels[0]]) part.hidden = !shown;
}

// -- the score -----------------------------------------------------------------------------------------------------

function score(mod) {
  $("mod").hidden = !mod;
  if (!mod) return;
  $("score").textContent = mod.text;
  const pen = $("heat").getContext("2d"), { width, height } = $("heat");
  pen.fillStyle = colours.css.paper;
  pen.fillRect(0, 0, width, height);
  let said = mod.why ?? "";
  if (mod.change) {
    heat(pen, mod, width, height);
    const reach = Number(mod.reach.toPrecision(3));
    said = `What becomes of a score of 1 in batch 0, head 0, queries down and keys across: orange more, violet less, by up to ${reach}; grey hidden.`;
  } else if (mod.curves) {
    curves(pen, mod, width, height);
    const span = Number(mod.span.toPrecision(3));
    said = `What becomes of scores from −${span} to ${span}` + (mod.curves.length > 1 ? `, in heads 0 to ${mod.curves.length - 1}.` : ".");
  }
  $("heating").textContent = said;
  $("heat").setAttribute("aria-label", said);
}

function heat(pen, { change }, width, height) {
  const high = height / change.length, wide = width / change[0].length, [more, less] = darkness.matches ? ["#f0a35e", "#a78bdc"] : ["#d9730d", "#5e3c99"];
  change.forEach((row, i) => row.forEach((x, j) => {
    pen.globalAlpha = x === null ? 0.35 : Math.abs(x);
    pen.fillStyle = x === null ? colours.css.dim : x > 0 ? more : less;
    const [left, top] = [Math.floor(j * wide), Math.floor(i * high)];
    pen.fillRect(left, top, Math.floor((j + 1) * wide) - left, Math.floor((i + 1) * high) - top);
  }));
  pen.globalAlpha = 1;
}

function curves(pen, { curves: lines, span }, width, height) {
  const values = lines.flat().filter((y) => y !== null), top = clamp(Math.max(0, ...values.map(Math.abs)), span / 64, 3 * span) * 1.08;
  const X = (i, n) => (i / (n - 1)) * width, Y = (y) => ((1 - clamp(y, -top, top) / top) / 2) * height;
  pen.fillStyle = colours.css.dim;
  pen.globalAlpha = 0.4;
  pen.fillRect(0, Math.round(height / 2), width, 1);
  pen.fillRect(Math.round(width / 2), 0, 1, height);
  pen.globalAlpha = 1;
  pen.lineWidth = 2;
  lines.forEach((ys, h) => {
    pen.strokeStyle = [colours.css.full, colours.css.partial, colours.css.dim, colours.css.ink][h];
    pen.beginPath();
    ys.forEach((y, i) => y !== null && pen.lineTo(X(i, ys.length), Y(y)));
    pen.stroke();
  });
}
