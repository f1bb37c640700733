// A `quire.learn.picture.Picture` as SVG and tables.
const COLOURS = ["--decode", "--prefill", "--good", "--draft", "--bad", "--accent", "--soft"];
const STATES = { wait: "--wait", idle: "--line", prefill: "--prefill", decode: "--decode", draft: "--draft", cached: "--cached", transfer: "--bad", link: "--bad" };
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
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) found.push(10 ** e);
    const every = Math.ceil(found.length / most);
    return found.filter((v, i) => v >= low * 0.999 && v <= high * 1.001 && i % every === 0);
  }
  const rough = (high - low) / most, base = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 2.5, 5, 10].map((m) => m * base).find((s) => s >= rough) || base;
  for (let v = Math.ceil(low / step) * step; v <= high + step / 1e6; v += step) found.push(+v.toPrecision(12));
  return found;
}
const text = (x, y, s, anchor = "middle", fill = "--soft") => `<text x="${x}" y="${y}" text-anchor="${anchor}" fill="var(${fill})">${esc(s)}</text>`;
const legend = (names, from = "") => `<div class="qc-keys">${from}${names.map(([n, c]) => `<span><i style="background:${c}"></i>${esc(n)}</span>`).join("")}</div>`;

function lines(p, w) {
  const h = 300, left = 62, low = 34, all = p.lines.flatMap((l) => l.x.map((x, i) => [x, l.y[i]])).filter(([x, y]) => x != null && y != null && (!p.x.log || x > 0) && (!p.y.log || y > 0));
  if (!all.length) return "";
  const range = (k, log) => { let a = Math.min(...all.map((q) => q[k])), b = Math.max(...all.map((q) => q[k])); if (k && !log) a = Math.min(0, a); if (a === b) b = a + (Math.abs(a) || 1); return [a, b]; };
  const [x0, x1] = range(0, p.x.log), [y0, y1] = range(1, p.y.log), L = Math.log, right = w - 14, top = 12, foot = h - low;
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
  return `<div class="qc-note">${esc(title(p.y))}</div><svg width="${w}" height="${h}">${s}</svg>` + legend(p.lines.filter((l) => l.name).map((l) => [l.name, colour(p.lines.indexOf(l))]));
}
function bars(p, w) {
  const series = Object.entries(p.bars), sums = p.names.map((_, i) => (p.stacked ? series.reduce((a, [, v]) => a + (v[i] || 0), 0) : Math.max(...series.map(([, v]) => v[i] || 0)))), most = Math.max(...sums, 1e-12);
  const left = Math.min(w * 0.36, 14 + 7 * Math.max(...p.names.map((n) => n.length))), bar = 18, each = p.stacked ? bar : bar * series.length, wide = w - left - 110;
  let s = "", y = 4;
  p.names.forEach((name, i) => {
    s += text(left - 8, y + each / 2 + 4, name, "end", "--ink");
    let x = left;
    series.forEach(([, v], k) => {
      const long = (wide * (v[i] || 0)) / most;
      s += `<rect x="${x}" y="${p.stacked ? y : y + k * bar}" width="${Math.max(v[i] ? 1 : 0, long)}" height="${bar - 3}" fill="${colour(k)}"/>`;
      if (p.stacked) x += long;
      else s += text(x + long + 6, y + k * bar + 12, `${show(v[i])} ${p.y.unit}`, "start");
    });
    if (p.stacked) s += text(x + 6, y + 12, `${show(sums[i])} ${p.y.unit}`, "start");
    y += each + 8;
  });
  return `<div class="qc-note">${esc(title(p.y))}</div><svg width="${w}" height="${y}">${s}</svg>` + (series.length > 1 ? legend(series.map(([n], k) => [n, colour(k)])) : "");
}
function timeline(p, w) {
  const spans = p.rows.flatMap((r) => r.spans), a = Math.min(0, ...spans.map((s) => s.start)), b = Math.max(...spans.map((s) => s.end), a + 1e-9), seen = new Map(), used = new Map();
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
  return `<svg width="${w}" height="${foot + 34}">${s}</svg>` + legend([...used]);
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
  return `<svg width="${w}" height="${high * p.rows.length + 2}">${s}</svg>` + (used.size <= 24 ? legend([...used]) : "");
}
const cells = (tag, row) => row.map((v) => `<${tag}>${esc(typeof v === "string" ? v : show(v))}</${tag}>`).join("");
const table = (p) => `<table class="qc-table"><thead><tr>${cells("th", p.header)}</tr></thead><tbody>${p.rows.map((r) => `<tr>${cells("td", r)}</tr>`).join("")}</tbody></table>`;
const facts = (p) => `<table class="qc-table qc-facts"><tbody>${p.facts.map((f) => `<tr><th>${esc(f.text)}</th><td>${esc(show(f.value))} ${esc(f.unit)}</td></tr>`).join("")}</tbody></table>`;
const KINDS = { lines, bars, timeline, grid, table, facts };

export default {
  template: `<div class="qc-picture" :data-drawn="count"><div v-if="error" class="qc-error">{{ error }}</div><div ref="parts"></div></div>`,
  data: () => ({ count: 0, error: "" }),
  mounted() {
    this.resized = new ResizeObserver(() => this.picture && Math.abs(this.$el.clientWidth - this.wide) > 2 && this.draw());
    this.resized.observe(this.$el);
  },
  beforeUnmount() { this.resized.disconnect(); },
  methods: {
    fail(text) { this.error = text; },
    push(picture) { this.error = ""; this.picture = picture; this.count++; this.draw(); },
    draw() {
      this.wide = this.$el.clientWidth;
      const w = Math.max(260, this.wide - 2);
      this.$refs.parts.innerHTML = `<div class="qc-name">${esc(this.picture.title)}</div>` + this.picture.parts.map((p) => `<section data-kind="${p.kind}">${p.title ? `<h4>${esc(p.title)}</h4>` : ""}${KINDS[p.kind](p, w)}</section>`).join("");
    },
  },
};
