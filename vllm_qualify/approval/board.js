const FILTERS = {
  model: (cell) => [cell.model],
  gpu: (cell) => [cell.gpu],
  engine: (cell) => cell.engines,
  state: (cell) => [cell.state, cell.newer],
};
const STATES = [
  "approved", "waiting for a decision", "expired", "revoked", "rejected", "not passed", "never qualified",
];
const ORDER = new Intl.Collator("en", { numeric: true });
const form = document.getElementById("filters");
const cells = [...document.getElementById("cells").tBodies[0].rows].map(cellOf);

// --- what a row tells

function cellOf(row) {
  const [state, newer, by, expires, engines, startedS, runs] = JSON.parse(row.dataset.row);
  const parts = [...row.cells].slice(0, 4).map((column) => column.textContent);
  const until = endOf(expires);
  const isOver = until !== null && today >= until;
  return {
    id: parts.join("/"), model: parts[0], gpu: parts[2], row, text: null,
    state: isOver && state === "approved" ? "expired" : state, newer, by, until, engines, startedS, runs,
  };
}

function textOf(cell) {
  cell.text ??= [cell.id, cell.state, cell.newer, cell.by, ...cell.engines, ...cell.runs].join(" ").toLowerCase();
  return cell.text;
}

// --- the rows

function complete(cell) {
  const columns = cell.row.cells;
  // On narrow screens the rows are blocks, which are no table to a screen reader without these.
  cell.row.setAttribute("role", "row");
  for (const column of columns) column.setAttribute("role", column === columns[0] ? "rowheader" : "cell");
  // Many cells are of one model: a list of links needs their whole names.
  columns[0].firstElementChild?.setAttribute("aria-label", cell.id);
  if (cell.state === "expired") columns[4].firstElementChild.replaceWith(stateOf("expired"));
  if (cell.until !== null) columns[7].append(element("small", {}, ago(today - cell.until)));
  if (cell.startedS !== null) columns[8].append(element("small", {}, ago(today - Math.floor(cell.startedS / DAY_S))));
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
    number += isShown;
  }
  document.getElementById("count").textContent = `${COUNT.format(number)} of ${COUNT.format(cells.length)} cells`;
}

function remember() {
  const kept = new URLSearchParams();
  for (const { name, value } of form.elements) if (name && value.trim()) kept.set(name, value.trim());
  window.history.replaceState(null, "", `#${kept}`);
}

function recall() {
  const kept = new URLSearchParams(location.hash.slice(1));
  for (const name of [...Object.keys(FILTERS), "text"]) choose(name, kept.get(name) ?? "");
  show();
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
window.addEventListener("hashchange", recall);
recall();
form.hidden = false;
