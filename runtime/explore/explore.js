"use strict";
// The explorer: what people write and set becomes a question to the server, its answer the page. The state is in
// the address, behind #, so that a view can be kept, shared, and gone back to.

const begun = JSON.parse($("data").textContent); // the first state, the library, the tables of files
const id = crypto.randomUUID(), arrays = new Map(); // this page; tables by their digests
const PATIENCE = 250, BURST = 1000; // milliseconds: for an answer before a newer question ends it; of one change to undo
const SIZES = [["q_len", "queries", 4, 22], ["kv_len", "keys", 4, 22], ["tile_q", "tile, queries", 0, 12], ["tile_k", "tile, keys", 0, 12], ["batch", "batch", 0, 8], ["heads", "heads", 0, 8], ["documents", "documents", 0, 10]];
let state = null, found = null, turn = 0, latest = 0, since = null, under = null, waiting = 0;

// -- questions and answers -------------------------------------------------------------------------------

// One question is under way at a time. The newest one waits for its answer, or until PATIENCE is over: the server
// abandons the older one then.
function ask(when = performance.now()) {
  since ??= when;
  clearTimeout(waiting);
  waiting = setTimeout(send, under ? Math.max(0, under.sent + PATIENCE - performance.now()) : 0);
}

async function send() {
  const mine = { turn: ++turn, sent: performance.now(), since };
  under = mine;
  since = null;
  clearTimeout(waiting);
  waiting = 0;
  const { answer, next } = await answered(mine);
  if (under === mine) under = null;
  if (mine.turn > latest && !answer.abandoned) {
    latest = mine.turn;
    present(answer, next);
    measured(mine.since);
  }
  if (waiting && !under) send();
}

async function answered(mine) {
  try {
    const body = JSON.stringify({ ...state, page: id, turn: mine.turn, have: [...arrays.keys()] });
    const response = await fetch("./", { method: "POST", headers: { "Content-Type": "application/json" }, body });
    if (!response.ok) throw new Error(await response.text());
    const answer = await response.json();
    return { answer, next: answer.data && (await opened(whole(answer.data))) };
  } catch (error) {
    const message = error instanceof TypeError ? "the server does not answer\n  is `frisket explore` still running?" : error.message;
    return { answer: { error: "No answer", message, problems: [] } };
  }
}

// With the tables that are here already.
function whole(next) {
  for (const table of Object.values(next.mask.program?.tables ?? {})) {
    if (table.array.data) arrays.set(table.array.key, table.array);
    table.array = arrays.get(table.array.key);
  }
  return next;
}

// The time from a change to the end of the frame that shows it.
function measured(start) {
  requestAnimationFrame(() => {
    const channel = new MessageChannel();
    channel.port1.onmessage = () => {
      const { duration } = performance.measure("repaint", { start, end: performance.now() });
      if (!found.error) $("repaint").textContent = `${duration.toFixed(0)} ms after the change`;
      document.documentElement.dataset.ready = "yes";
    };
    channel.port2.postMessage(null);
  });
}

function present(answer, next) {
  found = answer;
  const wrong = "error" in answer;
  document.body.classList.toggle("old", wrong);
  $("paper").classList.toggle("wrong", wrong);
  $("source").setAttribute("aria-invalid", wrong);
  $("problems").replaceChildren(...(wrong ? complaints(answer) : []));
  mirror();
  if (wrong) return;
  show(next);
  document.title = `${answer.title} · frisket`;
  for (const part of ["shape", "block"]) $(part).textContent = answer[part];
  for (const part of ["tiles", "facts", "cost"]) $(part).innerHTML = answer[part]; // escaped by the server
  $("cost").insertAdjacentHTML("beforeend", '<tr><th>on screen</th><td id="repaint"></td></tr>');
  for (const part of ["command", "python"]) $(part).textContent = answer[part];
  scalars(answer.scalars);
  tables(answer);
  sizes();
  score(answer.score);
}

// -- the text ------------------------------------------------------------------------------------------------

function complaints({ error, message, problems }) {
  const element = (tag, name, text) => Object.assign(document.createElement(tag), { className: name, textContent: text });
  const one = (kind, lines, picture, remedy) => {
    const box = document.createElement("div"), what = element("p", "what", "");
    what.append(element("span", "kind", `${kind}: `), lines);
    box.append(what);
    if (picture) {
      const pre = document.createElement("pre");
      pre.append(`${picture[0]}\n`, element("i", "", picture[1]));
      box.append(pre);
    }
    if (remedy) box.append(element("p", "remedy", remedy));
    return box;
  };
  if (problems.length) return problems.map((p) => one(`${p.where.replace(/^mask /, "")}`, p.message, [p.line, p.caret], p.remedy));
  const [first, ...rest] = message.split("\n");
  return [one(error, first, null, rest.map((line) => line.trim()).join("\n"))];
}

