// The tokens of a response, each with the colour of what it was given. Only what is seen is drawn, and only
// that is asked for first, so that 131,072 tokens scroll as smoothly as 100.

import { h, morph } from "./h.js";
import { count, decimal, harmless, percent, short } from "./format.js";
import { MARKS, diverging, improbable } from "./colours.js";
import { Columns } from "./columns.js";
import { Strip } from "./strip.js";

const BLOCK = 256;
const MARGIN = 700;

/** What tokens can be coloured by: the name in addresses, in words, and the class of a token's value. */
export const COLOURS = {
  advantage: { name: "Advantage", of: (token) => diverging(token.advantage) },
  logprob: { name: "Log-probability", of: (token) => improbable(token.logprob) },
  reward: { name: "Reward", of: (token) => diverging(token.reward) },
  mask: { name: "Mask", of: () => "d0" },
};

/** The legend of a colouring. */
export function legend(colour) {
  if (colour === "mask") return h("div", { class: "legend" }, h("span", null, "Plain: trained on; grey and struck: masked"));
  if (colour === "logprob") {
    return h("div", { class: "legend" }, h("span", null, "likely 0"), Array.from({ length: 11 }, (_, step) => h("i", { class: `l${step}` })), h("span", null, "−10 and below"));
  }
  const steps = Array.from({ length: 21 }, (_, index) => h("i", { class: `d${index - 10}` }));
  const ends = [h("span", null, "−3"), steps.slice(0, 10), h("span", null, "0"), steps.slice(10), h("span", null, "+3")];
  return h("div", { class: "legend", title: `Even steps at ${MARKS.map(([value]) => short(value)).join(", ")}: small values can be told apart, too` }, ends);
}

/** The view of one response's tokens. It owns what is in its element. */
export class Tokens {
  constructor({ buffer, uid, total, colour, at }) {
    this.wanted = { buffer, uid, total, colour, at };
  }

  mount(node) {
    const { buffer, uid, total, colour, at } = this.wanted;
    this.uid = uid;
    this.colour = colour;
    this.columns = new Columns({ buffer, uid, total, onChunk: () => this.arrived() });
    this.heights = new Array(Math.ceil(total / BLOCK)).fill(0);
    this.drawn = new Map();
    this.on = -1;
    this.target = null;
    this.above = h("div");
    this.below = h("div");
    this.scroller = h("div", { class: "tokens wanting", tabindex: 0, role: "group", "aria-label": `${count(total)} response tokens; arrow keys go from one to the next`,
      onscroll: () => this.later(), onwheel: () => this.stay(), onpointerdown: () => this.stay(), onmouseover: (event) => this.hover(event), onclick: (event) => this.hover(event), onkeydown: (event) => this.key(event) }, this.above, this.below);
    this.looking = h("div", { class: "looking", "aria-live": "polite" }, h("span", { class: "soft" }, "Point at a token, or go through them with the arrow keys."));
    this.strip = new Strip({ total, columns: this.columns, jump: (index) => this.show(index) });
    node.append(h("div", { class: "bar-of" }, this.strip.canvas), this.scroller, this.looking);
    this.resized = new ResizeObserver(() => this.resize());
    this.resized.observe(this.scroller);
    this.themed = () => this.strip.repaint();
    addEventListener("theme", this.themed);
    queueMicrotask(() => (at ? this.show(at) : this.draw()));
  }

  unmount() {
    this.resized.disconnect();
    removeEventListener("theme", this.themed);
    this.columns.close();
  }

  update(_, { wanted }) {
    if (wanted.at && wanted.at !== this.wanted.at) {
      this.wanted.at = wanted.at;
      this.show(wanted.at);
    }
    if (wanted.colour === this.colour) return;
    this.colour = wanted.colour;
    for (const [index, block] of this.drawn) this.fill(index, block);
    this.strip.repaint(this.colour);
  }

