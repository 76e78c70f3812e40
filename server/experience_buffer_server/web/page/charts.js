// Small charts as SVG. Each has a sentence for those who don't see it.

import { h, s } from "./h.js";
import { count, duration, short } from "./format.js";
import { diverging } from "./colours.js";

const WIDTH = 200;

/** A line over time; gaps where values are null.
 *
 * @param points [[time, value]], times in seconds, ascending.
 * @param span [from, to]: the axis that it shares with its neighbours.
 */
export function spark(points, span, { label, height = 34, say = short, floor = 0 } = {}) {
  const known = points.filter(([time, value]) => typeof value === "number" && time >= span[0]);
  const values = known.map(([, value]) => value);
  const low = Math.min(floor ?? Infinity, ...values);
  const high = Math.max(floor ?? -Infinity, ...values);
  const top = high > low ? high : low + 1;
  const x = (time) => ((time - span[0]) / (span[1] - span[0])) * WIDTH;
  const y = (value) => height - 1.5 - ((value - low) / (top - low)) * (height - 4);
  const last = values.at(-1);
  const sentence = known.length
    ? `${label}: now ${say(last)}, between ${say(Math.min(...values))} and ${say(Math.max(...values))} in ${duration(span[1] - span[0])}`
    : `${label}: nothing yet`;
  const paths = runs(points, span[0]).flatMap((run) => drawn(run, x, y, height));
  const zero = low < 0 && high > 0 ? s("line", { class: "zero", x1: 0, x2: WIDTH, y1: y(0), y2: y(0) }) : null;
  return s(
    "svg",
    { class: "spark", viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": sentence },
    s("title", null, sentence), s("line", { class: "base", x1: 0, x2: WIDTH, y1: height - 0.5, y2: height - 0.5 }),
    zero, paths,
  );
}

// Stretches without a gap.
function runs(points, from) {
  const found = [];
  let run = null;
  for (const [time, value] of points) {
    if (typeof value !== "number" || time < from) run = null;
    else if (run) run.push([time, value]);
    else found.push((run = [[time, value]]));
  }
  return found;
}

function drawn(run, x, y, height) {
  const at = run.map(([time, value]) => `${x(time).toFixed(1)},${y(value).toFixed(1)}`);
  if (at.length === 1) at.push(`${(x(run[0][0]) + 1.5).toFixed(1)},${y(run[0][1]).toFixed(1)}`);
  const [first, end] = [at[0].split(",")[0], at.at(-1).split(",")[0]];
  return [
    s("path", { class: "area", d: `M${first},${height}L${at.join("L")}L${end},${height}Z` }),
    s("path", { class: "line", d: `M${at.join("L")}` }),
  ];
}

/** A histogram: [[low, high, number]]. Bars take the colours of their values where `coloured`. */
export function histogram(bins, { label, coloured = false, height = 90, ends = [bins[0]?.[0], bins.at(-1)?.[1]] } = {}) {
  const most = Math.max(1, ...bins.map(([, , number]) => number));
  const total = bins.reduce((sum, [, , number]) => sum + number, 0);
  if (!bins.length || !total) return h("p", { class: "soft" }, `${label}: none`);
  const width = 320 / bins.length;
  const sentence = `${label}: ${count(total)} values from ${short(ends[0])} to ${short(ends[1])}`;
  const bars = bins.map(([low, high, number], index) => {
    const tall = number ? Math.max(1.5, (number / most) * (height - 4)) : 0;
    return s(
      "rect",
      {
        class: coloured ? `bar ${diverging((low + high) / 2)}` : "bar",
        x: index * width + 0.5, width: Math.max(0.5, width - 1), y: height - tall, height: tall,
      },
      s("title", null, `${short(low)} to ${short(high)}: ${count(number)}`),
    );
  });
  return h(
    "figure",
    { class: "histogram" },
    h("figcaption", null, label),
    s("svg", { viewBox: `0 0 320 ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": sentence },
      bars, s("line", { class: "base", x1: 0, x2: 320, y1: height - 0.5, y2: height - 0.5 })),
    h("div", { class: "ends" }, h("span", null, short(ends[0])), h("span", null, short(ends[1]))),
  );
}

/** A bar from a zero that all bars of `most` share. */
export function bar(value, most, { label = "" } = {}) {
  if (typeof value !== "number") return h("span", { class: "soft" }, "–");
  const half = 50;
  const long = most ? Math.min(1, Math.abs(value) / most) * (half - 1) : 0;
  return s(
    "svg",
    { class: "zero-bar", viewBox: "0 0 100 12", preserveAspectRatio: "none", role: "img", "aria-label": `${label} ${short(value)}` },
    s("rect", { class: `bar ${diverging(value)}`, x: value < 0 ? half - long : half, width: Math.max(long, value ? 0.7 : 0), y: 1, height: 10 }),
    s("line", { class: "zero", x1: half, x2: half, y1: 0, y2: 12 }),
  );
}

/** How much of something is used, 0 to 1. */
export function meter(ratio, sentence) {
  const used = Math.max(0, Math.min(1, ratio || 0)) * 100;
  return s(
    "svg",
    { class: used > 90 ? "meter high" : "meter", viewBox: "0 0 100 6", preserveAspectRatio: "none", role: "img", "aria-label": sentence },
    s("rect", { class: "all", width: 100, height: 6 }), s("rect", { class: "used", width: used, height: 6 }),
  );
}
