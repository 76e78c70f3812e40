// A whole response at a glance: a pixel per token, or more where it is short; a click leads there.

import { h } from "./h.js";
import { count } from "./format.js";
import { COLOURS } from "./tokens.js";

const LOW = 14;
const ROWS_MOST = 200;

export class Strip {
  constructor({ total, columns, jump }) {
    this.total = total;
    this.columns = columns;
    this.colour = "advantage";
    this.seen = [0, 0];
    const go = (event) => event.buttons && jump(this.at(event));
    this.canvas = h("canvas", { class: "strip", role: "img", "aria-label": `All ${count(total)} tokens by their colours`, onpointerdown: go, onpointermove: go });
  }

  later(colour = this.colour) {
    this.colour = colour;
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.paint();
    });
  }

  /** Draw it anew: its size, theme or colouring has changed. */
  repaint(colour = this.colour) {
    this.palette = null;
    this.later(colour);
  }

  see(from, to, colour) {
    if (from === this.seen[0] && to === this.seen[1]) return;
    this.seen = [from, to];
    this.later(colour);
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    const row = Math.max(0, Math.min(this.rows - 1, Math.floor(y * this.rows)));
    return Math.max(0, Math.min(this.total - 1, row * this.perRow + Math.floor(x * this.perRow)));
  }

  paint() {
    const width = Math.floor(this.canvas.clientWidth);
    if (!width || !this.canvas.isConnected) return;
    this.palette ??= palette(this.canvas.parentNode);
    this.perRow = Math.min(this.total, Math.max(width, Math.ceil(this.total / ROWS_MOST)));
    this.rows = Math.ceil(this.total / this.perRow);
    const tall = this.rows === 1 ? LOW : 1;
    const image = new ImageData(this.perRow, this.rows);
    const pixels = new Uint32Array(image.data.buffer);
    for (let index = 0; index < this.total; index++) {
      const token = this.columns.token(index) ?? this.columns.point(index);
      pixels[index] = !token ? this.palette.none : token.isMasked ? this.palette.masked : this.palette[COLOURS[this.colour].of(token)];
    }
    this.canvas.width = this.perRow;
    this.canvas.height = this.rows * tall;
    this.canvas.style.height = `${Math.max(LOW, this.rows)}px`;
    const drawing = this.canvas.getContext("2d");
    if (tall === 1) drawing.putImageData(image, 0, 0);
    else for (let y = 0; y < tall; y++) drawing.putImageData(image, 0, y);
    this.paintSeen(drawing, tall);
  }

  paintSeen(drawing, tall) {
    const [from, to] = this.seen;
    if (to - from >= this.total) return;
    drawing.fillStyle = this.palette.accent;
    for (let row = Math.floor(from / this.perRow); row * this.perRow < to; row++) {
      const [x, end] = [Math.max(0, from - row * this.perRow), Math.min(this.perRow, to - row * this.perRow)];
      if (tall > 1) drawing.fillRect(x, tall - 2, end - x, 2);
      else drawing.fillRect(x, row, Math.min(3, end - x), 1);
    }
  }
}

// The style sheet's colours as pixels: whatever they are mixed of.
function palette(parent) {
  const probe = h("i", { class: "token" });
  parent.append(probe);
  const dot = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const pixel = (colour) => {
    dot.clearRect(0, 0, 1, 1);
    dot.fillStyle = colour;
    dot.fillRect(0, 0, 1, 1);
    return new Uint32Array(dot.getImageData(0, 0, 1, 1).data.buffer)[0];
  };
  const found = Object.create(null);
  for (let step = -10; step <= 10; step++) {
    for (const name of step < 0 ? [`d${step}`] : [`d${step}`, `l${step}`]) {
      probe.className = `token ${name}`;
      found[name] = pixel(getComputedStyle(probe).backgroundColor);
    }
  }
  probe.className = "soft";
  found.masked = pixel(getComputedStyle(probe).color);
  probe.className = "chip";
  found.none = pixel(getComputedStyle(probe).backgroundColor);
  found.accent = getComputedStyle(document.querySelector("a") ?? probe).color;
  probe.remove();
  return found;
}
