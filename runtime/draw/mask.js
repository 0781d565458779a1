"use strict";
// A mask at one position, with the meaning of dsl/evaluate.py, and why it is visible or hidden as in
// dsl/explain.py. An Expr arrives as a list of nodes, arguments before their users:
// [operator, arguments, payload, type]; coordinates are `var` 0..3 = b, h, q, k, everything else known is a literal.
//
// Ints are Numbers while they fit (|x| < 2^53) and BigInts from the first one that does not: `Ring` holds what
// differs. Leaving 64 bits is an error there as here.

class Beyond extends Error {} // an Int that a Number does not hold
class NoValue extends Error {} // the expression has no value here; the message says why

const SAFE = Number.MAX_SAFE_INTEGER;
function safe(x) {
  if (!(x <= SAFE && x >= -SAFE)) throw new Beyond();
  return x;
}
function within(estimate) {
  if (Math.abs(estimate) >= 2 ** 63) throw new NoValue("an integer leaves 64 bits");
}
const int32 = (x) => (x | 0) === x;
const wrapped = (x) => BigInt.asIntN(64, x);
const clipped = (x) => Math.trunc(Math.max(-(2 ** 62), Math.min(2 ** 62, Number.isNaN(x) ? 0 : x)));

function bits(small, large) {
  return (x, y) => (int32(x) && int32(y) ? small(x, y) : safe(Number(large(BigInt(x), BigInt(y)))));
}

const NUMBERS = {
  of: (x) => safe(Number(x)),
  index: (x) => x,
  low32: (x) => x >>> 0,
  float: (x) => x + 0, // -0 is an accident of Numbers: no Int is negative zero
  trunc: (x) => safe(clipped(x)),
  neg: (x) => -x,
  abs: (x) => Math.abs(x),
  sign: (x) => Math.sign(x),
  add: (x, y) => safe(x + y),
  sub: (x, y) => safe(x - y),
  mul: (x, y) => safe(x * y),
  min: (x, y) => (y < x ? y : x),
  max: (x, y) => (y > x ? y : x),
  mod(x, y) {
    if (y === 0) return 0;
    const r = x % y;
    return r !== 0 && r < 0 !== y < 0 ? r + y : r;
  },
  floordiv: (x, y) => (y === 0 ? 0 : safe(Math.round((x - NUMBERS.mod(x, y)) / y))),
  pow(x, y) {
    if (y > 64 && x !== 0 && Math.abs(x) !== 1) throw new Beyond();
    let out = 1;
    for (let i = y > 64 ? (y % 2 ? 1 : 2) : y; i > 0; i--) out = safe(out * x);
    return out;
  },
  bitand: bits((x, y) => x & y, (x, y) => x & y),
  bitor: bits((x, y) => x | y, (x, y) => x | y),
  bitxor: bits((x, y) => x ^ y, (x, y) => x ^ y),
  bitnot: (x) => -1 - x,
  shl: (x, y) => (y < 0 || y > 63 ? 0 : safe(x * 2 ** y)),
  shr: (x, y) => (y < 0 || y > 63 ? 0 : Math.floor(x / 2 ** y)),
  wrap: (x, n) => (n > 63 ? x : Number(BigInt.asIntN(Math.max(n, 0), BigInt(x)))),
};
for (const op of ["neg", "add", "sub", "mul", "shl", "pow"]) NUMBERS[`wrapping_${op}`] = NUMBERS[op];

// numpy looks at the same operation in floating point to see an overflow coming: so does this
function checked(fn, estimate) {
  return (x, y) => {
    within(estimate(Number(x), Number(y)));
    return fn(x, y);
  };
}

