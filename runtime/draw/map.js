"use strict";
// The map: tiles from far away, single tokens close up. What is drawn comes in pieces that are made once, a few
// milliseconds in every frame, and kept: chunks of CHUNK x CHUNK cells, where a cell is 2^level tiles, and patches of
// PATCH x PATCH tokens. Those of an earlier layout stand in for pieces that are still to come. Positions are counted
// from the upper left corner of the layout; what people read and type is global, `origin` away.

const CHUNK = 256, PATCH = 128, KEPT = 400, SLICE = 12, FIRST = 40, SHADES = 255; // cells, tokens, pieces, milliseconds per frame and for the first of a layout, of orange
const LEFT = 88, TOP = 46; // of the rulers, in CSS pixels
const EMPTY = 0, PARTIAL = 1, FULL = 2, KINDS = ["empty", "partial", "full"];
const $ = (id) => document.getElementById(id);
const canvas = $("map"), context = canvas.getContext("2d");
const view = { q: 0, k: 0, scale: 1, b: 0, h: 0, width: 0, height: 0, fit: 1 };
const at = { q: -1, k: -1, pinned: false };
const darkness = matchMedia("(prefers-color-scheme: dark)");
const number = new Intl.NumberFormat("en").format;
let data = null, runs = null, mask = null, colours = null, drawing = 0;
let pieces = new Map(), earlier = new Map(), wanted = [], until = 0, fresh = true; // made, of the layout before, still to make, till when

const clamp = (x, lo, hi) => Math.max(lo, Math.min(hi, x));
const originOf = (axis) => { const o = data.origin[axis]; return o[Math.min(view.b, o.length - 1)]; };
const sx = () => Math.max(view.scale, 90 / data.kvLen); // pixels per key; a side too thin to see is stretched
const sy = () => Math.max(view.scale, 90 / data.qLen);

// -- tiles ---------------------------------------------------------------------------------------------

const sliceOf = () => runs.sliceOf[view.b * data.heads + view.h];

// The first run of a row that ends after tile `column`.
function firstRun(line, column) {
  let lo = runs.rowPtr[line], hi = runs.rowPtr[line + 1];
  while (lo < hi) {
    const mid = (lo + hi) >> 1;
    if (runs.ends[2 * mid + 1] > column) hi = mid;
    else lo = mid + 1;
  }
  return lo;
}

function kindOf(row, column) {
  const line = sliceOf() * data.rows + row, r = firstRun(line, column);
  return r < runs.rowPtr[line + 1] && runs.ends[2 * r] <= column ? runs.kind[r] : EMPTY;
}

// Cells of a chunk: how many of their tiles are full, and how many are read; in each line `from` one cell `to` another.
function counted(level, ci, cj) {
  const cell = 2 ** level, w = CHUNK + 1;
  const full = new Float64Array(CHUNK * w), read = new Float64Array(CHUNK * w);
  const from = new Int32Array(CHUNK).fill(CHUNK), to = new Int32Array(CHUNK);
  const c0 = cj * CHUNK * cell, c1 = Math.min(data.columns, c0 + CHUNK * cell);
  const r0 = ci * CHUNK * cell, r1 = Math.min(data.rows, r0 + CHUNK * cell);
  // differences from cell to cell, summed up at the end: some tiles of the first, all of those between, some of the last
  const add = (sum, line, lo, hi) => {
    const first = Math.floor(lo / cell), last = Math.floor((hi - 1) / cell), here = line * w;
    const head = (first + 1) * cell - lo, tail = hi - last * cell;
    sum[here + first] += head;
    sum[here + first + 1] += cell - head;
    sum[here + last] += tail - cell;
    sum[here + last + 1] -= tail;
    if (first < from[line]) from[line] = first;
    if (last >= to[line]) to[line] = last + 1;
  };
  for (let row = r0; row < r1; row++) {
    const line = sliceOf() * data.rows + row, stop = runs.rowPtr[line + 1];
    for (let r = firstRun(line, c0); r < stop && runs.ends[2 * r] < c1; r++) {
      const lo = Math.max(runs.ends[2 * r], c0) - c0, hi = Math.min(runs.ends[2 * r + 1], c1) - c0;
      const place = Math.floor((row - r0) / cell);
      add(read, place, lo, hi);
      if (runs.kind[r] === FULL) add(full, place, lo, hi);
    }
  }
  for (const sum of [full, read])
    for (let i = 0; i < CHUNK; i++) for (let n = i * w + from[i] + 1; n <= i * w + to[i]; n++) sum[n] += sum[n - 1];
  return { full, read, from, to, r0, c0, cell };
}

