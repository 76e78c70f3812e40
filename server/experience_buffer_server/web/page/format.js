// Values as people read them: numbers, sizes, durations, instants, and texts that can't disturb others.

const NONE = "–";
const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** "1,234"; "–" for what isn't known. Texts such as "NaN" stay as they are. */
export function count(value) {
  if (value === null || value === undefined) return NONE;
  return isNumber(value) ? WHOLE.format(value) : String(value);
}

/** A number with so many digits behind the point, and a true minus sign. */
export function decimal(value, digits = 2) {
  if (value === null || value === undefined) return NONE;
  if (!isNumber(value)) return String(value);
  const said = Math.abs(value) >= 1e6 ? value.toExponential(2) : fixed(value, digits);
  return said.replace("-", "−").replace("e+", "e");
}

function fixed(value, digits) {
  const said = value.toLocaleString("en-US", {
    minimumFractionDigits: digits,
    maximumFractionDigits: digits,
  });
  // Beyond the sixth digit there is nothing but rounding.
  if (Math.abs(value) >= 1e-6 && /^-?[0.]+$/.test(said)) return value.toExponential(1);
  return said === `-${(0).toFixed(digits)}` ? (0).toFixed(digits) : said;
}

/** A number in as few digits as say it: "12", "0.25", "1.2e-5". */
export function short(value) {
  if (!isNumber(value)) return value === null || value === undefined ? NONE : String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return WHOLE.format(value).replace("-", "−");
  const said = Math.abs(value) < 1e-3 ? value.toExponential() : String(Number(value.toPrecision(4)));
  return (said.length > 9 ? value.toExponential(2) : said).replace("-", "−");
}

/** A rate: more digits where it is small. */
export function rate(value) {
  if (!isNumber(value)) return NONE;
  return value >= 100 ? count(value) : value === 0 ? "0" : decimal(value, value >= 10 ? 1 : 2);
}

/** "412 B", "1.2 MB". */
export function size(bytes) {
  if (!isNumber(bytes)) return NONE;
  if (bytes < 1000) return `${WHOLE.format(bytes)} B`;
  for (const unit of ["kB", "MB", "GB", "TB"]) {
    bytes /= 1000;
    if (bytes < 999.95 || unit === "TB") return `${decimal(bytes, 1)} ${unit}`;
  }
  return NONE;
}

/** "0.4 s", "41 s", "3 min 5 s", "3 d 4 h". */
export function duration(seconds) {
  if (!isNumber(seconds)) return NONE;
  if (seconds < 0) return `−${duration(-seconds)}`;
  if (seconds < 9.95) return seconds < 0.05 ? "0 s" : `${decimal(seconds, 1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  const units = [["d", "h", 86400, 3600], ["h", "min", 3600, 60], ["min", "s", 60, 1]];
  for (const [large, small, inLarge, inSmall] of units) {
    if (whole < inLarge) continue;
    const rest = Math.floor((whole % inLarge) / inSmall);
    return rest ? `${count(Math.floor(whole / inLarge))} ${large} ${rest} ${small}`
      : `${count(Math.floor(whole / inLarge))} ${large}`;
  }
  return NONE;
}

/** When something is full; empty where nobody needs to think of that yet. */
export function fullIn(seconds) {
  return isNumber(seconds) && seconds < 366 * 86400 ? `full in ${duration(seconds)} at this rate` : "";
}

/** How long ago: one unit where two say no more. */
export function ago(seconds) {
  if (!isNumber(seconds)) return NONE;
  if (seconds < 1) return "just now";
  const said = seconds < 9.95 ? `${Math.round(seconds)} s` : duration(seconds);
  return `${seconds < 600 ? said : said.split(" ").slice(0, 2).join(" ")} ago`;
}

/** The exact instant, in the reader's zone. */
export function instant(time) {
  if (!isNumber(time)) return "";
  const date = new Date(time * 1000);
  if (Number.isNaN(date.getTime())) return "";
  const two = (part) => String(part).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  const offset = -date.getTimezoneOffset();
  const zone = `${offset < 0 ? "−" : "+"}${two(Math.floor(Math.abs(offset) / 60))}:${two(Math.abs(offset) % 60)}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())} ${zone}`;
}

/** "0.2 %", "41 %". */
export function percent(ratio) {
  if (!isNumber(ratio)) return NONE;
  const value = ratio * 100;
  return `${value >= 0.05 && value < 9.95 ? decimal(value, 1) : WHOLE.format(value)} %`;
}

/** "1 group", "1,234 groups". */
export function counted(number, singular, plural = `${singular}s`) {
  return `${count(number)} ${number === 1 ? singular : plural}`;
}

// What moves a cursor, turns the direction of what follows, or can't be seen: said by its name.
const UNSEEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

/** A text whose control characters are seen, and do nothing. */
export function harmless(text) {
  return String(text).replace(/\r\n/g, "\n").replace(UNSEEN, (char) => {
    const code = char.codePointAt(0);
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

/** One line of a text, cut where it is long. */
export function line(text, mostChars = 160) {
  const said = harmless(String(text ?? "").slice(0, 4 * mostChars)).replace(/\s+/g, " ");
  return said.length <= mostChars ? said : `${said.slice(0, mostChars - 1)}…`;
}

/** A state's name in words. */
export function words(name) {
  return line(String(name ?? "").replaceAll("_", " "), 80);
}
