"use strict";
// Small helpers. Whatever comes from a run is put into the page by `textContent` alone, never as markup.

const DATA = JSON.parse(document.getElementById("data").textContent);
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const DASH_LENGTHS = ["none", "6 3", "2 3", "6 3 2 3", "10 3", "10 3 2 3"];

// Colours are the style sheet's, which has them for light and for dark: of runs and lines by number.
const COLOURS = 12;
const DARK = window.matchMedia("(prefers-color-scheme: dark)");
const colourName = (index) => `--c${(index + COLOURS) % COLOURS}`;
const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colourOf = (index) => theme(colourName(index));

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined) node.append(child instanceof Node ? child : String(child));
  }
  return node;
}

function number(value, unit = "") {
  if (value === null || value === undefined) return "–";
  if (unit === "s") return duration(value);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  if (size >= 100) return value.toFixed(1);
  if (size >= 0.001) return String(Number(value.toPrecision(4)));
  return value.toExponential(2);
}

// Of a share or a score, which stand beside each other: always so many digits.
const share = (value) => (value === null || value === undefined ? "–" : Math.abs(value) < 100 ? value.toFixed(3) : number(value));

function duration(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 100) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  if (seconds < 5400) return `${(seconds / 60).toFixed(1)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} d`;
}

function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// Plotly reads a little markup in names; this makes it read none.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// A long name may be cut after what divides it.
const cuttable = (text) => text.split(/(?<=[/_])/).flatMap((part, index) => (index ? [el("wbr"), part] : [part]));

function table(heads, rows, numeric = () => false) {
  const head = el("tr", {}, heads.map((name, column) => el("th", { class: numeric(column) ? "num" : null }, name)));
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, rows)));
}

function options(select, pairs) {
  for (const [value, text] of pairs) select.append(el("option", { value }, text));
  return select;
}
