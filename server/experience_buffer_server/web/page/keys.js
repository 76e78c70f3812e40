// What the keys do. Views say by attributes what they offer: rows by `data-row`, neighbours by `rel`, and
// anything else by `data-key`.

import { h } from "./h.js";

const HELP = [
  ["/", "search"],
  ["j k", "next and previous row"],
  ["Enter", "open the row"],
  ["[ ]", "previous and next member, token or page"],
  ["t", "what colours the tokens"],
  ["d", "compare two members"],
  ["← →", "token before and after"],
  ["g", "overview"],
  ["Esc", "leave"],
  ["?", "these keys"],
];

/** The dialog that lists them. */
export function help() {
  return h("dialog", { id: "keys", "aria-labelledby": "keys-title", onclick: (event) => event.target === event.currentTarget && event.currentTarget.close() },
    h("h2", { id: "keys-title" }, "Keys"),
    h("dl", { class: "facts" }, HELP.map(([keys, what]) => [
      h("dt", null, keys.split(" ").map((key, index) => [index ? " " : "", h("kbd", null, key)])),
      h("dd", null, what),
    ])),
    h("button", { type: "button", onclick: (event) => event.currentTarget.closest("dialog").close() }, "Close"));
}

/** One pressed key. */
export function press(event, actions) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  const inField = event.target.closest?.("input, textarea, select");
  if (inField) {
    if (event.key === "Escape") inField.blur();
    return;
  }
  const dialog = document.getElementById("keys");
  if (dialog?.open && event.key !== "?") return;
  const does = DOES[event.key];
  if (does && does(actions) !== false) event.preventDefault();
}

const DOES = {
  "/": () => focus("#search"),
  "?": () => {
    const dialog = document.getElementById("keys");
    if (dialog.open) dialog.close();
    else dialog.showModal();
  },
  g: () => { location.hash = "#/"; },
  j: () => row(1),
  k: () => row(-1),
  "[": () => click('[rel="prev"]'),
  "]": () => click('[rel="next"]'),
  t: () => click('[data-key="t"]'),
  d: () => click('[data-key="d"]'),
};

function focus(selector) {
  const found = document.querySelector(selector);
  found?.focus();
  found?.select?.();
  return Boolean(found);
}

function click(selector) {
  const found = document.querySelector(selector);
  found?.click();
  return Boolean(found);
}

function row(by) {
  const rows = [...document.querySelectorAll("[data-row]")];
  if (!rows.length) return false;
  const at = rows.findIndex((each) => each.contains(document.activeElement));
  const next = rows[at < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.max(0, Math.min(rows.length - 1, at + by))];
  const target = next.matches("a, button") ? next : next.querySelector("a, button");
  target?.focus();
  target?.scrollIntoView({ block: "nearest" });
  return true;
}
