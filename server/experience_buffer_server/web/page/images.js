// Images of an experience: asked of the server by where they are, and drawn from memory, so that nobody else is
// asked for anything, and a token can be sent along.

import { h } from "./h.js";
import { blob } from "./api.js";
import * as data from "./data.js";

const held = new Map();

/** Where images are: `draw(path)` gives an element, or null where the path is none's. */
export function imagesOf(buffer, uid, images, repaint) {
  const byPath = new Map(images.map((each) => [each.path, each]));
  return {
    draw(path, { local }) {
      const image = byPath.get(path);
      if (!image) return null;
      const key = `${buffer} ${uid} ${image.index}`;
      if (!held.has(key)) fetchInto(key, buffer, uid, image.index, repaint);
      const url = held.get(key);
      if (url === false) return h("p", { class: "soft" }, "An image that couldn't be read.");
      const isOpen = local[`image ${path}`];
      return h("figure", null, h("button", { class: "plain", type: "button", "aria-label": isOpen ? "Smaller" : "Larger", onclick: () => { local[`image ${path}`] = !isOpen; repaint(); } },
        url ? h("img", { src: url, alt: `image, ${image.width ?? "?"} by ${image.height ?? "?"}`, class: isOpen ? "open" : null }) : h("span", { class: "soft" }, "image")));
    },
  };
}

async function fetchInto(key, buffer, uid, index, repaint) {
  held.set(key, null);
  try {
    held.set(key, URL.createObjectURL(await blob(data.imagePath(buffer), { uid, index })));
  } catch {
    held.set(key, false);
  }
  repaint();
}

/** Forget those of a view that is left. */
export function forgetImages() {
  for (const url of held.values()) if (url) URL.revokeObjectURL(url);
  held.clear();
}
