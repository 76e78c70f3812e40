// The page: which view is shown, what keeps it live, and the keys.

import { h, morph } from "./h.js";
import { parse, to } from "./route.js";
import { Live, Refused, token } from "./api.js";
import { body } from "./shell.js";
import { press } from "./keys.js";
import * as data from "./data.js";
import { VIEWS } from "./views.js";

const OLD_SECONDS = 5;
const TICK_MS = 1000;

const state = { status: null, statusAt: null, isLive: false, lostAt: null, theme: localStorage.getItem("theme") ?? "" };
let shown = null;
const scrolled = new Map();

const live = new Live(
  (kind, said) => {
    state.status = data.told(state.status, kind, said);
    state.statusAt = Date.now();
    paint();
  },
  (isLive) => {
    state.isLive = isLive;
    state.lostAt = live.lostAt;
    state.isRefused = Boolean(live.refused);
    if (live.refused) fail(live.refused);
    paint();
  },
);

/** Show the view of the address. */
function go() {
  const place = parse(location.hash);
  const view = VIEWS[place.view] && Object.hasOwn(VIEWS, place.view) ? VIEWS[place.view] : VIEWS.unknown;
  const path = `${place.view} ${place.buffer} ${place.tail}`;
  const isSame = shown?.path === path && shown.view === view;
  const wasAsked = shown && asked(shown.place, view);
  if (shown) {
    shown.loading?.abort();
    if (!isSame) {
      scrolled.set(shown.hash, scrollY);
      shown.view.leave?.();
    }
  }
  // An entry that was shown before carries a state: its way back leads to where one had scrolled.
  const isBack = history.state !== null;
  history.replaceState({ shown: true }, "");
  shown = {
    ...{ place, view, path, hash: location.hash, loading: null, isFresh: !isSame, isBack },
    ...{ data: isSame ? shown.data : null, at: isSame ? shown.at : null, asked: isSame ? shown.asked : 0, error: null, local: isSame ? shown.local : {} },
  };
  if (!isSame || !shown.data || wasAsked !== asked(place, view)) load();
  paint();
}

// What of an address the server is asked for: how a view is drawn isn't part of it.
function asked({ query }, view) {
  return [...query].filter(([name]) => name !== "sort" && !view.kept?.includes(name)).join("&");
}

/** Ask for what the view shows; what it shows stays until the answer is there. */
async function load() {
  const mine = shown;
  mine.loading?.abort();
  mine.loading = new AbortController();
  const { signal } = mine.loading;
  mine.asked = Date.now();
  try {
    // Without events, as where too many tabs are open, what they would tell is asked for.
    if (!state.status || (!state.isLive && Date.now() - state.statusAt > OLD_SECONDS * 1000)) {
      state.status = await data.server(signal);
      state.statusAt = Date.now();
    }
    mine.data = await mine.view.load({ place: mine.place, signal, status: state.status, held: mine.data, local: mine.local });
    mine.at = Date.now();
    mine.error = null;
  } catch (error) {
    if (error.name === "AbortError") return;
    if (!(error instanceof Refused)) console.error(error);
    if (mine === shown) fail(error);
  }
  mine.loading = null;
  if (mine !== shown) return;
  paint();
  if (mine.isFresh && mine.data) settle(mine);
}

function settle(mine) {
  mine.isFresh = false;
  if (mine.view.at?.(mine.place)) return;
  scrollTo(0, mine.isBack ? scrolled.get(mine.hash) ?? 0 : 0);
}

function fail(error) {
  shown.error = error;
}

function paint() {
  if (!shown) return;
  const title = shown.data ? shown.view.title(shown.data, shown.place) : shown.view.title(null, shown.place);
  document.title = title ? `${title} · experience buffer` : "Experience buffer";
  const fresh = h("body", null, body({ state, shown, actions }));
  morph(document.body, fresh);
}

const actions = {
  reload: () => load(),
  repaint: () => paint(),
  setToken(value) {
    token.set(value);
    state.status = null;
    shown.error = null;
    live.start();
    load();
    paint();
  },
  setTheme(theme) {
    state.theme = theme;
    if (theme) localStorage.setItem("theme", theme);
    else localStorage.removeItem("theme");
    applyTheme();
    paint();
  },
};

function applyTheme() {
  if (state.theme) document.documentElement.dataset.theme = state.theme;
  else delete document.documentElement.dataset.theme;
  dispatchEvent(new Event("theme"));
}

function tick() {
  if (document.hidden || !shown) return;
  const { view, loading, at } = shown;
  const isDue = view.every && Date.now() - shown.asked >= view.every * 1000;
  // A server that is lost is asked by the events alone; what failed for another reason is asked anew.
  if (isDue && !loading && state.lostAt === null && !live.refused) load();
  if (view.every || state.lostAt !== null || !at || Date.now() - at > OLD_SECONDS * 1000) paint();
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    live.stop();
    shown?.loading?.abort();
  } else {
    live.start();
    if (shown) load();
  }
});
addEventListener("hashchange", go);
addEventListener("keydown", (event) => press(event, actions));
history.scrollRestoration = "manual";
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("theme")));
applyTheme();
if (!location.hash) history.replaceState(null, "", to("overview"));
go();
if (!document.hidden) live.start();
setInterval(tick, TICK_MS);
