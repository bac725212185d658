// The plot: lines and ribbons over time, a read-out, a legend whose buttons hide components.

import { make, svg, through } from "./elements.js";
import { text, ticks } from "./numbers.js";

const COLORS = 6; // in page.css; more components repeat them with other dashes
const SHOWN = 12; // of more components, so many at most are drawn at first

/** The classes that tell component `i` from the others. */
function look(i) {
  return `c${i % COLORS} d${Math.floor(i / COLORS) % 3}`;
}

/**
 * Draws `{t, series: [{label, own, bands}]}`: `own` is the line of the form's values, `bands` the
 * quantiles 5, 25, 50, 75, 95% of a sweep, or null. NaN leaves a gap.
 */
export class Plot {
  constructor({ picture, slider, time, legend, key }) {
    Object.assign(this, { picture, slider, time, legend, key });
    this.hidden = new Set();
    this.data = null;
    slider.addEventListener("input", () => this.#readOut());
    picture.addEventListener("pointermove", (event) => this.#follow(event));
    picture.addEventListener("pointerdown", (event) => this.#follow(event));
    new ResizeObserver(() => this.#paint()).observe(picture);
  }

  /** Another problem: nothing drawn, its components shown. */
  clear(labels) {
    const each = Math.ceil(labels.length / SHOWN);
    this.data = null;
    this.hidden = new Set(labels.map((_, i) => i).filter((i) => i % each));
    this.picture.replaceChildren();
    this.legend.replaceChildren(...labels.map((label, i) => this.#entry(label, i)));
    this.values = [...this.legend.querySelectorAll(".value")];
    this.time.textContent = "";
    this.key.hidden = true;
  }

  draw(data) {
    const last = this.data === null || this.slider.value === this.slider.max;
    const fraction = last ? 1 : this.slider.value / this.slider.max;
    this.data = data;
    this.slider.max = data.t.length - 1;
    this.slider.value = Math.round(fraction * (data.t.length - 1));
    this.key.hidden = !data.series.some((s) => s.bands);
    this.#paint();
  }

  /** What is drawn is not (or again) what the form says. */
  set stale(stale) {
    this.picture.classList.toggle("stale", stale);
  }

  #entry(label, i) {
    const line = svg("path", { class: `line ${look(i)}`, d: "M0 4H24" });
    const swatch = svg("svg", { class: "swatch", viewBox: "0 0 24 8", "aria-hidden": true }, line);
    const shown = { type: "button", title: "Show or hide", "aria-pressed": !this.hidden.has(i) };
    const button = make("button", shown, swatch, label);
    button.addEventListener("click", () => {
      if (!this.hidden.delete(i)) this.hidden.add(i);
      button.setAttribute("aria-pressed", !this.hidden.has(i));
      this.#paint();
    });
    return make("li", {}, button, make("span", { class: "value" }));
  }

  #paint() {
    const width = this.picture.clientWidth;
    const height = this.picture.clientHeight;
    if (!this.data || !width) return;
    const { t, series } = this.data;
    const shown = series.map((s, i) => ({ ...s, i })).filter(({ i }) => !this.hidden.has(i));
    const [low, high] = extent(shown.flatMap((s) => [s.own, ...(s.bands ?? [])]));
    const rows = ticks(low, high, height / 45);
    const left = 14 + 7 * Math.max(...rows.map((tick) => tick.label.length), 1);
    const right = width - 14;
    const bottom = height - 38;
    const start = t[0];
    const end = t[t.length - 1];
    const x = (time) => left + ((time - start) / (end - start || 1)) * (right - left);
    const y = (value) => bottom - ((value - low) / (high - low)) * (bottom - 10);
    this.scale = { x, y, left, right, bottom };

    const axes = svg("g");
    for (const tick of rows) {
      const at = y(tick.value).toFixed(1);
      axes.append(
        svg("path", { class: "grid", d: `M${left} ${at}H${right}` }),
        svg("text", { x: left - 6, y: at, class: "row" }, tick.label),
      );
    }
    const columns = start < end || start > end ? Math.max(2, (right - left) / 80) : 0;
    for (const tick of columns ? ticks(Math.min(start, end), Math.max(start, end), columns) : []) {
      const at = x(tick.value).toFixed(1);
      axes.append(
        svg("path", { class: "tick", d: `M${at} ${bottom}v5` }),
        svg("text", { x: at, y: bottom + 18, class: "column" }, tick.label),
      );
    }
    axes.append(
      svg("path", { class: "frame", d: `M${left} 10V${bottom}H${right}` }),
      svg("text", { x: (left + right) / 2, y: height - 4, class: "column" }, "time t"),
    );

    const line = (values) => through(t.map((time, i) => [x(time), y(values[i])]));
    const curves = svg("g", { class: "curves" });
    for (const { bands, i } of shown) {
      if (!bands) continue;
      const area = (a, b) => ribbon(t, bands[a], bands[b], x, y);
      curves.append(
        svg("path", { class: `ribbon wide ${look(i)}`, d: area(0, 4) }),
        svg("path", { class: `ribbon ${look(i)}`, d: area(1, 3) }),
      );
    }
    for (const { own, bands, i } of shown) {
      if (bands) curves.append(svg("path", { class: `line ${look(i)}`, d: line(bands[2]) }));
      const kind = bands ? "own" : "line";
      curves.append(svg("path", { class: `${kind} ${look(i)}`, d: line(own) }));
      const reached = own.findLastIndex(Number.isFinite);
      if (reached >= 0 && reached < t.length - 1) {
        // Where the solver gave up.
        const at = `M${x(t[reached]).toFixed(1)} ${y(own[reached]).toFixed(1)}`;
        curves.append(svg("path", { class: `end ${look(i)}`, d: `${at}m-5-5l10 10m0-10l-10 10` }));
      }
    }
    this.cursor = svg("g", { class: "cursor" });
    this.picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.picture.setAttribute("aria-label", summary(t, series, this.hidden));
    this.picture.replaceChildren(axes, curves, this.cursor);
    this.#readOut();
  }

  #follow(event) {
    if (!this.data || !this.scale) return;
    const at = event.clientX - this.picture.getBoundingClientRect().left;
    const far = this.data.t.map((time) => Math.abs(this.scale.x(time) - at));
    this.slider.value = far.reduce((nearest, x, i) => (x < far[nearest] ? i : nearest), 0);
    this.#readOut();
  }

  #readOut() {
    if (!this.data || !this.scale) return;
    const at = Number(this.slider.value);
    const { t, series } = this.data;
    const { x, y, bottom } = this.scale;
    const column = x(t[at]).toFixed(1);
    const marks = [svg("path", { d: `M${column} 10V${bottom}` })];
    const spoken = [];
    series.forEach(({ label, own, bands }, i) => {
      const value = (bands ? bands[2] : own)[at];
      const spread = bands ? ` (${text(bands[0][at], 4)} to ${text(bands[4][at], 4)})` : "";
      this.values[i].textContent = text(value) + spread;
      if (this.hidden.has(i)) return;
      spoken.push(`${label} ${text(value)}${spread}`);
      if (Number.isFinite(value)) {
        marks.push(svg("circle", { class: look(i), cx: column, cy: y(value).toFixed(1), r: 4 }));
      }
    });
    this.cursor.replaceChildren(...marks);
    this.time.textContent = `t = ${text(t[at])}`;
    this.slider.setAttribute("aria-valuetext", `t = ${text(t[at])}: ${spoken.join(", ")}`);
  }
}

/** The lowest and the highest finite value. */
function range(values) {
  const finite = values.filter(Number.isFinite);
  return [
    finite.reduce((a, b) => Math.min(a, b), Infinity),
    finite.reduce((a, b) => Math.max(a, b), -Infinity),
  ];
}

/** Those of all lists, with some room. */
function extent(lists) {
  const [low, high] = range(lists.flatMap(range));
  if (low > high) return [0, 1];
  // Rounding alone is not worth an axis of its own.
  const size = Math.max(Math.abs(low), Math.abs(high));
  const least = size * 1e-9 || 1;
  const room = high - low < least ? size / 10 || 1 : (high - low) * 0.04;
  return [low - room, high + room];
}

function ribbon(t, low, high, x, y) {
  const both = (i) => Number.isFinite(low[i]) && Number.isFinite(high[i]);
  const there = t.map((_, i) => i).filter(both);
  if (!there.length) return "";
  const point = (values) => (i) => `${x(t[i]).toFixed(1)} ${y(values[i]).toFixed(1)}`;
  return `M${[...there.map(point(high)), ...there.reverse().map(point(low))].join("L")}Z`;
}

function summary(t, series, hidden) {
  const said = series
    .filter((_, i) => !hidden.has(i))
    .map(({ label, own, bands }) => {
      const [low, high] = range(bands ? bands[2] : own);
      return `${label} between ${text(low, 3)} and ${text(high, 3)}`;
    });
  const what = series.some((s) => s.bands) ? "Median of a sweep" : "Trajectory";
  return `${what}, t from ${text(t[0])} to ${text(t[t.length - 1])}: ${said.join("; ")}.`;
}
