// Small parts that several views have.

import { h } from "./h.js";
import { to } from "./route.js";
import { ago, counted, decimal, duration, harmless, instant, line, short } from "./format.js";
import { diverging } from "./colours.js";

/** How long ago something was, with the instant behind it. `time` in seconds since the epoch. */
export function since(time) {
  if (typeof time !== "number") return "–";
  return h("time", { title: instant(time) }, ago(Math.max(0, Date.now() / 1000 - time)));
}

/** How long until something; "overdue since" where it has passed. */
export function until(time, none = "–") {
  if (typeof time !== "number") return none || null;
  const left = time - Date.now() / 1000;
  return h("time", { title: instant(time), class: left < 0 ? "red" : null }, left < 0 ? `${duration(-left)} ago` : `in ${duration(left)}`);
}

/** A text that somebody else wrote, in one line. */
export const said = (text, mostChars) => h("span", { class: "said" }, line(text, mostChars));

/** Links to what has a name. */
export const uidLink = (buffer, uid) => h("a", { class: "uid", href: to("experience", buffer, uid) }, line(uid, 120));
export const groupLink = (buffer, group) => h("a", { class: "uid", href: to("group", buffer, group) }, line(group, 120));

/** A state as a chip; red and amber only where a person is needed. */
export function chip(state, kind = KINDS[state]) {
  return h("span", { class: kind ? `chip ${kind}` : "chip" }, line(String(state ?? "").replaceAll("_", " "), 60));
}
const KINDS = { quarantined: "red", open: "amber", waiting_for_fields: "amber", waiting_for_group: "amber", tombstone: "", ready: "green" };

export function chips(names) {
  return names?.length ? h("span", { class: "chips" }, names.slice(0, 12).map((name) => chip(name, FLAGS[name] ?? ""))) : null;
}
const FLAGS = { stale: "amber" };

const MOST_MARKS = 64;

/** A group's members as a row of marks, filled by reward. */
export function marks(group) {
  const members = group.members ?? [];
  const missing = group.missing_runs ?? [];
  const numMissing = group.num_missing ?? 0;
  const label = [`${group.num_members} of ${group.group_size || "?"} members`];
  if (group.num_tombstones) label.push(`${group.num_tombstones} failed`);
  if (missing.length) label.push(`missing runs ${missing.slice(0, 8).join(", ")}`);
  const drawn = members.slice(0, MOST_MARKS).map(mark);
  for (let index = 0; index < numMissing && drawn.length < MOST_MARKS; index++) {
    drawn.push(h("span", { class: "mark missing", title: missing[index] === undefined ? "missing" : `run ${missing[index]} is missing` }));
  }
  const more = group.num_members + numMissing - drawn.length;
  return h("span", { class: "marks", role: "img", "aria-label": label.join(", ") }, drawn,
    more > 0 ? h("span", { class: "mark more" }, `+${more}`) : null);
}

export const isFailed = (member) => member.state === "tombstone";
export const isMasked = (member) => (member.flags ?? []).some((flag) => flag === "masked" || flag === "zero_mask");

function mark(member) {
  if (isFailed(member)) return h("span", { class: "mark failed", title: line(`run ${member.run} failed: ${member.message}`) });
  const reward = typeof member.reward === "number" ? `reward ${short(member.reward)}` : "no reward";
  return h("span", { class: `mark ${diverging(member.reward)}${isMasked(member) ? " masked" : ""}`, title: `run ${member.run}: ${reward}` });
}

/** Where something is for each consumer. */
export function consumerPlaces(places, buffer) {
  return facts(places.map((place) => [
    h("a", { href: to("consumers", buffer) }, line(place.consumer, 64)),
    [chip(place.state), " ",
      place.lease_id ? h("a", { href: to("lease", buffer, place.lease_id) }, `lease ${place.lease_id}`) : null,
      typeof place.step === "number" ? [" acknowledged at ", h("a", { href: to("step", buffer, `${place.consumer}/${place.step}`) }, `step ${short(place.step)}`)] : null,
      place.num_deliveries > 1 ? ` delivered ${short(place.num_deliveries)} times` : null,
      place.message ? said(` ${place.message}`, 200) : null],
  ]));
}