function chunk(level, ci, cj) {
  const { full, read, from, to, r0, c0, cell } = counted(level, ci, cj), w = CHUNK + 1;
  const [lines, across] = [data.rows - r0, data.columns - c0].map((n) => Math.min(CHUNK, Math.ceil(n / cell)));
  return painted(CHUNK, CHUNK, (pixels) => {
    for (let i = 0; i < lines; i++) {
      const high = Math.min(cell, data.rows - r0 - i * cell);
      pixels.fill(colours.empty, i * CHUNK, i * CHUNK + across);
      for (let j = from[i]; j < to[i]; j++) {
        const n = i * w + j, some = read[n], tiles = high * Math.min(cell, data.columns - c0 - j * cell);
        pixels[i * CHUNK + j] =
          some === 0 ? colours.empty : full[n] === tiles ? colours.full : colours.shades[Math.round((SHADES * some) / tiles)];
      }
    }
  });
}

// Tokens, where some of the tiles are partial; else null.
function patch(pi, pj) {
  const [bq, bk] = data.block, q0 = pi * PATCH, k0 = pj * PATCH;
  const q1 = Math.min(data.qLen, q0 + PATCH), k1 = Math.min(data.kvLen, k0 + PATCH);
  let any = false;
  for (let i = Math.floor(q0 / bq); i * bq < q1; i++)
    for (let j = Math.floor(k0 / bk); j * bk < k1; j++) any ||= kindOf(i, j) === PARTIAL;
  if (!any) return null;
  const [b, h] = [data.origin.b + view.b, data.origin.h + view.h], oq = originOf("q"), ok = originOf("k");
  return painted(PATCH, PATCH, (pixels) => {
    for (let q = q0; q < q1; q++) {
      for (let k = k0; k < k1; ) {
        const stop = Math.min(k1, (Math.floor(k / bk) + 1) * bk), kind = kindOf(Math.floor(q / bq), Math.floor(k / bk));
        for (; k < stop; k++) {
          const seen = kind === PARTIAL && shown(b, h, q + oq, k + ok);
          pixels[(q - q0) * PATCH + k - k0] = colours[kind === PARTIAL ? (seen ? "partial" : "tint") : KINDS[kind]];
        }
      }
    }
  });
}

function shown(b, h, q, k) {
  try {
    return mask.run(b, h, q, k);
  } catch (error) {
    if (error instanceof NoValue) return false;
    throw error;
  }
}

function painted(width, height, paint) {
  const to = document.createElement("canvas");
  to.width = width;
  to.height = height;
  const pen = to.getContext("2d"), image = pen.createImageData(width, height);
  paint(new Uint32Array(image.data.buffer));
  pen.putImageData(image, 0, 0);
  return to;
}

// A piece that is there or can be made in this frame; else it is put on the list, and an earlier one is shown.
function piece(name, make) {
  const key = `${view.b}.${view.h}.${name}`, kept = pieces.has(key);
  if (!kept && performance.now() >= until) {
    wanted.push(key);
    return earlier.get(key) ?? null;
  }
  const found = kept ? pieces.get(key) : make();
  pieces.delete(key); // the oldest come first
  pieces.set(key, found);
  if (pieces.size > KEPT) pieces.delete(pieces.keys().next().value);
  return found;
}

// The layout has changed: `alike` where the old pieces still lie at the same places.
function outdate(alike) {
  earlier = alike ? new Map([...earlier, ...pieces]) : new Map();
  pieces = new Map();
  fresh = true;
}

// -- drawing ---------------------------------------------------------------------------------------------

const packed = (hex) => {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  return (255 << 24 | b << 16 | g << 8 | r) >>> 0; // as ImageData has them on a little-endian machine
};
// From tint to partial.
function shades() {
  const mixed = (share, shift) => {
    const from = colours.tint >>> shift & 255, to = colours.partial >>> shift & 255;
    return Math.round(from + (to - from) * share) << shift;
  };
  return Uint32Array.from({ length: SHADES + 1 }, (_, i) => 255 << 24 | mixed(i / SHADES, 16) | mixed(i / SHADES, 8) | mixed(i / SHADES, 0));
}

function recolour() {
  const palette = data.palettes[darkness.matches ? "dark" : "light"];
  colours = { css: palette };
  for (const name of ["full", "partial", "tint", "empty"]) colours[name] = packed(palette[name]);
  colours.shades = shades();
  outdate(false);
  redraw();
}

function redraw() {
  drawing ||= requestAnimationFrame(() => {
    drawing = 0;
    if (!runs) return; // nothing to draw yet
    draw();
    if (wanted.length) redraw();
    else earlier = new Map();
  });
}

