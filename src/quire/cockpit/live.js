// What an engine does, from the messages of /engine/live (quire/scheduler/live.py says what their columns are).
const WINDOW_S = 20, KEEP = 480, HISTOGRAMS = { ttft: "Time to first token", itl: "Inter-token latency", tpot: "Time per output token" };
const PARTS = [["plan_s", "schedule", "--good"], ["compute_s", "compute", "--decode"], ["draft_s", "drafts", "--draft"], ["apply_s", "apply", "--prefill"]];
const si = (x) => (Number.isInteger(x) && x < 1e4 ? String(x) : x >= 1e6 ? (x / 1e6).toFixed(1) + "M" : x >= 1e4 ? (x / 1e3).toFixed(1) + "k" : x >= 100 ? x.toFixed(0) : x >= 10 ? x.toFixed(1) : x.toFixed(x ? 2 : 0));
const sec = (s) => (s == null ? "–" : s >= 10 ? s.toFixed(0) + " s" : s >= 1 ? s.toFixed(1) + " s" : s >= 0.01 ? (1e3 * s).toFixed(0) + " ms" : (1e3 * s).toFixed(1) + " ms");
const hue = (i) => (i * 137.508) % 360;

// The value below which a share `q` of the counted observations lies, as Prometheus interpolates it.
export function quantile(bounds, counts, q) {
  const total = counts.reduce((a, b) => a + b, 0);
  if (!total) return null;
  let seen = 0;
  for (let i = 0; i < counts.length; i++) {
    if (seen + counts[i] >= q * total && counts[i]) {
      if (i >= bounds.length) return bounds[bounds.length - 1];
      const low = i ? bounds[i - 1] : 0;
      return low + ((bounds[i] - low) * (q * total - seen)) / counts[i];
    }
    seen += counts[i];
  }
  return bounds[bounds.length - 1];
}

