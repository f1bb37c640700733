// The reader's conversations, in the browser's own storage: the server has one only while a page shows it.
const KEY = "quire.conversations", CURRENT = "quire.conversation", MOST = 50;
const read = () => { try { return JSON.parse(localStorage.getItem(KEY)) || []; } catch { return []; } };
function write(all) {
  all.sort((a, b) => b.at - a.at);
  all.length = Math.min(all.length, MOST);
  while (all.length) {
    try { return localStorage.setItem(KEY, JSON.stringify(all)); } catch { all.pop(); } // it is full: the oldest one goes
  }
  localStorage.removeItem(KEY);
}
export default {
  template: `<nav class="qc-kept" aria-label="Conversations">
    <h2 class="qc-title">Conversations</h2>
    <ul v-if="list.length"><li v-for="c in list" :key="c.id">
      <button type="button" class="qc-open" :aria-current="c.id === current" :title="c.title" @click="open(c.id)">{{ c.title }}</button>
      <button type="button" class="qc-forget" :aria-label="'Forget: ' + c.title" @click="forget(c.id)">×</button></li></ul>
    <p class="qc-note">{{ list.length ? "Kept in this browser alone." : "They are kept in this browser alone." }}
      <button v-if="list.length" type="button" class="qc-link" @click="forgetAll">Forget all</button></p></nav>`,
  data: () => ({ list: [], current: "" }),
  mounted() {
    this.changed = () => this.refresh();
    window.addEventListener("storage", this.changed); // another tab has written
    this.refresh();
    const last = read().find((c) => c.id === localStorage.getItem(CURRENT));
    if (last) this.$emit("restored", last);
  },
  beforeUnmount() { window.removeEventListener("storage", this.changed); },
  methods: {
    refresh() { this.list = read().map(({ id, title }) => ({ id, title })); },
    mark(id) {
      this.current = id;
      localStorage.setItem(CURRENT, id);
    },
    save(conversation) {
      this.mark(conversation.id);
      write([{ ...conversation, at: Date.now() }, ...read().filter((c) => c.id !== conversation.id)]);
      this.refresh();
    },
    open(id) {
      const found = read().find((c) => c.id === id);
      if (!found) return this.refresh();
      this.mark(id);
      this.$emit("opened", found);
    },
    forget(id) {
      write(read().filter((c) => c.id !== id));
      this.refresh();
      if (id === this.current) this.$emit("forgotten");
    },
    forgetAll() {
      localStorage.removeItem(KEY);
      this.refresh();
      this.$emit("forgotten");
    },
  },
};