function draw() {
  const ratio = devicePixelRatio || 1, c = context, css = colours.css;
  wanted = [];
  until = performance.now() + (fresh ? FIRST : SLICE);
  fresh = false;
  c.setTransform(ratio, 0, 0, ratio, 0, 0);
  c.fillStyle = css.paper;
  c.fillRect(0, 0, view.width, view.height);
  c.save();
  c.beginPath();
  c.rect(LEFT, TOP, view.width - LEFT, view.height - TOP);
  c.clip();
  const edge = { x: X(0), y: Y(0), w: data.kvLen * sx(), h: data.qLen * sy() };
  c.fillStyle = css.empty;
  c.fillRect(edge.x, edge.y, edge.w, edge.h);
  c.beginPath();
  c.rect(edge.x, edge.y, edge.w, edge.h);
  c.save();
  c.clip();
  c.imageSmoothingEnabled = false;
  if (pixelsOfTile() >= 4) drawRuns();
  else drawCells();
  const fine = mask && Math.min(sx(), sy()) * ratio >= 0.5;
  if (fine) drawTokens(ratio);
  const cell = number(2 ** levelOf());
  $("scale").textContent = fine ? "tokens of partial tiles shown" : levelOf() ? `one dot shows ${cell} × ${cell} tiles` : "";
  drawLines();
  c.restore();
  c.strokeStyle = css.dim;
  c.lineWidth = 1;
  c.strokeRect(edge.x - 0.5, edge.y - 0.5, edge.w + 1, edge.h + 1);
  drawPosition();
  c.restore();
  drawRulers();
}

const X = (k) => LEFT + (k - view.k) * sx();
const Y = (q) => TOP + (q - view.q) * sy();
const keyAt = (x) => (x - LEFT) / sx() + view.k;
const queryAt = (y) => (y - TOP) / sy() + view.q;

// Both ends of what is on the screen along an axis, in units of so many tokens, the second exclusive.
function range(first, last, unit, n) {
  return [clamp(Math.floor(first / unit), 0, n), clamp(Math.ceil(last / unit), 0, n)];
}
const seenRows = (unit) => range(view.q, queryAt(view.height), unit, Math.ceil(data.qLen / unit));
const seenColumns = (unit) => range(view.k, keyAt(view.width), unit, Math.ceil(data.kvLen / unit));

// A rectangle of tokens in whole pixels of the screen: what touches in tokens touches there.
function snapped(q, k, queries, keys) {
  const ratio = devicePixelRatio || 1, snap = (x) => Math.round(x * ratio) / ratio;
  const x = snap(X(k)), y = snap(Y(q));
  return [x, y, snap(X(k + keys)) - x, snap(Y(q + queries)) - y];
}

const pixelsOfTile = () => Math.min(data.block[0] * sy(), data.block[1] * sx()) * (devicePixelRatio || 1);
const levelOf = () => Math.max(0, Math.ceil(-Math.log2(pixelsOfTile())));

function drawRuns() {
  const [bq, bk] = data.block, [i0, i1] = seenRows(bq), [j0, j1] = seenColumns(bk);
  for (let i = i0; i < i1; i++) {
    const line = sliceOf() * data.rows + i, stop = runs.rowPtr[line + 1];
    for (let r = firstRun(line, j0); r < stop && runs.ends[2 * r] < j1; r++) {
      const first = Math.max(runs.ends[2 * r], j0), last = Math.min(runs.ends[2 * r + 1], j1); // not far off the screen
      context.fillStyle = colours.css[KINDS[runs.kind[r]]];
      context.fillRect(...snapped(i * bq, first * bk, bq, (last - first) * bk));
    }
  }
}

function drawCells() {
  const [bq, bk] = data.block, level = levelOf();
  const high = CHUNK * 2 ** level * bq, wide = CHUNK * 2 ** level * bk;
  const [i0, i1] = seenRows(high), [j0, j1] = seenColumns(wide);
  for (let i = i0; i < i1; i++) {
    for (let j = j0; j < j1; j++) {
      const image = piece(`${level}.${i}.${j}`, () => chunk(level, i, j));
      if (image) context.drawImage(image, ...snapped(i * high, j * wide, high, wide));
    }
  }
}

function drawTokens(ratio) {
  context.imageSmoothingEnabled = Math.min(sx(), sy()) * ratio < 1; // several tokens in a pixel: their mean
  const [i0, i1] = seenRows(PATCH), [j0, j1] = seenColumns(PATCH);
  for (let i = i0; i < i1; i++) {
    for (let j = j0; j < j1; j++) {
      const image = piece(`t.${i}.${j}`, () => patch(i, j));
      if (image) context.drawImage(image, ...snapped(i * PATCH, j * PATCH, PATCH, PATCH));
    }
  }
}

