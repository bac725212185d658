// The form: a field for each value, with a slider where the registry has both limits.

import { make, set } from "./elements.js";
import { brief, flatten, index, linspace, niceStep, text, unflatten, uniform } from "./numbers.js";

const FIELDS = 32; // of more values, the others stay as registered
const POINTS = 101; // save points, where the registry has too few for a line
const FEW = 16;

function finite(x) {
  return typeof x === "number" && Number.isFinite(x);
}

/** A labelled number field, with a slider where there are two limits. */
class Field {
  constructor(id, label, value, low = null, high = null, { slider = true, whole = false } = {}) {
    this.label = label;
    const two = finite(low) && finite(high) && low < high;
    // Over decades, sliders move by ratios.
    const ratio = two && low > 0 && high / low >= 1000;
    const step = whole ? 1 : niceStep((two ? high - low : Math.abs(value) || 1) / 250);
    this.number = make("input", {
      id,
      type: "number",
      inputmode: "decimal",
      step: ratio ? "any" : step,
      min: finite(low) ? low : null,
      max: finite(high) ? high : null,
    });
    const name = make("label", { for: id, id: `${id}-label` }, label);
    this.element = make("div", { class: "field" }, name, this.number);
    if (finite(low) || finite(high)) {
      const limits = two
        ? `${text(low)} to ${text(high)}`
        : `at ${finite(low) ? "least" : "most"} ${text(finite(low) ? low : high)}`;
      this.element.append(make("small", { id: `${id}-limits` }, limits));
      this.number.setAttribute("aria-describedby", `${id}-limits`);
    }
    if (two && slider) {
      const to = ratio ? Math.log10 : (x) => x;
      const from = ratio ? (x) => 10 ** x : (x) => x;
      this.slider = make("input", {
        id: `${id}-slider`,
        type: "range",
        "aria-labelledby": `${id}-label`,
        min: to(low),
        max: to(high),
        step: ratio ? niceStep((to(high) - to(low)) / 250) : step,
      });
      this.slider.addEventListener("input", () => {
        const moved = Number(from(Number(this.slider.value)).toPrecision(6));
        this.#write(Math.min(Math.max(moved, low), high));
        this.#speak();
      });
      this.number.addEventListener("input", () => this.#follow());
      this.to = to;
      this.element.append(this.slider);
    }
    this.value = value;
  }

  /** What is typed, NaN where that is no number; else the number in all its digits. */
  get value() {
    return this.number.value === this.written ? this.exact : this.number.valueAsNumber;
  }

  set value(value) {
    this.#write(value);
    this.#follow();
  }

  #write(value) {
    this.exact = value;
    this.written = brief(value);
    this.number.value = this.written;
  }

  #follow() {
    if (!this.slider || !finite(this.value)) return;
    this.slider.value = this.to(this.value);
    this.#speak();
  }

  #speak() {
    this.slider.setAttribute("aria-valuetext", text(this.value));
  }

  mark(bad) {
    const marks = { "aria-invalid": bad || null, "aria-errormessage": bad ? "alert" : null };
    for (const input of [this.number, this.slider].filter(Boolean)) set(input, marks);
  }
}

/** A value that cannot be sent: `fields` are those to mark. */
export class BadValue extends Error {
  constructor(message, fields) {
    super(message);
    this.fields = fields;
  }
}

/** The values of one problem: those of the registry, and the fields over them. */
class Values {
  constructor(kind, { default: registered, labels, low, high }, names) {
    this.registered = flatten(registered);
    this.labels = this.registered.map((_, i) => labels?.[i] ?? names(i));
    const [lows, highs] = [flatten(low), flatten(high)];
    this.low = this.registered.map((_, i) => lows[i] ?? -Infinity);
    this.high = this.registered.map((_, i) => highs[i] ?? Infinity);
    this.fields = this.registered
      .slice(0, FIELDS)
      .map((value, i) => new Field(`${kind}-${i}`, this.labels[i], value, lows[i], highs[i]));
  }

