// One experience: what was said, what each token got for it, and what has become of it.

import { h } from "../h.js";
import { ask, to } from "../route.js";
import { download } from "../api.js";
import { conversation } from "../conversation.js";
import { forgetImages, imagesOf } from "../images.js";
import { COLOURS, Tokens, legend } from "../tokens.js";
import { tree } from "../tree.js";
import { count, counted, decimal, instant, line, short, size } from "../format.js";
import { chip, chips, computed, consumerPlaces, copy, facts, groupLink, neighbours, prose, said, since } from "../parts.js";
import * as data from "../data.js";

export const experience = {
  every: 5,
  kept: ["colour", "at"],
  title: (_, { tail, buffer }) => `${tail} · ${buffer}`,
  at: ({ query }) => query.get("at"),
  async load({ place, signal, held, local }) {
    const { stored, content } = await data.experience(place.buffer, place.tail, signal, local.isWhole ? MOST_CHARS : null);
    return { found: { ...stored, content }, group: held?.group ?? (await membersOf(place.buffer, stored.summary, signal)) };
  },
  leave: forgetImages,
  render({ found, group }, outer) {
    const { place } = outer;
    const { summary, content } = found;
    const context = { ...outer, images: imagesOf(place.buffer, summary.uid, content?.images ?? [], outer.repaint) };
    const colour = Object.hasOwn(COLOURS, place.query.get("colour") ?? "") ? place.query.get("colour") : "advantage";
    return [
      top(found, group, place),
      h("div", { class: "columns" },
        h("div", { class: "stack" },
          words(found, context),
          summary.response_tokens ? tokens(found, place, colour) : null),
        h("div", { class: "stack" }, identity(found, place.buffer), where(summary, place.buffer), past(found, place.buffer), later(found), beside(found))),
    ];
  },
};

const MOST_CHARS = 2_000_000;

