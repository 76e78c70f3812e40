// What needs a person, worst first; then each buffer in a row.

import { h } from "../h.js";
import { to } from "../route.js";
import { meter } from "../charts.js";
import { count, counted, duration, fullIn, line, percent, size } from "../format.js";
import { FIRST, charts, isBusy } from "./trends.js";
import { firstLines } from "./first.js";
import * as data from "../data.js";

const MOST_BUFFERS = 24;
const MOST_POINTS = 200;
const MOST_NEEDS = 12;

export const overview = {
  every: 30,
  usesStatus: true,
  title: (loaded) => (loaded?.numNeeds ? `${counted(loaded.numNeeds, "thing")} to see to` : "Overview"),
  async load({ signal, status }) {
    const names = status.buffers.slice(0, MOST_BUFFERS).map((buffer) => buffer.name);
    const answers = await Promise.all(names.map((name) => data.trends(name, signal).catch(forgive)));
    const numNeeds = (status.advice ?? []).filter((each) => each.severity !== "info").length;
    return { numNeeds, trends: new Map(names.map((name, index) => [name, answers[index]])) };
  },
  render({ trends }, { status }) {
    for (const [name, each] of trends) grow(each, status.points?.[name]);
    const shown = status.buffers.slice(0, MOST_BUFFERS);
    const begun = Math.min(...[...trends.values()].map((each) => each?.begin_time ?? Infinity));
    return [
      h("div", { class: "head" }, h("h1", { tabindex: -1 }, "Overview"),
        h("p", { class: "soft" }, `server ${line(status.version, 40)}, up ${duration(status.uptime_seconds)}`)),
      needs(status.advice ?? []),
      disk(status),
      shown.filter((buffer) => isBusy(trends.get(buffer.name))).map((buffer) => row(buffer, trends.get(buffer.name), begun)),
      idle(shown.filter((buffer) => !isBusy(trends.get(buffer.name)))),
      shown.length ? null : firstLines("", status.grpc_address),
      status.buffers.length > MOST_BUFFERS ? h("p", { class: "soft" }, `${counted(status.buffers.length - MOST_BUFFERS, "more buffer")} aren't drawn.`) : null,
    ];
  },
};

// The newest point comes with the events: the charts grow without being asked for anew.
function grow(trends, point) {
  if (!trends || !point || point.time <= (trends.points.at(-1)?.time ?? 0)) return;
  trends.points.push(point);
  if (trends.points.length > MOST_POINTS) trends.points.shift();
}

// A buffer that was deleted meanwhile, or isn't this caller's to see, has no charts.
function forgive(error) {
  if (error.status === 404 || error.status === 403) return null;
  throw error;
}

/** What needs a person: sentences. */
export function needs(advice) {
  if (!advice.length) return h("section", { class: "card flush", "aria-label": "What needs a person" }, h("p", { class: "calm" }, "Nothing waits."));
  const left = advice.length - MOST_NEEDS;
  return h("section", { class: "card flush", "aria-label": "What needs a person" },
    h("ol", { class: "needs" }, advice.slice(0, MOST_NEEDS).map((each) => h("li", { class: each.severity, key: `${each.buffer} ${each.consumer} ${each.kind}` },
      h("strong", { class: "said" }, each.buffer && each.text.startsWith(each.buffer) ? line(each.text, 400) : upper(line(each.text, 400)), "."), " ",
      each.buffer ? h("a", { href: link(each), "data-row": true }, SHOW[each.view] ?? "Look") : null,
      each.cure || each.command ? h("p", null, each.cure ? `${upper(line(each.cure, 400))}. ` : "", each.command ? h("code", null, line(each.command, 200)) : null) : null))),
    left > 0 ? h("p", { class: "calm soft" }, `${count(left)} more`) : null);
}

const SHOW = { groups: "See the groups", leases: "See the leases", consumers: "See the consumers", search: "See which", departures: "See what left", buffer: "See the buffer" };
const KINDS = { quarantined_groups: { state: "quarantined" }, damaged: { state: "quarantined" }, missing_fields: { state: "waiting_for_fields" } };
const upper = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function link({ view, buffer, consumer, kind }) {
  if (view === "search") {
    const state = kind === "quarantined_units" ? "quarantined" : KINDS[kind]?.state;
    const of = kind === "quarantined_units" ? ` consumer = ${consumer}` : "";
    return to("search", buffer, "", { q: state ? `state = ${state}${of}` : "" });
  }
  return to(view in SHOW ? view : "buffer", buffer);
}

function row(buffer, trends, begun) {
  const ready = buffer.consumers.map((each) => `${line(each.name, 40)} ${count(each.num_ready_units)} ready`).join(", ");
  return h("section", { class: "card", key: buffer.name, "aria-label": buffer.name },
    h("div", { class: "head" },
      h("h2", null, h("a", { href: to("buffer", buffer.name), "data-row": true }, line(buffer.name, 64))),
      h("p", { class: "soft said" }, [
        `${counted(buffer.num_items, "experience")}, ${size(buffer.num_bytes)}`,
        buffer.num_open_groups ? counted(buffer.num_open_groups, "open group") : null,
        buffer.policy_version === null ? null : `policy version ${count(buffer.policy_version)}`,
        ready,
      ].filter(Boolean).join("; "))),
    charts(trends, FIRST, begun));
}

// Buffers in which nothing happens, in a line each.
function idle(buffers) {
  return buffers.length ? h("section", { class: "card", key: "idle" }, h("p", { class: "soft" }, "Nothing has happened in the last 15 minutes:"),
    buffers.map((buffer) => h("p", null, h("a", { href: to("buffer", buffer.name), "data-row": true }, line(buffer.name, 64)), h("span", { class: "soft" }, `  ${counted(buffer.num_items, "experience")}, ${size(buffer.num_bytes)}`)))) : null;
}

/** The disk, and when it is full at this rate. */
function disk({ disk: of }) {
  if (!of) return null;
  const said = [
    `${size(of.live_bytes)} in use${of.limit_bytes ? ` of ${size(of.limit_bytes)}` : ""}`,
    of.free_bytes === null ? null : `${size(of.free_bytes)} free on the disk`,
    fullIn(of.full_in_seconds) && `${fullIn(of.full_in_seconds)} (${line(of.full_by, 60)})`,
  ].filter(Boolean).join("; ");
  return h("section", { class: "card stack tight", "aria-label": "Store" },
    h("div", { class: "head" }, h("h2", null, "Store"), h("p", { class: "soft said", title: line(of.place, 200) }, said)),
    of.used_ratio === null ? null : meter(of.used_ratio, `${percent(of.used_ratio)} of what it may have`));
}
