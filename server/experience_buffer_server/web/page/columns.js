// The columns of a response's tokens: the whole in points, and of what is looked at each token, in parts.

import * as data from "./data.js";

const CHUNK = 4096;
const KNOWN = new Set(["advantages", "returns", "logprobs", "token_level_reward"]);
const NAMES = { values: "value", ref_logprobs: "reference logprob", teacher_logprobs: "teacher logprob", versions: "version" };

export class Columns {
  constructor({ buffer, uid, total, onChunk }) {
    this.buffer = buffer;
    this.uid = uid;
    this.total = total;
    this.onChunk = onChunk;
    this.chunks = new Array(Math.ceil(total / CHUNK)).fill(null);
    this.queue = [];
    this.aborting = new AbortController();
    this.overview = null;
    if (this.chunks.length > 1) this.fetchOverview();
  }

  close() {
    this.aborting.abort();
    this.queue.length = 0;
  }

  /** Tokens of a range; null where some aren't here yet: they are asked for next. */
  range(start, end) {
    const missing = [];
    for (let index = Math.floor(start / CHUNK); index * CHUNK < end; index++) if (!this.chunks[index]) missing.push(index);
    if (missing.length) {
      this.want(missing);
      return null;
    }
    return Array.from({ length: end - start }, (_, index) => this.token(start + index));
  }

  /** One token; null where it isn't here yet. */
  token(index) {
    const chunk = this.chunks[Math.floor(index / CHUNK)];
    if (!chunk) return null;
    const at = index % CHUNK;
    const of = (name) => chunk.columns[name]?.[at] ?? null;
    return {
      index, id: chunk.ids[at] ?? null, text: chunk.texts?.[at] ?? null,
      advantage: of("advantages"), return: of("returns"), logprob: of("logprobs"), reward: of("token_level_reward"),
      isMasked: chunk.mask?.[at] === false, others: chunk.others.map((name) => [NAMES[name] ?? name, of(name)]).filter(([, value]) => value !== null),
    };
  }

  /** What stands for a token where it isn't here itself: the point of the overview that it is in; null where there is none. */
  point(index) {
    const { overview } = this;
    if (!overview) return null;
    const at = Math.min(overview.starts.length - 1, Math.floor((index / this.total) * overview.starts.length));
    const of = (name) => overview.columns[name]?.[at] ?? null;
    return { advantage: of("advantages"), logprob: of("logprobs"), reward: of("token_level_reward"), isMasked: overview.mask[at] < 0.5 };
  }

  // What was asked for last is wanted first: one has scrolled on since.
  want(missing) {
    const isIdle = !this.queue.length && !this.busy;
    this.queue = [...missing, ...this.queue.filter((index) => !missing.includes(index))].slice(0, 4);
    if (isIdle) this.fetchNext();
  }

  async fetchNext() {
    this.busy = true;
    for (let index; (index = this.queue.shift()) !== undefined;) {
      if (this.chunks[index]) continue;
      try {
        const chunk = await data.tokens(this.buffer, this.uid, index * CHUNK, CHUNK, this.aborting.signal);
        this.chunks[index] = { ...chunk, others: Object.keys(chunk.columns).filter((name) => !KNOWN.has(name)) };
      } catch (error) {
        if (error.name === "AbortError") return;
        this.failure = error;
        this.queue.length = 0;
      }
      this.onChunk();
    }
    this.busy = false;
  }

  async fetchOverview() {
    try {
      this.overview = await data.strip(this.buffer, this.uid, CHUNK, this.aborting.signal);
    } catch (error) {
      if (error.name === "AbortError") return;
      this.failure = error;
    }
    this.onChunk();
  }
}
