// The state of the watched server in the header. It turns grey by itself where nobody says anything any more.
const LOST_MS = 9000;
export default {
  template: `<div class="qc-state" :class="{gone: isGone, ill: !isGone && text}" role="status" :data-status="status">
    <span class="qc-dot" aria-hidden="true"></span>{{ said }}</div>`,
  data: () => ({ status: "ready", since: 0, text: "", names: "" }),
  computed: {
    isGone() { return this.status === "gone" || this.status === "lost"; },
    said() {
      if (this.status === "ready" || !this.since) return this.names;
      const at = new Date(1e3 * this.since), isToday = at.toDateString() === new Date().toDateString();
      const since = `since ${isToday ? at.toLocaleTimeString() : at.toLocaleString()}`;
      return this.status === "lost" ? `no news of the server ${since}` : this.status === "gone" ? `the server is gone ${since}` : `the server ${this.text}, ${since}`;
    },
  },
  mounted() {
    this.heard = Date.now();
    this.watch = setInterval(() => {
      if (Date.now() - this.heard > LOST_MS && !this.isGone) Object.assign(this, { status: "lost", since: this.heard / 1e3 });
    }, 1000);
  },
  beforeUnmount() { clearInterval(this.watch); },
  methods: {
    show(state) {
      this.heard = Date.now();
      Object.assign(this, state);
    },
  },
};
