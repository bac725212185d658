// The server's load, from /metrics.

import { make, svg, through } from "./elements.js";
import { text } from "./numbers.js";
import { metrics } from "./service.js";

const EVERY = 2000; // milliseconds
const WINDOW = 30; // polls that quantiles and means are of
const KEPT = 60; // polls in a sparkline

const SPARK = {
  class: "spark",
  viewBox: `0 0 ${KEPT - 1} 20`,
  preserveAspectRatio: "none",
  "aria-hidden": "true",
};

const FIGURES = [
  ["queue", "Queued trajectories", ""],
  ["rate", "Requests a second", ""],
  ["batch", "Trajectories a batch, mean", ""],
  ["solve50", "Solve, p50", " ms"],
  ["solve99", "Solve, p99", " ms"],
  ["total50", "Total, p50", " ms"],
  ["total99", "Total, p99", " ms"],
];

/** Prometheus text: the sum over all labels of each series, and of each bucket of a histogram. */
export function parse(lines) {
  const sums = new Map();
  const buckets = new Map();
  for (const line of lines.split("\n")) {
    const match = line.match(/^(\w+)(?:\{(.*)\})?\s+(\S+)/);
    if (!match || line.startsWith("#")) continue;
    const [, name, labels, value] = match;
    const bound = name.endsWith("_bucket") && labels?.match(/(?:^|,)le="([^"]*)"/);
    if (bound) {
      const of = name.slice(0, -"_bucket".length);
      const le = bound[1] === "+Inf" ? Infinity : Number(bound[1]);
      if (!buckets.has(of)) buckets.set(of, new Map());
      buckets.get(of).set(le, (buckets.get(of).get(le) ?? 0) + Number(value));
    } else {
      sums.set(name, (sums.get(name) ?? 0) + Number(value));
    }
  }
  return { sums, buckets };
}

/** The `q` quantile of what a histogram counted between two polls, as Prometheus estimates it. */
export function histogramQuantile(q, now, before) {
  const counts = [...(now ?? [])].sort(([a], [b]) => a - b);
  const added = counts.map(([le, count]) => [le, count - (before?.get(le) ?? 0)]);
  const all = added.at(-1)?.[1] ?? 0;
  if (!(all > 0)) return NaN;
  let [low, below] = [0, 0];
  for (const [le, count] of added) {
    if (count >= q * all) {
      if (le === Infinity) return low;
      return low + ((le - low) * (q * all - below)) / (count - below);
    }
    [low, below] = [le, count];
  }
  return low;
}

/** Figures and sparklines, polled while the page is looked at. */
export class Load {
  constructor(list, note) {
    this.note = note;
    this.polls = [];
    this.rows = FIGURES.map(([key, name, unit]) => {
      const line = svg("path");
      const value = make("dd", {}, "–", svg("svg", SPARK, line));
      list.append(make("div", {}, make("dt", {}, name), value));
      return { key, value, unit, line, history: [] };
    });
  }

  start() {
    this.stop();
    this.#poll();
    this.timer = setInterval(() => document.hidden || this.#poll(), EVERY);
  }

  stop() {
    clearInterval(this.timer);
  }

  async #poll() {
    let now;
    try {
      now = { ...parse(await metrics()), at: performance.now() };
    } catch (error) {
      this.note.textContent = `Not known: ${error.message}`;
      this.polls = [];
      return;
    }
    this.polls = [...this.polls, now].slice(-WINDOW - 1);
    const figures = compare(now, this.polls[0], this.polls.at(-2) ?? now);
    for (const { key, value, unit, line, history } of this.rows) {
      const figure = figures[key];
      history.push(figure);
      if (history.length > KEPT) history.shift();
      value.firstChild.textContent = Number.isFinite(figure) ? text(figure, 3) + unit : "–";
      line.setAttribute("d", spark(history));
    }
    const seconds = Math.round((now.at - this.polls[0].at) / 1000);
    this.note.textContent = seconds
      ? `Means and quantiles of the last ${seconds} s.`
      : "Just begun.";
  }
}

function compare(now, first, last) {
  const since = (name, then) => (now.sums.get(name) ?? 0) - (then.sums.get(name) ?? 0);
  const ms = (name, q) =>
    1000 * histogramQuantile(q, now.buckets.get(name), first.buckets.get(name));
  return {
    queue: now.sums.get("ensembleode_queue_trajectories") ?? NaN,
    rate: (1000 * since("ensembleode_requests_total", last)) / (now.at - last.at),
    batch:
      since("ensembleode_batch_size_sum", first) / since("ensembleode_batch_size_count", first),
    solve50: ms("ensembleode_solve_seconds", 0.5),
    solve99: ms("ensembleode_solve_seconds", 0.99),
    total50: ms("ensembleode_request_seconds", 0.5),
    total99: ms("ensembleode_request_seconds", 0.99),
  };
}

function spark(history) {
  const most = Math.max(...history.filter(Number.isFinite), 1e-12);
  const first = KEPT - history.length;
  return through(history.map((value, i) => [first + i, 18.5 - (17 * value) / most]));
}
