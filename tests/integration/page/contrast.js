// Texts of the page whose contrast with what is behind them is too low: [text, ratio, colour, background].
const dot = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const seen = new Map();
function pixel(colour) {
  if (!seen.has(colour)) {
    dot.clearRect(0, 0, 1, 1);
    dot.fillStyle = colour;
    dot.fillRect(0, 0, 1, 1);
    seen.set(colour, [...dot.getImageData(0, 0, 1, 1).data].map((part) => part / 255));
  }
  return seen.get(colour);
}
const over = ([r, g, b, a], below) => [r, g, b].map((part, index) => part * a + below[index] * (1 - a)).concat(1);
function behind(element) {
  const layers = [];
  for (let each = element; each; each = each.parentElement) {
    const colour = pixel(getComputedStyle(each).backgroundColor);
    layers.push(colour);
    if (colour[3] === 1) break;
  }
  return layers.reverse().reduce((below, layer) => over(layer, below), [1, 1, 1, 1]);
}
const light = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
const luminance = ([r, g, b]) => 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let node; (node = walker.nextNode());) {
  const element = node.parentElement;
  const text = node.data.trim();
  if (!text || !element.checkVisibility({ opacityProperty: true, visibilityProperty: true }) || element.closest(".unseen, .old, noscript, option, [disabled]")) continue;
  const [below, colour] = [behind(element), getComputedStyle(element).color];
  const above = over(pixel(colour), below);
  const [high, low] = [luminance(above), luminance(below)].sort((a, b) => b - a);
  const ratio = (high + 0.05) / (low + 0.05);
  if (ratio < arguments[0]) found.push([text.slice(0, 40), Number(ratio.toFixed(2)), colour, element.className]);
}
return found.slice(0, 10);
