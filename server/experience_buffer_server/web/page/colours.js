// One scale for values around zero: the same value has the same colour in every view. Blue below, orange above,
// so that people with any kind of colour-blindness can tell them apart; the style sheet has the colours.

export const NUM_STEPS = 10;
const FULL = 3;
const FINE = 0.05;

const spread = (size) => Math.log1p(size / FINE) / Math.log1p(FULL / FINE);

/** The step of a value: -10 to 10; 0 for zero alone, so that a sign is always seen. */
export function step(value) {
  if (typeof value !== "number" || Number.isNaN(value) || value === 0) return 0;
  const size = Math.min(1, spread(Math.abs(value))) * NUM_STEPS;
  return Math.sign(value) * Math.max(1, Math.round(size));
}

/** The class with a value's colour: "d3", "d-10", "d0". */
export const diverging = (value) => `d${step(value)}`;

/** The class of a log-probability: "l0" for 0, "l10" for -10 and below. */
export function improbable(logprob) {
  if (typeof logprob !== "number" || Number.isNaN(logprob)) return "l0";
  return `l${Math.round(Math.min(1, Math.sqrt(Math.max(0, -logprob) / NUM_STEPS)) * NUM_STEPS)}`;
}

/** Where a legend says a number: value and step. */
export const MARKS = [-3, -1, -0.3, 0, 0.3, 1, 3].map((value) => [value, step(value)]);