  // Another width breaks the lines elsewhere: the first token that is seen stays the first.
  resize() {
    const width = this.scroller.clientWidth;
    if (width === this.width) return this.later();
    const first = this.width ? this.first() : 0;
    this.width = width;
    this.heights.fill(0);
    this.strip.repaint(this.colour);
    if (first) this.show(first);
    else this.draw();
  }

  arrived() {
    for (const [index, block] of this.drawn) if (block.classList.contains("wanting")) this.fill(index, block);
    if (this.target !== null && this.columns.token(this.target)) this.show(this.target);
    this.later();
    this.strip.later(this.colour);
  }

  // Whoever scrolls isn't led back to where the address had led.
  stay() {
    this.target = null;
  }

  later() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
    });
  }

  // Blocks that nobody has seen yet count as tall as those that were.
  guess() {
    const known = this.heights.filter(Boolean);
    return known.length ? known.reduce((sum, height) => sum + height, 0) / known.length : 130;
  }

  // The first block that is seen, and how far below the upper edge it begins: there it stays, whatever the
  // blocks above it turn out to be tall.
  anchor() {
    const top = this.scroller.scrollTop;
    const index = [...this.drawn.keys()].sort((a, b) => a - b).find((each) => {
      const block = this.drawn.get(each);
      return block.offsetTop + block.offsetHeight > top && block.offsetTop < top + this.scroller.clientHeight;
    });
    return index === undefined ? null : { index, block: this.drawn.get(index), below: this.drawn.get(index).offsetTop - top };
  }

  draw() {
    if (!this.scroller.isConnected) return;
    this.scroller.classList.remove("wanting");
    const guess = this.guess();
    const tall = this.heights.map((height) => height || guess);
    const anchor = this.anchor();
    const sum = (from, to) => tall.slice(from, to).reduce((all, each) => all + each, 0);
    const top = anchor ? sum(0, anchor.index) - anchor.below : this.scroller.scrollTop;
    const [from, to] = this.within(tall, top - MARGIN, top + this.scroller.clientHeight + MARGIN);
    for (const [index, block] of this.drawn) {
      if (index >= from && index <= to) continue;
      block.remove();
      this.drawn.delete(index);
    }
    let before = this.above;
    for (let index = from; index <= to; index++) {
      let block = this.drawn.get(index);
      if (!block) {
        block = h("div", { class: "block" }, h("span", { class: "at" }, count(index * BLOCK)), h("div", { class: "text" }));
        this.fill(index, block);
        before.after(block);
        this.drawn.set(index, block);
      }
      before = block;
    }
    this.above.style.height = `${sum(0, from)}px`;
    this.below.style.height = `${sum(to + 1)}px`;
    for (const [index, block] of this.drawn) if (!block.classList.contains("wanting")) this.heights[index] = block.offsetHeight;
    const moved = anchor ? anchor.block.offsetTop - this.scroller.scrollTop - anchor.below : 0;
    if (Math.abs(moved) >= 1) this.scroller.scrollTop += moved;
    this.mark();
    // What is drawn tells how tall the rest will be.
    if (Math.abs(this.guess() - guess) > guess / 10) this.later();
  }

  // The first and last block that reach into a stretch.
  within(tall, top, bottom) {
    let [from, to, y] = [-1, tall.length - 1, 0];
    for (let index = 0; index < tall.length; index++) {
      y += tall[index];
      if (from < 0 && y >= top) from = index;
      if (y >= bottom) {
        to = index;
        break;
      }
    }
    return [from < 0 ? to : from, to];
  }

  fill(index, block) {
    const start = index * BLOCK;
    const end = Math.min(start + BLOCK, this.wanted.total);
    const tokens = this.columns.range(start, end);
    block.classList.toggle("wanting", !tokens);
    const text = block.lastChild;
    if (!tokens) {
      text.textContent = this.columns.failure ? `Couldn't be read: ${harmless(this.columns.failure.message)}` : "…";
      block.style.minHeight = `${this.guess()}px`;
      return;
    }
    block.style.minHeight = "";
    text.replaceChildren(...tokens.map((token) => this.drawnToken(token)));
  }

  drawnToken(token) {
    const parts = ["token", COLOURS[this.colour].of(token)];
    if (token.isMasked) parts.push("masked");
    if (token.index === this.on) parts.push("on");
    if (token.text === null) parts.push("id");
    const span = document.createElement("span");
    span.className = parts.join(" ");
    span.dataset.t = token.index;
    span.textContent = token.text === null ? String(token.id) : seen(token.text);
    return span;
  }

  hover(event) {
    const at = event.target.dataset?.t;
    if (at !== undefined) this.look(Number(at));
  }

  key(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    if (!(event.key in steps) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const first = this.on < 0 ? this.first() - Math.sign(steps[event.key]) : this.on;
    const next = Math.max(0, Math.min(this.wanted.total - 1, first + steps[event.key]));
    this.look(next);
    const span = this.scroller.querySelector(`[data-t="${next}"]`);
    if (span) span.scrollIntoView({ block: "nearest" });
    else this.show(next);
  }

  /** Say what is known of a token. */
  look(index) {
    this.scroller.querySelector(".token.on")?.classList.remove("on");
    this.on = index;
    this.scroller.querySelector(`[data-t="${index}"]`)?.classList.add("on");
    const token = this.columns.range(index, index + 1)?.[0];
    if (!token) return;
    const said = [
      ["position", count(index)], ["id", token.id === null ? "–" : String(token.id)],
      token.text === null ? null : ["text", h("code", { class: "said" }, JSON.stringify(harmless(token.text)))],
      ["advantage", decimal(token.advantage, 4)],
      token.return !== null && token.return !== token.advantage ? ["return", decimal(token.return, 4)] : null,
      token.logprob === null ? null : ["logprob", `${decimal(token.logprob, 3)} (${percent(Math.exp(token.logprob))})`],
      token.reward === null ? null : ["reward", decimal(token.reward, 4)],
      ...token.others.map(([name, value]) => [name, short(value)]),
      token.isMasked ? ["mask", "masked: not trained on"] : null,
    ].filter(Boolean);
    morph(this.looking, h("div", { class: "looking", "aria-live": "polite" }, said.map(([name, value]) => h("span", null, h("span", { class: "soft" }, `${name} `), value))));
  }

  first() {
    const top = this.scroller.getBoundingClientRect().top;
    for (const [index, block] of [...this.drawn].sort(([a], [b]) => a - b)) {
      if (block.getBoundingClientRect().bottom > top + 2) return index * BLOCK;
    }
    return 0;
  }

  /** Bring a token into sight. */
  show(index) {
    const block = Math.floor(index / BLOCK);
    if (!this.drawn.has(block)) {
      // What is drawn elsewhere must hold nothing in its place.
      for (const each of this.drawn.values()) each.remove();
      this.drawn.clear();
      const guess = this.guess();
      this.above.style.height = `${this.heights.reduce((sum, height) => sum + (height || guess), 0)}px`;
      this.scroller.scrollTop = this.heights.slice(0, block).reduce((sum, height) => sum + (height || guess), 0);
    }
    this.draw();
    this.look(index);
    const span = this.scroller.querySelector(`[data-t="${index}"]`);
    this.target = span ? null : index;
    if (span) this.scroller.scrollTop += span.getBoundingClientRect().top - this.scroller.getBoundingClientRect().top - 40;
  }

  mark() {
    const box = this.scroller.getBoundingClientRect();
    let [from, to] = [this.wanted.total, 0];
    for (const [index, block] of this.drawn) {
      const { top, bottom, height } = block.getBoundingClientRect();
      if (bottom < box.top || top > box.bottom) continue;
      const share = (y) => Math.round(Math.max(0, Math.min(1, (y - top) / (height || 1))) * BLOCK);
      from = Math.min(from, index * BLOCK + share(box.top));
      to = Math.max(to, index * BLOCK + share(box.bottom));
    }
    this.strip.see(from, Math.min(to, this.wanted.total), this.colour);
  }
}

const seen = (text) => harmless(text).replaceAll("\n", "⏎\n");
