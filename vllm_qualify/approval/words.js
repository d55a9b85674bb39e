const DAY_S = 86400;

// Made once: each call of toLocaleString makes another one.
const COUNT = new Intl.NumberFormat("en");
const RATE = new Intl.NumberFormat("en", { maximumSignificantDigits: 5 });
const today = Math.floor(Date.now() / 1000 / DAY_S);

// The day on which an approval ends, in days.
function endOf(expires) {
  return expires === null ? null : Date.parse(`${expires}T00:00:00Z`) / 1000 / DAY_S;
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

function stateOf(name) {
  return element("span", { class: name.replaceAll(" ", "-") }, name);
}