export default {
  template: `<div class="ql" :data-messages="count" :data-tokens="generated">
    <div v-if="note" class="w12 qc-note">{{ note }}</div>
    <div class="tiles"><div v-for="t in tiles" class="tile"><b :class="{alarm: t.alarm}">{{ t.value }}</b><span>{{ t.name }}</span></div></div>
    <section class="w12"><h3>Requests, the last {{ span }} s<em><i style="background:var(--wait)"></i>queued<i style="background:var(--prefill)"></i>prompt chunk<i style="background:var(--decode)"></i>decode<template v-if="drafting"><i style="background:var(--draft)"></i>accepted drafts</template><i style="background:var(--bad)"></i>preempted
      <a href="#" @click.prevent="paused = !paused" style="margin-left:12px">{{ paused ? "continue" : "pause" }}</a></em></h3><canvas ref="lanes" style="height:300px" role="img" aria-label="time line of requests"></canvas></section>
    <section class="w6"><h3>KV blocks<em>{{ blocksSaid }}<i style="background:var(--cached)"></i>cached<i style="background:var(--shared)"></i>shared<i style="background:hsl(210 60% 55%)"></i>one owner</em></h3><canvas ref="blocks" style="height:220px"></canvas></section>
    <section class="w6"><h3>Prefix tree<em>{{ treeSaid }}</em></h3><canvas ref="tree" style="height:220px"></canvas></section>
    <section v-for="(title, key) in titles" class="w4"><h3>{{ title }}<em :class="{alarm: (latency[key] || {}).alarm}">{{ (latency[key] || {}).said }}</em></h3><canvas :ref="'h_' + key" style="height:120px"></canvas></section>
    <section class="w4"><h3>Tokens/s<em><i style="background:var(--decode)"></i>generated<i style="background:var(--prefill)"></i>prompt</em></h3><canvas ref="tokens" style="height:120px"></canvas></section>
    <section class="w4"><h3>Batch<em><i style="background:var(--decode)"></i>running<i style="background:var(--wait)"></i>waiting</em></h3><canvas ref="batch" style="height:120px"></canvas></section>
    <section class="w4"><h3>Step, ms<em><template v-for="p in parts"><i :style="{background: 'var(' + p[2] + ')'}"></i>{{ p[1] }}</template></em></h3><canvas ref="steps" style="height:120px"></canvas></section>
  </div>`,
  data: () => ({ count: 0, generated: 0, note: "", tiles: [], paused: false, drafting: false, span: WINDOW_S, blocksSaid: "", treeSaid: "", latency: {}, titles: HISTOGRAMS, parts: PARTS.filter((p) => p[0] !== "draft_s") }),
  created() {
    Object.assign(this, { rows: new Map(), points: [], at: 0, offset: 0, last: null, first: null, tree_: [] });
  },
  mounted() {
    const draw = (t) => {
      if (t - this.at > 90 && !this.paused && !document.hidden && this.last) {
        this.at = t;
        this.drawLanes();
      }
      this.frame = requestAnimationFrame(draw);
    };
    this.frame = requestAnimationFrame(draw);
    this.resized = new ResizeObserver(() => this.last && this.drawAll());
    this.resized.observe(this.$el);
  },
  beforeUnmount() {
    cancelAnimationFrame(this.frame);
    this.resized.disconnect();
  },
  methods: {
    say(text) { this.note = text; },
    push(text) {
      const m = JSON.parse(text), before = this.last;
      this.note = "";
      if (before && m.t < before.t) { this.rows.clear(); this.points = []; this.first = null; } // the engine started again
      this.first ??= m;
      this.last = m;
      this.count++;
      this.offset = performance.now() / 1e3 - m.t;
      if (m.tree) this.tree_ = m.tree;
      this.follow(m);
      const g = m.gauges, b = before && before.t <= m.t ? before.gauges : g, dt = Math.max(1e-3, m.t - m.since);
      this.generated = g.num_generated_tokens;
      if (this.count > 1) {
        this.points.push({ t: m.t, made: Math.max(0, g.num_generated_tokens - b.num_generated_tokens) / dt, prompt: m.steps.prompt_tokens / dt, running: g.num_running, waiting: g.num_waiting, steps: m.steps, drafts: g.num_draft_tokens, accepted: g.num_accepted_tokens });
        if (this.points.length > KEEP) this.points.shift();
      }
      this.drafting ||= g.num_draft_tokens > 0;
      if (this.drafting) this.parts = PARTS;
      if (!this.paused && !document.hidden) this.drawAll();
    },
    follow(m) {
      const row = (id) => {
        if (!this.rows.has(id)) this.rows.set(id, { id, segs: [], name: "", seen: m.t, end: 0 });
        return this.rows.get(id);
      };
      for (const [id, epoch, , start] of m.new) {
        const r = row(id);
        if (epoch && r.segs.length) r.segs.push({ k: "lost", a: start, b: start });
      }
      const live = new Set();
      for (const [id, request, sample, state, prompt, cached, planned, out, blocks, preempted] of m.seqs) {
        const r = row(id);
        live.add(id);
        Object.assign(r, { name: request, sample, state, prompt, cached, planned, out, blocks, end: 0 });
        if (state === "waiting" || state === "loading_kv") this.extend(r, preempted ? "lost" : "wait", m.since, m.t);
      }
      for (const [id, a, b, n] of m.chunks) row(id).segs.push({ k: "chunk", a, b, n });
      for (const [id, a, b, n, drafts, accepted] of m.decodes) this.extend(row(id), "decode", a, b, n, drafts, accepted);
      for (const [id, r] of this.rows) {
        if (!live.has(id) && !r.end) r.end = Math.max(...r.segs.map((s) => s.b), r.seen);
        while (r.segs.length && r.segs[0].b < m.t - 3 * WINDOW_S) r.segs.shift();
        if (r.end && r.end < m.t - WINDOW_S) this.rows.delete(id);
      }
    },
    extend(r, k, a, b, n = 0, drafts = 0, accepted = 0) {
      const s = r.segs[r.segs.length - 1];
      if (s && s.k === k && a - s.b < 0.1 && !drafts && !s.drafts) { s.b = b; s.n += n; }
      else r.segs.push({ k, a, b, n, drafts, accepted });
    },
    pen(name) {
      const found = this.$refs[name], canvas = Array.isArray(found) ? found[0] : found;
      if (!canvas || !canvas.clientWidth) return null;
      const w = canvas.clientWidth, h = canvas.clientHeight, r = window.devicePixelRatio || 1;
      if (canvas.width !== Math.round(w * r) || canvas.height !== Math.round(h * r)) { canvas.width = Math.round(w * r); canvas.height = Math.round(h * r); }
      const c = canvas.getContext("2d"), style = getComputedStyle(document.body);
      c.setTransform(r, 0, 0, r, 0, 0);
      c.clearRect(0, 0, w, h);
      c.font = "11px " + style.getPropertyValue("--mono");
      return { c, w, h, ink: (v) => style.getPropertyValue(v).trim() };
    },
    drawAll() {
      this.drawTiles();
      this.drawLanes();
      this.drawBlocks();
      this.drawTree();
      for (const key in HISTOGRAMS) this.drawHistogram(key);
      this.drawSeries("tokens", [["made", "--decode"], ["prompt", "--prefill"]]);
      this.drawSeries("batch", [["running", "--decode"], ["waiting", "--wait"]], this.last.limits.max_num_seqs);
      this.drawSteps();
    },
    drawTiles() {
      const m = this.last, g = m.gauges, f = this.first.gauges, late = this.points.slice(-8);
      const mean = (get) => (late.length ? late.reduce((a, p) => a + get(p), 0) / late.length : 0);
      const steps = late.reduce((a, p) => a + p.steps.count, 0), used = late.reduce((a, p) => a + PARTS.reduce((s, [k]) => s + p.steps[k], 0), 0);
      const held = g.num_blocks - g.num_free_blocks - g.num_idle_blocks, per = (a, b) => (b > 0 ? ((100 * a) / b).toFixed(0) + " %" : "–");
      const asked = g.num_prompt_tokens - f.num_prompt_tokens, hit = g.num_cached_tokens - f.num_cached_tokens;
      this.tiles = [
        { name: "generated tokens/s", value: si(mean((p) => p.made)) },
        { name: "prompt tokens/s", value: si(mean((p) => p.prompt)) },
        { name: `running of ${m.limits.max_num_seqs}`, value: g.num_running },
        { name: "waiting", value: g.num_waiting },
        { name: "KV blocks in use", value: held / g.num_blocks < 0.1 ? ((100 * held) / g.num_blocks).toFixed(1) + " %" : per(held, g.num_blocks) },
        { name: asked > 0 ? "of prompts cached" : "of prompts cached, since start", value: asked > 0 ? per(hit, asked) : per(g.num_cached_tokens, g.num_prompt_tokens) },
        { name: "a step", value: steps ? sec(used / steps) : "–" },
      ];
      if (this.drafting) {
        const first = this.points[0] || { drafts: 0, accepted: 0 }, tried = g.num_draft_tokens - first.drafts;
        this.tiles.push({ name: "drafts accepted", value: tried > 0 ? per(g.num_accepted_tokens - first.accepted, tried) : per(g.num_accepted_tokens, g.num_draft_tokens) });
      }
      if (g.num_preemptions) this.tiles.push({ name: "preemptions", value: si(g.num_preemptions), alarm: g.num_preemptions > f.num_preemptions });
      if (g.num_refused) this.tiles.push({ name: "refused", value: si(g.num_refused), alarm: g.num_refused > f.num_refused });
      if (g.num_loaded_blocks + g.num_stored_blocks) this.tiles.push({ name: "blocks from / to tiers", value: si(g.num_loaded_blocks) + " / " + si(g.num_stored_blocks) });
    },
    drawLanes() {
      const p = this.pen("lanes");
      if (!p) return;
      const { c, w, h, ink } = p, now = performance.now() / 1e3 - this.offset - 0.25, from = now - WINDOW_S;
      const rows = [...this.rows.values()].filter((r) => (r.end || now) >= from).sort((a, b) => a.id - b.id), free = [];
      for (const r of rows) { // the lowest lane that is free by then
        const start = r.segs.length ? r.segs[0].a : r.seen, end = r.end || Infinity;
        let lane = free.findIndex((until) => until <= start);
        if (lane < 0) lane = free.length;
        free[lane] = end;
        r.lane = lane;
      }
      const room = h - 16, high = Math.min(20, Math.max(3, Math.floor(room / Math.max(1, free.length)))), most = Math.floor(room / high), shown = rows.filter((r) => r.lane < most), names = 0;
      const x = (t) => names + ((w - names) * (t - from)) / WINDOW_S;
      c.strokeStyle = ink("--line");
      c.fillStyle = ink("--soft");
      for (let s = 0; s <= WINDOW_S; s += 5) {
        const at = x(now - s);
        c.beginPath(); c.moveTo(at, 0); c.lineTo(at, room); c.stroke();
        c.textAlign = s === 0 ? "right" : "center";
        if (at > names + 10) c.fillText(s ? `−${s} s` : "now", at, h - 3);
      }
      const colour = { wait: ink("--wait"), chunk: ink("--prefill"), decode: ink("--decode"), lost: ink("--bad") }, violet = ink("--draft");
      shown.forEach((r) => {
        const top = r.lane * high, tall = Math.max(2, high - (high > 5 ? 2 : 1));
        for (const s of r.segs) {
          const a = Math.max(names, x(s.a)), b = x(s.b);
          if (b < names) continue;
          c.fillStyle = colour[s.k];
          const slim = s.k === "wait" ? tall / 3 : tall;
          c.fillRect(a, top + (tall - slim) / 2, Math.max(s.k === "lost" ? 3 : 1.2, b - a), slim);
          if (s.k === "decode" && high >= 14 && b - a > 90 && r.name) { c.fillStyle = "#fff"; c.textAlign = "left"; c.fillText(`${r.name.replace(/\/\d+$/, "").slice(-6)}${r.sample ? "." + r.sample : ""}`, a + 4, top + tall / 2 + 4); }
          if (s.accepted) { c.fillStyle = violet; const part = Math.max(1.5, (tall * s.accepted) / Math.max(1, s.n)); c.fillRect(a, top + tall - part, Math.max(1.2, b - a), part); }
        }
      });
      if (rows.length > shown.length) { c.fillStyle = ink("--soft"); c.textAlign = "left"; c.fillText(`${rows.length - shown.length} more are not drawn`, 4, h - 3); }
      if (!rows.length) { c.fillStyle = ink("--soft"); c.textAlign = "center"; c.fillText("no requests: send one in Chat, or by curl", w / 2, room / 2); }
      this.$el.dataset.rows = rows.length;
    },
    drawBlocks() {
      const p = this.pen("blocks"), m = this.last, g = m.gauges;
      if (!p) return;
      const cells = Uint8Array.from(atob(m.blocks), (s) => s.charCodeAt(0)), { c, w, h, ink } = p;
      this.blocksSaid = `${si(cells.length * m.blocks_per_cell)} of ${si(g.num_blocks)} ever used` + (m.blocks_per_cell > 1 ? `, ${m.blocks_per_cell} a cell` : "");
      let size = 14;
      while (size > 2 && Math.floor(w / size) * Math.floor(h / size) < cells.length) size--;
      const columns = Math.floor(w / size), gap = size > 4 ? 1 : 0, fixed = [ink("--faint"), ink("--cached"), ink("--shared")], bright = document.body.classList.contains("body--dark") ? 62 : 52;
      cells.forEach((v, i) => {
        c.fillStyle = v < 3 ? fixed[v] : `hsl(${hue(v - 3)} 58% ${bright}%)`;
        c.fillRect((i % columns) * size, Math.floor(i / columns) * size, size - gap, size - gap);
      });
    },
    drawTree() {
      const p = this.pen("tree"), runs = this.tree_;
      if (!p) return;
      const { c, w, h, ink } = p, size = this.last.limits.block_size;
      const nodes = new Map(runs.map(([id, parent, start, length, used, hits]) => [id, { id, parent, start, length, used, hits, kids: [] }]));
      const roots = [];
      for (const n of nodes.values()) (nodes.has(n.parent) ? nodes.get(n.parent).kids : roots).push(n);
      const leaves = (n) => (n.leaves = n.kids.length ? n.kids.reduce((a, k) => a + leaves(k), 0) : 1);
      const total = roots.reduce((a, n) => a + leaves(n), 0), deep = Math.max(1, ...runs.map((r) => r[2] + r[3])), most = Math.max(1, ...runs.map((r) => r[5]));
      const unit = Math.min(26, (h - 4) / Math.max(1, total)), x = (row) => (w * row) / deep;
      this.treeSaid = runs.length ? `${runs.length} runs, up to ${si(deep * size)} tokens deep; darker: more hits` : "";
      if (!runs.length) { c.fillStyle = ink("--soft"); c.textAlign = "center"; c.fillText("no cached prefixes yet", w / 2, h / 2); }
      const place = (n, top) => {
        const high = unit * n.leaves, left = x(n.start), wide = Math.max(2, x(n.start + n.length) - left - 1);
        c.globalAlpha = 0.16 + 0.84 * Math.sqrt(n.hits / most);
        c.fillStyle = n.used ? ink("--accent") : ink("--soft");
        c.fillRect(left, top, wide, Math.max(1, high - 1));
        c.globalAlpha = 1;
        const text = `${n.length * size} tokens` + (n.hits ? `, ${n.hits} hits` : "");
        if (high > 12 && wide > text.length * 6.8) { c.fillStyle = n.hits / most > 0.25 ? ink("--panel") : ink("--ink"); c.textAlign = "left"; c.fillText(text, left + 4, top + high / 2 + 4); }
        for (const kid of n.kids) { place(kid, top); top += unit * kid.leaves; }
      };
      let top = 2;
      for (const n of roots) { place(n, top); top += unit * n.leaves; }
    },
    drawHistogram(key) {
      const p = this.pen("h_" + key), now = this.last.latency[key], base = this.first.latency[key].counts;
      if (!p) return;
      let counts = now.counts.map((x, i) => x - base[i]), since = "";
      if (!counts.some((x) => x)) { counts = now.counts; since = ", since start"; }
      const { c, w, h, ink } = p, b = now.bounds, [p50, p90, p99] = [0.5, 0.9, 0.99].map((q) => quantile(b, counts, q)), n = counts.reduce((a, x) => a + x, 0);
      const wide = n >= 20 && p99 > 10 * p50, slo = this.last.model.slo[key === "itl" ? "tpot" : key];
      this.latency[key] = { said: n ? `p50 ${sec(p50)} · p90 ${sec(p90)} · p99 ${sec(p99)}${wide ? ` · p99 is ${(p99 / p50).toFixed(0)} × p50` : ""}${since}` : "no request yet", alarm: wide };
      const used = counts.map((x, i) => (x ? i : -1)).filter((i) => i >= 0), low = Math.max(0, (used[0] ?? 3) - 2), high = Math.min(b.length, (used[used.length - 1] ?? 10) + 2);
      const step = w / (high - low + 1), top = Math.max(1, ...counts), room = h - 16;
      for (let i = low; i <= high; i++) {
        const tall = (room * counts[i]) / top;
        c.fillStyle = slo && b[i - 1] >= slo ? ink("--bad") : ink("--decode");
        c.fillRect((i - low) * step + 1, room - tall, step - 2, tall);
        c.fillStyle = ink("--soft");
        c.textAlign = "center";
        if ((i - low) % Math.ceil(46 / step) === 0) c.fillText(i < b.length ? sec(b[i]) : ">", (i - low + 0.5) * step, h - 3);
      }
      const x = (v) => { let i = b.findIndex((bound) => bound >= v); if (i < 0) i = b.length; const from = i ? b[i - 1] : 0, to = b[i] ?? 2 * from; return (i - low + (v - from) / (to - from)) * step; };
      for (const [v, ink_] of [[p50, "--ink"], [p99, "--prefill"], [slo, "--bad"]]) if (v && n) { c.strokeStyle = ink(ink_); c.setLineDash(ink_ === "--bad" ? [] : [3, 3]); c.beginPath(); c.moveTo(x(v), 0); c.lineTo(x(v), room); c.stroke(); c.setLineDash([]); }
    },
    axis(p, most, text) {
      const { c, w, h, ink } = p;
      c.strokeStyle = ink("--line");
      for (const share of [0.5, 1]) { const y = h - 4 - (h - 18) * share; c.beginPath(); c.moveTo(0, y); c.lineTo(w, y); c.stroke(); c.fillStyle = ink("--soft"); c.textAlign = "left"; c.fillText(text(most * share), 2, y - 3); }
      return [(i) => w - (w * (this.points.length - 1 - i)) / Math.max(60, this.points.length - 1), (v) => h - 4 - ((h - 18) * v) / most];
    },
    drawSeries(name, series, limit) {
      const p = this.pen(name);
      if (!p) return;
      const most = Math.max(1, ...series.flatMap(([key]) => this.points.map((q) => q[key]))), [x, y] = this.axis(p, most, si);
      for (const [key, colour] of series) {
        p.c.strokeStyle = p.ink(colour); p.c.lineWidth = 1.5; p.c.beginPath();
        this.points.forEach((q, i) => p.c[i ? "lineTo" : "moveTo"](x(i), y(q[key])));
        p.c.stroke();
      }
      if (limit && limit <= 1.5 * most) { p.c.strokeStyle = p.ink("--bad"); p.c.setLineDash([4, 3]); p.c.beginPath(); p.c.moveTo(0, y(limit)); p.c.lineTo(p.w, y(limit)); p.c.stroke(); p.c.setLineDash([]); }
    },
    drawSteps() {
      const p = this.pen("steps");
      if (!p) return;
      const each = this.points.map((q) => PARTS.map(([key]) => (q.steps.count ? (1e3 * q.steps[key]) / q.steps.count : 0))), most = Math.max(0.1, ...each.map((v) => v.reduce((a, b) => a + b, 0))), [x, y] = this.axis(p, most, (v) => si(v));
      const wide = Math.max(1, x(1) - x(0));
      each.forEach((v, i) => { let sum = 0; v.forEach((ms, k) => { p.c.fillStyle = p.ink(PARTS[k][2]); p.c.fillRect(x(i) - wide, y(sum + ms), wide + 0.3, y(sum) - y(sum + ms)); sum += ms; }); });
    },
  },
};
