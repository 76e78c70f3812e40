// What differs between two texts, by words.

const MOST_WORDS = 4000;
const MOST_EDITS = 1500;

/** Parts of both texts: [["same" | "del" | "ins", text]]; null where they differ too much to be compared. */
export function diff(one, other) {
  const a = one.match(/\S+\s*|\s+/gu) ?? [];
  const b = other.match(/\S+\s*|\s+/gu) ?? [];
  const isCut = a.length > MOST_WORDS || b.length > MOST_WORDS;
  const parts = joined(edits(a.slice(0, MOST_WORDS), b.slice(0, MOST_WORDS)));
  return { parts, isCut };
}

// Myers' greedy algorithm, with the ways kept to go back on.
function edits(a, b) {
  const most = Math.min(a.length + b.length, MOST_EDITS);
  let ends = new Map([[1, 0]]);
  const past = [];
  for (let depth = 0; depth <= most; depth++) {
    past.push(new Map(ends));
    for (let k = -depth; k <= depth; k += 2) {
      const isDown = k === -depth || (k !== depth && (ends.get(k - 1) ?? -1) < (ends.get(k + 1) ?? -1));
      let x = isDown ? ends.get(k + 1) : ends.get(k - 1) + 1;
      let y = x - k;
      while (x < a.length && y < b.length && a[x] === b[y]) { x++; y++; }
      ends.set(k, x);
      if (x >= a.length && y >= b.length) return back(a, b, past);
    }
    if (past.length * past.length > 4e6) break;
  }
  return [["del", a.join("")], ["ins", b.join("")]];
}

function back(a, b, past) {
  const found = [];
  let [x, y] = [a.length, b.length];
  for (let depth = past.length - 1; depth >= 0; depth--) {
    const ends = past[depth];
    const k = x - y;
    const isDown = k === -depth || (k !== depth && (ends.get(k - 1) ?? -1) < (ends.get(k + 1) ?? -1));
    const from = isDown ? k + 1 : k - 1;
    const [fromX, fromY] = [ends.get(from), ends.get(from) - from];
    while (x > fromX && y > fromY && x > 0 && y > 0) { found.push(["same", a[--x]]); y--; }
    if (depth === 0) break;
    if (isDown) found.push(["ins", b[--y]]);
    else found.push(["del", a[--x]]);
  }
  return found.reverse();
}

function joined(parts) {
  const found = [];
  for (const [kind, text] of parts) {
    if (found.at(-1)?.[0] === kind) found.at(-1)[1] += text;
    else found.push([kind, text]);
  }
  return found;
}
