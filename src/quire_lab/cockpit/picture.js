// A `quire_lab.learn.picture.Picture` as SVG and tables.
//
// Charts that are compared have one axis: the parts of a picture whose x axes have one title and unit share its range,
// and the pictures that stand beside each other share all axes of like parts.
const COLOURS = ["--decode", "--prefill", "--good", "--draft", "--bad", "--accent", "--soft"];
const STATES = { wait: "--wait", idle: "--line", prefill: "--prefill", decode: "--decode", both: "--draft", draft: "--draft", cached: "--cached", transfer: "--bad", link: "--bad" };
const OWNERS = { "": "--faint", waste: "--bad", shared: "--shared", accepted: "--good", missed: "--bad" };
const esc = (s) => String(s).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
export const show = (v) => {
  if (v == null) return "–";
  if (typeof v !== "number") return String(v);
  const a = Math.abs(v);
  if (Number.isInteger(v) && a < 1e15) return v.toLocaleString("en-US");
  return a >= 1e5 || a < 1e-3 ? v.toExponential(2) : a >= 100 ? v.toFixed(0) : a >= 10 ? v.toFixed(1) : a >= 1 ? v.toFixed(2) : v.toPrecision(3);
};
const short = (v) => (Math.abs(v) >= 1e9 ? v / 1e9 + "G" : Math.abs(v) >= 1e6 ? v / 1e6 + "M" : Math.abs(v) >= 1e4 ? v / 1e3 + "k" : String(+v.toPrecision(6)));
const colour = (i) => (i < COLOURS.length ? `var(${COLOURS[i]})` : `hsl(${(i * 137.5) % 360} 50% 55%)`);
const of = (name, table, seen) => (name in table ? `var(${table[name]})` : colour((seen.has(name) ? seen : seen.set(name, seen.size)).get(name)));
const title = (a) => a.title + (a.unit ? ", " + a.unit : "");
function ticks(low, high, log, most = 6) {
  const found = [];
  if (log) {
    const steps = Math.log10(high / low) < 2 ? [1, 2, 5] : [1];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) found.push(...steps.map((m) => +(m * 10 ** e).toPrecision(3)));
    const inside = found.filter((v) => v >= low * 0.999 && v <= high * 1.001), every = Math.ceil(inside.length / most);
    return inside.filter((_, i) => i % every === 0);
  }
  const rough = (high - low) / most, base = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 2.5, 5, 10].map((m) => m * base).find((s) => s >= rough) || base;
  for (let v = Math.ceil(low / step) * step; v <= high + step / 1e6; v += step) found.push(+v.toPrecision(12));
  return found;
}
const nameOf = (a) => `${a.title}|${a.unit}|${a.log ? "log" : ""}`;
const valuesOf = (line, axis, log) => line[axis].filter((v) => v != null && (!log || v > 0));
const longest = (p) => (p.stacked ? p.names.map((_, i) => Object.values(p.bars).reduce((a, v) => a + (v[i] || 0), 0)) : Object.values(p.bars).flat().map((v) => v || 0));
const endsOf = (p) => [0, ...p.rows.flatMap((r) => r.spans.flatMap((s) => [s.start, s.end]))];
// The values of each axis of a part, with the name under which other parts share its range.
function axesOf(p) {
  if (p.kind === "lines") return [[`x|${nameOf(p.x)}`, p.lines.flatMap((l) => valuesOf(l, "x", p.x.log))], [`y|${p.title}|${nameOf(p.y)}`, p.lines.flatMap((l) => valuesOf(l, "y", p.y.log))]];
  if (p.kind === "timeline") return [[`x|${nameOf(p.x)}`, endsOf(p)]];
  return p.kind === "bars" ? [[`y|${p.title}|${nameOf(p.y)}`, longest(p)]] : [];
}
function rangesOf(pictures) {
  const ranges = new Map();
  for (const p of pictures.flatMap((each) => each.parts)) for (const [name, values] of axesOf(p)) {
    const [low, high] = ranges.get(name) || [Infinity, -Infinity];
    ranges.set(name, [values.reduce((a, v) => Math.min(a, v), low), values.reduce((a, v) => Math.max(a, v), high)]);
  }
  return ranges;
}
const text = (x, y, s, anchor = "middle", fill = "--soft") => `<text x="${x}" y="${y}" text-anchor="${anchor}" fill="var(${fill})">${esc(s)}</text>`;
const svg = (w, h, inner, p) => `<svg width="${w}" height="${h}" role="img" aria-label="${esc(p.title || title(p.y || p.x || { title: "cells" }))}">${inner}</svg>`;
const legend = (names, from = "") => `<div class="qc-keys">${from}${names.map(([n, c]) => `<span><i style="background:${c}"></i>${esc(n)}</span>`).join("")}</div>`;