// The text once more below the one that is edited, for what is underlined. Places count characters.
function mirror() {
  const text = [...$("source").value], spans = (found?.problems ?? []).map(({ start, stop }) => [start, Math.max(stop, start + 1)]);
  const parts = [];
  let at = 0;
  for (const [start, stop] of spans.sort((x, y) => x[0] - y[0])) {
    if (start < at) continue;
    const mark = document.createElement("mark");
    mark.textContent = text.slice(start, stop).join("");
    parts.push(text.slice(at, start).join(""), mark);
    at = stop;
  }
  $("mirror").replaceChildren(...parts, `${text.slice(at).join("")}\n`);
}

function write(text, when) {
  $("source").value = text;
  change("text", { text }, when);
  mirror();
}

// -- the library -----------------------------------------------------------------------------------------------

let chosen = 0, offered = [];

function search() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (e) => words.every((w) => `${e.signature} ${e.sentence} ${e.section}`.toLowerCase().includes(w));
  const named = (e) => (words.length && e.name.startsWith(words[0]) ? 0 : 1); // those called so come first
  offered = begun.library.filter(fits).sort((x, y) => named(x) - named(y));
  const list = $("entries");
  list.replaceChildren();
  let section = null;
  offered.forEach((e, i) => {
    if (!words.length && e.section !== section) list.append(Object.assign(document.createElement("h3"), { textContent: (section = e.section) }));
    const option = document.createElement("div"), sentence = document.createElement("span");
    Object.assign(option, { id: `entry-${i}`, role: "option" });
    option.append(Object.assign(document.createElement("code"), { textContent: e.signature }), sentence);
    sentence.textContent = e.sentence;
    option.addEventListener("click", () => pick(e));
    list.append(option);
  });
  if (!offered.length) list.append("nothing is called so");
  choose(0);
}

function choose(i) {
  chosen = clamp(i, 0, Math.max(0, offered.length - 1));
  for (const option of $("entries").querySelectorAll("[role=option]")) option.setAttribute("aria-selected", option.id === `entry-${chosen}`);
  $("search").setAttribute("aria-activedescendant", offered.length ? `entry-${chosen}` : "");
  $(`entry-${chosen}`)?.scrollIntoView({ block: "nearest" });
}

function browse() {
  $("search").value = "";
  $("library").showModal();
  search();
  $("search").focus();
}

// Into the text: joined with what stands before and after, or in place of what is marked.
function pick(entry) {
  $("library").close();
  const source = $("source"), text = source.value, { selectionStart: from, selectionEnd: to } = source;
  const named = /^\s*(mask|score)\s*=/m.test(text), ofScore = !named && found?.score && !found.error;
  source.focus();
  if (!text.trim() || to - from === text.length) return write(entry.text);
  if (!named && !!entry.score !== !!ofScore)
    return write(entry.score ? `mask = ${text.trim()}\nscore = ${entry.text}` : `mask = ${entry.text}\nscore = ${text.trim()}`);
  const glue = entry.score ? " then " : " & ", ends = /[\w)\]]$/, starts = /^[\w(~]/;
  const before = text.slice(0, from), after = text.slice(to);
  const left = from === to && ends.test(before.trimEnd()) ? glue.slice(before.length - before.trimEnd().length) : "";
  const right = from === to && starts.test(after.trimStart()) ? glue : "";
  write(before + left + entry.text + right + after);
  const place = (before + left + entry.text).length;
  return source.setSelectionRange(place, place);
}

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
  $("parameters").hidden = !list.length && !Object.keys(found.made).length && !Object.keys(begun.files).length;
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
  $("tables").replaceChildren(...rows.map(([name, note]) => {
    const row = document.createElement("tr");
    row.append(...[["th", name], ["td", note]].map(([tag, textContent]) => Object.assign(document.createElement(tag), { textContent })));
    return row;
  }));
}

const sizeOf = (name) => (name === "tile_q" ? state.block[0] : name === "tile_k" ? state.block[1] : state[name]);

function resized(name, n, when) {
  n = clamp(Math.round(n), 1, begun.longest);
  const square = name === "q_len" && state.q_len === state.kv_len; // keys go along while they are as many
  if (name === "tile_q") change(name, { block: [n, state.block[1]] }, when);
  else if (name === "tile_k") change(name, { block: [state.block[0], n] }, when);
  else change(name, { [name]: n, ...(square ? { kv_len: n } : {}) }, when);
  sizes();
}

