// What people type into the search, as the filters that the server knows.

const FIELDS = {
  reward: { low: "min_reward", high: "max_reward" },
  length: { low: "min_response_tokens", high: "max_response_tokens", isWhole: true },
  version: { low: "min_policy_version", high: "max_policy_version", isWhole: true },
  staleness: { low: "min_staleness", high: "max_staleness", isWhole: true },
};
const EQUAL = { state: "state", consumer: "consumer", step: "step", task: "tid", tid: "tid", run: "rid", rid: "rid", sid: "sid", uid: "uid_prefix", flag: "flag", flags: "flag" };
const SAME = { tokens: "length", response_tokens: "length", policy_version: "version", stale: "staleness" };
const TERM = /(\w+)\s*(<=|>=|!=|<|>|=|:)\s*("[^"]*"|[^\s"]+)|"([^"]*)"|(\S+)/g;

export const EXAMPLES = ["reward < 0", "version = 12", "state = quarantined", "length > 2000", "task = 0/17", "truncated = yes", "flag = zero_variance", "archived = yes"];

/** Filters by name, and what couldn't be understood, in words. */
export function understood(text) {
  const filters = {};
  const problems = [];
  for (const [, name, sign, given, quoted, bare] of text.matchAll(TERM)) {
    if (name === undefined) word(filters, quoted ?? bare);
    else {
      const value = given.replace(/^"|"$/g, "");
      const field = name.toLowerCase();
      const problem = term(filters, SAME[field] ?? field, sign, value);
      if (problem) problems.push(problem);
    }
  }
  return { filters, problems };
}

function word(filters, text) {
  if (text.includes("/")) filters.uid_prefix = text;
  else filters.text = filters.text ? `${filters.text} ${text}` : text;
}

function term(filters, field, sign, value) {
  const isEqual = sign === "=" || sign === ":";
  if (Object.hasOwn(FIELDS, field)) return range(filters, field, sign, value);
  if (!isEqual) return `${field} ${sign}: only = is known for it`;
  if (field === "truncated" || field === "archived") filters[field] = /^(yes|true|1)$/i.test(value) ? "true" : "false";
  else if (field === "text") filters.text = value;
  else if (Object.hasOwn(EQUAL, field)) filters[EQUAL[field]] = value;
  else return `${field} isn't known`;
  return null;
}

function range(filters, field, sign, value) {
  const { low, high, isWhole } = FIELDS[field];
  const number = Number(value.replace("−", "-"));
  if (!Number.isFinite(number) || sign === "!=") return `${field} ${sign} ${value}: give a number with <, <=, =, >= or >`;
  const next = (by) => (isWhole ? (by < 0 ? Math.ceil(number) - 1 : Math.floor(number) + 1) : neighbour(number, by));
  if (sign === "=" || sign === ":") filters[low] = filters[high] = number;
  else if (sign === "<") filters[high] = next(-1);
  else if (sign === "<=") filters[high] = number;
  else if (sign === ">") filters[low] = next(1);
  else filters[low] = number;
  return null;
}

// The next number that a double can hold: the server's limits are included, "<" isn't.
function neighbour(number, by) {
  if (number === 0) return by * Number.MIN_VALUE;
  const view = new DataView(new ArrayBuffer(8));
  view.setFloat64(0, number);
  view.setBigInt64(0, view.getBigInt64(0) + (number > 0 === by > 0 ? 1n : -1n));
  return view.getFloat64(0);
}
