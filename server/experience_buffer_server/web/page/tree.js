// Plain data as a tree, whatever its keys are.

import { h } from "./h.js";
import { count, line, short } from "./format.js";

const MOST_ENTRIES = 40;
const MOST_DEPTH = 8;

/** A tree of an object's entries. */
export function tree(value, depth = 0) {
  const entries = Array.isArray(value) ? value.map((each, index) => [index, each]) : Object.entries(value ?? {});
  if (!entries.length) return h("p", { class: "soft" }, "empty");
  const left = entries.length - MOST_ENTRIES;
  return h("ul", { class: depth ? null : "tree" },
    entries.slice(0, MOST_ENTRIES).map(([name, each]) => h("li", null, node(line(String(name), 80), each, depth))),
    left > 0 ? h("li", { class: "soft" }, `${count(left)} more`) : null);
}

function node(name, value, depth) {
  if (value === null || typeof value !== "object") {
    const text = typeof value === "number" ? short(value) : value === null ? "none" : typeof value === "string" ? line(value, 160) : String(value);
    return [h("span", { class: "name" }, `${name}: `), h("span", { class: "said" }, text)];
  }
  const size = Array.isArray(value) ? value.length : Object.keys(value).length;
  const title = `${name} (${count(size)})`;
  if (!size || depth >= MOST_DEPTH) return h("span", { class: "name" }, title);
  if (Array.isArray(value) && size <= 12 && value.every((each) => typeof each === "number")) {
    return [h("span", { class: "name" }, `${name}: `), value.map(short).join(", ")];
  }
  return h("details", { open: depth === 0 && size <= 8 }, h("summary", null, title), tree(value, depth + 1));
}