function sizes() {
  for (const [name, , low, high] of SIZES) {
    const value = sizeOf(name);
    place(name, { low, high, step: 1, at: Math.round(Math.log2(value)), value });
  }
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
    pen.globalAlpha = x === null ? 1 : Math.abs(x);
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

// -- the state, and the ways back to it ------------------------------------------------------------------------------

let burst = { kind: "", when: -Infinity }, last = 0; // the change under way; the newest entry of the history

// Something is set anew: a change that goes on is one to undo.
function change(kind, parts, when = performance.now()) {
  const goesOn = burst.kind === kind && when - burst.when < BURST;
  burst = { kind, when };
  if (!goesOn) history.pushState({ n: (history.state?.n ?? 0) + 1 }, "");
  last = history.state.n;
  Object.assign(state, parts);
  keep();
  ask(when);
}

function keep() {
  history.replaceState(history.state ?? { n: 0 }, "", `#${fragment()}`);
  $("back").disabled = history.state.n === 0;
  $("forth").disabled = history.state.n >= last;
}

function fragment() {
  const { text, q_len, kv_len, batch, heads, block, documents, values } = state;
  const out = new URLSearchParams({ text, q_len, kv_len, block: block.join("x") });
  for (const [name, n, usual] of [["batch", batch, 1], ["heads", heads, 1], ["documents", documents, 8]]) if (n !== usual) out.set(name, n);
  for (const [name, x] of Object.entries(values)) out.append("set", `${name}=${x}`);
  if (data && view.scale !== view.fit) out.set("view", [view.q, view.k, view.scale].map((x) => Number(x.toPrecision(7))).join());
  return String(out);
}

// What an address says, with the first state where it says nothing, or nothing that makes sense.
function fromFragment(hash) {
  const given = new URLSearchParams(hash.slice(1)), out = structuredClone(begun.state);
  const whole = (text) => (/^\d{1,9}$/.test(text ?? "") ? clamp(Number(text), 1, begun.longest) : null);
  if (given.has("text")) Object.assign(out, { text: given.get("text"), values: {} });
  for (const name of ["q_len", "kv_len", "batch", "heads", "documents"]) out[name] = whole(given.get(name)) ?? out[name];
  const block = (given.get("block") ?? "").split("x").map(whole);
  if (block.length === 2 && block.every(Boolean)) out.block = block;
  for (const pair of given.getAll("set")) {
    const [, name, x] = /^(\w+)=(.+)$/.exec(pair) ?? [], n = Number(x);
    if (name && (x === "true" || x === "false")) out.values[name] = x === "true";
    else if (name && Number.isFinite(n)) out.values[name] = n;
  }
  const seen = (given.get("view") ?? "").split(",").map(Number);
  return { state: out, seen: seen.length === 3 && seen.every(Number.isFinite) ? seen : null };
}

async function restore(hash) {
  const from = fromFragment(hash);
  state = from.state;
  burst = { kind: "", when: -Infinity };
  $("source").value = state.text;
  mirror();
  sizes();
  $("back").disabled = !(history.state?.n > 0);
  $("forth").disabled = !(history.state?.n < last);
  since ??= performance.now();
  await send();
  if (from.seen && data) moveTo(...from.seen);
}

// -- elsewhere ----------------------------------------------------------------------------------------------------------

async function copy(what) {
  keep();
  await navigator.clipboard.writeText(what === "link" ? location.href : $(what).textContent);
  $("copied").textContent = { command: "The command is copied.", python: "The Python is copied.", link: "The link is copied: it works while this server runs." }[what];
}

function savePicture() {
  canvas.toBlob((blob) => {
    const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: "mask.png" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  });
}

// -- all together ---------------------------------------------------------------------------------------------------------

function wireExplorer() {
  $("sizes").append(...SIZES.flatMap(([name, label]) => slider(name, label, false, (x, sliding, when) => resized(name, sliding ? 2 ** x : x, when))));
  $("source").addEventListener("input", (event) => {
    mirror();
    change("text", { text: $("source").value }, event.timeStamp);
  });
  $("choose").addEventListener("click", browse);
  $("search").addEventListener("input", search);
  $("library").addEventListener("click", (event) => event.target === $("library") && $("library").close());
  $("search").addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 8, PageUp: -8 }[event.key];
    if (step) choose(chosen + step);
    else if (event.key === "Enter" && offered.length) pick(offered[chosen]);
    else return;
    event.preventDefault();
  });
  document.addEventListener("keydown", (event) => {
    if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
      event.preventDefault();
      if (!$("library").open) browse();
    }
  });
  $("back").addEventListener("click", () => history.back());
  $("forth").addEventListener("click", () => history.forward());
  addEventListener("popstate", () => restore(location.hash));
  let settling = 0;
  for (const kind of ["pointerup", "wheel", "keyup"]) canvas.addEventListener(kind, () => {
    clearTimeout(settling);
    settling = setTimeout(keep, 300);
  });
  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copy(button.dataset.copy));
  $("save").addEventListener("click", savePicture);
  darkness.addEventListener("change", () => found && !found.error && score(found.score));
}

wire();
wireExplorer();
history.replaceState(history.state ?? { n: 0 }, "");
last = history.state.n;
restore(location.hash).then(() => {
  $("source").focus();
  $("source").setSelectionRange(state.text.length, state.text.length);
});
