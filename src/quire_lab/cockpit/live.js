// What an engine does, from the messages of /engine/live (quire/scheduler/live.py says what their columns are).
// Rates, latencies and alarms come computed, with each message (quire_lab/cockpit/readings.py).
const LANES_S = 20, SERIES_S = 120, LOST_MS = 6000;
const HISTOGRAMS = { ttft: "Time to first token", itl: "Inter-token latency", tpot: "Time per output token" };
const PARTS = [["plan_s", "schedule", "--good"], ["compute_s", "compute", "--decode"], ["draft_s", "drafts", "--draft"], ["apply_s", "apply", "--prefill"]];
const si = (x) => (Number.isInteger(x) && x < 1e4 ? String(x) : x >= 1e6 ? (x / 1e6).toFixed(1) + "M" : x >= 1e4 ? (x / 1e3).toFixed(1) + "k" : x >= 100 ? x.toFixed(0) : x >= 10 ? x.toFixed(1) : x.toFixed(x ? 2 : 0));
const sec = (s) => (s >= 10 ? s.toFixed(0) + " s" : s >= 1 ? s.toFixed(1) + " s" : s >= 0.01 ? (1e3 * s).toFixed(0) + " ms" : (1e3 * s).toFixed(1) + " ms");
const hue = (i) => (i * 137.508) % 360;
const clock = (ms) => new Date(ms).toLocaleTimeString();

