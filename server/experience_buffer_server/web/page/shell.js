// What is around each view: the top, the places of a buffer, and what stands in a view's place when it
// can't be shown.

import { h } from "./h.js";
import { to } from "./route.js";
import { ago, duration, harmless } from "./format.js";
import { help } from "./keys.js";
import { token } from "./api.js";

const PLACES = [
  ["buffer", "Buffer"], ["groups", "Groups"], ["consumers", "Consumers"], ["leases", "Leases"],
  ["steps", "Steps"], ["departures", "Departures"], ["search", "Experiences"],
];
const WITHIN = { group: "groups", experience: "search", lease: "leases", step: "steps" };
const THEMES = [["", "System"], ["light", "Light"], ["dark", "Dark"]];
const OLD_MS = 5000;
const SLACK_MS = 2000;

/** Everything in the body. */
export function body({ state, shown, actions }) {
  return [
    h("a", { class: "unseen", href: "#main", onclick: toMain }, "To the content"),
    top(state, shown, actions),
    places(state, shown.place),
    main(state, shown, actions),
    help(),
  ];
}

// The address is the view's: an anchor would leave it.
function toMain(event) {
  event.preventDefault();
  document.querySelector("main").focus();
}

function top(state, { place }, actions) {
  return h("header", { class: "top" },
    h("a", { class: "brand", href: to("overview") }, h("img", { src: "icon.svg", alt: "", width: 20, height: 20 }), "Experience buffer"),
    h("form", { role: "search", onsubmit: (event) => seek(event, state, place) },
      h("label", { class: "unseen", for: "search" }, "Search"),
      h("input", { id: "search", type: "search", name: "q", autocomplete: "off", spellcheck: "false",
        placeholder: "Search: uid, task, text, reward < 0   ( / )" })),
    liveness(state),
    h("label", { class: "unseen", for: "theme" }, "Theme"),
    h("select", { id: "theme", onchange: (event) => actions.setTheme(event.target.value) },
      THEMES.map(([value, name]) => h("option", { value, selected: value === state.theme }, name))),
    h("button", { class: "plain", type: "button", "aria-label": "Keys", title: "Keys (?)", onclick: () => document.getElementById("keys").showModal() }, "?"));
}

function seek(event, state, place) {
  event.preventDefault();
  const asked = event.target.elements.q.value.trim();
  const buffer = place.buffer || state.status?.buffers?.[0]?.name || "";
  if (asked && buffer) location.hash = to("search", buffer, "", { q: asked });
  event.target.elements.q.blur();
}

function liveness(state) {
  if (state.isRefused) return h("span", { class: "live", role: "status" }, "locked");
  if (state.lostAt !== null) return h("span", { class: "live off", role: "status" }, "lost");
  return state.isLive ? h("span", { class: "live on", role: "status", title: "Follows the server" }, "live")
    : h("span", { class: "live", role: "status" }, "not live");
}

function places(state, place) {
  const buffers = state.status?.buffers ?? [];
  if (!place.buffer) {
    return h("nav", { class: "places", key: "all", "aria-label": "Buffers" },
      h("a", { href: to("overview"), "aria-current": place.view === "overview" ? "page" : null }, "Overview"),
      buffers.slice(0, 12).map((buffer) => h("a", { href: to("buffer", buffer.name) }, buffer.name)));
  }
  const here = WITHIN[place.view] ?? place.view;
  return h("nav", { class: "places", key: "one", "aria-label": `Of buffer ${place.buffer}` },
    h("a", { href: to("overview") }, "Overview"),
    h("span", { class: "of said" }, harmless(place.buffer)),
    PLACES.map(([view, name]) => h("a", { href: to(view, place.buffer), "aria-current": view === here ? "page" : null }, name)));
}