/** Facts as a list: [[name, value]]; what is null is left out. */
export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) => [h("dt", null, name), h("dd", null, value)]));
}

/** Links to what is before and after: [[rel, address, name]]; those without an address are left out. */
export function neighbours(links) {
  const keys = { prev: "[", next: "]" };
  return links.filter(([, address]) => address).map(([rel, address, name]) => h("a", { class: "neighbour", rel, href: address }, h("kbd", null, keys[rel]), ` ${name}`));
}

/** Large numbers with what they are: [[value, name]]. */
export function numbers(pairs) {
  return h("div", { class: "numbers" }, pairs.map(([value, name]) => h("div", null, h("b", null, value), h("span", null, name))));
}

/** A view's first line: where it is, what it is, and what can be done. */
export function head(title, { crumbs = null, tools = null, note = null } = {}) {
  return h("div", null,
    crumbs ? h("p", { class: "crumbs" }, crumbs) : null,
    h("div", { class: "head" }, h("h1", { tabindex: -1 }, title), note ? h("p", { class: "soft" }, note) : null, tools ? h("div", { class: "tools" }, tools) : null));
}

/** What stands where there is nothing: a sentence, and what to do. */
export function empty(sentence, ...more) {
  return h("section", { class: "card empty" }, h("p", null, sentence), more);
}

/** A button that copies a text. */
export function copy(name, text) {
  return h("button", { type: "button", onclick: async (event) => {
    const button = event.currentTarget;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      // Without a secure context there is no clipboard: show it, selected.
      getSelection().removeAllRanges();
      prompt("Copy this:", text);
    }
    setTimeout(() => { button.textContent = name; }, 1200);
  } }, name);
}

const MOST_CHARS = 1200;
const MORE_CHARS = 20_000;

/** A text that may be long: its beginning, and a button for more. `local` remembers how much is shown. */
export function prose(text, { local, name, repaint, most = MOST_CHARS, className = "prose" }) {
  const whole = String(text ?? "");
  if (!whole) return h("p", { class: "soft" }, "empty");
  const length = local[name] ?? most;
  const left = whole.length - length;
  return [
    h("div", { class: className }, harmless(whole.slice(0, length))),
    left > 0 ? h("button", { type: "button", class: "plain more", onclick: () => { local[name] = length + MORE_CHARS; repaint(); } },
      `Show ${counted(Math.min(left, MORE_CHARS), "more character")}${left > MORE_CHARS ? ` of ${counted(left, "character")}` : ""}`) : null,
  ];
}

/** How one experience came to its advantage, in one line: the formula where the numbers follow from it, else
 * what was used. `of` says whose it is. */
export function computed(computation, { reward, advantage }, of = "") {
  const { estimator, mean, std, votes, "parameters.eps": eps = 1e-6 } = computation;
  const counts = typeof votes === "number" ? `; ${counted(votes, "vote")}` : "";
  if (FORMULAS.has(estimator) && [reward, advantage, mean].every((each) => typeof each === "number")) {
    const divided = typeof std === "number";
    const value = divided ? (reward - mean) / (std + eps) : reward - mean;
    const difference = `${decimal(reward, 2)} − mean ${decimal(mean, 2)}`;
    const formula = divided ? `(${difference}) / (std ${decimal(std, 2)} + ${short(eps)})` : difference;
    if (Math.abs(value - advantage) <= 1e-3 * Math.max(1, Math.abs(value))) return `${estimator}: ${formula} = ${decimal(advantage, 2)}${of}${counts}`;
  }
  const used = Object.entries(computation).filter(([name, value]) => !SAID.has(name) && value !== false)
    .map(([name, value]) => [name.startsWith("parameters.") ? `${name.slice(11)} =` : name.replaceAll("_", " "), value])
    .map(([name, value]) => (value === true ? name : `${name} ${told(value)}`));
  return line(`${estimator ?? "computed"}: ${used.join(", ")}${counts}`, 600);
}

const FORMULAS = new Set(["grpo", "group_norm", "dr_grpo"]);
const SAID = new Set(["estimator", "votes", "mean_advantage", "mean_magnitude"]);

const told = (value) => typeof value === "number" ? (Number.isInteger(value) ? short(value) : decimal(value, 4)) : line(typeof value === "string" ? value : JSON.stringify(value), 80);
