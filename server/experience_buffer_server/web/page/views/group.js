// One group: its prompt once, its members side by side, and how their advantages came about.

import { h } from "../h.js";
import { ask, to } from "../route.js";
import { bar } from "../charts.js";
import { conversation } from "../conversation.js";
import { forgetImages, imagesOf } from "../images.js";
import { diff } from "../diff.js";
import { count, counted, decimal, harmless, line, short, size, words } from "../format.js";
import { chip, chips, computed, consumerPlaces, facts, isFailed, isMasked, marks, since, until } from "../parts.js";
import * as data from "../data.js";

const MOST_TEXTS = 32;
const AT_ONCE = 4;
const MOST_FOLDED = 2000;
const FOLDED = 420;
const MOST_OPEN = 60_000;
const FEW_CHARS = 20_000;

export const group = {
  every: 4,
  kept: ["compare"],
  title: (loaded, { tail, buffer }) => (loaded ? `${tail} · ${buffer} · ${loaded.group.num_members} of ${loaded.group.group_size || "?"}` : `${tail} · ${buffer}`),
  async load({ place, signal, held }) {
    const found = await data.group(place.buffer, place.tail, signal);
    const texts = held?.texts ?? new Map();
    await fetchTexts(place.buffer, found.members, texts, signal);
    return { group: found, texts };
  },
  leave: forgetImages,
  render({ group, texts }, context) {
    const { place } = context;
    const chosen = (place.query.get("compare") ?? "").split(",").filter(Boolean).map(Number).filter((index) => group.members[index]);
    return [
      top(group, place, chosen),
      group.waits_for ? h("p", { class: "banner mild said" }, line(group.waits_for, 500)) : null,
      prompt(texts, context),
      group.computation ? h("p", { class: "sum" }, sums(group)) : null,
      chosen.length === 2 ? comparison(group, chosen, texts) : null,
      h("div", { class: "members" },
        group.members.map((member, index) => card(member, index, group, texts, chosen, context)),
        missing(group)),
      delivery(group, place.buffer),
    ];
  },
};

const CLOSED = { whole: "whole", sealed: "sealed", deadline: "closed at its deadline", dropped: "dropped" };

// Each member's texts are asked for once.
async function fetchTexts(buffer, members, texts, signal) {
  const wanted = members.filter((member) => !isFailed(member) && !texts.has(member.uid)).slice(0, Math.max(0, MOST_TEXTS - texts.size));
  const one = async () => {
    for (let member; (member = wanted.shift());) {
      try {
        texts.set(member.uid, (await data.experience(buffer, member.uid, signal, FEW_CHARS)).content);
      } catch (error) {
        if (error.name === "AbortError") throw error;
        texts.set(member.uid, null);
      }
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, one));
}

function top(group, place, chosen) {
  return h("div", null,
    h("p", { class: "crumbs" }, h("a", { href: to("groups", place.buffer) }, "Groups")),
    h("div", { class: "head" },
      h("h1", { class: "uid", tabindex: -1 }, line(group.group, 200)), chip(group.state), marks(group),
      h("p", { class: "soft" }, `${count(group.num_members)} of ${group.group_size ? count(group.group_size) : "?"} members, `, "begun ", since(group.create_time),
        group.closed ? [`, ${CLOSED[group.closed] ?? line(group.closed, 20)} `, group.close_time === null ? null : since(group.close_time)] : null,
        !group.closed && group.deadline_time ? [", deadline ", until(group.deadline_time), ` (then: ${words(group.on_deadline)})`] : null),
      group.members.length > 1 ? h("div", { class: "tools" }, h("button", { type: "button", "data-key": "d", "aria-pressed": String(chosen.length === 2), title: "d",
        onclick: () => ask({ compare: chosen.length ? "" : "0,1" }) }, "Compare")) : null));
}

function prompt(texts, context) {
  const [uid, first] = [...texts].find(([, content]) => content) ?? [];
  if (!first) return null;
  const messages = (first.messages ?? []).slice(0, firstAnswer(first.messages ?? []));
  if (!messages.length && !first.prompt_text) return null;
  const whole = messages.length ? conversation(messages, { ...context, images: imagesOf(context.place.buffer, uid, first.images, context.repaint) }) : h("div", { class: "prose" }, harmless(first.prompt_text.slice(0, MOST_FOLDED)));
  return h("section", { class: "card", "aria-label": "Prompt" }, h("h2", null, "Prompt"), whole);
}

const firstAnswer = (messages) => {
  const at = messages.findIndex((message) => message?.role === "assistant");
  return at < 0 ? messages.length : at;
};

/** What a member answered, as one text. */
function answerOf(experience) {
  if (!experience) return "";
  if (experience.response_text) return experience.response_text;
  const messages = experience.messages ?? [];
  return messages.slice(firstAnswer(messages)).map((message) => {
    const content = typeof message?.content === "string" ? message.content : JSON.stringify(message?.content ?? "");
    const calls = (message?.tool_calls ?? []).map((call) => `→ ${call?.function?.name ?? "?"}(${call?.function?.arguments ?? ""})`);
    return [message?.role === "assistant" ? null : `[${message?.role}]`, content, ...calls].filter(Boolean).join("\n");
  }).join("\n\n");
}

