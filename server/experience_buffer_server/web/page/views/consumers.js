// Who reads a buffer: what each has, what it waits for in words, and where it is.

import { h } from "../h.js";
import { to } from "../route.js";
import { count, duration, line } from "../format.js";
import { empty, head, said } from "../parts.js";
import { table } from "../table.js";

export const consumers = {
  every: 2,
  usesStatus: true,
  title: (_, { buffer }) => `Consumers · ${buffer}`,
  load: async () => ({}),
  render(_, { place, status }) {
    const stats = status.buffers.find((each) => each.name === place.buffer);
    if (!stats) return empty("There is no such buffer.");
    const pushes = stats.pushes_wait_for ? h("p", { class: "banner mild said" }, `Pushes wait: ${line(stats.pushes_wait_for, 400)}`) : null;
    return [head("Consumers", { note: "Each sees everything; what all have acknowledged leaves." }), pushes, consumerTable(stats.consumers, place.buffer)];
  },
};

/** Consumers as a table. */
export function consumerTable(all, buffer) {
  return table({
    label: "Consumers", rows: all, key: (each) => each.name,
    columns: [
      { name: "Consumer", cell: (each) => h("a", { href: to("leases", buffer, "", { consumer: each.name }) }, line(each.name, 64)), tight: true },
      { name: "Unit", cell: (each) => each.unit, tight: true },
      { name: "Waits for", cell: (each) => (each.waiting_for || each.pushes_wait_for ? [
        each.waiting_for ? [each.num_waiting ? null : h("span", { class: "soft" }, "nobody waits; a batch would, for: "), said(each.waiting_for, 300)] : null,
        each.waiting_seconds !== null && each.num_waiting ? h("div", { class: "soft said" }, `since ${duration(each.waiting_seconds)}${each.waiting_holders.length ? `: ${line(each.waiting_holders.join(", "), 200)}` : ""}`) : null,
        each.num_waiting > 1 ? h("div", { class: "soft" }, `${count(each.num_waiting)} calls stand in line`) : null,
        each.pushes_wait_for ? h("div", { class: "soft said" }, `pushes are held back: ${line(each.pushes_wait_for, 300)}`) : null,
      ] : h("span", { class: "soft" }, each.num_waiting ? "a batch" : "nothing")), words: true },
      { name: "Ready", cell: (each) => count(each.num_ready_units), number: true },
      { name: "Leased", cell: (each) => count(each.num_leased_units), number: true },
      { name: "Leases", cell: (each) => h("a", { href: to("leases", buffer, "", { consumer: each.name }) }, count(each.num_leases)), number: true },
      { name: "Acknowledged", cell: (each) => count(each.num_acked_units), number: true, title: "units, since the server started" },
      { name: "Came back", cell: (each) => count(each.num_redelivered_units), number: true, title: "offered again after an expiry or nack, since the server started" },
      { name: "Too stale", cell: (each) => count(each.num_stale_units), number: true },
      { name: "Held", cell: (each) => count(each.num_held_units), number: true },
      { name: "Quarantined", cell: (each) => h("span", { class: each.num_quarantined_units ? "red" : null }, count(each.num_quarantined_units)), number: true },
      { name: "Step", cell: (each) => (each.last_step === null ? "–" : h("a", { href: to("step", buffer, `${each.name}/${each.last_step}`) }, count(each.last_step))), number: true },
      { name: "Safe step", cell: (each) => count(each.safe_step), number: true, title: "it can't be rewound before this one" },
    ],
  });
}
