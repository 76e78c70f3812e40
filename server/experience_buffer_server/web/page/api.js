// What the server says: /api/v1, and its events. The token, where one is asked for, stays in this tab.

const BASE = new URL("../api/v1/", document.baseURI);
const TOKEN = "experience-buffer-token";

/** An answer that isn't the one asked for. Status 0: the server couldn't be reached. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const token = {
  get: () => sessionStorage.getItem(TOKEN) ?? "",
  set: (value) => (value ? sessionStorage.setItem(TOKEN, value) : sessionStorage.removeItem(TOKEN)),
};

function headers(accept) {
  const held = token.get();
  return held ? { Accept: accept, Authorization: `Bearer ${held}` } : { Accept: accept };
}

/** The address of something under /api/v1. `parts` are encoded; what is null or empty in `query` is left out. */
export function address(parts, query = {}) {
  const url = new URL(parts.map(encodeURIComponent).join("/"), BASE);
  for (const [name, value] of Object.entries(query)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") url.searchParams.append(name, each);
    }
  }
  return url;
}

async function call(url, accept, signal) {
  let answer;
  try {
    answer = await fetch(url, { headers: headers(accept), signal, cache: "no-store", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "The server can't be reached.");
  }
  if (!answer.ok) throw new Refused(answer.status, await reason(answer));
  return answer;
}

async function reason(answer) {
  const text = (await answer.text()).slice(0, 4000);
  try {
    const said = JSON.parse(text);
    const message = said.message ?? said.detail ?? said.error?.message ?? said.error ?? text;
    return typeof message === "string" ? message : JSON.stringify(message);
  } catch {
    return text || `${answer.status} ${answer.statusText}`;
  }
}

/** The JSON at an address. */
export async function get(parts, query, signal) {
  return (await call(address(parts, query), "application/json", signal)).json();
}

/** The bytes at an address. */
export async function blob(parts, query) {
  return (await call(address(parts, query), "*/*")).blob();
}

/** Save what is at an address as a file. */
export async function download(parts, query, name) {
  const url = URL.createObjectURL(await blob(parts, query));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** The events of the server, for as long as the tab is seen. Read by fetch: an EventSource can't send a token.
 *
 * `live.lostAt` is since when the server can't be reached, in ms since the epoch; null while it can.
 */
export class Live {
  constructor(onEvent, onState) {
    this.isHeard = false;
    this.lostAt = null;
    this.refused = null;
    this._onEvent = onEvent;
    this._onState = onState;
    this._reading = null;
    this._retry = 0;
    this._timer = null;
  }

  start() {
    clearTimeout(this._timer);
    this._reading?.abort();
    this._reading = new AbortController();
    this._read(this._reading.signal).catch((error) => this._lost(error));
  }

  stop() {
    clearTimeout(this._timer);
    this._reading?.abort();
    this._reading = null;
  }

  async _read(signal) {
    const answer = await call(address(["events"]), "text/event-stream", signal);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let held = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Refused(0, "The server has gone.");
      if (!this.isHeard) {
        this.isHeard = true;
        this.lostAt = this.refused = null;
        this._onState(true);
      }
      this._retry = 0;
      held = (held + value).replaceAll("\r\n", "\n");
      for (let end; (end = held.indexOf("\n\n")) >= 0; held = held.slice(end + 2)) {
        this._tell(held.slice(0, end));
      }
    }
  }

  _tell(message) {
    let kind = "message";
    const data = [];
    for (const each of message.split("\n")) {
      if (each.startsWith("data:")) data.push(each.slice(5).trimStart());
      else if (each.startsWith("event:")) kind = each.slice(6).trim();
    }
    if (data.length) this._onEvent(kind, JSON.parse(data.join("\n")));
  }

  _lost(error) {
    if (error.name === "AbortError") return;
    this.refused = error.status === 401 || error.status === 403 ? error : null;
    this.isHeard = false;
    // A server that refuses is there all the same.
    this.lostAt = error.status ? null : this.lostAt ?? Date.now();
    this._onState(false);
    // A token that is missing doesn't come by asking again.
    if (this.refused) return;
    this._retry = Math.min(this._retry + 1, 5);
    this._timer = setTimeout(() => this.start(), 500 * 2 ** this._retry * (0.75 + Math.random() / 2));
  }
}
