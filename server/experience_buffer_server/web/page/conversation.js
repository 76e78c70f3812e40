// A conversation as people read it: by roles, with tool calls folded, and images that came with it.

import { h } from "./h.js";
import { counted, harmless, line } from "./format.js";
import { prose } from "./parts.js";

const MOST_TURNS = 60;
const ROLES = new Set(["system", "user", "assistant", "tool"]);

/** The turns of the field `named`; `images` knows the pictures that came with them. */
export function conversation(messages, { local, repaint, images, named = "messages" }) {
  const most = local[`${named}s`] ?? MOST_TURNS;
  const turns = messages.slice(0, most).map((message, index) => turn(message ?? {}, { local, repaint, images, name: `${named} ${index}`, path: `${named}.${index}` }));
  const left = messages.length - most;
  return [turns, left > 0 ? h("button", { type: "button", onclick: () => { local[`${named}s`] = most + 2 * MOST_TURNS; repaint(); } }, `Show ${counted(left, "more turn")}`) : null];
}

function turn(message, options) {
  const role = line(message.role ?? "?", 40);
  const calls = Array.isArray(message.tool_calls) ? message.tool_calls : [];
  return h("div", { class: ROLES.has(role) ? `turn ${role}` : "turn" },
    h("div", { class: "role" }, role, message.name ? h("div", { class: "soft said" }, line(message.name, 60)) : null),
    h("div", null,
      typeof message.reasoning_content === "string" && message.reasoning_content ? folded("Reasoning", message.reasoning_content, { ...options, name: `${options.name} reasoning` }) : null,
      content(message.content, options), calls.slice(0, 20).map((call, index) => toolCall(call, { ...options, name: `${options.name} call ${index}` }))));
}

function content(value, options) {
  if (value === null || value === undefined || value === "") return null;
  if (typeof value === "string") return prose(value, options);
  if (Array.isArray(value)) return value.slice(0, 50).map((part, index) => piece(part, { ...options, name: `${options.name} part ${index}`, path: `${options.path}.content.${index}` }));
  return prose(JSON.stringify(value, null, 1), options);
}

function piece(part, options) {
  if (typeof part === "string") return prose(part, options);
  if (typeof part?.text === "string") return prose(part.text, options);
  for (const [name, address] of [["image_url.url", part?.image_url?.url], ["image_url", part?.image_url], ["image", part?.image], ["url", part?.url]]) {
    if (typeof address === "string") return image(address, { ...options, path: `${options.path}.${name}` });
  }
  return prose(JSON.stringify(part), options);
}

// An image that came with the message is drawn; one that lies elsewhere is named: nothing is asked of others.
function image(address, { images, path, ...context }) {
  return images?.draw(path, context)
    ?? h("p", { class: "soft said" }, address.startsWith("data:") ? "An image that can't be shown." : ["Image elsewhere, not loaded: ", h("span", { class: "mono" }, line(address, 120))]);
}

function toolCall(call, options) {
  const called = call?.function ?? call ?? {};
  const given = typeof called.arguments === "string" ? pretty(called.arguments) : JSON.stringify(called.arguments ?? {}, null, 1);
  return folded(["calls ", h("code", null, line(called.name ?? "?", 80))], given, options, "mono prose");
}

function folded(title, text, options, className) {
  return h("details", { class: "call" }, h("summary", null, title), prose(text, { ...options, className }));
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 1);
  } catch {
    return harmless(text);
  }
}
