// The page: what is chosen and moved becomes a request, its answer a plot.

import { make, set } from "./elements.js";
import { BadValue, Form } from "./form.js";
import { Load } from "./load.js";
import { flatten, quantiles, text } from "./numbers.js";
import { Plot } from "./plot.js";
import { hasToken, problems, ServiceError, solve, useToken } from "./service.js";

const QUIET = 80; // milliseconds without a change before a request
const PATIENCE = 250; // milliseconds of changes until a request all the same
const QUANTILES = [0.05, 0.25, 0.5, 0.75, 0.95];

const $ = (id) => document.getElementById(id);
const plot = new Plot({
  picture: $("plot"),
  slider: $("at"),
  time: $("time"),
  legend: $("legend"),
  key: $("key"),
});
const load = new Load($("figures"), $("load-note"));
let served = [];
let form = null;
let drawn = null;
let asked = new AbortController();
let timer = null;
let waitingSince = null;

async function begin() {
  try {
    served = await problems();
  } catch (error) {
    refused(error, begin);
    return;
  }
  say(null);
  $("token-form").hidden = true;
  $("problems").replaceChildren(...served.map(entry));
  if (!served.length) {
    say("This service has no problems registered.");
    return;
  }
  document.querySelector("main").hidden = false;
  load.start();
  choose();
}

function entry({ name, description, state, parameters, alg }) {
  const size = flatten(state.default).length;
  const facts = [count(size, "state"), count(parameters.size, "parameter"), alg].filter(Boolean);
  // A path: no id of an element.
  const link = make("a", { href: `#/${encodeURIComponent(name)}` }, name);
  const small = make("small", {}, facts.join(", "));
  return make("li", { title: description || null }, link, small);
}

