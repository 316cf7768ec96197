"use strict";
// Small helpers. Whatever comes from a run is put into the page by `textContent` alone, never as markup.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUN_COLOURS = ["#2563eb", "#e07b00", "#15803d", "#b3266e", "#7c3aed", "#8a6d1d", "#0e7490", "#64748b", "#d64545", "#4d7c0f", "#a16207", "#c084fc"];
const LINE_COLOURS = ["#2563eb", "#e07b00", "#15803d", "#b3266e", "#7c3aed", "#0e7490", "#8a6d1d", "#64748b", "#d64545", "#4d7c0f"];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const runColour = (run) => RUN_COLOURS[run % RUN_COLOURS.length];

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

function duration(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 100) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  if (seconds < 5400) return `${(seconds / 60).toFixed(1)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} d`;
}

// Plotly reads a little markup in names; this makes it read none.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

function table(heads, rows, numeric = () => false) {
  const head = el("tr", {}, heads.map((name, column) => el("th", { class: numeric(column) ? "num" : null }, name)));
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, rows)));
}

function options(select, pairs) {
  for (const [value, text] of pairs) select.append(el("option", { value }, text));
  return select;
}
