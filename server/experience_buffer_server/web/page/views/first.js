// What an empty buffer needs: the lines of Python that fill it, with this server's address.

import { h } from "../h.js";
import { copy, empty } from "../parts.js";

/** The lines for one buffer. */
export function lines(buffer = "math", listens = "") {
  return [
    "from experience_buffer import EID, Client, Experience",
    `client = Client(${JSON.stringify(reached(listens))})`,
    `client.push([Experience(eid=EID(task=7, run=run), prompt=[5, 6], response=[8, run], reward=run % 2) for run in range(4)], buffer=${JSON.stringify(buffer)})`,
  ].join("\n");
}

// Where it listens isn't where it is reached from: the host is that of the page.
function reached(listens) {
  if (listens.startsWith("unix:")) return listens;
  return `${location.hostname || "127.0.0.1"}:${listens.split(":").at(-1) || 50051}`;
}

/** They, in place of what isn't there yet. */
export function firstLines(buffer, listens) {
  const text = lines(buffer, listens);
  return empty(buffer ? "Nothing has been pushed to this buffer yet. These three lines push a group of four:" : "There is no buffer yet. Make one in the server's configuration or by create_buffer; then these three lines fill it:",
    h("pre", { tabindex: 0 }, text), copy("Copy", text));
}
