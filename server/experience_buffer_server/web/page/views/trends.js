// The last fifteen minutes as small charts over one axis.

import { h } from "../h.js";
import { histogram, spark } from "../charts.js";
import { ago, count, decimal, duration, rate } from "../format.js";

const SECONDS = 900;
const SHORTEST = 60;

const perSecond = (name) => (point) => point[name] / point.seconds;
const plain = (name) => (point) => point[name];

const MEASURES = {
  pushed: { name: "pushed /s", value: perSecond("num_pushed"), say: rate },
  trained: { name: "trained /s", value: perSecond("num_trained"), say: rate },
  ready: { name: "ready units", value: plain("num_ready_units"), say: count },
  staleness: { name: "staleness, versions", value: plain("mean_staleness"), say: (value) => decimal(value, 1) },
  reward: { name: "mean reward", value: plain("mean_reward"), say: (value) => decimal(value, 2) },
  open: { name: "open groups", value: plain("num_open_groups"), say: count },
  stored: { name: "stored", value: plain("num_items"), say: count },
  solved: { name: "reward above 0, %", value: (point) => (point.solve_ratio === null ? null : 100 * point.solve_ratio), say: (value) => decimal(value, 0) },
  length: { name: "response tokens", value: plain("mean_response_tokens"), say: count },
  waited: { name: "time in buffer", value: plain("mean_seconds_in_buffer"), say: duration },
  unused: { name: "left unused /s", value: perSecond("num_unused"), say: rate },
  flat: { name: "no variance, % of groups", value: (point) => point.num_groups ? (100 * point.num_zero_variance_groups) / point.num_groups : null, say: (value) => decimal(value, 0) },
};

export const FIRST = ["pushed", "trained", "ready", "staleness", "reward"];
export const ALL = [...FIRST, "solved", "flat", "length", "open", "waited", "unused", "stored"];

/** The charts of some measures over one axis: of 15 minutes, or since `begun` (seconds since the epoch). */
export function charts(trends, names, begun = trends?.begin_time ?? 0) {
  const points = trends?.points ?? [];
  if (!isBusy(trends)) return h("p", { class: "soft" }, "Nothing has happened in the last 15 minutes.");
  const end = points.at(-1).time;
  const span = [Math.min(Math.max(end - SECONDS, begun), end - SHORTEST), end];
  return h("div", { class: "charts" }, names.map((name) => one(MEASURES[name], points, span)));
}

/** Whether anything was pushed, delivered or trained on, or left, in this time. */
export const isBusy = (trends) => Boolean(trends?.points.some((point) => point.num_pushed || point.num_delivered || point.num_trained || point.num_unused));

function one({ name, value, say }, points, span) {
  const line = points.map((point) => [point.time, value(point) ?? null]);
  const last = line.findLast(([, each]) => typeof each === "number")?.[1];
  return h("div", { class: "chart" },
    h("div", { class: "name" }, h("span", null, name), h("b", null, last === undefined ? "–" : say(last))),
    spark(line, span, { label: name, say }),
    h("div", { class: "axis", "aria-hidden": "true" }, h("span", null, ago(span[1] - span[0])), h("span", null, "now")));
}

/** How values are spread, as a histogram; `label` says of what. */
export function spread(distribution, label, coloured = false) {
  const { limits = [], counts = [], mean = null, min, max } = distribution ?? {};
  const bins = counts.map((number, index) => [limits[index], limits[index + 1], number]);
  return histogram(bins, { label: mean === null ? label : `${label}; mean ${decimal(mean, 2)}`, coloured, ends: [min, max] });
}
