// What left, and why: by reason over time, then one by one.

import { h } from "../h.js";
import { to } from "../route.js";
import { spark } from "../charts.js";
import { count, decimal, line, words } from "../format.js";
import { chip, empty, groupLink, head, said, since, uidLink } from "../parts.js";
import { choices, table } from "../table.js";
import * as data from "../data.js";

const MOST = 200;

export const departures = {
  every: 5,
  title: (_, { buffer, query }) => `${query.get("reason") ? `Left: ${words(query.get("reason"))}` : "Departures"} · ${buffer}`,
  load: ({ place, signal }) => data.departures(place.buffer, { reason: place.query.get("reason"), unused_only: place.query.get("unused") === "yes" ? true : null, limit: MOST }, signal),
  render({ departures: found, counts, window_times: times }, { place }) {
    const reason = place.query.get("reason") ?? "";
    const unused = place.query.get("unused") ?? "";
    return [
      head("Departures", { note: "What left this buffer, and why." }),
      counts.length ? h("section", { class: "card" }, h("h2", null, "By reason: how many left over time, and in all since the server started"), h("div", { class: "charts" }, counts.map((each) => over(each, times)))) : null,
      h("div", { class: "filters" },
        choices("Reason", "reason", reason, [["", "All"], ...counts.map((each) => [each.reason, words(each.reason)])]),
        choices("Use", "unused", unused, [["", "Used or not"], ["yes", "Never trained on"]])),
      found.length ? table({ label: "Departures", rows: found, sorted: place.query.get("sort") ?? "", key: (each) => `${each.uid} ${each.time}`, columns: columns(place.buffer) })
        : empty("Nothing has left lately.", h("p", { class: "soft" }, "The server remembers the last thousand or so since it started.")),
      found.length >= MOST ? h("p", { class: "soft" }, `The newest ${count(MOST)}.`) : null,
    ];
  },
};

function over({ reason, total, recent }, times) {
  const points = recent.map((number, index) => [times[index], number]);
  return h("div", { class: "chart" },
    h("div", { class: "name" }, h("span", null, words(reason)), h("b", { title: "since the server started" }, count(total))),
    points.length > 1 ? spark(points, [times[0], times.at(-1)], { label: `left as ${words(reason)}`, say: count }) : null);
}

function columns(buffer) {
  return [
    { name: "Experience", cell: (each) => uidLink(buffer, each.uid), sort: (each) => each.uid },
    { name: "Group", cell: (each) => (each.group ? groupLink(buffer, each.group) : null), sort: (each) => each.group },
    { name: "Reason", cell: (each) => chip(each.reason), sort: (each) => each.reason, tight: true, self: true },
    { name: "Why", cell: (each) => (each.message ? said(each.message, 240) : null), words: true },
    { name: "Reward", cell: (each) => (each.reward === null ? null : decimal(each.reward, 2)), sort: (each) => each.reward, number: true },
    { name: "When", cell: (each) => since(each.time), sort: (each) => -each.time, number: true },
    { name: "Trained on by", cell: (each) => (each.acked_by.length ? acked(each.acked_by, buffer) : each.is_trained ? null : h("span", { class: "soft" }, "nobody")), tight: true },
    { name: "Archived", cell: (each) => (each.is_archived ? "yes" : null), tight: true },
  ];
}

const acked = (all, buffer) => all.slice(0, 4).map((by, index) => [index ? ", " : "", line(by.consumer, 64),
  typeof by.step === "number" ? [" at ", h("a", { href: to("step", buffer, `${by.consumer}/${by.step}`) }, `step ${count(by.step)}`)] : null]);
