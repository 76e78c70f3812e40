// Groups with their members, stuck ones first.

import { h } from "../h.js";
import { count, counted, decimal, line } from "../format.js";
import { chip, empty, groupLink, head, marks, said, since, until } from "../parts.js";
import { choices, table } from "../table.js";
import { pages } from "./pages.js";
import * as data from "../data.js";

const STATES = [["", "All"], ["open", "Open"], ["computing", "Computing"], ["waiting_for_fields", "Waiting for fields"],
  ["ready", "Ready"], ["leased", "Leased"], ["held", "Held"], ["quarantined", "Quarantined"], ["retained", "Retained"], ["dropped", "Dropped"]];
const PAGE = 100;

export const groups = {
  every: 3,
  title: (_, { buffer, query }) => `${query.get("state") ? `${query.get("state").replaceAll("_", " ")} groups` : "Groups"} · ${buffer}`,
  load({ place, signal }) {
    const { query } = place;
    return data.groups(place.buffer, { state: query.get("state"), order: query.get("order"), prefix: query.get("prefix"), page_size: PAGE, page_token: query.get("page") }, signal);
  },
  render(answer, { place }) {
    const state = place.query.get("state") ?? "";
    const found = answer.groups;
    const stuck = found.filter((group) => group.waits_for).length;
    return [
      head("Groups", { note: found.length ? `${counted(found.length, "group")} on this page${stuck ? `, ${count(stuck)} of them stuck` : ""}` : null }),
      h("div", { class: "filters" }, choices("State", "state", state, STATES)),
      found.length ? legend() : null,
      found.length ? table({ label: "Groups", rows: found, sorted: place.query.get("sort") ?? "", key: (group) => `${group.group} ${group.create_time}`, columns: columns(place.buffer) })
        : empty(state ? `No group is ${line(state.replaceAll("_", " "), 40)} now.` : "There are no groups now: nothing was pushed yet, or everything was consumed."),
      pages(place, answer.next_page_token),
    ];
  },
};

// What the marks mean.
function legend() {
  const marked = (name, what) => h("span", null, h("span", { class: `mark ${name}` }), ` ${what}`);
  return h("p", { class: "soft links" }, marked("d7", "a member, filled by its reward"), marked("missing", "missing"), marked("failed", "failed"), marked("d0 masked", "masked"));
}

function columns(buffer) {
  return [
    { name: "Group", cell: (group) => groupLink(buffer, group.group), sort: (group) => group.group },
    { name: "State", cell: (group) => chip(group.state), sort: (group) => group.state, tight: true, self: true },
    { name: "Members", cell: marks, sort: (group) => group.num_members, self: true },
    { name: "Here", cell: (group) => `${count(group.num_members)} of ${group.group_size ? count(group.group_size) : "?"}`, sort: (group) => group.num_members / (group.group_size || Infinity), number: true },
    { name: "Mean reward", cell: (group) => decimal(group.mean_reward, 2), sort: (group) => group.mean_reward, number: true, title: "of the members that are here" },
    { name: "Staleness", cell: (group) => (group.staleness === null ? null : count(group.staleness)), sort: (group) => group.staleness, number: true, title: "policy versions behind" },
    { name: "Begun", cell: (group) => since(group.create_time), sort: (group) => -group.create_time, number: true },
    { name: "Deadline", cell: (group) => (group.closed ? null : until(group.deadline_time, "")), sort: (group) => group.deadline_time, number: true },
    { name: "Why it isn't delivered", cell: (group) => (group.waits_for ? said(group.waits_for, 240) : null), words: true },
  ];
}
