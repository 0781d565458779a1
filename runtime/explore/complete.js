"use strict";
// Colours of the text, and names of the library that are offered while somebody writes one.

const classes = begun.tokens.map(([scope, pattern]) => [scope.replaceAll(".", "-"), new RegExp(pattern, "y")]);
let names = [], taken = -1, word = [0, 0]; // offered, the one that is marked, and the word they stand for in the text

// [class, start, stop] of every token; "" for white space, and for characters that are in no token.
function tokens(text) {
  const found = [];
  for (let at = 0; at < text.length; ) {
    let kind = "", stop = at + 1;
    for (const [name, pattern] of classes) {
      pattern.lastIndex = at;
      const hit = pattern.exec(text);
      if (!hit?.[0]) continue;
      [kind, stop] = [name, pattern.lastIndex];
      break;
    }
    found.push([kind, at, stop]);
    at = stop;
  }
  return found;
}

function coloured(text) {
  return tokens(text).map(([className, start, stop]) => Object.assign(document.createElement("span"), { className, textContent: text.slice(start, stop) }));
}

// The names that begin with the word before the cursor, where it has so many letters; nothing inside a comment.
function offer(least) {
  const source = $("source"), { value, selectionStart: at, selectionEnd } = source;
  const token = tokens(value).find(([, start, stop]) => start < at && at <= stop), part = token && value.slice(token[1], at);
  const fits = token && at === selectionEnd && at === token[2] && /^[A-Za-z_]\w*$/.test(part) && part.length >= least;
  const all = fits && value[at] !== "(" ? begun.library.filter((e) => e.name.startsWith(part)) : [];
  names = all.some((e) => e.text === part) ? [] : all; // written to its end, and nothing to give to it
  word = fits ? [token[1], at] : [0, 0];
  taken = -1;
  $("offers").hidden = !names.length;
  document.body.classList.toggle("offering", names.length > 0);
  $("offering").textContent = names.length ? `${names.length} names: arrows choose, Tab writes, Escape closes` : "";
  $("offers").replaceChildren(...names.map((entry, i) => {
    const option = Object.assign(document.createElement("div"), { id: `offer-${i}`, role: "option" });
    option.append(
      Object.assign(document.createElement("code"), { textContent: entry.signature }),
      Object.assign(document.createElement("span"), { textContent: entry.sentence.replaceAll("`", "") }),
    );
    option.addEventListener("pointerdown", (event) => event.preventDefault()); // the text keeps the focus
    option.addEventListener("click", () => take(entry));
    return option;
  }));
  mark(-1);
  if (names.length) below(word[0]);
}

// Under the character at this place of the text.
function below(place) {
  const spans = [...$("mirror").querySelectorAll("span")], starts = [];
  spans.reduce((at, span) => (starts.push(at), at + span.textContent.length), 0);
  const box = (spans[starts.findLastIndex((at) => at <= place)] ?? $("mirror")).getBoundingClientRect(), around = $("write").getBoundingClientRect();
  const left = Math.max(8, Math.min(box.left - around.left - 8, around.width - $("offers").offsetWidth - 8));
  Object.assign($("offers").style, { left: `${left}px`, top: `${box.bottom - around.top + 4}px` });
}

function mark(i) {
  taken = i;
  $("offers").querySelectorAll("[role=option]").forEach((option, n) => option.setAttribute("aria-selected", n === i));
  if (i < 0) return $("source").removeAttribute("aria-activedescendant");
  $("source").setAttribute("aria-activedescendant", `offer-${i}`);
  return $(`offer-${i}`).scrollIntoView({ block: "nearest" });
}

function closeOffers() {
  if (names.length) offer(Infinity);
}

// In place of the word, with its arguments marked: what is typed next replaces them.
function take(entry) {
  const source = $("source"), open = entry.text.indexOf("(");
  source.setRangeText(entry.text, ...word, "end");
  if (open >= 0) source.setSelectionRange(word[0] + open + 1, word[0] + entry.text.length - 1);
  mirror();
  change("text", { text: source.value });
  closeOffers();
}

function wireOffers() {
  const source = $("source");
  source.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key], plain = !(event.ctrlKey || event.metaKey || event.altKey || event.shiftKey);
    if (event.ctrlKey && event.key === " ") offer(0);
    else if (!names.length || !plain) return;
    else if (step) mark((taken + step + (taken < 0 && step < 0 ? 1 : 0) + names.length) % names.length);
    else if (event.key === "Tab" || (event.key === "Enter" && taken >= 0)) take(names[Math.max(0, taken)]);
    else if (event.key === "Escape") closeOffers();
    else {
      if (["ArrowLeft", "ArrowRight", "Home", "End", "Enter", "PageUp", "PageDown"].includes(event.key)) closeOffers();
      return;
    }
    event.preventDefault();
  });
  source.addEventListener("blur", closeOffers);
  source.addEventListener("pointerdown", closeOffers);
}
