"use strict";
// Text of the data reaches a page only as text nodes or attribute values, never as HTML.

function make(tag, attributes = {}, ...children) {
  const inSvg = ["svg", "path", "line", "text", "circle", "rect"].includes(tag);
  const node = inSvg
    ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function format(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string" || !Number.isFinite(value)) return String(value);
  if (value === 0) return "0";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size < 1e-3 || size >= 1e6
    ? value.toExponential(2).replace(/\.?0+e/, "e") : String(Number(value.toPrecision(4)));
}

function addTable(table, titles, rows) {
  const head = titles.map(([title, kind]) => make("th", { class: kind }, title));
  table.append(make("tr", {}, ...head), ...rows);
}

