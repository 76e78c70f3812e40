// Elements from values, and changing a tree into another one. Texts become text nodes, and nothing else:
// whatever a rollout has written is shown, never read as markup.

const SVG = "http://www.w3.org/2000/svg";
const PROPERTIES = new Set(["value", "checked", "disabled", "selected", "hidden"]);
const FORBIDDEN = /^(style|srcdoc|innerhtml|outerhtml|action|formaction|xlink:href)$/i;
const HARMLESS_ADDRESS = /^(#|blob:|data:image\/(png|jpeg|gif|webp);base64,)|^[.\w/-]+$/;

/** An element; children are elements, texts, numbers, arrays of those, or nothing (null, undefined, false). */
export function h(tag, props, ...children) {
  return made(document.createElement(tag), props, children);
}

/** The same for SVG. */
export function s(tag, props, ...children) {
  return made(document.createElementNS(SVG, tag), props, children);
}

function made(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) listen(node, name.slice(2), value);
    else if (name === "key") node._key = String(value);
    else if (name === "own") node._own = value;
    else if (PROPERTIES.has(name)) node[name] = value;
    else if (FORBIDDEN.test(name)) throw new Error(`${name} isn't set from values`);
    else if ((name === "href" || name === "src") && !HARMLESS_ADDRESS.test(value)) {
      throw new Error(`${name} leads elsewhere`);
    } else node.setAttribute(name, value === true ? "" : String(value));
  }
  add(node, children);
  if (node._own) node._own.mount(node);
  return node;
}

function add(node, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false || child === true) continue;
    if (Array.isArray(child)) add(node, child);
    else node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

function listen(node, type, handler) {
  if (typeof handler !== "function") throw new Error(`on${type} isn't a function`);
  node._on ??= Object.create(null);
  if (!(type in node._on)) node.addEventListener(type, heard);
  node._on[type] = handler;
}

function heard(event) {
  return event.currentTarget._on?.[event.type]?.(event);
}

/** Change a tree into a fresh one in place: what stays the same isn't touched, so focus, selection and
 * scrolling stay. An element with `own` looks after what is in it: it is told of its new values. */
export function morph(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName || old._key !== fresh._key) {
    old._own?.unmount?.(old);
    old.replaceWith(fresh);
    return fresh;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return old;
  }
  morphAttributes(old, fresh);
  for (const [type, handler] of Object.entries(fresh._on ?? {})) listen(old, type, handler);
  for (const type of Object.keys(old._on ?? {})) if (!(type in (fresh._on ?? {}))) old._on[type] = null;
  if (fresh._own && old._own) {
    old._own.update?.(old, fresh._own);
    return old;
  }
  morphChildren(old, fresh);
  if ("value" in fresh && old !== document.activeElement && old.value !== fresh.value) {
    old.value = fresh.value;
  }
  return old;
}

function morphAttributes(old, fresh) {
  const isOpenByHand = old.nodeName === "DETAILS" || old.nodeName === "DIALOG";
  for (const { name, value } of [...fresh.attributes]) {
    if (isOpenByHand && name === "open") continue;
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && !(isOpenByHand && name === "open")) old.removeAttribute(name);
  }
  for (const name of ["checked", "disabled", "selected", "hidden"]) {
    if (name in fresh && old[name] !== fresh[name]) old[name] = fresh[name];
  }
}

function morphChildren(old, fresh) {
  const keyed = new Map();
  for (const child of old.childNodes) if (child._key !== undefined) keyed.set(child._key, child);
  let place = old.firstChild;
  for (const child of [...fresh.childNodes]) {
    const match = child._key === undefined ? place : keyed.get(child._key);
    if (!match || (child._key === undefined && match._key !== undefined)) {
      old.insertBefore(child, place);
      continue;
    }
    keyed.delete(child._key);
    if (match === place) place = place.nextSibling;
    else old.insertBefore(match, place);
    morph(match, child);
  }
  while (place) {
    const next = place.nextSibling;
    place._own?.unmount?.(place);
    place.remove();
    place = next;
  }
}
