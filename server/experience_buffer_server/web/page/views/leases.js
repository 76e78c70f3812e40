// Who holds what, since when and until when; and one lease with its units.

import { h } from "../h.js";
import { to } from "../route.js";
import { count, counted, line, size } from "../format.js";
import { empty, facts, groupLink, head, said, since, uidLink, until } from "../parts.js";
import { choices, table } from "../table.js";
import { pages } from "./pages.js";
import * as data from "../data.js";

export const leases = {
  every: 2,
  title: (_, { buffer }) => `Leases · ${buffer}`,
  load: ({ place, signal }) => data.leases(place.buffer, { consumer: place.query.get("consumer"), page_token: place.query.get("page") }, signal),
  render({ leases: found, next_page_token: next }, { place, status }) {
    const all = status.buffers.find((each) => each.name === place.buffer)?.consumers ?? [];
    const consumer = place.query.get("consumer") ?? "";
    const expired = found.filter((lease) => lease.expire_time * 1000 < Date.now()).length;
    return [
      head("Leases", { note: found.length ? `${counted(found.length, "open lease")}${expired ? `, ${count(expired)} past their time` : ""}` : null }),
      all.length > 1 ? choices("Consumer", "consumer", consumer, [["", "All"], ...all.map((each) => [each.name, line(each.name, 40)])]) : null,
      found.length ? table({ label: "Leases", rows: found, sorted: place.query.get("sort") ?? "", key: (lease) => lease.id, columns: columns(place.buffer) })
        : empty("Nobody holds anything: what was delivered is acknowledged, or came back."),
      pages(place, next),
    ];
  },
};

function columns(buffer) {
  return [
    { name: "Lease", cell: (lease) => h("a", { href: to("lease", buffer, lease.id) }, String(lease.id)), sort: (lease) => lease.id, tight: true },
    { name: "Consumer", cell: (lease) => said(lease.consumer, 64), sort: (lease) => lease.consumer },
    { name: "Holder", cell: holder, sort: (lease) => lease.holder, words: true },
    { name: "Since", cell: (lease) => since(lease.grant_time), sort: (lease) => -lease.grant_time, number: true },
    { name: "Until", cell: (lease) => until(lease.expire_time), sort: (lease) => lease.expire_time, number: true },
    { name: "Units", cell: (lease) => count(lease.num_units), sort: (lease) => lease.num_units, number: true },
    { name: "Experiences", cell: (lease) => count(lease.num_experiences), sort: (lease) => lease.num_experiences, number: true },
    { name: "Size", cell: (lease) => size(lease.num_bytes), sort: (lease) => lease.num_bytes, number: true },
    { name: "Most deliveries", cell: (lease) => count(lease.max_deliveries), sort: (lease) => lease.max_deliveries, number: true, title: "of one unit to this consumer" },
    { name: "Ranks", cell: ranks },
  ];
}

const holder = (lease) => [said(lease.holder || (lease.grant_time === null ? "unknown: from before the server's start" : "not named"), 120), lease.address ? h("div", { class: "soft said" }, line(lease.address, 80), lease.caller ? `, as ${line(lease.caller, 60)}` : "") : null];
const ranks = (lease) => (lease.world_size ? `${count(lease.parts.filter((part) => part.is_acked).length)} of ${count(lease.world_size)} have acknowledged` : null);

export const lease = {
  every: 2,
  title: (_, { tail, buffer }) => `Lease ${tail} · ${buffer}`,
  async load({ place, signal }) {
    const { leases: found } = await data.leases(place.buffer, { lease_id: place.tail }, signal);
    return { lease: found[0] };
  },
  render({ lease: found }, { place }) {
    const crumbs = h("a", { href: to("leases", place.buffer) }, "Leases");
    if (!found) return [head(`Lease ${line(place.tail, 40)}`, { crumbs }), empty("It isn't open any more: acknowledged, returned or expired.")];
    return [
      head(`Lease ${found.id}`, { crumbs }),
      h("section", { class: "card" }, facts([
        ["consumer", said(found.consumer, 64)], ["holder", holder(found)], ["since", since(found.grant_time)], ["until", until(found.expire_time)],
        ["holds", `${counted(found.num_units, "unit")}, ${counted(found.num_experiences, "experience")}, ${size(found.num_bytes)}`],
        ["on a stream", found.on_stream ? "yes: its end gives it back" : "no"],
        ["ranks", found.world_size ? ranks(found) : "not shared"],
        ["note", found.is_ending ? "its acknowledgement is on its way to the disk" : null],
      ])),
      found.parts.length ? table({ label: "Parts", rows: found.parts, key: (part) => part.rank, columns: parts(place.buffer, found) }) : null,
      table({ label: "Units", rows: found.units, key: (unit) => unit.key, columns: [
        { name: "Unit", cell: (unit) => (found.unit === "group" ? groupLink(place.buffer, unit.key) : uidLink(place.buffer, unit.key)) },
        { name: "Experiences", cell: (unit) => count(unit.num_experiences), number: true },
        { name: "Deliveries", cell: (unit) => count(unit.num_deliveries), number: true },
        { name: "Rank", cell: (unit) => (found.world_size ? count(unit.rank) : null), number: true },
        { name: "Note", cell: (unit) => [unit.is_stale ? "too stale" : null, unit.is_gone ? "dropped meanwhile" : null].filter(Boolean).join(", ") || null },
      ] }),
      found.num_units > found.units.length ? h("p", { class: "soft" }, `These are the first ${count(found.units.length)} of ${count(found.num_units)}.`) : null,
    ];
  },
};

const parts = (buffer, { consumer }) => [
  { name: "Rank", cell: (part) => h("b", null, count(part.rank)), tight: true },
  { name: "Holder", cell: (part) => [said(part.holder || "not received yet", 120), part.address ? h("div", { class: "soft said" }, line(part.address, 80), part.caller ? `, as ${line(part.caller, 60)}` : "") : null], words: true },
  { name: "Units", cell: (part) => count(part.num_units), number: true },
  { name: "Received", cell: (part) => since(part.receive_time), number: true },
  { name: "Acknowledged", cell: (part) => (part.is_acked ? ["yes", typeof part.step === "number" ? [" at ", h("a", { href: to("step", buffer, `${consumer}/${part.step}`) }, `step ${count(part.step)}`)] : null] : h("span", { class: "soft" }, "not yet")) },
];