function count(n, what) {
  return `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;
}

/** The problem that the address names, or the one that is shown, or the first. */
function choose() {
  const wanted = decodeURIComponent(location.hash.slice(2));
  const problem = served.find(({ name }) => name === wanted) ?? form?.problem ?? served[0];
  if (!problem || form?.problem === problem) return;
  for (const link of $("problems").querySelectorAll("a")) {
    set(link, { "aria-current": link.textContent === problem.name || null });
  }
  document.title = `${problem.name} – ensembleode`;
  $("name").textContent = problem.name;
  $("description").textContent = problem.description ?? "";
  form = new Form(problem);
  plot.clear(form.u0.labels);
  drawn = null;
  show();
}

/** Something moved: ask soon, and no more for what was asked before. */
function changed() {
  asked.abort();
  waitingSince ??= performance.now();
  clearTimeout(timer);
  const left = PATIENCE - (performance.now() - waitingSince);
  timer = setTimeout(show, Math.max(0, Math.min(QUIET, left)));
}

/** Ask for the form's values, and for the sweep, and draw both answers. */
async function show() {
  clearTimeout(timer);
  asked.abort();
  asked = new AbortController();
  waitingSince = null;
  const { signal } = asked;
  const { problem } = form;
  const sweeping = form.sweeping.checked;
  const start = performance.now();
  let requests;
  try {
    requests = [form.body(), ...(sweeping ? [form.sweepBody()] : [])];
  } catch (error) {
    refused(error, show);
    return;
  }
  $("picture").setAttribute("aria-busy", "true");
  const [own, sweep] = await Promise.allSettled(
    requests.map((body) => solve(problem.name, body, signal)),
  );
  if (signal.aborted) return; // What was asked later is what counts.
  $("picture").removeAttribute("aria-busy");
  if (own.status === "rejected") {
    refused(own.reason, show);
    return;
  }
  if (sweep?.status === "rejected") refused(sweep.reason, show, true);
  else say(null);
  drawn = picture(own.value, sweep?.value);
  plot.draw(drawn);
  plot.stale = false;
  describe(own.value, sweep?.value, performance.now() - start);
  table();
}

/** What to draw: a line a component, and the quantiles of the trajectories that succeeded. */
function picture(own, sweep) {
  const labels = form.u0.labels;
  const t = own.t;
  const lines = components(own.u, t.length, labels.length);
  const good = sweep ? sweep.u.filter((_, i) => sweep.retcode[i] === "Success") : [];
  const all = good.map((u) => components(u, t.length, labels.length));
  return {
    t,
    series: labels.map((label, c) => ({
      label,
      own: lines[c],
      bands: all.length ? bands(all.map((one) => one[c]), t.length) : null,
    })),
  };
}

/** States over time as a list a component; what was not reached is NaN. */
function components(u, rows, size) {
  const lists = Array.from({ length: size }, () => new Float64Array(rows).fill(NaN));
  for (let row = 0; row < Math.min(u.length, rows); row++) {
    flatten(u[row]).forEach((value, c) => {
      if (value !== null) lists[c][row] = value;
    });
  }
  return lists;
}

function bands(lines, rows) {
  const lists = QUANTILES.map(() => new Float64Array(rows).fill(NaN));
  for (let row = 0; row < rows; row++) {
    const values = Float64Array.from(lines, (line) => line[row]).filter(Number.isFinite);
    if (!values.length) continue;
    quantiles(values, QUANTILES).forEach((value, q) => (lists[q][row] = value));
  }
  return lists;
}

/** Say how it went: return codes, steps and times. */
function describe(own, sweep, milliseconds) {
  const { stats, seconds, retcode, t } = own;
  const ms = (x) => `${text(x, 3)} ms`;
  const took = (s) => s && `waited ${ms(1000 * s.wait)}, solved in ${ms(1000 * s.solve)}`;
  const said = [
    `${retcode}, ${t.length} save points`,
    stats && `${stats.naccept} steps (${stats.nreject} rejected), ${stats.nf} evaluations`,
    took(seconds),
    `${ms(milliseconds)} in all`,
  ];
  const problems = [];
  if (retcode !== "Success") {
    const last = drawn.series[0].own.findLastIndex(Number.isFinite);
    const where = last >= 0 ? ` after t = ${text(t[last])}` : "";
    problems.push(`The solver gave up${where}: ${retcode}.`);
  }
  let swept = "";
  if (sweep) {
    const all = sweep.retcode.length;
    const codes = new Map();
    for (const code of sweep.retcode) codes.set(code, (codes.get(code) ?? 0) + 1);
    swept = ` Sweep: ${[`${all} trajectories`, took(sweep.seconds)].filter(Boolean).join(", ")}.`;
    const failed = all - (codes.get("Success") ?? 0);
    codes.delete("Success");
    if (failed) {
      const which = [...codes].map(([code, n]) => `${code} ${n}`).join(", ");
      problems.push(
        `${failed} of ${all} trajectories of the sweep failed and are in no ribbon: ${which}.`,
      );
    }
  }
  message($("failures"), problems.join(" "));
  $("status").textContent = `${said.filter(Boolean).join("; ")}.${swept}`;
}

/** The numbers of the plot, as a table, once that is looked at. */
function table() {
  if (!$("data").open || !drawn) return;
  const { t, series } = drawn;
  const columns = [["t", t]];
  for (const { label, own, bands } of series) {
    columns.push([label, own]);
    bands?.forEach((values, q) => columns.push([`${label}, ${100 * QUANTILES[q]}%`, values]));
  }
  const head = columns.map(([name]) => make("th", { scope: "col" }, name));
  const rows = t.map((_, row) => {
    const [first, ...rest] = columns.map(([, values]) => text(values[row], 6));
    const cells = rest.map((words) => make("td", {}, words));
    return make("tr", {}, make("th", { scope: "row" }, first), ...cells);
  });
  const thead = make("thead", {}, make("tr", {}, ...head));
  $("table").replaceChildren(thead, make("tbody", {}, ...rows));
}

/** An error, in words, at its field; `again` where it is worth another try. */
function refused(error, again, sweep = false) {
  if (error.name === "AbortError") return;
  $("picture").removeAttribute("aria-busy");
  plot.stale = !sweep;
  if (!sweep) {
    message($("failures"), "");
    $("status").textContent = drawn ? "The plot shows the last answer, of other values." : "";
  }
  if (error instanceof BadValue) {
    say(error.message, error.fields);
    return;
  }
  if (!(error instanceof ServiceError)) throw error;
  if (error.status === 401) {
    say(hasToken() ? `The token is refused: ${error.message}` : "This service asks for a token.");
    load.stop();
    $("token-form").hidden = false;
    $("token").focus();
    return;
  }
  const id = error.id ? ` (id ${error.id})` : "";
  let fields = form?.fieldsOf(error.path, sweep) ?? [];
  if (sweep && error.status === 413 && !fields.length) fields = [form.count];
  const later = { 0: 3, 429: 1, 503: 2 }[error.status];
  const wait = later && (error.retryAfter ?? later);
  const retry = wait ? ` Trying again in ${wait} s.` : "";
  say(`${sweep ? "Sweep: " : ""}${error.message}${id}${retry}`, fields);
  if (wait) {
    clearTimeout(timer);
    timer = setTimeout(again, 1000 * wait);
  }
}

/** The message at the top, with links to the fields it is about; null: all is well. */
function say(words, fields = []) {
  for (const field of form?.fields ?? []) field.mark(fields.includes(field));
  const links = fields.map((field) => {
    const link = make("a", { href: `#${field.number.id}` }, field.label);
    link.addEventListener("click", (event) => {
      event.preventDefault(); // The address names the problem.
      field.number.focus();
    });
    return link;
  });
  message($("alert"), words ?? "", links);
}

/** A region's words; the same ones are not spoken again. */
function message(region, words, links = []) {
  if (region.dataset.words === words) return;
  region.dataset.words = words;
  const said = [...links.flatMap((link) => [link, ": "]), words];
  region.replaceChildren(...(words ? [make("p", { class: "message" }, ...said)] : []));
}

window.addEventListener("hashchange", choose);
$("values").addEventListener("input", (event) => {
  if (event.target === $("vary")) form.varied();
  $("sweep-values").hidden = !form.sweeping.checked;
  changed();
});
$("values").addEventListener("submit", (event) => {
  event.preventDefault();
  show();
});
$("values").addEventListener("reset", (event) => {
  event.preventDefault();
  form.reset();
  show();
});
$("data").addEventListener("toggle", table);
$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useToken($("token").value);
  $("token").value = "";
  form = null;
  begin();
});
begin();
