// Experiences by what is asked of them.

import { h } from "../h.js";
import { ask, to } from "../route.js";
import { EXAMPLES, understood } from "../asked.js";
import { count, counted, decimal, line, size } from "../format.js";
import { chip, empty, head, said, since, uidLink } from "../parts.js";
import { choices, table } from "../table.js";
import { pages } from "./pages.js";
import * as data from "../data.js";

const PAGE = 100;
const MOST_CALLS = 30;

export const search = {
  every: 0,
  title: (_, { buffer, query }) => `${query.get("q") || "Experiences"} · ${buffer}`,
  async load({ place, signal }) {
    const { filters, problems } = understood(place.query.get("q") ?? "");
    if (problems.length) return { problems, experiences: [] };
    const archived = place.query.get("from") === "archive" ? true : filters.archived;
    const newest = place.query.get("order") === "oldest" ? null : true;
    const asked = { ...filters, archived, newest_first: newest, page_size: PAGE };
    return { ...(await looked(place.buffer, asked, place.query.get("page"), signal)), problems };
  },
  render({ experiences, problems, next_page_token: next }, { place, status }) {
    const asked = place.query.get("q") ?? "";
    const buffers = status.buffers.slice(0, 12);
    return [
      head("Experiences", { note: experiences.length ? `${counted(experiences.length, "experience")}${next || place.query.get("page") ? " on this page" : ""}` : null }),
      h("form", { class: "filters", onsubmit: (event) => { event.preventDefault(); ask({ q: event.target.elements.q.value.trim(), page: "" }); } },
        h("label", { class: "unseen", for: "asked" }, "What is asked"),
        h("input", { id: "asked", name: "q", type: "search", value: asked, spellcheck: "false", autocomplete: "off", placeholder: "uid, text, reward < 0, version = 12, state = ready" }),
        h("button", null, "Search"),
        choices("Order", "order", place.query.get("order") ?? "", [["", "Newest first"], ["oldest", "Oldest first"]]),
        choices("Where", "from", place.query.get("from") ?? "", [["", "Stored"], ["archive", "Archived"]])),
      h("p", { class: "chips" }, EXAMPLES.map((example) => h("a", { class: "chip", href: to("search", place.buffer, "", { q: example }) }, example))),
      buffers.length > 1 && asked ? h("p", { class: "soft" }, "The same in ", buffers.filter((each) => each.name !== place.buffer).map((each, index) => [index ? ", " : "", h("a", { href: to("search", each.name, "", { q: asked }) }, line(each.name, 64))])) : null,
      problems.length ? h("p", { class: "banner said" }, problems.map((each) => line(each, 200)).join("; ")) : null,
      experiences.length ? experienceTable(experiences, place) : problems.length ? null
        : next ? empty("Nothing like this among the many that were looked at; there are more.") : empty(asked ? "Nothing like this is stored." : "Nothing is stored now.", place.query.get("from") ? null : h("p", { class: "soft" }, "What has left may be ", h("a", { href: to("search", place.buffer, "", { q: asked, from: "archive" }) }, "in the archive"), ".")),
      pages(place, next),
    ];
  },
};

// Each call looks at a bounded number of experiences: on, until something is found.
async function looked(buffer, asked, page, signal) {
  let answer = { experiences: [], next_page_token: page };
  for (let calls = 0; calls < MOST_CALLS && !answer.experiences.length && (answer.next_page_token || !calls); calls++) {
    answer = await data.experiences(buffer, { ...asked, page_token: answer.next_page_token }, signal);
  }
  return answer;
}

/** Experiences as a table. */
export function experienceTable(rows, place) {
  return table({ label: "Experiences", rows, sorted: place.query.get("sort") ?? "", key: (each) => each.uid, columns: [
    { name: "Experience", cell: (each) => uidLink(place.buffer, each.uid), sort: (each) => each.uid },
    { name: "State", cell: (each) => chip(each.state), sort: (each) => each.state, tight: true, self: true },
    { name: "Reward", cell: (each) => (each.reward === null ? null : decimal(each.reward, 2)), sort: (each) => each.reward, number: true },
    { name: "Tokens", title: "of the response", cell: (each) => count(each.response_tokens), sort: (each) => each.response_tokens, number: true },
    { name: "Version", cell: (each) => (each.min_policy_version === null ? null : each.min_policy_version === each.max_policy_version ? count(each.min_policy_version) : `${count(each.min_policy_version)}–${count(each.max_policy_version)}`), sort: (each) => each.min_policy_version, number: true },
    { name: "Size", cell: (each) => size(each.payload_bytes), sort: (each) => each.payload_bytes, number: true },
    { name: "Left as", cell: (each) => (each.departure_reason ? said(each.departure_reason.replaceAll("_", " "), 60) : null), sort: (each) => each.departure_reason, tight: true },
    { name: "Left", cell: (each) => (each.departure_time === null ? null : since(each.departure_time)), sort: (each) => -each.departure_time, number: true },
    { name: "Pushed", cell: (each) => since(each.push_time), sort: (each) => -each.push_time, number: true },
    { name: "Note", cell: (each) => (each.message ? said(each.message, 160) : null), words: true },
  ] });
}
