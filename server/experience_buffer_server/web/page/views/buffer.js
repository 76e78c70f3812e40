// One buffer: what needs a person, its last fifteen minutes, its consumers and its settings.

import { h } from "../h.js";
import { to } from "../route.js";
import { meter } from "../charts.js";
import { count, counted, fullIn, instant, line, percent, size } from "../format.js";
import { facts, head, numbers, since } from "../parts.js";
import { ALL, charts, isBusy, spread } from "./trends.js";
import { needs } from "./overview.js";
import { consumerTable } from "./consumers.js";
import { firstLines } from "./first.js";
import * as data from "../data.js";

export const buffer = {
  every: 5,
  title: (_, place) => place.buffer,
  async load({ place, signal }) {
    const [info, trends] = await Promise.all([data.info(place.buffer, signal), data.trends(place.buffer, signal)]);
    return { info, trends };
  },
  render({ info, trends }, { place, status }) {
    const stats = status.buffers.find((each) => each.name === place.buffer);
    const advice = (status.advice ?? []).filter((each) => each.buffer === place.buffer);
    const isEmpty = stats && !stats.num_items && !stats.num_open_groups && !isBusy(trends);
    return [
      head(line(place.buffer, 80), { note: estimator(info) }),
      needs(advice),
      stats ? stored(stats, place.buffer) : null,
      isEmpty ? firstLines(place.buffer, status.grpc_address) : h("section", { class: "card" }, h("h2", null, "The last 15 minutes"), charts(trends, ALL)),
      spreads(trends),
      stats?.consumers.length ? h("section", null, h("h2", null, "Consumers"), consumerTable(stats.consumers, place.buffer)) : null,
      settings(info),
    ];
  },
};

function estimator({ config }) {
  const grouped = config.group_by === "none" ? "no groups" : `groups by ${line(config.group_by, 20)}${config.group_size ? ` of ${count(config.group_size)}` : ""}`;
  return `${grouped}; ${config.advantage?.estimator ? `advantages by ${line(config.advantage.estimator, 60)}` : "no advantages"}`;
}

function stored(stats, name) {
  const said = stats.max_bytes ? `${size(stats.num_bytes)} of ${size(stats.max_bytes)}` : size(stats.num_bytes);
  const forecast = fullIn(stats.full_in_seconds);
  return h("section", { class: "card stack", "aria-label": "What it holds" },
    numbers([
      [stats.max_items ? `${count(stats.num_items)} of ${count(stats.max_items)}` : count(stats.num_items), "experiences"],
      [said, "stored"],
      [link("groups", name, stats.num_open_groups, { state: "open" }), "open groups"],
      stats.num_overdue_groups ? [count(stats.num_overdue_groups), "past their deadline"] : null,
      stats.num_computing_groups ? [count(stats.num_computing_groups), "groups are computed"] : null,
      stats.num_quarantined_groups ? [link("groups", name, stats.num_quarantined_groups, { state: "quarantined" }), "groups can't be computed"] : null,
      stats.num_waiting_for_fields ? [count(stats.num_waiting_for_fields), "wait for fields"] : null,
      [stats.policy_version === null ? "–" : count(stats.policy_version), "policy version"],
      [percent(stats.keep_ratio), "of what left was trained on"],
    ].filter(Boolean)),
    stats.used_ratio === null ? null : [meter(stats.used_ratio, `${percent(stats.used_ratio)} of what it may hold`), h("p", { class: "soft" }, `${percent(stats.used_ratio)} of what it may hold${forecast && `; ${forecast}`}`)],
    stats.archive ? h("p", { class: "soft said" }, archive(stats.archive), " ", h("a", { href: to("search", name, "", { from: "archive" }) }, "Look into it")) : null,
    stats.archive?.trouble ? h("p", { class: "red said" }, line(stats.archive.trouble, 400)) : null,
    stats.oldest_open_group ? h("p", { class: "soft said" }, line(stats.oldest_open_group, 300)) : null,
    stats.computing_waits_for ? h("p", { class: "soft said" }, line(stats.computing_waits_for, 300)) : null);
}

const archive = (of) => [
  `Archive: ${counted(of.num_rows + of.num_pending, "experience")}${of.num_segments ? ` in ${counted(of.num_segments, "file")} of ${size(of.num_bytes)}` : ", not in a file yet"}`,
  of.oldest_time === null ? null : `back to ${instant(of.oldest_time).slice(0, 16)}`, of.num_lost ? `${count(of.num_lost)} were lost` : null,
].filter(Boolean).join("; ");

const link = (view, name, number, query) => h("a", { href: to(view, name, "", query) }, count(number));

function spreads(trends) {
  const shown = [
    ["rewards", "Rewards, as pushed", true], ["advantages", "Advantages, mean per experience", true],
    ["response_tokens", "Response tokens", false], ["staleness", "Staleness when delivered, versions", false],
    ["seconds_in_buffer", "Seconds in the buffer", false],
  ].filter(([name]) => trends[name]?.counts?.some(Boolean));
  if (!shown.length) return null;
  return h("section", { class: "card" }, h("h2", null, "How values were spread in this time"),
    h("div", { class: "charts" }, shown.map(([name, label, coloured]) =>
      spread(trends[name], label, coloured))));
}

function settings({ config, create_time: made }) {
  const said = Object.entries(config).filter(([name, value]) => name !== "consumers" && value !== null && !(Array.isArray(value) && !value.length));
  return h("details", { class: "card" }, h("summary", null, "Settings"),
    facts([["made", since(made)], ...said.map(([name, value]) => [line(name, 60), h("span", { class: "mono" }, line(typeof value === "object" ? JSON.stringify(value) : String(value), 400))])]));
}