function main(state, shown, actions) {
  const { view, place, data, error } = shown;
  const isLost = state.lostAt !== null;
  const parts = [banner(state, shown)];
  if (error?.status === 401) parts.push(tokenForm(error, actions));
  else if (error?.status === 403) parts.push(notAllowed(error, actions));
  else if (data) parts.push(view.render(data, { place, status: state.status, local: shown.local, ...actions }));
  else if (error) parts.push(failed(error, place, actions));
  else parts.push(skeleton());
  return h("main", { id: "main", tabindex: -1, key: shown.path, "data-place": shown.hash, "aria-busy": String(!data && !error), class: isLost && data ? "old" : null }, parts);
}

function banner(state, { data, at, asked, error, view }) {
  const now = Date.now();
  if (state.lostAt !== null && ![401, 403].includes(error?.status)) {
    const shown = data && at ? ` Below is how it was ${ago((now - at) / 1000)}.` : "";
    return h("p", { class: "banner", role: "alert" }, `The server can't be reached since ${clock(state.lostAt)}; trying again.${shown}`);
  }
  if (!data) {
    const waited = now - asked;
    return error || waited < OLD_MS ? null : h("p", { class: "banner mild", role: "status" }, `The server hasn't answered for ${duration(waited / 1000)}.`);
  }
  if (error && ![401, 403].includes(error.status)) {
    return h("p", { class: "banner", role: "alert" }, `Couldn't be read anew: ${harmless(error.message)}`);
  }
  const age = now - (view.usesStatus ? state.statusAt : at);
  // Events bring what is new at once; what is read every few seconds may be as old as that.
  if (view.every && age > Math.max(OLD_MS, view.usesStatus ? 0 : view.every * 1000 + SLACK_MS)) {
    return h("p", { class: "banner mild", role: "status" }, `This is from ${ago(age / 1000)}: the server answers slowly.`);
  }
  return null;
}

const clock = (time) => new Date(time).toLocaleTimeString("en-GB");

function skeleton() {
  return h("div", { class: "skeleton", "aria-label": "Loading" }, Array.from({ length: 8 }, () => h("div")));
}

function tokenForm(error, actions) {
  const isWrong = token.get() !== "";
  return h("section", { class: "card empty", key: "token" },
    h("h1", null, isWrong ? "This token isn't known" : "This server asks for a token"),
    h("p", { class: "soft said" }, "One with the role look is enough. It stays in this tab, and leaves with it."),
    h("form", { class: "filters", onsubmit: (event) => {
      event.preventDefault();
      actions.setToken(event.target.elements.token.value.trim());
    } },
    h("label", { class: "unseen", for: "token" }, "Token"),
    h("input", { id: "token", name: "token", type: "password", autocomplete: "off", required: true, placeholder: "Token" }),
    h("button", null, "Look")),
    isWrong ? h("p", { class: "red said" }, harmless(error.message)) : null);
}

function notAllowed(error, actions) {
  return h("section", { class: "card empty", key: "refused" },
    h("h1", null, "This token may not see this"),
    h("p", { class: "said" }, harmless(error.message)),
    h("p", { class: "soft" }, "A token's roles and buffers are in the server's access file."),
    h("button", { type: "button", onclick: () => actions.setToken("") }, "Use another token"));
}

function failed(error, place, actions) {
  const isGone = error.status === 404;
  return h("section", { class: "card empty", key: "failed" },
    h("h1", null, isGone ? "It isn't here" : error.status ? "The server refused this" : "No answer"),
    h("p", { class: "said" }, harmless(error.message)),
    isGone && place.buffer ? h("p", { class: "soft" }, "What was consumed, dropped or refused may be among the ",
      h("a", { href: to("departures", place.buffer) }, "departures"),
      place.tail ? [", and what is archived of it ", h("a", { href: to("search", place.buffer, "", { q: place.view === "group" ? `task = ${JSON.stringify(place.tail)}` : place.tail, from: "archive" }) }, "here")] : null, ".") : null,
    h("button", { type: "button", onclick: actions.reload }, "Try again"));
}
