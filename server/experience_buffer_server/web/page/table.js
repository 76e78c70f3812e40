// Tables that can be sorted, and are lists of facts on a telephone.

import { h } from "./h.js";
import { ask } from "./route.js";

/** A table.
 *
 * @param columns [{name, cell(row), sort(row)?, number?, title?, tight?, words?, self?}]; what has `sort` can be
 *   sorted by it; on a telephone `words` take a line of their own, and what is `self` needs no name.
 * @param rows Any values; the first cell should hold the row's link.
 * @param sorted "name" or "-name" of the column that it is sorted by; empty: as it came.
 * @param key Names a row, so that it stays the same one when others come and go.
 */
export function table({ columns, rows, sorted = "", key, label }) {
  const down = sorted.startsWith("-");
  const by = columns.find((column) => column.sort && column.name === (down ? sorted.slice(1) : sorted));
  const inOrder = by ? order(rows, by.sort, down) : rows;
  const cells = inOrder.map((row) => columns.map((column) => column.cell(row)));
  // A column in which nothing stands is left out.
  const shown = columns.map((_, index) => index).filter((index) => !index || cells.some((row) => row[index] !== null && row[index] !== undefined));
  return h("div", { class: "card flush" },
    h("table", { class: "wide", role: "table", "aria-label": label },
      h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, shown.map((index) => heading(columns[index], by === columns[index], down)))),
      h("tbody", { role: "rowgroup" }, inOrder.map((each, at) => h("tr", { role: "row", class: "row", key: key(each), "data-row": true },
        shown.map((index) => [columns[index], index]).map(([column, index]) => h("td", {
          role: "cell",
          class: [column.number && "number", column.tight && "tight", column.words && "words"].filter(Boolean).join(" ") || null,
          "data-name": index && !column.self ? column.name : null,
        }, cells[at][index])))))));
}

function heading(column, isSorted, down) {
  const next = isSorted && !down ? `-${column.name}` : isSorted && down ? "" : column.name;
  return h("th", {
    role: "columnheader", scope: "col", class: column.number ? "number" : null, title: column.title,
    "aria-sort": isSorted ? (down ? "descending" : "ascending") : null,
  }, column.sort ? h("button", { type: "button", onclick: () => ask({ sort: next }) }, column.name) : column.name);
}

// What isn't known comes last, in either direction.
function order(rows, value, down) {
  const sign = down ? -1 : 1;
  return [...rows].sort((one, other) => {
    const [a, b] = [value(one), value(other)];
    const [noA, noB] = [a === null || a === undefined, b === null || b === undefined];
    if (noA || noB) return noA - noB;
    return sign * (typeof a === "string" ? a.localeCompare(b) : a - b);
  });
}

/** Buttons that choose one of several values of a parameter of the address. */
export function choices(label, parameter, current, values) {
  return h("div", { class: "filters", role: "group", "aria-label": label }, values.map(([value, name]) =>
    h("button", { type: "button", "aria-pressed": String(value === current), onclick: () => ask({ [parameter]: value, page: "" }) }, name)));
}