const BIGINTS = {
  of: (x) => {
    const n = BigInt(x);
    if (n !== wrapped(n)) throw new NoValue("an integer leaves 64 bits");
    return n;
  },
  index: (x) => Number(x),
  low32: (x) => Number(BigInt.asUintN(32, x)),
  float: (x) => Number(x),
  trunc: (x) => BigInt(clipped(x)),
  neg: checked((x) => -x, (x) => -x),
  abs: checked((x) => (x < 0n ? -x : x), (x) => Math.abs(x)),
  sign: (x) => (x > 0n ? 1n : x < 0n ? -1n : 0n),
  add: checked((x, y) => x + y, (x, y) => x + y),
  sub: checked((x, y) => x - y, (x, y) => x - y),
  mul: checked((x, y) => x * y, (x, y) => x * y),
  min: (x, y) => (y < x ? y : x),
  max: (x, y) => (y > x ? y : x),
  mod(x, y) {
    if (y === 0n) return 0n;
    const r = x % y;
    return r !== 0n && r < 0n !== y < 0n ? r + y : r;
  },
  floordiv: (x, y) => (y === 0n ? 0n : wrapped((x - BIGINTS.mod(x, y)) / y)),
  pow: checked((x, y) => x ** y, (x, y) => x ** y),
  bitand: (x, y) => x & y,
  bitor: (x, y) => x | y,
  bitxor: (x, y) => x ^ y,
  bitnot: (x) => ~x,
  shl: (x, y) => (y < 0n || y > 63n ? 0n : checked((a, b) => a << b, (a, b) => a * 2 ** b)(x, y)),
  shr: (x, y) => (y < 0n || y > 63n ? 0n : x >> y),
  wrap: (x, n) => BigInt.asIntN(n > 64n ? 64 : n < 0n ? 0 : Number(n), x),
  // below `wrap` a BigInt has as many bits as it takes
  wrapping_neg: (x) => -x,
  wrapping_add: (x, y) => x + y,
  wrapping_sub: (x, y) => x - y,
  wrapping_mul: (x, y) => x * y,
  wrapping_shl: (x, y) => (y < 0n || y > 63n ? 0n : x << y),
  wrapping_pow: (x, y) => x ** y,
};

function erf(x) {
  if (Number.isNaN(x)) return x;
  if (Math.abs(x) > 6) return Math.sign(x);
  // 2/sqrt(pi) exp(-x^2) sum of 2^n x^(2n+1) / (1 3 5 ... 2n+1): no cancellation (Abramowitz, Stegun 7.1.6)
  let term = x;
  let sum = x;
  for (let n = 1; Math.abs(term) > 1e-17 * Math.abs(sum); n++) sum += term *= (2 * x * x) / (2 * n + 1);
  return (2 / Math.sqrt(Math.PI)) * Math.exp(-x * x) * sum;
}

const FLOATS = {
  neg: (x) => -x,
  abs: Math.abs,
  sign: Math.sign,
  add: (x, y) => x + y,
  sub: (x, y) => x - y,
  mul: (x, y) => x * y,
  div: (x, y) => x / y,
  min: Math.min,
  max: Math.max,
  // C's pow, which numpy has: 1 to any power is 1, as is -1 to an infinite one
  pow: (x, y) => (x === 1 || (x === -1 && Math.abs(y) === Infinity) ? 1 : x ** y),
  exp: Math.exp,
  exp2: (x) => 2 ** x,
  log: Math.log,
  log2: Math.log2,
  log1p: Math.log1p,
  tanh: Math.tanh,
  sigmoid: (x) => 0.5 * (1 + Math.tanh(0.5 * x)),
  sin: Math.sin,
  cos: Math.cos,
  tan: Math.tan,
  sqrt: Math.sqrt,
  rsqrt: (x) => 1 / Math.sqrt(x),
  erf,
};

const ANY = {
  lt: (x, y) => x < y,
  le: (x, y) => x <= y,
  gt: (x, y) => x > y,
  ge: (x, y) => x >= y,
  eq: (x, y) => x === y,
  ne: (x, y) => x !== y,
  and: (x, y) => x && y,
  or: (x, y) => x || y,
  xor: (x, y) => x !== y,
  not: (x) => !x,
  isfinite: Number.isFinite,
};
const JOIN = { any: "or", all: "and", sum: "add", min: "min", max: "max" };

function mix(x) {
  x = Math.imul(x ^ (x >>> 16), 0x85ebca6b);
  x = Math.imul(x ^ (x >>> 13), 0xc2b2ae35);
  return (x ^ (x >>> 16)) >>> 0;
}
function uniform(counters) {
  let x = mix((counters[0] + 0x9e3779b9) >>> 0);
  for (let i = 1; i < counters.length; i++) x = mix(x ^ Math.imul(counters[i], 0x9e3779b1));
  return (x >>> 8) * 2 ** -24;
}

function segment(table, x) {
  let lo = 0;
  let hi = table.length;
  while (lo < hi) {
    const mid = (lo + hi) >> 1;
    if (x < table[mid]) hi = mid;
    else lo = mid + 1;
  }
  return Math.max(0, Math.min(lo - 1, Math.max(table.length - 2, 0)));
}

// -- a list of nodes that runs --------------------------------------------------------------------------

