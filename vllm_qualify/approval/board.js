"use strict";
(() => {
const DAY_S = 86400;
const DASH = "—";
const UNTRUSTED = "none that can be trusted: see the report";
const KEY = /^reports(\/[A-Za-z0-9_@+=~][A-Za-z0-9_@+=~.,:-]*)+$/;
const FILTERS = {
  model: (cell) => [cell.model],
  gpu: (cell) => [cell.gpu],
  engine: (cell) => cell.engines,
  state: (cell) => [cell.state, cell.newer],
};
const STATES = [
  "approved", "waiting for a decision", "expired", "revoked", "rejected", "not passed", "never qualified",
];

// Made once: each call of toLocaleString or localeCompare makes another one.
const COUNT = new Intl.NumberFormat("en");
const RATE = new Intl.NumberFormat("en", { maximumSignificantDigits: 5 });
const ORDER = new Intl.Collator("en", { numeric: true });
const today = Math.floor(Date.now() / 1000 / DAY_S);
const data = JSON.parse(document.getElementById("data").textContent);
const form = document.getElementById("filters");
const table = document.getElementById("cells");
const rows = [...table.tBodies[0].rows];
const cells = data.cells.map(cellOf);
const byRow = new Map(cells.map((cell) => [cell.row, cell]));

// --- what the data tells

function text(number) {
  return number === null ? null : data.texts[number];
}

function cellOf([parts, state, newer, by, expires, engines, runs, last], at) {
  const until = expires === null ? null : Date.parse(`${expires}T00:00:00Z`) / 1000 / DAY_S;
  const isOver = until !== null && today >= until;
  return {
    id: parts.join("/"), model: parts[0], gpu: parts[2], row: rows[at], history: null, found: null,
    state: isOver && text(state) === "approved" ? "expired" : text(state),
    newer: text(newer), by: text(by), until, engines: engines.map(text), raw: runs, last,
  };
}

function runOf(cell, [id, startedS, standing, told, engine, image, metric, score, lower, upper, output, gpus]) {
  const isLast = id === cell.last;
  const isExpired = isLast && text(standing) === "approved" && cell.state === "expired";
  return {
    id, startedS, isLast, standing: isExpired ? "expired" : text(standing), told: text(told), engine: text(engine),
    image: text(image), metric: text(metric), score, lower, upper, output, gpus,
  };
}

function textOf(cell) {
  const names = cell.raw.flatMap((run) => [run[0], text(run[4]), text(run[5]), text(run[3])]);
  cell.found ??= [cell.id, cell.state, cell.newer, cell.by, ...cell.engines, ...names].join(" ").toLowerCase();
  return cell.found;
}

function address(cell, run) {
  const key = `reports/${cell.id}/${run.id}/report.html`;
  return KEY.test(key) ? key.split("/").map(encodeURIComponent).join("/") : null;
}

// --- words

function days(number) {
  return number === 1 ? "1 day" : `${COUNT.format(number)} days`;
}

function ago(number) {
  return number === 0 ? "today" : number > 0 ? `${days(number)} ago` : `in ${days(-number)}`;
}

function share(number, decimals = 2) {
  return `${(100 * number).toFixed(decimals)}\u00a0%`;
}

function rate(number, decimals = null) {
  return decimals === null ? RATE.format(number) : number.toFixed(decimals).replace(/\B(?=(\d{3})+(?!\d))/g, ",");
}

// --- elements: text from outside is only ever text, or the value of an attribute

function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function drawing(name, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function none(reason) {
  return element("span", { class: "none" }, DASH, element("span", { class: "unseen" }, ` (${reason})`));
}

function stateOf(name) {
  return element("span", { class: name.replaceAll(" ", "-") }, name);
}

// --- the rows

function complete(cell) {
  const columns = cell.row.cells;
  const name = columns[0];
  const told = { type: "button", "aria-expanded": "false", "aria-label": `${cell.id}: history` };
  cell.button = element("button", told, name.textContent);
  name.replaceChildren(cell.button);
  if (cell.state === "expired") columns[4].firstElementChild.replaceWith(stateOf("expired"));
  if (cell.until !== null) columns[7].append(element("small", {}, ago(today - cell.until)));
  const startedS = cell.raw.length ? cell.raw[0][1] : null;
  if (startedS !== null) columns[8].append(element("small", {}, ago(today - Math.floor(startedS / DAY_S))));
}

function tally() {
  const list = document.getElementById("tally");
  for (const state of STATES) {
    const number = cells.filter((cell) => FILTERS.state(cell).includes(state)).length;
    if (!number) continue;
    const link = element("a", { href: `#${new URLSearchParams({ state })}` }, `${COUNT.format(number)} ${state}`);
    list.append(element("li", {}, link));
  }
  list.hidden = false;
}

// --- filters

function choices(select, values) {
  const sorted = [...new Set(values)].filter((value) => value).sort(ORDER.compare);
  select.append(...sorted.map((value) => new Option(value, value)));
}

function choose(name, value) {
  const field = form.elements[name];
  const isUnknown = field.options && ![...field.options].some((option) => option.value === value);
  if (isUnknown) field.append(new Option(value, value));
  field.value = value;
}

function show() {
  const wanted = Object.keys(FILTERS).filter((name) => form.elements[name].value);
  const words = form.elements.text.value.toLowerCase().split(/\s+/).filter((word) => word);
  let number = 0;
  for (const cell of cells) {
    const isShown = wanted.every((name) => FILTERS[name](cell).includes(form.elements[name].value))
      && words.every((word) => textOf(cell).includes(word));
    cell.row.hidden = !isShown;
    if (cell.history) cell.history.hidden = !isShown || !isOpen(cell);
    number += isShown;
  }
  document.getElementById("count").textContent = `${COUNT.format(number)} of ${COUNT.format(cells.length)} cells`;
}

function remember() {
  const kept = new URLSearchParams();
  for (const { name, value } of form.elements) if (name && value.trim()) kept.set(name, value.trim());
  for (const cell of cells) if (isOpen(cell)) kept.append("cell", cell.id);
  window.history.replaceState(null, "", `#${kept}`);
}

function recall() {
  const kept = new URLSearchParams(location.hash.slice(1));
  for (const name of [...Object.keys(FILTERS), "text"]) choose(name, kept.get(name) ?? "");
  const opened = new Set(kept.getAll("cell"));
  for (const cell of cells) if (isOpen(cell) !== opened.has(cell.id)) toggle(cell);
  show();
  cells.find(isOpen)?.row.scrollIntoView();
}

// --- the history of a cell

function isOpen(cell) {
  return cell.button.getAttribute("aria-expanded") === "true";
}

function toggle(cell) {
  const opens = !isOpen(cell);
  if (opens && !cell.history) {
    cell.history = historyOf(cell);
    cell.row.after(cell.history);
    cell.button.setAttribute("aria-controls", cell.history.id);
  }
  cell.history.hidden = !opens;
  cell.row.classList.toggle("open", opens);
  cell.button.setAttribute("aria-expanded", String(opens));
}

function historyOf(cell) {
  const runs = cell.raw.map((run) => runOf(cell, run));
  const byTime = [...runs].sort((one, other) => (one.id < other.id ? -1 : 1));
  const title = element("h2", {}, `History of ${cell.id}`);
  const parts = runs.length ? [charts(byTime), tableOf(cell, runs)] : [none("no report")];
  const section = element("section", { "aria-label": `History of ${cell.id}` }, title, ...parts);
  const column = element("td", { role: "cell", colspan: "9" }, section);
  return element("tr", { role: "row", class: "history", id: `history-${cells.indexOf(cell)}` }, column);
}

function tableOf(cell, runs) {
  const names = ["Run", "State", "Engine", "Image", "Accuracy", "Output per GPU", "GPUs"];
  const head = names.map((name, at) => element("th", { scope: "col", ...(at > 3 && { class: "number" }) }, name));
  const caption = element("caption", {}, "The newest reports, the newest first, and the approved one");
  const found = element(
    "table", { class: "runs" }, caption,
    element("thead", {}, element("tr", {}, ...head)),
    element("tbody", {}, ...runs.map((run) => rowOf(cell, run))),
  );
  return element("div", { class: "wide", role: "region", tabindex: "0", "aria-label": `Reports of ${cell.id}` }, found);
}

function rowOf(cell, run) {
  const at = run.startedS === null ? null : `${new Date(1000 * run.startedS).toISOString().slice(0, 16).replace("T", " ")} UTC`;
  const href = address(cell, run);
  const name = href === null ? element("span", {}, at ?? run.id) : element("a", { href }, at ?? run.id);
  return element(
    "tr", {},
    element("th", { scope: "row" }, name, ...(at === null ? [] : [element("small", {}, element("code", {}, run.id))])),
    element("td", { class: "state" }, stateOf(run.standing), ...(run.told === null ? [] : [element("small", {}, run.told)])),
    element("td", {}, run.engine ?? none("not in its manifest")),
    element("td", {}, run.image === null ? none("no image, or not reported") : element("code", {}, run.image)),
    element("td", { class: "number" }, ...(run.score === null ? [none(UNTRUSTED)] : scoreOf(run))),
    element("td", { class: "number" }, run.output === null ? none(UNTRUSTED) : `${rate(run.output)} tok/s`),
    element("td", { class: "number" }, run.gpus === null ? none("no GPU, or not reported") : String(run.gpus)),
  );
}

function scoreOf(run) {
  const interval = run.lower === null ? "no interval" : `${share(run.lower)} to ${share(run.upper)}`;
  return [share(run.score), element("small", {}, interval), element("small", {}, run.metric)];
}

// --- charts

const WIDTH = 420, HEIGHT = 200, LEFT = 62, RIGHT = 14, TOP = 12, BOTTOM = 42, FONT = 12, LETTER = 7;

function charts(runs) {
  const metric = runs.findLast((run) => run.metric !== null)?.metric ?? null;
  const scores = runs.map((run) => pointOf(run, run.metric === metric ? run.score : null, run.lower, run.upper));
  const outputs = runs.map((run) => pointOf(run, run.output, null, null));
  return element(
    "div", { class: "charts" },
    figureOf(`Accuracy: ${metric ?? "not measured"}`, "with its interval", scores, share),
    figureOf("Output per GPU, tok/s", "the load's", outputs, rate),
  );
}

function pointOf(run, value, lower, upper) {
  return { engine: run.engine, isLast: run.isLast, name: run.id, value, lower: lower ?? value, upper: upper ?? value };
}

function figureOf(title, what, points, format) {
  const known = points.filter((point) => point.value !== null);
  if (!known.length) return figure(`${title}: no report has one that can be trusted.`);
  const values = known.map((point) => point.value);
  const told = `newest ${format(values.at(-1))}, lowest ${format(Math.min(...values))}, highest ${format(Math.max(...values))}`;
  const missing = points.length - known.length;
  const gaps = missing ? ` ${missing} of ${points.length} reports have no such value.` : "";
  const caption = `${title}, ${what}, from the oldest report to the newest. The filled point is the last approved one.${gaps}`;
  return figure(caption, chart(`${title}: ${told}. The table has all values.`, points, known, format));
}

function figure(caption, ...drawings) {
  return element("figure", {}, ...drawings, element("figcaption", {}, caption));
}

function chart(label, points, known, format) {
  const scale = scaleOf(Math.min(...known.map((point) => point.lower)), Math.max(...known.map((point) => point.upper)));
  const slot = (WIDTH - LEFT - RIGHT) / points.length;
  const x = (at) => LEFT + slot * (at + 0.5);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - scale.least) / (scale.most - scale.least));
  return drawing(
    "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label, "font-size": FONT, fill: "currentColor" },
    ...scale.steps.map((value) => line(LEFT, y(value), WIDTH - RIGHT, y(value), 0.15)),
    ...scale.steps.map((value) => word(LEFT - 8, y(value) + 4, "end", format(value, scale.decimals(value, format)))),
    ...engineLabels(points, slot, x),
    drawing("path", { d: pathOf(points, x, y), fill: "none", stroke: "currentColor", "stroke-opacity": 0.5 }),
    ...points.flatMap((point, at) => (point.value === null ? [] : marks(point, x(at), y, format))),
  );
}

function scaleOf(least, most) {
  const reach = most - least || Math.abs(most) / 10 || 1;
  const [from, to] = [Math.max(0, least - reach / 10), most + reach / 10];
  const magnitude = 10 ** Math.floor(Math.log10((to - from) / 3));
  const step = [1, 2, 5, 10].map((factor) => factor * magnitude).find((found) => found >= (to - from) / 3.5);
  const first = Math.ceil(from / step);
  const steps = Array.from({ length: Math.floor(to / step) - first + 1 }, (_, at) => (first + at) * step);
  const decimals = (_, format) => Math.max(0, Math.ceil(-Math.log10(step * (format === share ? 100 : 1)) - 1e-9));
  return { least: from, most: to, steps, decimals };
}

function pathOf(points, x, y) {
  const known = points.map((point, at) => ({ ...point, at, isAfterGap: !at || points[at - 1].value === null }));
  const drawn = known.filter((point) => point.value !== null);
  return drawn.map((point) => `${point.isAfterGap ? "M" : "L"}${x(point.at).toFixed(1)} ${y(point.value).toFixed(1)}`).join("");
}

function marks(point, x, y, format) {
  const interval = point.lower === point.upper ? "" : ` (${format(point.lower)} to ${format(point.upper)})`;
  const title = drawing("title", {}, `${point.name}, ${point.engine ?? "engine not told"}: ${format(point.value)}${interval}`);
  const fill = point.isLast ? "currentColor" : "var(--panel)";
  const dot = { cx: x, cy: y(point.value), r: 4, stroke: "currentColor", "stroke-width": 1.5, fill };
  return [...(interval ? [line(x, y(point.lower), x, y(point.upper), 0.7)] : []), drawing("circle", dot, title)];
}

// In two lines by turns, each up to the next one in its line.
function engineLabels(points, slot, x) {
  const begins = points.flatMap((point, at) => (point.engine !== null && point.engine !== points[at - 1]?.engine ? [at] : []));
  return begins.map((at, number) => {
    const isAtEnd = at === points.length - 1;
    const slots = isAtEnd ? 2 : (begins[number + 2] ?? points.length) - at;
    const letters = Math.floor((slots * slot) / LETTER);
    const version = points[at].engine.split(" ").pop();
    const shown = version.length > letters ? `${version.slice(0, Math.max(1, letters - 1))}…` : version;
    const [left, anchor] = isAtEnd ? [WIDTH, "end"] : [x(at) - slot / 2, "start"];
    return word(left, HEIGHT - BOTTOM + FONT * (1.5 + (number % 2) * 1.2), anchor, shown, points[at].engine);
  });
}

function line(x1, y1, x2, y2, opacity) {
  return drawing("line", { x1, y1, x2, y2, stroke: "currentColor", "stroke-opacity": opacity });
}

function word(x, y, anchor, shown, whole = null) {
  return drawing("text", { x, y, "text-anchor": anchor }, shown, ...(whole ? [drawing("title", {}, whole)] : []));
}

// --- begin

let remembering = 0;
function rememberSoon() {
  clearTimeout(remembering);
  remembering = setTimeout(remember, 200);
}

cells.forEach(complete);
tally();
for (const name of Object.keys(FILTERS)) choices(form.elements[name], name === "state" ? [] : cells.flatMap(FILTERS[name]));
form.elements.state.append(...STATES.map((state) => new Option(state, state)));
form.addEventListener("input", () => { show(); rememberSoon(); });
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", () => setTimeout(() => { show(); remember(); }));
table.addEventListener("click", (event) => {
  const cell = byRow.get(event.target.closest("tr"));
  if (!cell || event.target.closest("a") || String(window.getSelection())) return;
  toggle(cell);
  remember();
});
window.addEventListener("hashchange", recall);
recall();
form.hidden = false;
})();