export default {
  template: `<div class="ql" :class="{gone: quietSaid}" :data-messages="count" :data-tokens="generated">
    <div v-if="quietSaid" class="w12 qc-gone" role="alert">{{ quietSaid }}</div>
    <div v-if="note" class="w12 qc-note">{{ note }}</div>
    <div class="tiles"><div v-for="t in tiles" class="tile" :class="{over: t.alarm}"><b>{{ t.value }}</b><span>{{ t.name }}</span></div></div>
    <section class="w12"><h2>Requests, the last {{ span }} s<em><i style="background:var(--wait)"></i>queued<i style="background:var(--prefill)"></i>prompt chunk<i style="background:var(--decode)"></i>decode<template v-if="drafting"><i style="background:var(--draft)"></i>accepted drafts</template><i style="background:var(--bad)"></i>preempted
      <button type="button" class="qc-link" :aria-pressed="paused" @click="paused = !paused">{{ paused ? "continue" : "pause" }}</button></em></h2><canvas ref="lanes" style="height:300px" role="img" :aria-label="'Time line of requests: ' + lanesSaid"></canvas></section>
    <section class="w6"><h2>KV blocks<em>{{ blocksSaid }}<i style="background:var(--cached)"></i>cached<i style="background:var(--shared)"></i>shared<i style="background:hsl(210 60% 55%)"></i>one owner</em></h2><canvas ref="blocks" style="height:220px" role="img" :aria-label="'KV blocks by owner: ' + blocksSaid"></canvas></section>
    <section class="w6"><h2>Prefix tree<em>{{ treeSaid }}</em></h2><canvas ref="tree" style="height:220px" role="img" :aria-label="'Prefix tree: ' + treeSaid"></canvas></section>
    <section v-for="(title, key) in titles" class="w4" :class="{over: (latency[key] || {}).is_over}" :data-panel="key"><h2>{{ title }}<em>{{ (latency[key] || {}).said }}</em></h2><canvas :ref="'h_' + key" style="height:120px" role="img" :aria-label="title + ': ' + (latency[key] || {}).said"></canvas></section>
    <section class="w4"><h2>Tokens/s<em><i style="background:var(--decode)"></i>generated<i style="background:var(--prefill)"></i>prompt</em></h2><canvas ref="tokens" style="height:130px" role="img" aria-label="Tokens per second over the last two minutes"></canvas></section>
    <section class="w4"><h2>Batch<em><i style="background:var(--decode)"></i>running<i style="background:var(--wait)"></i>waiting</em></h2><canvas ref="batch" style="height:130px" role="img" aria-label="Running and waiting sequences over the last two minutes"></canvas></section>
    <section class="w4"><h2>Step, ms<em><template v-for="p in parts"><i :style="{background: 'var(' + p[2] + ')'}"></i>{{ p[1] }}</template></em></h2><canvas ref="steps" style="height:130px" role="img" aria-label="Time of a step by its parts over the last two minutes"></canvas></section>
  </div>`,
  data: () => ({ count: 0, generated: 0, note: "", quietSaid: "", tiles: [], paused: false, drafting: false, span: LANES_S, lanesSaid: "", blocksSaid: "", treeSaid: "", latency: {}, titles: HISTOGRAMS, parts: PARTS.filter((p) => p[0] !== "draft_s") }),
  created() {
    Object.assign(this, { rows: new Map(), points: [], at: 0, offset: 0, last: null, heard: 0, tree_: [] });
  },
  mounted() {
    const draw = (t) => {
      if (t - this.at > 90 && !this.paused && !document.hidden && this.last && !this.quietSaid) {
        this.at = t;
        this.drawLanes();
      }
      this.frame = requestAnimationFrame(draw);
    };
    this.frame = requestAnimationFrame(draw);
    // The process of the page may be gone with the server: then nobody says so.
    this.watch = setInterval(() => { if (this.heard && Date.now() - this.heard > LOST_MS) this.quiet("Nothing comes from the page's process."); }, 1000);
    this.resized = new ResizeObserver(() => this.last && this.drawAll());
    this.resized.observe(this.$el);
  },
  beforeUnmount() {
    cancelAnimationFrame(this.frame);
    clearInterval(this.watch);
    this.resized.disconnect();
  },
  methods: {
    say(text) { this.note = text; },
    quiet(text) {
      if (this.quietSaid) return;
      this.quietSaid = this.count ? `No news since ${clock(this.news)}: the figures below are of that time. ${text}` : text;
    },
    push(text, reading) {
      const m = JSON.parse(text);
      if (reading.is_new) { this.rows.clear(); this.points = []; }
      this.note = this.quietSaid = "";
      this.heard = this.news = Date.now();
      this.last = m;
      this.count++;
      this.offset = performance.now() / 1e3 - m.t;
      if (m.tree) this.tree_ = m.tree;
      this.follow(m);
      this.generated = m.gauges.num_generated_tokens;
      this.tiles = reading.tiles;
      this.latency = reading.latency;
      this.drafting = reading.drafting;
      if (this.drafting) this.parts = PARTS;
      if (reading.point) this.points.push(reading.point);
      while (this.points.length && this.points[0].t < m.t - SERIES_S) this.points.shift();
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
        while (r.segs.length && r.segs[0].b < m.t - 3 * LANES_S) r.segs.shift();
        if (r.end && r.end < m.t - LANES_S) this.rows.delete(id);
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
      this.drawLanes();
      this.drawBlocks();
      this.drawTree();
      const range = this.latencyRange();
      for (const key in HISTOGRAMS) this.drawHistogram(key, range);
      this.drawSeries("tokens", [["made", "--decode"], ["prompt", "--prefill"]]);
      this.drawSeries("batch", [["running", "--decode"], ["waiting", "--wait"]], this.last.limits.max_num_seqs);
      this.drawSteps();
    },
    drawLanes() {
      const p = this.pen("lanes");
      if (!p) return;
      const { c, w, h, ink } = p, now = performance.now() / 1e3 - this.offset - 0.25, from = now - LANES_S;
      const rows = [...this.rows.values()].filter((r) => (r.end || now) >= from).sort((a, b) => a.id - b.id), free = [];
      for (const r of rows) { // the lowest lane that is free by then
        const start = r.segs.length ? r.segs[0].a : r.seen, end = r.end || Infinity;
        let lane = free.findIndex((until) => until <= start);
        if (lane < 0) lane = free.length;
        free[lane] = end;
        r.lane = lane;
      }
      const room = h - 16, high = Math.min(20, Math.max(3, Math.floor(room / Math.max(1, free.length)))), most = Math.floor(room / high), shown = rows.filter((r) => r.lane < most), names = 0;
      const x = (t) => names + ((w - names) * (t - from)) / LANES_S;
      c.strokeStyle = ink("--line");
      c.fillStyle = ink("--soft");
      for (let s = 0; s <= LANES_S; s += 5) {
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
      this.lanesSaid = `${rows.length} requests`;
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
    // One axis of time, in powers of ten, for the three latencies: what all their bars need.
    latencyRange() {
      let low = Infinity, high = 0;
      for (const key in HISTOGRAMS) {
        const b = this.last.latency[key].bounds, { counts, slo } = this.latency[key];
        counts.forEach((n, i) => { if (n) { low = Math.min(low, b[i - 1] ?? b[0] / 2); high = Math.max(high, b[i] ?? 2 * b[b.length - 1]); } });
        if (slo && high) { low = Math.min(low, slo / 1.5); high = Math.max(high, 1.5 * slo); }
      }
      return high ? [low, high] : [1e-3, 1];
    },
    drawHistogram(key, [low, high]) {
      const p = this.pen("h_" + key), { counts, p50, p99, slo } = this.latency[key];
      if (!p) return;
      const { c, w, h, ink } = p, b = this.last.latency[key].bounds, room = h - 16, top = Math.max(1, ...counts);
      const x = (v) => (w * Math.log(Math.max(v, low) / low)) / Math.log(high / low);
      c.strokeStyle = ink("--line");
      for (let e = Math.ceil(Math.log10(low)); 10 ** e <= high; e++) {
        const at = x(10 ** e);
        c.beginPath(); c.moveTo(at, 0); c.lineTo(at, room); c.stroke();
        c.fillStyle = ink("--soft");
        c.textAlign = at < 20 ? "left" : at > w - 20 ? "right" : "center";
        c.fillText(sec(10 ** e).replace(".0 ", " "), at, h - 3);
      }
      counts.forEach((n, i) => {
        if (!n) return;
        const from = x(b[i - 1] ?? low), to = x(b[i] ?? high), tall = (room * n) / top;
        c.fillStyle = slo && b[i - 1] >= slo ? ink("--bad") : ink("--decode");
        c.fillRect(from, room - tall, Math.max(1, to - from - 1), tall);
      });
      for (const [v, colour] of [[p50, "--ink"], [p99, "--prefill"], [slo, "--bad"]]) {
        if (!v) continue;
        c.strokeStyle = ink(colour); c.setLineDash(colour === "--bad" ? [] : [3, 3]);
        c.beginPath(); c.moveTo(x(v), 0); c.lineTo(x(v), room); c.stroke(); c.setLineDash([]);
      }
    },
    // The axes of the three series: one axis of time for all, and y up to `most`.
    axes(p, most, text) {
      const { c, w, h, ink } = p, foot = h - 16, x = (t) => w - (w * (this.last.t - t)) / SERIES_S, y = (v) => foot - ((foot - 14) * v) / most;
      c.strokeStyle = ink("--line"); c.fillStyle = ink("--soft");
      for (const share of [0, 0.5, 1]) { c.beginPath(); c.moveTo(0, y(share * most)); c.lineTo(w, y(share * most)); c.stroke(); c.textAlign = "left"; if (share) c.fillText(text(share * most), 2, y(share * most) - 3); }
      for (let s = 0; s <= SERIES_S; s += 30) { c.textAlign = s === 0 ? "right" : s === SERIES_S ? "left" : "center"; c.fillText(s ? `−${s} s` : "now", x(this.last.t - s), h - 3); }
      return [x, y];
    },
    drawSeries(name, series, limit) {
      const p = this.pen(name);
      if (!p) return;
      const most = Math.max(1, ...series.flatMap(([key]) => this.points.map((q) => q[key]))), [x, y] = this.axes(p, most, si);
      for (const [key, colour] of series) {
        p.c.strokeStyle = p.ink(colour); p.c.lineWidth = 1.5; p.c.beginPath();
        this.points.forEach((q, i) => { const before = this.points[i - 1]; p.c[before && q.t - q.seconds - before.t < 0.5 ? "lineTo" : "moveTo"](x(q.t), y(q[key])); });
        p.c.stroke();
      }
      if (limit && limit <= 1.5 * most) { p.c.strokeStyle = p.ink("--bad"); p.c.setLineDash([4, 3]); p.c.beginPath(); p.c.moveTo(0, y(limit)); p.c.lineTo(p.w, y(limit)); p.c.stroke(); p.c.setLineDash([]); }
    },
    drawSteps() {
      const p = this.pen("steps");
      if (!p) return;
      const each = this.points.map((q) => PARTS.map(([key]) => (q.steps.count ? (1e3 * q.steps[key]) / q.steps.count : 0))), most = Math.max(0.1, ...each.map((v) => v.reduce((a, b) => a + b, 0))), [x, y] = this.axes(p, most, si);
      each.forEach((v, i) => {
        const q = this.points[i], left = x(q.t - q.seconds);
        let sum = 0;
        v.forEach((ms, k) => { p.c.fillStyle = p.ink(PARTS[k][2]); p.c.fillRect(left, y(sum + ms), x(q.t) - left + 0.3, y(sum) - y(sum + ms)); sum += ms; });
      });
    },
  },
};