  read() {
    const values = this.fields.map(read);
    return [...values, ...this.registered.slice(values.length)];
  }

  get changed() {
    return this.fields.some((field, i) => field.value !== this.registered[i]);
  }
}

function read(field) {
  if (!finite(field.value)) throw new BadValue(`${field.label} is not a number.`, [field]);
  return field.value;
}

/** How many: checked here, as so many numbers are made before the service sees them. */
function readCount(field) {
  const count = read(field);
  const most = Number(field.number.max) || Infinity;
  if (!Number.isInteger(count) || count < 2) {
    throw new BadValue(`${field.label} is not a whole number from 2.`, [field]);
  }
  if (count > most) throw new BadValue(`${field.label} is limited to ${most}.`, [field]);
  return count;
}

/** The form of one problem. */
export class Form {
  constructor(problem) {
    const { state, parameters, tspan, saveat, limits } = problem;
    this.problem = problem;
    const { shape } = state;
    this.u0 = new Values("u0", state, (i) => `u${index(i, shape)}`);
    // A network's weights are no sliders.
    const few = parameters.size <= FIELDS;
    const shown = few ? parameters : { ...parameters, default: [] };
    this.p = new Values("p", shown, (i) => `p[${i}]`);
    const [earliest, latest] = limits?.tspan ?? [null, null];
    const plain = { slider: false };
    this.start = new Field("t0", "From", tspan[0], earliest, latest, plain);
    this.end = new Field("t1", "To", tspan[1], earliest, latest, plain);
    const rows = limits?.saveat ?? null;
    const enough = saveat?.length >= FEW;
    const points = enough ? saveat.length : Math.min(POINTS, rows ?? POINTS);
    const whole = { slider: false, whole: true };
    this.points = new Field("points", "Save points", points, 2, rows, whole);
    this.registered = { tspan, points, saveat: enough ? saveat : null };

    const most = limits?.trajectories ?? null;
    const count = Math.min(200, most ?? 200);
    this.count = new Field("count", "Trajectories", count, 2, most, whole);
    this.percent = new Field("percent", "By ± percent", 10, 0, 100, plain);
    this.from = new Field("sweep-from", "From", 0, null, null, plain);
    this.to = new Field("sweep-to", "To", 1, null, null, plain);

    this.sweeping = document.getElementById("sweep");
    this.vary = document.getElementById("vary");
    this.#show(few);
  }

  #show(few) {
    const { size } = this.problem.parameters;
    const fill = (id, ...children) => document.getElementById(id).replaceChildren(...children);
    const elements = (fields) => fields.map((field) => field.element);
    const note = (there, words) => (there ? [make("p", { class: "small" }, words)] : []);
    const more = this.u0.registered.length - this.u0.fields.length;
    const weights = `${size.toLocaleString("en")} parameters (a network's, say)`;
    fill("u0", ...elements(this.u0.fields), ...note(more, `${more} more stay as registered.`));
    fill(
      "p",
      ...elements(this.p.fields),
      ...note(!few, `${weights}: they stay as registered.`),
      ...note(!size, "None."),
    );
    fill("times", ...elements([this.start, this.end, this.points]));
    fill("range", ...elements([this.from, this.to, this.percent, this.count]));

