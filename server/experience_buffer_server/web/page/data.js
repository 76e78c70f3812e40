// What each view asks the server for: the one place that knows the paths below /api/v1.

import { get } from "./api.js";

const of = (buffer, ...rest) => ["buffers", buffer, ...rest];

/** What the server is, what its buffers hold, and what needs a person. */
export async function server(signal) {
  const [status, stats, { advice }] = await Promise.all([get(["status"], {}, signal), get(["stats"], {}, signal), get(["advice"], {}, signal)]);
  return { ...status, ...stats, advice };
}

/** The same, with what an event says of it. */
export function told(held, kind, said) {
  if (!held || !said || typeof said !== "object") return held;
  const { buffers, advice, stats } = said;
  const fresh = { ...held };
  if (Array.isArray(buffers) && typeof buffers[0] !== "string") fresh.buffers = buffers;
  if (Array.isArray(stats?.buffers)) Object.assign(fresh, stats);
  if (Array.isArray(advice)) fresh.advice = advice;
  if (said.points) fresh.points = said.points;
  if (typeof said.uptime_seconds === "number") fresh.uptime_seconds = said.uptime_seconds;
  return fresh;
}

export const info = (buffer, signal) => get(of(buffer), {}, signal);
export const trends = (buffer, signal) => get(of(buffer, "trends"), {}, signal);
export const groups = (buffer, query, signal) => get(of(buffer, "groups"), query, signal);
export const group = (buffer, key, signal) => get(of(buffer, "group"), { key }, signal);
export const leases = (buffer, query, signal) => get(of(buffer, "leases"), query, signal);
export const steps = (buffer, query, signal) => get(of(buffer, "steps"), query, signal);
export const step = (buffer, consumer, number, signal) => get(of(buffer, "steps", consumer, number), {}, signal);
export const departures = (buffer, query, signal) => get(of(buffer, "departures"), query, signal);
export const experiences = (buffer, query, signal) => get(of(buffer, "experiences"), query, signal);
export const experience = (buffer, uid, signal, chars) => get(of(buffer, "experience"), { uid, chars }, signal);
export const strip = (buffer, uid, points, signal) => get(of(buffer, "experience", "overview"), { uid, points }, signal);
export const tokens = (buffer, uid, start, count, signal) => get(of(buffer, "experience", "tokens"), { uid, start, count }, signal);
export const payloadPath = (buffer) => of(buffer, "experience", "payload");
export const imagePath = (buffer) => of(buffer, "experience", "image");