function drawLines() {
  for (const [unit, least, strength] of [[[1, 1], 9, 0.16], [data.block, 14, 0.3]]) {
    context.globalAlpha = strength;
    context.strokeStyle = colours.css.dim;
    context.lineWidth = 1;
    context.beginPath();
    const [q0, q1] = seenRows(unit[0]), [k0, k1] = seenColumns(unit[1]);
    if (unit[0] * sy() >= least) for (let i = q0 + 1; i < q1; i++) {
      const y = Math.round(Y(i * unit[0])) + 0.5;
      context.moveTo(LEFT, y);
      context.lineTo(view.width, y);
    }
    if (unit[1] * sx() >= least) for (let j = k0 + 1; j < k1; j++) {
      const x = Math.round(X(j * unit[1])) + 0.5;
      context.moveTo(x, TOP);
      context.lineTo(x, view.height);
    }
    context.stroke();
  }
  context.globalAlpha = 1;
}

function drawPosition() {
  if (at.q < 0) return;
  const c = context, w = Math.max(9, sx()), h = Math.max(9, sy());
  const x = X(at.k + 0.5) - w / 2, y = Y(at.q + 0.5) - h / 2;
  for (const [colour, width] of [[colours.css.paper, 5], [colours.css.ink, 2]]) {
    c.strokeStyle = colour;
    c.lineWidth = width;
    c.strokeRect(x, y, w, h);
  }
}

// The distance of ticks: tokens in powers of two inside a tile, then tiles in powers of two.
function tickStep(block, scale, room) {
  let step = 1;
  while (step * scale < room) step = step * 2 < block || step >= block ? step * 2 : block;
  return step;
}

// The name of an axis, in the middle of what is seen of it; that of queries reads upwards.
function title(text, across, from, to) {
  const c = context, low = Math.max(from, across ? LEFT : TOP), high = Math.min(to, across ? view.width : view.height);
  c.save();
  c.fillStyle = colours.css.ink;
  c.font = "600 12px system-ui, sans-serif";
  c.textAlign = "center";
  if (across) c.translate((low + high) / 2, 12);
  else c.translate(13, (low + high) / 2), c.rotate(-Math.PI / 2);
  if (high > low) c.fillText(text, 0, 0);
  c.restore();
}

function drawRulers() {
  const c = context, css = colours.css;
  c.fillStyle = css.paper;
  c.fillRect(0, 0, view.width, TOP);
  c.fillRect(0, 0, LEFT, view.height);
  c.font = "11px system-ui, sans-serif";
  c.textBaseline = "middle";
  title("keys", true, X(0), X(data.kvLen));
  title("queries", false, Y(0), Y(data.qLen));
  const marks = [];
  const [dq, dk] = [tickStep(data.block[0], sy(), 34), tickStep(data.block[1], sx(), 84)];
  const [q0, q1] = seenRows(dq), [k0, k1] = seenColumns(dk);
  for (let i = q0; i < q1; i++) marks.push([LEFT, Y(i * dq), number(i * dq + originOf("q")), false, css.dim, css.paper]);
  for (let j = k0; j < k1; j++) marks.push([X(j * dk), TOP, number(j * dk + originOf("k")), true, css.dim, css.paper]);
  const pointed = at.q < 0 ? [] : [
    [LEFT, Y(at.q + 0.5), number(at.q + originOf("q")), false, css.paper, css.ink],
    [X(at.k + 0.5), TOP, number(at.k + originOf("k")), true, css.paper, css.ink],
  ];
  for (const [x, y, text, across, ink, behind] of [...marks, ...pointed]) {
    if (across ? x < LEFT - 1 || x > view.width : y < TOP - 1 || y > view.height) continue;
    const wide = c.measureText(text).width;
    const tx = across ? clamp(x - wide / 2, LEFT - 30, view.width - wide - 4) : LEFT - 9 - wide;
    const ty = across ? TOP - 13 : clamp(y, TOP + 6, view.height - 8);
    if (behind !== css.paper) {
      c.fillStyle = behind;
      c.fillRect(tx - 4, ty - 9, wide + 8, 17);
    }
    const covers = ([px, py, said, along]) =>
      along === across && (across ? Math.abs(px - x) < (wide + c.measureText(said).width) / 2 + 8 : Math.abs(py - y) < 17);
    c.fillStyle = ink;
    if (behind !== css.paper || !pointed.some(covers)) c.fillText(text, tx, ty);
    c.fillStyle = css.dim;
    if (across) c.fillRect(Math.round(x), TOP - 5, 1, 5);
    else c.fillRect(LEFT - 5, Math.round(y), 5, 1);
  }
}