class Program {
  constructor(nodes, tables, ring) {
    this.nodes = nodes;
    this.tables = tables;
    this.ring = ring;
    this.values = new Array(nodes.length);
    this.at = [0, 0, 0, 0];
    const below = nodes.map(() => null); // the bound variables a node hangs on, by the height of their binder
    const late = nodes.map(() => 0); // when a value changes: 0 with b and h, 1 with q, 2 with k
    nodes.forEach(([op, args, payload], i) => {
      const free = new Set(op === "bound" ? [payload] : args.flatMap((a) => [...below[a]]));
      if (op === "reduce") free.delete(payload[1]);
      below[i] = free;
      late[i] = op === "var" ? Math.max(0, payload - 1) : Math.max(0, ...args.map((a) => late[a]));
    });
    this.below = below;
    this.steps = [];
    nodes.forEach((node, i) => this.steps.push(this.compiled(node, i)));
    this.lists = [0, 1, 2].map((n) => this.steps.filter((_, i) => below[i].size === 0 && late[i] === n));
    this.forget();
  }

  forget() {
    this.known = 0; // how many of the lists hold for `at`
  }

  run(b, h, q, k) {
    const at = this.at;
    if (at[0] !== b || at[1] !== h) this.known = 0;
    else if (at[2] !== q) this.known = Math.min(this.known, 1);
    at[0] = b; at[1] = h; at[2] = q; at[3] = k;
    try {
      for (let n = Math.min(this.known, 2); n < 3; n++) {
        for (const step of this.lists[n]) step();
        this.known = n + 1;
      }
    } catch (error) {
      this.forget();
      throw error;
    }
    return this.values[this.nodes.length - 1];
  }

  compiled([op, args, payload, type], i) {
    const v = this.values, ring = this.ring, [x, y, z] = args;
    if (op === "lit") {
      const value = type === "I" ? null : type === "F" ? Number(payload) : payload;
      return type === "I" ? () => { v[i] = ring.of(payload); } : () => { v[i] = value; };
    }
    if (op === "var") return () => { v[i] = ring.of(this.at[payload]); };
    if (op === "bound") return () => {};
    if (op === "where") return () => { v[i] = v[x] ? v[y] : v[z]; };
    if (op === "float") return () => { v[i] = ring.float(v[x]); };
    if (op === "floor") return () => { v[i] = ring.trunc(Math.floor(v[x])); };
    if (op === "int") {
      if (this.nodes[x][3] === "B") return () => { v[i] = ring.of(v[x] ? 1 : 0); };
      return () => { v[i] = ring.trunc(v[x]); };
    }
    if (op === "random") return () => { v[i] = uniform(args.map((a) => ring.low32(v[a]))); };
    if (op === "lookup") return this.lookup(args, payload, type, i);
    if (op === "segment") {
      const { values } = this.tables[payload];
      return () => { v[i] = ring.of(segment(values, v[x])); };
    }
    if (op === "reduce") return this.reduce(args, payload, type, i);
    const fn = ANY[op] || (type === "F" ? FLOATS : ring)[op];
    if (args.length === 1) return () => { v[i] = fn(v[x]); };
    if (args.length === 2) return () => { v[i] = fn(v[x], v[y]); };
    return () => {
      let out = v[x];
      for (let n = 1; n < args.length; n++) out = fn(out, v[args[n]]);
      v[i] = out;
    };
  }

  lookup(args, name, type, i) {
    const v = this.values, ring = this.ring, { values, shape } = this.tables[name];
    const kept = type === "B" ? (x) => x !== 0 : type === "F" ? Number : ring.of;
    return () => {
      let at = 0;
      for (let n = 0; n < args.length; n++) {
        const index = ring.index(v[args[n]]);
        at = at * shape[n] + (index < 0 ? 0 : index < shape[n] ? index : shape[n] - 1);
      }
      v[i] = kept(values[at]);
    };
  }

  // The body runs once for each j: those of its nodes that hang on j, and on no binder further in.
  reduce([lo, hi, body], [kind, height], type, i) {
    const v = this.values, ring = this.ring, inside = new Set(), stack = [body];
    while (stack.length) {
      const n = stack.pop();
      if (inside.has(n)) continue;
      inside.add(n);
      stack.push(...this.nodes[n][1]);
    }
    const mine = [...inside].sort((m, n) => m - n);
    const variables = mine.filter((n) => this.nodes[n][0] === "bound" && this.nodes[n][2] === height);
    const steps = mine
      .filter((n) => this.nodes[n][0] !== "bound" && Math.min(...this.below[n]) === height)
      .map((n) => this.steps[n]);
    const join = ANY[JOIN[kind]] || (type === "F" ? FLOATS : ring)[JOIN[kind]];
    return () => {
      const first = ring.index(v[lo]), last = ring.index(v[hi]);
      let out = kind === "any" ? false : kind === "all" ? true : type === "F" ? 0 : ring.of(0);
      if (first >= last && (kind === "min" || kind === "max"))
        throw new NoValue(`${kind} over the empty range ${first}..${last}`);
      for (let j = first; j < last; j++) {
        for (const n of variables) v[n] = ring.of(j);
        for (const step of steps) step();
        out = j === first ? v[body] : join(out, v[body]);
      }
      v[i] = out;
    };
  }
}

