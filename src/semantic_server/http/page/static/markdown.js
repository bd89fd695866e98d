// A model's Markdown as elements: headings, lists, tables, code, emphasis and links. Never markup.

import { el } from "./dom.js";

const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)/g;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*(\S*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const DASHES = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

function inline(text) {
  const parts = [];
  let from = 0;
  for (const match of text.matchAll(INLINE)) {
    const [all, code, strong, soft, label, address] = match;
    parts.push(text.slice(from, match.index));
    if (code !== undefined) parts.push(el("code", {}, code));
    else if (strong !== undefined) parts.push(el("strong", {}, ...inline(strong)));
    else if (soft !== undefined) parts.push(el("em", {}, ...inline(soft)));
    else parts.push(el("a", { href: address, rel: "noopener noreferrer", target: "_blank" }, label));
    from = match.index + all.length;
  }
  parts.push(text.slice(from));
  return parts.filter((part) => part !== "");
}

const cellsOf = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

// Takes the lines that `test` accepts from the start of `lines`.
function taken(lines, test) {
  const found = [];
  while (lines.length && test(lines[0])) found.push(lines.shift());
  return found;
}

function fenced(lines) {
  const [, mark] = FENCE.exec(lines.shift());
  const inside = taken(lines, (line) => !line.trim().startsWith(mark));
  lines.shift();
  return el("pre", {}, el("code", {}, inside.join("\n")));
}

function list(lines) {
  const [, margin, mark] = ITEM.exec(lines[0]);
  const made = el(/\d/.test(mark) ? "ol" : "ul", /\d/.test(mark) && parseInt(mark) !== 1 ? { start: parseInt(mark) } : {});
  while (lines.length) {
    const item = ITEM.exec(lines[0]);
    if (!item || item[1].length !== margin.length) break;
    lines.shift();
    const inner = taken(lines, (line) => line.trim() && line.search(/\S/) > margin.length);
    const cut = Math.min(...inner.map((line) => line.search(/\S/)), Infinity);
    made.append(el("li", {}, ...inline(item[3]), ...blocks(inner.map((line) => line.slice(cut)))));
    if (lines.length > 1 && !lines[0].trim() && ITEM.test(lines[1])) lines.shift();
  }
  return made;
}

function table(lines) {
  const [head, , ...rows] = taken(lines, (line) => line.includes("|"));
  const row = (line, tag) => el("tr", {}, ...cellsOf(line).map((cell) => el(tag, {}, ...inline(cell))));
  return el("div", { class: "wide" }, el("table", {}, el("thead", {}, row(head, "th")),
    el("tbody", {}, ...rows.map((line) => row(line, "td")))));
}

function begins(lines) {
  const [line, next] = lines;
  if (FENCE.test(line)) return fenced;
  if (HEADING.test(line)) return (rest) => { const [, marks, text] = HEADING.exec(rest.shift()); return el(`h${Math.min(6, marks.length + 2)}`, {}, ...inline(text)); };
  if (RULE.test(line)) return (rest) => { rest.shift(); return el("hr"); };
  if (ITEM.test(line)) return list;
  if (QUOTE.test(line)) return (rest) => el("blockquote", {}, ...blocks(taken(rest, (one) => QUOTE.test(one)).map((one) => QUOTE.exec(one)[1])));
  if (line.includes("|") && next !== undefined && DASHES.test(next) && next.includes("-")) return table;
  return null;
}

function blocks(lines) {
  const made = [];
  while (lines.length) {
    if (!lines[0].trim()) {
      lines.shift();
      continue;
    }
    const make = begins(lines);
    if (make) {
      made.push(make(lines));
      continue;
    }
    const text = [lines.shift()];
    while (lines.length && lines[0].trim() && !begins(lines)) text.push(lines.shift());
    made.push(el("p", {}, ...inline(text.join("\n"))));
  }
  return made;
}

export const markdown = (text) => blocks(text.split("\n"));