// The uids of its group's members: of the group, or of what the archive has of it.
async function membersOf(buffer, summary, signal) {
  const { group: key, state } = summary;
  if (!key) return null;
  try {
    if (state !== "archived") return (await data.group(buffer, key, signal)).members.map((member) => member.uid);
    const by = ["tid", "rid", "sid"].find((name) => summary[name] === key);
    const { experiences } = await data.experiences(buffer, { [by]: key, archived: true, page_size: 256 }, signal);
    return [...new Set(experiences.map((each) => each.uid))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return null;
  }
}

function top({ summary, departure }, members, place) {
  const key = summary.group;
  const at = members?.indexOf(summary.uid) ?? -1;
  const query = { colour: place.query.get("colour") };
  const beside = (by) => (at >= 0 && members[at + by] !== undefined ? to("experience", place.buffer, members[at + by], query) : null);
  return h("div", null,
    h("p", { class: "crumbs" }, key ? ["Group ", groupLink(place.buffer, key)] : h("a", { href: to("search", place.buffer) }, "Experiences"),
      at >= 0 ? [`, member ${count(at + 1)} of ${count(members.length)}`, neighbours([["prev", beside(-1), "previous"], ["next", beside(1), "next"]])] : null),
    h("div", { class: "head" }, h("h1", { class: "uid", tabindex: -1 }, line(summary.uid, 300)), chip(summary.state),
      h("div", { class: "tools" },
        copy("Copy uid", summary.uid), copy("Copy as Python", `client.get(${pythonText(summary.uid)}, buffer=${pythonText(place.buffer)})`),
        h("button", { type: "button", onclick: () => download(data.payloadPath(place.buffer), { uid: summary.uid }, `${summary.uid.replace(/[^\w.-]+/g, "_")}.trxp`) }, "Download"))));
}

// JSON's escapes are Python's, but those of half a pair.
const pythonText = (text) => JSON.stringify(text);

function words({ content: told, summary }, context) {
  if (!told) return h("section", { class: "card" }, h("h2", null, "A failed rollout"), h("p", { class: "said" }, line(summary.message || "No reason was given.", 1000)));
  const messages = told.messages ?? [];
  if (messages.length) return h("section", { class: "card" }, h("h2", null, "Conversation"), conversation(messages, context), rest(told, context));
  return h("section", { class: "card" },
    told.prompt_text ? [h("h2", null, "Prompt"), prose(told.prompt_text, { ...context, name: "prompt" })] : null,
    told.response_text ? [h("h2", null, "Response"), prose(told.response_text, { ...context, name: "response" })] : null,
    !told.prompt_text && !told.response_text ? h("p", { class: "soft" }, "It was pushed without texts; its tokens are below.") : null,
    rest(told, context));
}

// Pairs of answers, images that no message holds, and what is too long to have come at once.
function rest(told, context) {
  const pairs = [["chosen_messages", "Chosen"], ["rejected_messages", "Rejected"]].filter(([name]) => told[name]?.length)
    .map(([name, title]) => [h("h2", null, title), conversation(told[name], { ...context, named: name })]);
  const beside = told.images.filter(({ path }) => !/^(chosen_|rejected_)?messages\./.test(path)).slice(0, 24);
  const cut = told.cuts.filter((each) => each.num_chars !== null).length;
  return [pairs,
    beside.length ? [h("h2", null, "Images"), h("div", { class: "links" }, beside.map(({ path }) => h("div", null, context.images.draw(path, context), h("span", { class: "soft said" }, line(path, 60)))))] : null,
    cut && !context.local.isWhole ? h("button", { type: "button", onclick: () => { context.local.isWhole = true; context.reload(); } }, `Load ${counted(cut, "long text")} whole`) : null];
}

function tokens({ summary }, { buffer }, colour) {
  const names = Object.keys(COLOURS);
  const next = names[(names.indexOf(colour) + 1) % names.length];
  return h("section", { class: "card flush", "aria-label": "Response tokens" },
    h("div", { class: "bar-of" }, h("h2", { class: "inline" }, counted(summary.response_tokens, "response token")),
      h("div", { class: "filters", role: "group", "aria-label": "Colours" }, names.map((name) =>
        h("button", { type: "button", "aria-pressed": String(name === colour), onclick: () => ask({ colour: name === "advantage" ? "" : name }) }, COLOURS[name].name)),
      h("button", { class: "plain", type: "button", "data-key": "t", title: "The next colouring", onclick: () => ask({ colour: next === "advantage" ? "" : next }) }, h("kbd", null, "t"))),
      legend(colour)),
    h("div", { key: summary.uid, own: new Tokens({ buffer, uid: summary.uid, total: summary.response_tokens, colour, at: place_at() }) }));
}

const place_at = () => Number(new URLSearchParams(location.hash.split("?")[1] ?? "").get("at")) || 0;

function identity({ summary, content: told, computation }, buffer) {
  const { group: key, staleness } = summary;
  const advantage = computation?.mean_advantage ?? null;
  const { min_policy_version: low, max_policy_version: high } = summary;
  return h("section", { class: "card stack" },
    facts([
      ["reward", summary.reward === null ? "none" : h("b", null, short(summary.reward))],
      ["advantage", typeof advantage === "number" ? decimal(advantage, 3) : null],
      ["group", key ? groupLink(buffer, key) : null],
      ["response", counted(summary.response_tokens, "token")],
      ["prompt", told ? counted(told.num_prompt_tokens, "token") : null],
      ["version", low === null ? "not known" : low === high ? short(low) : `${short(low)} to ${short(high)}`],
      ["staleness", typeof staleness === "number" ? counted(staleness, "version") : null],
      ["cut off", told?.truncate_status ? line(told.truncate_status.replaceAll("_", " "), 60) : null],
      ["pushed", since(summary.push_time)],
      ["payload", size(summary.payload_bytes)],
      ["priority", summary.priority === 1 ? null : short(summary.priority)],
    ]),
    chips(FLAGS.filter((name) => computation?.[name] === true)),
    summary.message ? h("p", { class: "said" }, line(summary.message, 1000)) : null,
    computation ? h("p", { class: "sum" }, computed(computation, { reward: summary.reward, advantage })) : null);
}

const FLAGS = ["singleton", "zero_variance", "zero_mask", "bootstrapped", "masked"];

const WHAT = {
  pushed: "pushed", completed: "its group became whole", computed: "advantages computed", annotated: "annotated", leased: "leased",
  returned: "came back", acknowledged: "acknowledged", rewound: "available again by a rewind", departed: "left", archived: "archived",
};

// Where it is for each consumer.
function where({ places }, buffer) {
  if (!places?.length) return null;
  return h("section", { class: "card" }, h("h2", null, "For each consumer"), consumerPlaces(places, buffer));
}

// Of what has left, the archive knows the ends; of what is stored, the server remembers each step.
function eventsOf({ summary, history = [], departure }) {
  if (!departure) return history;
  const known = history.length ? history : [
    { kind: "pushed", time: summary.push_time },
    ...departure.acked_by.map((by) => ({ kind: "acknowledged", ...by })),
  ];
  const left = { kind: `left: ${departure.reason.replaceAll("_", " ")}`, time: departure.time, message: departure.message };
  return known.some((event) => event.kind === "departed") ? known : [...known, left];
}

function past(found, buffer) {
  const events = [...eventsOf(found)];
  if (!events.length) return null;
  if (events.every((event) => typeof event.time === "number")) events.sort((one, other) => one.time - other.time);
  return h("section", { class: "card" }, h("h2", null, "What has happened"),
    h("ol", { class: "timeline" }, events.map((event) => h("li", null,
      h("div", null, WHAT[event.kind] ?? line(event.kind, 60),
        event.consumer ? [event.kind === "leased" ? " by " : " for ", said(event.consumer, 64)] : null,
        event.who ? [event.consumer ? " (" : " by ", said(event.who, 120), event.consumer ? ")" : ""] : null,
        typeof event.step === "number" ? [" at ", h("a", { href: to("step", buffer, `${event.consumer}/${event.step}`) }, `step ${count(event.step)}`)] : null,
        event.lease_id ? [", ", h("a", { href: to("lease", buffer, event.lease_id) }, `lease ${event.lease_id}`)] : null,
        typeof event.until_time === "number" ? [", until ", clock(event.until_time)] : null),
      event.message && event.message !== "its group is whole" ? h("div", { class: "soft said" }, line(event.message, 300)) : null,
      typeof event.time === "number" ? h("time", null, clock(event.time), ", ", since(event.time)) : null))));
}

const clock = (time) => h("span", { title: instant(time) }, instant(time).slice(11, 19));

// What was found out about it after it had left.
function later({ later: found = [] }) {
  return found.length ? h("section", { class: "card stack" }, h("h2", null, "Found out later"), found.slice(-20).map((each) => h("div", null,
    h("p", { class: "soft" }, since(each.time), each.reward === null ? null : `: reward ${short(each.reward)}`), Object.keys(each.info).length ? tree(each.info) : null))) : null;
}

function beside({ content: told }) {
  if (!told) return null;
  const parts = [["info", "Info"], ["metrics", "Metrics"], ["tools", "Tools"]].filter(([name]) => told[name] && Object.keys(told[name]).length);
  return h("section", { class: "card stack" }, parts.map(([name, title]) => h("div", null, h("h2", null, title), tree(told[name]))),
    h("details", null, h("summary", null, counted(told.tensors.length, "tensor")), facts(told.tensors.slice(0, 40).map((each) => [line(each.name, 60), `${each.dtype} [${each.shape.join(", ")}], ${size(each.num_bytes)}`]))));
}