function card(member, index, group, texts, chosen, { place, local, repaint }) {
  const most = Math.max(0.001, ...group.members.map((each) => Math.abs(each.advantage ?? 0)));
  const name = h("a", { href: to("experience", place.buffer, member.uid), "data-row": true, title: harmless(member.uid) }, `run ${count(member.run)}${member.step ? `, step ${count(member.step)}` : ""}`);
  if (isFailed(member)) {
    return h("section", { class: "card member failed", key: member.uid }, h("h2", null, name, chip("failed")), h("p", { class: "said" }, line(member.message || "It failed; no reason was given.", 400)));
  }
  const text = answerOf(texts.get(member.uid));
  const isOpen = local[`open ${member.uid}`];
  return h("section", { class: chosen.includes(index) ? "card member chosen" : "card member", key: member.uid },
    h("h2", null, name, h("button", { type: "button", class: "plain", "aria-pressed": String(chosen.includes(index)), onclick: () => choose(index, chosen) }, "compare")),
    typeof member.advantage === "number" ? bar(member.advantage, most, { label: "advantage" }) : null,
    facts([
      ["reward", h("b", null, short(member.reward))],
      ["advantage", advantageOf(member)],
      ["length", `${counted(member.response_tokens, "token")}, ${size(member.payload_bytes)}`],
      ["version", versions(member)],
      ["state", chip(member.state)],
    ]),
    chips(member.flags),
    member.message ? h("p", { class: "said red" }, line(member.message, 300)) : null,
    text ? [
      h("div", { class: isOpen || text.length < FOLDED ? "prose" : "prose folded" }, harmless(text.slice(0, isOpen ? MOST_OPEN : MOST_FOLDED))),
      text.length >= FOLDED ? h("button", { type: "button", class: "plain more", "aria-expanded": String(Boolean(isOpen)), onclick: () => { local[`open ${member.uid}`] = !isOpen; repaint(); } }, isOpen ? "Fold" : `Unfold ${counted(text.length, "character")}`) : null,
    ] : h("p", { class: "soft" }, texts.has(member.uid) ? "No text was pushed; open it to see its tokens." : "Open it to see its text."));
}

function advantageOf({ advantage, per_token: varies, min_advantage: low, max_advantage: high, num_trained_tokens: trained }) {
  if (typeof advantage !== "number") return trained === 0 ? "no token trains" : "not computed";
  return varies ? [decimal(advantage, 3), h("span", { class: "soft" }, `, ${decimal(low, 2)} to ${decimal(high, 2)}`)] : decimal(advantage, 3);
}

const versions = ({ min_policy_version: low, max_policy_version: high }) => (low === null ? "not known" : low === high ? short(low) : `${short(low)} to ${short(high)}`);

function choose(index, chosen) {
  const rest = chosen.filter((each) => each !== index);
  ask({ compare: (rest.length < chosen.length ? rest : [...chosen.slice(-1), index]).join(",") });
}

function missing(group) {
  const runs = group.missing_runs ?? [];
  const number = Math.min(group.num_missing ?? 0, 16);
  return Array.from({ length: number }, (_, index) => h("section", { class: "card member missing", key: `missing ${index}` },
    h("h2", null, runs[index] === undefined ? "missing" : `run ${count(runs[index])}`, chip("missing", "red")),
    h("p", { class: "soft" }, "It hasn't been pushed. Is its worker still at it?")));
}

function comparison(group, [one, other], texts) {
  const [a, b] = [one, other].map((index) => answerOf(texts.get(group.members[index].uid)));
  const { parts, isCut } = diff(a, b);
  const legend = h("p", { class: "soft diff" }, "In ", h("del", null, `run ${group.members[one].run} alone`), ", in ", h("ins", null, `run ${group.members[other].run} alone`), isCut ? "; the first 4,000 words" : "");
  return h("section", { class: "card", key: "diff", "aria-label": "Comparison" }, h("h2", null, "What differs"), legend,
    h("div", { class: "prose diff" }, parts.slice(0, 4000).map(([kind, text]) => (kind === "same" ? harmless(text) : h(kind, null, harmless(text))))));
}

// The computation, told of the first member that has an advantage.
function sums(group) {
  const member = group.members.find((each) => typeof each.advantage === "number") ?? {};
  return `${computed(group.computation, member, member.uid ? ` for run ${count(member.run)}` : "")}, ${count(group.members.filter(isMasked).length)} masked`;
}

function delivery(group, buffer) {
  if (!group.places?.length) return null;
  return h("section", { class: "card" }, h("h2", null, "For each consumer"), consumerPlaces(group.places, buffer));
}
