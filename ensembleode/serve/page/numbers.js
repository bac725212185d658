// Numbers: their text, ticks, quantiles, samples, nested lists.

/** A number in at most `digits` significant digits, without trailing zeros. */
export function text(x, digits = 5) {
  return Number.isFinite(x) ? minus(plain(x, digits, 1e-4, 1e6)) : "–";
}

/** A number for a field, short enough to be seen whole. */
export function brief(x) {
  return plain(x, 5, 1e-3, 1e7);
}

function plain(x, digits, least, most) {
  const size = Math.abs(x);
  if (x === 0 || (size >= least && size < most)) return String(Number(x.toPrecision(digits)));
  return x.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e");
}

/** Round numbers from `low` to `high`, about `count` of them, and their texts. */
export function ticks(low, high, count) {
  const step = niceStep((high - low) / Math.max(count, 1));
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) {
    values.push(i * step);
  }
  const size = Math.max(Math.abs(low), Math.abs(high));
  const exponents = size >= 1e5 || step < 1e-4;
  const digits = Math.max(1, Math.floor(Math.log10(size)) - Math.floor(Math.log10(step)) + 1);
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const label = (x) => (exponents ? text(x, Math.min(digits, 12)) : minus(x.toFixed(decimals)));
  return values.map((value) => ({ value, label: value === 0 ? "0" : label(value) }));
}

function minus(text) {
  return text.replaceAll("-", "−");
}

/** The 1, 2 or 5 times a power of ten that is next above `x`. */
export function niceStep(x) {
  const power = 10 ** Math.floor(Math.log10(x));
  return [1, 2, 5, 10].map((m) => m * power).find((step) => step >= x * (1 - 1e-9));
}

/** `n` evenly spaced numbers, two or more, the ends exact. */
export function linspace(low, high, n) {
  const at = (i) => low + ((high - low) * i) / (n - 1);
  return Array.from({ length: n }, (_, i) => (i === n - 1 ? high : at(i)));
}

/** The quantiles `qs` of finite `values` (sorted in place), by linear interpolation. */
export function quantiles(values, qs) {
  values.sort();
  return qs.map((q) => {
    const at = q * (values.length - 1);
    const below = Math.floor(at);
    const above = Math.min(below + 1, values.length - 1);
    return values[below] + (at - below) * (values[above] - values[below]);
  });
}

/** Uniform numbers in [0, 1), always the same: a sweep must not flicker as sliders move. */
export function uniform() {
  let state = 1;
  return () => {
    state = (state + 0x6d2b79f5) | 0; // mulberry32
    let x = Math.imul(state ^ (state >>> 15), 1 | state);
    x = (x + Math.imul(x ^ (x >>> 7), 61 | x)) ^ x;
    return ((x ^ (x >>> 14)) >>> 0) / 4294967296;
  };
}

/** Nested lists, or a number, as one list. */
export function flatten(nested) {
  return Array.isArray(nested) ? nested.flat(Infinity) : [nested];
}

/** One list as lists nested to `shape`; a number where that is empty. */
export function unflatten(values, shape) {
  if (shape.length === 0) return values[0];
  if (shape.length === 1) return [...values];
  const size = values.length / shape[0];
  return Array.from({ length: shape[0] }, (_, i) =>
    unflatten(values.slice(i * size, (i + 1) * size), shape.slice(1)),
  );
}

/** The indices of entry `i` of an array of `shape`, as `[1][0]`. */
export function index(i, shape) {
  const indices = [];
  for (const size of [...shape].reverse()) {
    indices.unshift(`[${i % size}]`);
    i = Math.floor(i / size);
  }
  return indices.join("");
}
