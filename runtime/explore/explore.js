"use strict";
// The explorer: what people write and set becomes a question to the server, its answer the page. The state is in
// the address, behind #, so that a view can be kept, shared, and gone back to.

const id = crypto.randomUUID(), arrays = new Map(); // this page; tables by their digests
const PATIENCE = 250, BURST = 1000; // milliseconds: for an answer before a newer question ends it; of one change to undo
let state = null, found = null, turn = 0, latest = 0, since = null, under = null, waiting = 0, drawn = null; // drawn: the text that the picture shows

// -- questions and answers -------------------------------------------------------------------------------

// One question is under way at a time. The newest one waits for its answer, or until PATIENCE is over: the server
// abandons the older one then.
function ask(when = performance.now()) {
  since ??= when;
  clearTimeout(waiting);
  waiting = 0;
  if (under) waiting = setTimeout(send, Math.max(0, under.sent + PATIENCE - performance.now()));
  else send();
}

async function send() {
  const mine = { turn: ++turn, sent: performance.now(), since, text: state.text };
  under = mine;
  since = null;
  clearTimeout(waiting);
  waiting = 0;
  const { answer, next } = await answered(mine);
  if (under === mine) under = null;
  if (mine.turn > latest && !answer.abandoned) {
    latest = mine.turn;
    present(answer, next, mine.text);
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
    if (table.array.type) arrays.set(table.array.key, table.array);
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

function present(answer, next, text) {
  found = answer;
  const wrong = "error" in answer;
  document.body.classList.toggle("old", wrong);
  $("paper").classList.toggle("wrong", wrong);
  $("source").setAttribute("aria-invalid", wrong);
  $("problems").replaceChildren(...(wrong ? [...complaints(answer), ...still()] : []));
  mirror();
  if (wrong) return;
  drawn = text;
  show(next);
  asleep(false);
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

// What the picture shows while the text has a mistake.
function still() {
  if (drawn === null) return [];
  const line = Object.assign(document.createElement("p"), { className: "still", textContent: "The picture, the facts and the lines to copy are still those of " });
  line.append(Object.assign(document.createElement("code"), { textContent: drawn }));
  return [line];
}

// The text once more below the one that is edited, which has no colour of its own: coloured, and underlined where it
// is wrong. Places count characters.
function mirror() {
  const text = [...$("source").value], spans = (found?.problems ?? []).map(({ start, stop }) => [start, Math.max(stop, start + 1)]);
  const parts = [];
  let at = 0;
  for (const [start, stop] of spans.sort((x, y) => x[0] - y[0])) {
    if (start < at) continue;
    const mark = document.createElement("mark");
    mark.append(...coloured(text.slice(start, stop).join("")));
    parts.push(...coloured(text.slice(at, start).join("")), mark);
    at = stop;
  }
  $("mirror").replaceChildren(...parts, ...coloured(text.slice(at).join("")), "\n");
}

function write(text, when) {
  $("source").value = text;
  $("source").setSelectionRange(text.length, text.length);
  change("text", { text }, when);
  mirror();
}

// -- the state, and the ways back to it ------------------------------------------------------------------------------

let burst = { kind: "", when: -Infinity }, last = 0, keeping = 0; // the change under way; the newest entry of the history; a timer

// Something is set anew: a change that goes on is one to undo.
function change(kind, parts, when = performance.now()) {
  const goesOn = burst.kind === kind && when - burst.when < BURST;
  burst = { kind, when };
  if (!goesOn) {
    if (keeping) keep();
    history.pushState({ n: history.state.n + 1 }, "");
    last = history.state.n;
  }
  Object.assign(state, parts);
  keepSoon();
  ask(when);
}

// Browsers count how often an address changes, and stop it where a slider is moved.
function keepSoon() {
  keeping ||= setTimeout(keep, 300);
  steps();
}

function keep() {
  clearTimeout(keeping);
  keeping = 0;
  history.replaceState(history.state ?? { n: 0 }, "", `#${fragment()}`);
  steps();
}

function steps() {
  $("back").disabled = !(history.state?.n > 0);
  $("forth").disabled = !(history.state?.n < last);
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
  const whole = (text) => (/^[1-9]\d{0,8}$/.test(text ?? "") ? clamp(Number(text), 1, begun.longest) : null);
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
  steps();
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

// Until there is a picture, nothing can be done with it.
function asleep(yes) {
  for (const part of [$("stage"), $("in").parentElement, $("position")]) part.inert = yes;
}

function wireExplorer() {
  asleep(true);
  wireSizes();
  $("source").addEventListener("input", (event) => {
    mirror();
    change("text", { text: $("source").value }, event.timeStamp);
    offer(2);
  });
  wireOffers();
  $("help").addEventListener("click", () => $("helping").showModal());
  $("helping").addEventListener("click", (event) => event.target === $("helping") && $("helping").close());
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
  $("back").addEventListener("click", () => {
    if (keeping) keep();
    history.back();
  });
  $("forth").addEventListener("click", () => history.forward());
  addEventListener("popstate", () => restore(location.hash));
  for (const kind of ["pointerup", "wheel", "keyup"]) canvas.addEventListener(kind, keepSoon);
  addEventListener("pagehide", () => keeping && keep());
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
