// Elements made from parts, never from markup, and figures in words.

const SVG = "http://www.w3.org/2000/svg";

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, String(value));
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

export const el = (tag, attributes = {}, ...children) =>
  filled(document.createElement(tag), attributes, children);

export const svg = (tag, attributes = {}, ...children) =>
  filled(document.createElementNS(SVG, tag), attributes, children);

// Writes out invisible characters that change how others look, as in \u{202e}.
const UNSEEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cs}\p{Co}]/gu;

export const visible = (name) =>
  name.replace(UNSEEN, (mark) => `\\u{${mark.codePointAt(0).toString(16)}}`);

// An agent's name, whose text direction changes nothing around it.
export const named = (name) => el("bdi", { title: visible(name) }, visible(name));

const whole = new Intl.NumberFormat("en");
export const count = (n) => whole.format(n);

export function rounded(n) {
  if (n < 1e4) return count(n);
  const [unit, size] = n < 1e6 ? ["k", 1e3] : n < 1e9 ? ["M", 1e6] : ["G", 1e9];
  return `${(n / size).toFixed(n / size < 10 ? 1 : 0)} ${unit}`;
}

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (n >= 1024 && at < units.length - 1) [n, at] = [n / 1024, at + 1];
  return `${at && n < 10 ? n.toFixed(1) : Math.round(n)} ${units[at]}`;
}

export function duration(seconds) {
  if (seconds < 0.9995) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export const percent = (share) => `${Math.floor(share * 100)} %`;

// A share as a bar, with its percentage.
export function bar(share) {
  const filled = el("span", { class: "filled" });
  filled.style.inlineSize = `${Math.min(100, 100 * share)}%`;
  return el("span", { class: "share" }, el("span", { class: "bar", "aria-hidden": "true" }, filled), percent(share));
}

export const clock = (at) =>
  new Date(at * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
