// Addresses of views: "#/b/math/groups?state=open". They hold everything that makes a view what it is, so
// that they can be sent; behind the "#", so that the page works under any prefix of a proxy.

/** A view's address. What is null, undefined or empty in `query` is left out. */
export function to(view, buffer = "", tail = "", query = {}) {
  const parts = buffer ? ["b", part(buffer), view] : view === "overview" ? [] : [view];
  let path = `#/${parts.join("/")}`;
  if (tail !== "" && tail !== null) path += `/${part(tail)}`;
  const asked = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return asked.length ? `${path}?${new URLSearchParams(asked)}` : path;
}

// Keys and uids have slashes, which stay readable.
function part(text) {
  const whole = String(text).toWellFormed?.() ?? String(text);
  return encodeURIComponent(whole).replaceAll("%2F", "/");
}

/** What an address names: view, buffer, tail (a key, uid or id; may hold slashes) and query. */
export function parse(hash) {
  const [path, asked = ""] = splitOnce(hash.replace(/^#\/?/, ""), "?");
  const found = { view: "overview", buffer: "", tail: "", query: new URLSearchParams(asked) };
  if (!path) return found;
  if (!path.startsWith("b/")) {
    const [view, tail] = splitOnce(path, "/");
    return { ...found, view, tail: decoded(tail ?? "") };
  }
  const [buffer, rest] = splitOnce(path.slice(2), "/");
  const [view, tail] = splitOnce(rest ?? "buffer", "/");
  return { ...found, buffer: decoded(buffer), view, tail: decoded(tail ?? "") };
}

function splitOnce(text, separator) {
  const at = text.indexOf(separator);
  return at < 0 ? [text] : [text.slice(0, at), text.slice(at + 1)];
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Change the query of the address in place: the way back isn't filled with each keystroke. */
export function ask(changes) {
  const { view, buffer, tail, query } = parse(location.hash);
  const asked = { ...Object.fromEntries(query), ...changes };
  history.replaceState(null, "", to(view, buffer, tail, asked));
  dispatchEvent(new HashChangeEvent("hashchange"));
}
