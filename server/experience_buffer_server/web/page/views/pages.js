// The way to the next page, and back to the first.

import { h } from "../h.js";
import { to } from "../route.js";

/** Links below a list; nothing where one page is all. */
export function pages(place, next, from = place.query.get("from")) {
  const page = place.query.get("page");
  if (!next && !page) return null;
  const asked = Object.fromEntries(place.query);
  return h("p", { class: "filters" },
    page ? h("a", { rel: "prev", href: to(place.view, place.buffer, place.tail, { ...asked, page: "" }) }, "First page") : null,
    next ? h("a", { rel: "next", href: to(place.view, place.buffer, place.tail, { ...asked, from, page: next }) }, "Next page") : null);
}
