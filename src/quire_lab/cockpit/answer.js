// One answer: text, reasoning and calls as they come, tokens by probability, and where the time went.
const PARTS = [
  ["queue", "--wait"], ["prefill", "--prefill"], ["decode", "--decode"], ["network", "--soft"],
];

// What truncation leaves of candidates with raw log-probabilities `tops`, as the engine does it:
// temperature, then min_p, top_k, top_p. Where all that is left is among the candidates, the result is exact.
export function processed(tops, s) {
  if (!s.temperature) return tops.map((_, i) => (i ? 0 : 1));
  const peak = tops[0].logprob;
  const w = tops.map((t) => Math.exp((t.logprob - peak) / s.temperature));
  let keep = w.map((x) => x >= (s.min_p || 0));
  if (s.top_k > 0) keep = keep.map((k, i) => k && i < s.top_k);
  const total = w.reduce((a, x, i) => a + (keep[i] ? x : 0), 0);
  if (s.top_p < 1) {
    let sum = 0;
    keep = keep.map((k, i) => {
      const is = k && sum < s.top_p * total;
      if (k) sum += w[i];
      return is;
    });
  }
  const left = w.reduce((a, x, i) => a + (keep[i] ? x : 0), 0);
  return w.map((x, i) => (keep[i] ? x / left : 0));
}

export default {
  template: `<div class="qc-one">
    <div v-if="think" class="qc-answer qc-think">{{ think }}</div>
    <div class="qc-answer" ref="text" role="group" aria-label="Answer" @keydown="move"></div>
    <div v-for="c in calls" class="qc-call">{{ c.name }}({{ c.arguments }})</div>
    <div v-if="error" class="qc-error" role="alert">{{ error }}</div>
    <div v-if="end" class="qc-end" :class="{cut: end.is_cut}" :data-finish="end.reason" role="status">
      <span>{{ end.text }}</span> <code>finish_reason {{ end.reason }}</code>
      <button v-if="end.can_go_on" type="button" class="qc-goon" @click="$emit('go_on')">Go on</button></div>
    <div v-if="parts.length" class="qc-bar" role="img" :aria-label="said"><i v-for="p in parts" :style="{flex: p.ms, background: p.color}" :title="p.name + ' ' + p.ms.toFixed(1) + ' ms'"></i></div>
    <div v-if="parts.length" class="qc-keys"><span v-for="p in parts"><i :style="{background: p.color}"></i>{{ p.name }} <b>{{ p.ms.toFixed(1) }} ms</b></span><span v-for="f in facts">{{ f[0] }} <b>{{ f[1] }}</b></span></div>
    <table v-if="picked" ref="probs" class="qc-probs" style="max-width:640px"><thead><tr><th scope="col">token {{ picked.at + 1 }}</th><th scope="col">raw</th>
      <th v-if="picked.exact" scope="col">sampled from</th><th v-else scope="col">sampled from (of these {{ picked.rows.length }})</th><td class="b"></td></tr></thead>
      <tbody><tr v-for="r in picked.rows" :class="{on: r.on}"><td>{{ r.token }}</td>
      <td>{{ r.raw }}</td><td>{{ r.after }}</td><td class="b"><i :style="{width: r.width}"></i></td></tr></tbody></table>
  </div>`,
  data: () => ({ think: "", calls: [], error: "", end: null, picked: null, parts: [], facts: [], said: "" }),
  mounted() { this.show(true); },
  methods: {
    restart(settings) {
      Object.assign(this, { think: "", calls: [], error: "", end: null, picked: null, parts: [], facts: [], settings, tokens: [] });
      this.$refs.text.replaceChildren();
      this.show(true);
    },
    resume() {
      Object.assign(this, { error: "", end: null, picked: null, parts: [], facts: [] });
      this.show(true);
    },
    push(events) {
      const column = this.$el.closest(".qc-turns"), isAtEnd = column && column.scrollHeight - column.scrollTop - column.clientHeight < 160;
      for (const e of events) this.take(e);
      this.$nextTick(() => this.show(isAtEnd)); // follows, unless its reader has scrolled up
    },
    // Scroll to what has happened: the end of the conversation, and the conversation where the page is longer than the window.
    show(really) {
      const column = this.$el.closest(".qc-turns");
      if (!really || !column) return;
      column.scrollTop = column.scrollHeight;
      const box = column.getBoundingClientRect();
      if (box.bottom < 80 || box.top > innerHeight - 80) column.scrollIntoView({ block: "nearest" });
    },
    take(e) {
      if (e.error) this.error = e.error;
      if (e.think) this.think += e.think;
      for (const c of e.calls || []) {
        const at = this.calls[c.index] || (this.calls[c.index] = { name: "", arguments: "" });
        at.name += c.name || "";
        at.arguments += c.arguments || "";
      }
      if (e.tokens && e.tokens.length) e.tokens.forEach((t) => this.token(t));
      else if (e.text) this.$refs.text.append(e.text);
      if (e.timing) this.bar(e.timing);
      if (e.end) this.end = e.end;
    },
    token(t) {
      const at = this.tokens.push(t) - 1;
      const span = document.createElement("span");
      const p = Math.exp(t.logprob);
      span.className = "tok";
      span.tabIndex = at ? -1 : 0; // one stop of the Tab key; arrows go from token to token
      span.textContent = t.text;
      span.title = `${(100 * p).toFixed(1)} %`;
      span.style.background = `color-mix(in srgb, var(--prefill) ${Math.round(45 * (1 - p))}%, transparent)`;
      span.onmouseenter = span.onfocus = () => this.pick(at);
      this.$refs.text.append(span);
    },
    move(e) {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key], from = document.activeElement;
      if (!step || !from.classList.contains("tok")) return;
      const spans = [...this.$refs.text.querySelectorAll(".tok")], to = spans[spans.indexOf(from) + step];
      if (!to) return;
      from.tabIndex = -1;
      to.tabIndex = 0;
      to.focus();
      e.preventDefault();
    },
    pick(at) {
      const isFirst = !this.picked;
      const t = this.tokens[at];
      const tops = t.top || [];
      const after = tops.length ? processed(tops, this.settings) : [];
      const rows = tops.map((c, i) => ({
        token: JSON.stringify(c.token), raw: (100 * Math.exp(c.logprob)).toFixed(2) + " %",
        after: (100 * after[i]).toFixed(2) + " %", width: 100 * after[i] + "%", on: c.token === t.token,
      }));
      const kept = after.filter((x) => x > 0).length;
      this.picked = { at, rows, exact: !this.settings.temperature || (this.settings.top_k > 0 && this.settings.top_k <= tops.length) || (kept < tops.length && this.settings.top_p === 1) };
      if (isFirst) this.$nextTick(() => this.$refs.probs.scrollIntoView({ block: "nearest" }));
    },
    bar(t) {
      const style = getComputedStyle(document.body);
      this.parts = PARTS.filter(([name]) => t[name] > 0).map(([name, v]) => ({ name, ms: t[name], color: style.getPropertyValue(v) }));
      this.facts = t.facts;
      this.said = this.parts.map((p) => `${p.name} ${p.ms.toFixed(1)} ms`).join(", ");
    },
  },
  created() {
    this.tokens = [];
    this.settings = { temperature: 1, top_p: 1, top_k: 0, min_p: 0 };
  },
};