function lines(p, w, ranges) {
  const h = 260, left = 64, low = 34, isEmpty = axesOf(p).some(([, values]) => !values.length);
  if (isEmpty) return "";
  const [[xName], [yName]] = axesOf(p), wide = ([a, b]) => (a === b ? [a, b + (Math.abs(a) || 1)] : [a, b]);
  const [x0, x1] = wide(ranges.get(xName)), [yLow, yHigh] = ranges.get(yName), [y0, y1] = wide([p.y.log ? yLow : Math.min(0, yLow), yHigh]);
  const L = Math.log, right = w - 14, top = 12, foot = h - low;
  const X = (v) => left + ((right - left) * (p.x.log ? L(v / x0) / L(x1 / x0) : (v - x0) / (x1 - x0))), Y = (v) => foot - ((foot - top) * (p.y.log ? L(v / y0) / L(y1 / y0) : (v - y0) / (y1 - y0)));
  let s = "";
  if (p.zone && p.zone[0] != null) { const a = Math.max(x0, p.zone[0]), b = Math.min(x1, p.zone[1] ?? x1); if (b > a) s += `<rect x="${X(a)}" y="${top}" width="${X(b) - X(a)}" height="${foot - top}" fill="var(--good)" opacity=".13"/>` + text((X(a) + X(b)) / 2, top + 12, p.zone[2], "middle", "--good"); }
  for (const v of ticks(x0, x1, p.x.log)) s += `<path d="M${X(v)} ${top}V${foot}" stroke="var(--line)"/>` + text(X(v), foot + 14, short(v));
  for (const v of ticks(y0, y1, p.y.log, 5)) s += `<path d="M${left} ${Y(v)}H${right}" stroke="var(--line)"/>` + text(left - 6, Y(v) + 4, short(v), "end");
  p.lines.forEach((l, i) => {
    const points = l.x.map((x, k) => [x, l.y[k]]).filter(([x, y]) => x != null && y != null && (!p.x.log || x > 0) && (!p.y.log || y > 0)).map(([x, y]) => [X(x).toFixed(1), Y(y).toFixed(1)]), c = colour(i);
    if (l.style === "points") s += points.map(([x, y]) => `<circle cx="${x}" cy="${y}" r="3.500" fill="${c}"/>`).join("");
    else s += `<path d="${points.map(([x, y], k) => (k === 0 ? "M" : l.style === "steps" ? `H${x}V` : "L") + (k && l.style === "steps" ? y : x + " " + y)).join("")}" fill="none" stroke="${c}" stroke-width="2" ${l.style === "dashed" ? 'stroke-dasharray="6 4"' : ""}/>`;
  });
  p.marks.forEach(([v, label], i) => { if (v >= x0 && v <= x1) s += `<path d="M${X(v)} ${top}V${foot}" stroke="var(--ink)" stroke-dasharray="2 3"/>` + text(X(v) + (X(v) > w * 0.7 ? -5 : 5), top + 26 + 14 * (i % 5), label, X(v) > w * 0.7 ? "end" : "start", "--ink"); });
  s += text((left + right) / 2, h - 4, title(p.x));
  return `<div class="qc-note">${esc(title(p.y))}</div>${svg(w, h, s, p)}` + legend(p.lines.filter((l) => l.name).map((l) => [l.name, colour(p.lines.indexOf(l))]));
}
// A label in at most two lines of `most` characters.
function lined(label, most) {
  if (label.length <= most) return [label];
  const at = label.lastIndexOf(" ", most), cut = at > most / 2 ? at : most, rest = label.slice(cut).trim();
  return [label.slice(0, cut), rest.length > most ? rest.slice(0, most - 1) + "…" : rest];
}
function bars(p, w, ranges) {
  const series = Object.entries(p.bars), sums = p.names.map((_, i) => series.reduce((a, [, v]) => a + (v[i] || 0), 0)), most = Math.max(ranges.get(axesOf(p)[0][0])[1], 1e-12);
  const left = Math.min(w * 0.36, 14 + 7 * Math.max(0, ...p.names.map((n) => n.length))), bar = 18, wide = w - left - 150;
  let s = "", y = 4;
  p.names.forEach((name, i) => {
    const said = lined(name, Math.floor((left - 10) / 7)), each = Math.max(p.stacked ? bar : bar * series.length, 15 * said.length), middle = y + each / 2 + 4 - 7 * (said.length - 1);
    said.forEach((line, k) => { s += text(left - 8, middle + 14 * k, line, "end", "--ink"); });
    let x = left;
    series.forEach(([kind, v], k) => {
      const long = (wide * (v[i] || 0)) / most;
      s += `<rect x="${x}" y="${p.stacked ? y : y + k * bar}" width="${Math.max(v[i] ? 1 : 0, long)}" height="${bar - 3}" fill="${colour(k)}"><title>${esc(`${kind} ${show(v[i])} ${p.y.unit}`)}</title></rect>`;
      if (p.stacked) x += long;
      else s += text(x + long + 6, y + k * bar + 12, `${show(v[i])} ${p.y.unit}`, "start");
    });
    if (p.stacked) s += text(x + 6, y + 12, `${show(sums[i])} ${p.y.unit}`, "start");
    y += each + 8;
  });
  const names = series.map(([n, v], k) => [p.stacked && p.names.length === 1 ? `${n} ${show(v[0])} ${p.y.unit}` : n, colour(k)]);
  return `<div class="qc-note">${esc(title(p.y))}</div>${svg(w, y, s, p)}` + (series.length > 1 ? legend(names) : "");
}
function timeline(p, w, ranges) {
  const [a, last] = ranges.get(axesOf(p)[0][0]), b = Math.max(last, a + 1e-9), seen = new Map(), used = new Map();
  const left = Math.min(w * 0.3, 12 + 7 * Math.max(0, ...p.rows.map((r) => r.name.length))), high = Math.max(7, Math.min(24, Math.floor(460 / Math.max(1, p.rows.length)))), X = (v) => left + ((w - left - 8) * (v - a)) / (b - a), foot = high * p.rows.length;
  let s = ticks(a, b, false, 8).map((v) => `<path d="M${X(v)} 0V${foot}" stroke="var(--line)"/>` + text(X(v), foot + 14, short(v))).join("");
  p.rows.forEach((r, i) => {
    if (high >= 12 || i % Math.ceil(12 / high) === 0) s += text(left - 6, i * high + high / 2 + 4, r.name, "end", "--ink");
    for (const e of r.spans) {
      const c = of(e.state, STATES, seen), long = Math.max(1, X(e.end) - X(e.start) - 0.6), tall = e.state === "wait" || e.state === "idle" ? 0.4 : 0.84;
      used.set(e.state, c);
      s += `<rect x="${X(e.start)}" y="${i * high + (high * (1 - tall)) / 2}" width="${long}" height="${high * tall}" fill="${c}" rx="1"><title>${esc(`${e.state} ${e.label} ${show(e.start)} … ${show(e.end)}`)}</title></rect>`;
      if (e.label && long > 7 * e.label.length + 4 && high >= 14) s += `<text x="${X(e.start) + long / 2}" y="${i * high + high / 2 + 4}" text-anchor="middle" fill="#fff">${esc(e.label)}</text>`;
    }
  });
  s += text((left + w) / 2, foot + 30, title(p.x));
  return `${svg(w, foot + 34, s, p)}` + legend([...used]);
}
function grid(p, w) {
  const seen = new Map(), used = new Map(), most = Math.max(1, ...p.rows.map((r) => r.length)), left = p.names.length ? Math.min(w * 0.3, 12 + 7 * Math.max(...p.names.map((n) => n.length))) : 0, long = Math.max(0, ...p.rows.flat().map((c) => c.text.length));
  const wide = Math.min(Math.max(22, 8 * long + 6), (w - left) / most), high = Math.max(8, Math.min(22, long ? 22 : wide));
  let s = "";
  p.rows.forEach((row, i) => {
    if (p.names[i]) s += text(left - 6, i * high + high / 2 + 4, p.names[i], "end", "--ink");
    row.forEach((cell, k) => {
      const c = of(cell.owner, OWNERS, seen);
      if (cell.owner) used.set(cell.owner, c);
      s += `<rect x="${left + k * wide}" y="${i * high}" width="${Math.max(1, wide - 1)}" height="${high - 1}" fill="${c}"/>`;
      if (cell.text && wide > 6.4 * cell.text.length) s += `<text x="${left + k * wide + wide / 2}" y="${i * high + high / 2 + 4}" text-anchor="middle" fill="${cell.owner ? "#fff" : "var(--soft)"}">${esc(cell.text)}</text>`;
    });
  });
  return `${svg(w, high * p.rows.length + 2, s, p)}` + (used.size <= 24 ? legend([...used]) : "");
}
const value = (v) => esc(typeof v === "string" ? v : show(v));
const head = (header) => (header.some((h) => h) ? `<thead><tr>${header.map((h) => (h ? `<th scope="col">${esc(h)}</th>` : "<td></td>")).join("")}</tr></thead>` : "");
const table = (p) => `<table class="qc-table">${head(p.header)}<tbody>${p.rows.map((r) => `<tr>${r.map((v) => `<td>${value(v)}</td>`).join("")}</tr>`).join("")}</tbody></table>`;
const facts = (p) => `<table class="qc-table qc-facts"><tbody>${p.facts.map((f) => `<tr><th scope="row">${esc(f.text)}</th><td>${value(f.value)} ${esc(f.unit)}</td></tr>`).join("")}</tbody></table>`;
const KINDS = { lines, bars, timeline, grid, table, facts };

