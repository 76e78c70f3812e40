// What each training step has consumed.

import { h } from "../h.js";
import { to } from "../route.js";
import { count, counted, decimal, line, percent } from "../format.js";
import { copy, empty, groupLink, head, neighbours, numbers, since } from "../parts.js";
import { choices, table } from "../table.js";
import { spread } from "./trends.js";
import { pages } from "./pages.js";
import { experienceTable } from "./search.js";
import * as data from "../data.js";

const MOST = 200;
const flat = (step) => (step.num_compared_groups ? step.num_zero_variance_groups / step.num_compared_groups : null);

export const steps = {
  every: 5,
  title: (_, { buffer }) => `Steps · ${buffer}`,
  load: ({ place, signal }) => data.steps(place.buffer, { consumer: place.query.get("consumer"), limit: MOST }, signal),
  render({ steps: found }, { place, status }) {
    const all = (status.buffers.find((each) => each.name === place.buffer)?.consumers ?? []).filter((each) => each.last_step !== null);
    const consumer = place.query.get("consumer") ?? "";
    return [
      head("Steps", { note: "What each training step has consumed, the newest first." }),
      all.length > 1 ? choices("Consumer", "consumer", consumer, [["", "All"], ...all.map((each) => [each.name, line(each.name, 40)])]) : null,
      found.length ? table({ label: "Steps", rows: found, sorted: place.query.get("sort") ?? "", key: (step) => `${step.consumer} ${step.step}`, columns: columns(place.buffer) })
        : empty("No acknowledgement has carried a step yet.", h("p", { class: "soft" }, "With ", h("code", null, "batch.ack(step)"), " it is known which step consumed what, and a trainer can go back to a checkpoint.")),
      found.length >= MOST ? h("p", { class: "soft" }, `The newest ${count(MOST)}.`) : null,
    ];
  },
};

function columns(buffer) {
  return [
    { name: "Step", cell: (step) => h("a", { href: to("step", buffer, `${step.consumer}/${step.step}`) }, count(step.step)), sort: (step) => step.step, tight: true },
    { name: "Consumer", cell: (step) => line(step.consumer, 40), sort: (step) => step.consumer },
    { name: "Experiences", cell: (step) => count(step.num_experiences), sort: (step) => step.num_experiences, number: true },
    { name: "Groups", cell: (step) => count(step.num_groups), sort: (step) => step.num_groups, number: true },
    { name: "Without variance", cell: (step) => percent(flat(step)), sort: flat, number: true, title: "groups all of whose members had the same reward" },
    { name: "Response tokens", cell: (step) => count(step.response_tokens), sort: (step) => step.response_tokens, number: true },
    { name: "Mean reward", cell: (step) => decimal(step.rewards?.mean, 3), sort: (step) => step.rewards?.mean, number: true },
    { name: "Staleness, mean", cell: (step) => decimal(step.mean_staleness, 1), sort: (step) => step.mean_staleness, number: true, title: "policy versions behind when delivered" },
    { name: "most", cell: (step) => count(step.max_staleness), sort: (step) => step.max_staleness, number: true },
    { name: "Acknowledged", cell: (step) => since(step.last_ack_time), sort: (step) => (step.last_ack_time === null ? null : -step.last_ack_time), number: true },
    { name: "Note", cell: (step) => [step.is_retained ? "can be rewound" : null, step.is_partial ? "in part from before the server's start" : null].filter(Boolean).join("; ") || null },
  ];
}

/** "trainer/51": the step is behind the last slash. */
const partsOf = (tail) => [tail.slice(0, tail.lastIndexOf("/")), tail.slice(tail.lastIndexOf("/") + 1)];

// Those that are stored; where none is any more, those that the archive has.
async function membersOf({ buffer, query }, consumer, step, signal) {
  const asked = { consumer, step, page_size: 100, page_token: query.get("page") };
  if (query.get("from") !== "archive") {
    const stored = await data.experiences(buffer, asked, signal);
    if (stored.experiences.length || stored.next_page_token) return stored;
  }
  return { ...(await data.experiences(buffer, { ...asked, archived: true }, signal)), from: "archive" };
}

export const step = {
  every: 10,
  title: (_, { tail, buffer }) => `Step ${partsOf(tail)[1]} of ${partsOf(tail)[0]} · ${buffer}`,
  async load({ place, signal }) {
    const [consumer, number] = partsOf(place.tail);
    const [found, members] = await Promise.all([
      data.step(place.buffer, consumer, number, signal),
      membersOf(place, consumer, number, signal),
    ]);
    return { step: found, members };
  },
  render({ step: found, members }, { place }) {
    const number = Number(partsOf(place.tail)[1]);
    const beside = (by) => (number + by < 0 ? null : to("step", place.buffer, `${found.consumer}/${number + by}`));
    const bundle = `experience-buffer replay-bundle step-${number}.zip --step ${number} -b ${place.buffer} -c ${found.consumer}`;
    return [
      head(`Step ${count(found.step)} of ${line(found.consumer, 64)}`, { crumbs: [h("a", { href: to("steps", place.buffer, "", { consumer: found.consumer }) }, "Steps"), neighbours([["prev", beside(-1), "previous"], ["next", beside(1), "next"]])] }),
      h("section", { class: "card stack" }, numbers([
        [count(found.num_experiences), "experiences"], [count(found.num_groups), "groups"], [count(found.num_leases), "batches"], [count(found.response_tokens), "response tokens"],
        [decimal(found.mean_staleness, 1), `staleness, mean${typeof found.max_staleness === "number" ? `; at most ${count(found.max_staleness)}` : ""}`],
        [percent(flat(found)), "of the groups without variance"], [since(found.last_ack_time), "acknowledged"],
      ]), found.is_partial ? h("p", { class: "soft" }, "Some of it was acknowledged before the server started, and isn't counted in the distributions.") : null),
      h("section", { class: "card" }, h("div", { class: "charts" },
        spread(found.rewards, "Rewards", true), spread(found.advantages, "Advantages, mean per experience", true))),
      h("section", { class: "card" }, h("h2", null, "The same batches again"), found.is_retained ? h("div", { class: "filters" }, h("code", { class: "said" }, bundle), copy("Copy", bundle))
        : h("p", { class: "soft" }, "The step is safe: what it consumed isn't kept to be delivered again.")),
      found.groups.length ? h("section", { class: "card" }, h("h2", null, found.groups.length < found.num_groups ? `The first ${count(found.groups.length)} of its groups` : "Its groups"), h("p", { class: "links" }, found.groups.map((key) => groupLink(place.buffer, key)))) : null,
      members.experiences.length ? [h("h2", null, `${counted(members.experiences.length, "experience")} of it`), experienceTable(members.experiences, place)]
        : h("p", { class: "soft" }, "Its experiences have left, and no archive keeps them."),
      pages(place, members.next_page_token, members.from),
    ];
  },
};
