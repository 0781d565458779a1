"use strict";
// Entries of the library, to search and to write into the text.

const begun = JSON.parse($("data").textContent); // the first state, the library, the tables of files
let chosen = 0, offered = [], marked = [0, 0]; // in the text, when the library was opened

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
    sentence.textContent = e.sentence.replaceAll("`", "");
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
  marked = [$("source").selectionStart, $("source").selectionEnd];
  $("library").showModal();
  search();
  $("search").focus();
}

// Into the text: joined with what stands before and after, or in place of what is marked.
function pick(entry) {
  $("library").close();
  const source = $("source"), text = source.value, [from, to] = marked;
  const named = /^\s*(mask|score|weight)\s*=/m.test(text), kind = found?.score && !found.error ? "score" : "mask";
  const weight = entry.kind === "weight", whole = !text.trim() || to - from === text.length;
  source.focus();
  if (whole) return write(weight ? `weight = ${entry.text}` : entry.text);
  if (weight) return write(`${named ? text.trim() : `${kind} = ${text.trim()}`}\nweight = ${entry.text}`);
  if (!named && entry.kind !== kind)
    return write(kind === "mask" ? `mask = ${text.trim()}\nscore = ${entry.text}` : `mask = ${entry.text}\nscore = ${text.trim()}`);
  const glue = entry.kind === "score" ? " then " : " & ", ends = /[\w)\]]$/, starts = /^[\w(~]/;
  const before = text.slice(0, from), after = text.slice(to);
  const left = from === to && ends.test(before.trimEnd()) ? glue.slice(before.length - before.trimEnd().length) : "";
  const right = from === to && starts.test(after.trimStart()) ? glue : "";
  write(before + left + entry.text + right + after);
  const place = (before + left + entry.text).length;
  return source.setSelectionRange(place, place);
}