export default {
  template: `<div class="qc-picture" :data-drawn="count"><div v-if="error" class="qc-error" role="alert">{{ error }}</div><div ref="parts"></div></div>`,
  data: () => ({ count: 0, error: "" }),
  mounted() {
    this.resized = new ResizeObserver(() => this.picture && Math.abs(this.$el.clientWidth - this.wide) > 2 && this.draw());
    this.resized.observe(this.$el);
  },
  beforeUnmount() { this.resized.disconnect(); },
  methods: {
    fail(text) { this.error = text; },
    push(picture, compared) {
      Object.assign(this, { error: "", picture, ranges: rangesOf([picture, ...compared]) });
      this.count++;
      this.draw();
    },
    reveal() {
      const calm = matchMedia("(prefers-reduced-motion: reduce)").matches, box = this.$el.getBoundingClientRect();
      if (box.top < 60 || box.top > innerHeight - 120) this.$el.scrollIntoView({ behavior: calm ? "auto" : "smooth", block: "start" });
    },
    draw() {
      this.wide = this.$el.clientWidth;
      const w = Math.max(260, this.wide - 2);
      this.$refs.parts.innerHTML = `<h2 class="qc-name">${esc(this.picture.title)}</h2>` + this.picture.parts.map((p) => `<section data-kind="${p.kind}">${p.title ? `<h3>${esc(p.title)}</h3>` : ""}${KINDS[p.kind](p, w, this.ranges)}</section>`).join("");
    },
  },
};
