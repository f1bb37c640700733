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
    <div class="qc-answer" ref="text"></div>
    <div v-for="c in calls" class="qc-call">{{ c.name }}({{ c.arguments }})</div>
    <div v-if="error" class="qc-error">{{ error }}</div>
    <div v-if="parts.length" class="qc-bar" role="img" :aria-label="said"><i v-for="p in parts" :style="{flex: p.ms, background: p.color}" :title="p.name + ' ' + p.ms.toFixed(1) + ' ms'"></i></div>
    <div v-if="parts.length" class="qc-keys"><span v-for="p in parts"><i :style="{background: p.color}"></i>{{ p.name }} <b>{{ p.ms.toFixed(1) }} ms</b></span><span v-for="f in facts">{{ f[0] }} <b>{{ f[1] }}</b></span></div>
    <table v-if="picked" class="qc-probs" style="max-width:640px"><thead><tr><th>token {{ picked.at + 1 }}</th><th>raw</th>
      <th v-if="picked.exact">sampled from</th><th v-else>sampled from (of these {{ picked.rows.length }})</th><th class="b"></th></tr></thead>
      <tbody><tr v-for="r in picked.rows" :class="{on: r.on}"><td>{{ r.token }}</td>
      <td>{{ r.raw }}</td><td>{{ r.after }}</td><td class="b"><i :style="{width: r.width}"></i></td></tr></tbody></table>
  </div>`,
  data: () => ({ think: "", calls: [], error: "", picked: null, parts: [], facts: [], said: "" }),
  methods: {
    restart(settings) {
      Object.assign(this, { think: "", calls: [], error: "", picked: null, parts: [], facts: [], settings, tokens: [] });
      this.$refs.text.replaceChildren();
    },
    push(events) {
      for (const e of events) this.take(e);
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
      const column = this.$el.closest(".qc-turns"); // follows, unless its reader has scrolled up
      if (column && column.scrollHeight - column.scrollTop - column.clientHeight < 160) column.scrollTop = column.scrollHeight;
    },
    token(t) {
      const at = this.tokens.push(t) - 1;
      const span = document.createElement("span");
      const p = Math.exp(t.logprob);
      span.className = "tok";
      span.tabIndex = 0;
      span.textContent = t.text;
      span.title = `${(100 * p).toFixed(1)} %`;
      span.style.background = `color-mix(in srgb, var(--prefill) ${Math.round(70 * (1 - p))}%, transparent)`;
      span.onmouseenter = span.onfocus = () => this.pick(at);
      this.$refs.text.append(span);
    },
    pick(at) {
      const t = this.tokens[at];
      const tops = t.top || [];
      const after = tops.length ? processed(tops, this.settings) : [];
      const rows = tops.map((c, i) => ({
        token: JSON.stringify(c.token), raw: (100 * Math.exp(c.logprob)).toFixed(2) + " %",
        after: (100 * after[i]).toFixed(2) + " %", width: 100 * after[i] + "%", on: c.token === t.token,
      }));
      const kept = after.filter((x) => x > 0).length;
      this.picked = { at, rows, exact: !this.settings.temperature || (this.settings.top_k > 0 && this.settings.top_k <= tops.length) || (kept < tops.length && this.settings.top_p === 1) };
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
