const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs.map(runOf);

function text(number) {
  return number === null ? null : data.texts[number];
}

function runOf([id, engine, metric, score, lower, upper, output]) {
  return { id, isLast: id === data.last, engine: text(engine), metric: text(metric), score, lower, upper, output };
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
  const summary = `newest ${format(values.at(-1))}, lowest ${format(Math.min(...values))}, highest ${format(Math.max(...values))}`;
  const missing = points.length - known.length;
  const gaps = missing ? ` ${missing} of ${points.length} reports have no such value.` : "";
  const caption = `${title}, ${what}, from the oldest report to the newest. The filled point is the last approved one.${gaps}`;
  return figure(caption, chart(`${title}: ${summary}. The table has all values.`, points, known, format));
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
  const step = [1, 2, 5, 10].map((factor) => factor * magnitude).find((candidate) => candidate >= (to - from) / 3.5);
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
  const title = drawing("title", {}, `${point.name}, ${point.engine ?? "engine unknown"}: ${format(point.value)}${interval}`);
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

const byTime = [...runs].sort((one, other) => (one.id < other.id ? -1 : 1));
if (byTime.length) document.getElementById("charts").replaceWith(charts(byTime));
const end = endOf(data.expires);
if (end !== null) document.getElementById("until").append(element("small", {}, ago(today - end)));
if (end !== null && today >= end) {
  for (const state of document.querySelectorAll("[data-last] .approved")) state.replaceWith(stateOf("expired"));
}