    const option = (value, words) => make("option", { value }, words);
    const every = (kind, words) =>
      this[kind].fields.length > 1 ? [option(`${kind}:all`, words)] : [];
    const each = (kind, words) =>
      this[kind].fields.map((field, i) => option(`${kind}:${i}`, field.label + words));
    this.vary.replaceChildren(
      ...every("p", "all parameters"),
      ...every("u0", "all initial values"),
      ...each("p", ""),
      ...each("u0", " at the start"),
    );
    this.vary.value = this.p.fields.length ? "p:0" : "u0:0";
    this.varied();
  }

  /** Another thing to vary is chosen: the ends of its range are its limits. */
  varied() {
    const [kind, which] = this.vary.value.split(":");
    const all = which === "all";
    this.from.element.hidden = this.to.element.hidden = all;
    this.percent.element.hidden = !all;
    if (all) return;
    const { low, high, fields } = this[kind];
    const value = finite(fields[which].value) ? fields[which].value : this[kind].registered[which];
    const around = Math.abs(value) / 2 || 1;
    this.from.value = finite(low[which]) ? low[which] : Number((value - around).toPrecision(6));
    this.to.value = finite(high[which]) ? high[which] : Number((value + around).toPrecision(6));
  }

  /** Back to what is registered. */
  reset() {
    for (const values of [this.u0, this.p]) {
      values.fields.forEach((field, i) => (field.value = values.registered[i]));
    }
    [this.start.value, this.end.value] = this.registered.tspan;
    this.points.value = this.registered.points;
    this.varied();
  }

  /** The body of the request for the form's own values: `p` only if changed, so that a registered
   * one stays shared by the whole batch. */
  body() {
    const body = {};
    const u0 = this.u0.read();
    const p = this.p.read();
    if (this.u0.changed) body.u0 = unflatten(u0, this.problem.state.shape);
    if (this.p.changed) body.p = p;
    const tspan = [read(this.start), read(this.end)];
    const points = readCount(this.points);
    const { saveat, tspan: registered } = this.registered;
    const same = tspan.every((t, i) => t === registered[i]) && points === this.registered.points;
    if (!(same && saveat)) {
      body.tspan = tspan;
      body.saveat = linspace(tspan[0], tspan[1], points);
    }
    return body;
  }

  /** The body of the request for a sweep. */
  sweepBody() {
    const body = this.body();
    const count = readCount(this.count);
    const [kind, which] = this.vary.value.split(":");
    const values = this[kind].read();
    let samples;
    if (which === "all") {
      const part = read(this.percent) / 100;
      const random = uniform();
      const { low, high, fields } = this[kind];
      const ranges = values.map((value, i) => {
        if (i >= fields.length) return [value, value];
        const width = part * Math.abs(value);
        // Not beyond the limits, which the service would refuse.
        const least = Math.max(value - width, Math.min(low[i], value));
        return [least, Math.min(value + width, Math.max(high[i], value))];
      });
      samples = Array.from({ length: count }, () => ranges.map(([a, b]) => a + (b - a) * random()));
    } else {
      const ends = [read(this.from), read(this.to)];
      samples = linspace(...ends, count).map((value) => values.with(which, value));
    }
    this.samples = samples;
    const { shape } = this.problem.state;
    body[kind] = kind === "p" ? samples : samples.map((one) => unflatten(one, shape));
    return body;
  }

  /** The fields that an error's `path` speaks of; those of the sweep if its request was refused. */
  fieldsOf(path, sweep) {
    if (!path) return [];
    const name = path.match(/^\w+/)?.[0];
    const indices = [...path.matchAll(/\[(\d+)\]/g)].map((match) => Number(match[1]));
    const ends = [this.start, this.end];
    if (name === "tspan") return ends[indices.at(-1)] ? [ends[indices.at(-1)]] : ends;
    if (name === "saveat") return [this.points];
    if (name !== "u0" && name !== "p") return [];
    const shape = name === "p" ? [this.p.registered.length] : this.problem.state.shape;
    // Before those of the state there may be that of the trajectory.
    const own = shape.length ? indices.slice(-shape.length) : [];
    const whole = own.length === shape.length;
    const at = whole ? own.reduce((sum, i, k) => sum * shape[k] + i, 0) : null;
    const [kind, which] = this.vary.value.split(":");
    if (sweep && kind === name && which !== "all" && (at === null || at === Number(which))) {
      const value = this.samples[indices[0]]?.[which];
      if (value < this[kind].low[which]) return [this.from];
      if (value > this[kind].high[which]) return [this.to];
      return [this.from, this.to];
    }
    return at === null ? this[name].fields : [this[name].fields[at]].filter(Boolean);
  }

  get fields() {
    const { start, end, points, count, percent, from, to } = this;
    return [...this.u0.fields, ...this.p.fields, start, end, points, count, percent, from, to];
  }
}