// -- what the page asks --------------------------------------------------------------------------------

class Mask {
  // `nodes`, `tables` {name: {values, shape}}, and `clauses` {node: [text, [[text of a part, node], ...]]}
  constructor({ nodes, tables, clauses }) {
    Object.assign(this, { nodes, tables, clauses });
    this.small = new Program(nodes, tables, NUMBERS);
    this.large = null;
  }

  run(b, h, q, k) {
    try {
      this.last = this.small;
      return this.small.run(b, h, q, k);
    } catch (error) {
      if (!(error instanceof Beyond)) throw error;
    }
    this.large ??= new Program(this.nodes, this.tables, BIGINTS);
    this.last = this.large;
    return this.large.run(b, h, q, k);
  }

  explain(b, h, q, k) {
    const visible = this.run(b, h, q, k);
    const clauses = this.deciding(this.nodes.length - 1, visible);
    return { visible, clauses, because: clauses.map((i) => this.said(i)).join("; ") };
  }

  // The smallest parts of node `i` that make it what it is.
  deciding(i, truth) {
    const [op, args] = this.nodes[i], v = this.last.values;
    if (op === "not") return this.deciding(args[0], !truth);
    if (op === "where") return [...this.deciding(args[0], v[args[0]]), ...this.deciding(v[args[0]] ? args[1] : args[2], truth)];
    if (op === "and" || op === "or") {
      if (truth === (op === "or")) return this.deciding(args.find((a) => v[a] === truth), truth);
      return args.flatMap((a) => this.deciding(a, truth));
    }
    return [i];
  }

  said(i) {
    const [text, parts] = this.clauses[i], v = this.last.values, truth = String(v[i]);
    if (text === null) return `the constant is ${truth}`;
    const shown = parts.map(([name, n]) => `${name} = ${printed(v[n], this.nodes[n][3])}`);
    return `${text} is ${truth}` + (shown.length ? `: ${shown.join(", ")}` : "");
  }
}

// As Python prints it.
function printed(x, type) {
  if (type === "B") return x ? "True" : "False";
  if (type === "I") return String(x === 0 ? 0 : x);
  if (Number.isNaN(x)) return "nan";
  if (!Number.isFinite(x)) return x > 0 ? "inf" : "-inf";
  const [mantissa, exponent] = x.toExponential().split("e");
  const e = Number(exponent);
  if (e < -4 || e >= 16) return `${mantissa}e${e < 0 ? "-" : "+"}${String(Math.abs(e)).padStart(2, "0")}`;
  if (Object.is(x, -0)) return "-0.0";
  const text = e < 0 ? x.toFixed(Math.min(100, mantissa.replace(/[-.]/g, "").length - 1 - e)) : String(x);
  return text.includes(".") ? text : `${text}.0`;
}

// -- arrays ----------------------------------------------------------------------------------------------

const ARRAYS = { u1: Uint8Array, i4: Int32Array, i8: BigInt64Array, f4: Float32Array, f8: Float64Array };

function bytesOf(base64) {
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

// Base64 of the bytes, or of deflated ones: there Ints of 32 bits are differences to their neighbours.
async function unpacked({ type, data, plain }) {
  if (plain !== undefined) return new ARRAYS[type](bytesOf(plain).buffer);
  const bytes = bytesOf(data), stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const out = new ARRAYS[type](await new Response(stream).arrayBuffer());
  if (type === "i4") for (let i = 1; i < out.length; i++) out[i] += out[i - 1];
  return out;
}

async function unpackedMask({ nodes, tables, clauses }) {
  const open = {};
  for (const [name, { shape, array }] of Object.entries(tables)) {
    array.values ??= await unpacked(array); // kept: the next mask may read the same table
    open[name] = { shape, values: array.values };
  }
  return new Mask({ nodes, tables: open, clauses });
}

if (typeof module !== "undefined") module.exports = { Mask, NoValue, printed, unpacked, unpackedMask };
