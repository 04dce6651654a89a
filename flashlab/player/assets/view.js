// A view shows one trace at one event: its heading and its panels.

class View {
  constructor(trace, page, alone) {
    this.trace = trace;
    this.story = new Story(trace, page);
    this.scores = new ScoresPanel(trace, page);
    this.sram = new SramPanel(trace, page);
    this.code = new CodePanel(trace, page);
    this.counters = new CountersPanel(trace, page);
    this.values = new ValuesPanel(trace, page);
    this.panels = [this.story, this.scores, this.sram, this.code, this.counters, this.values];
    this.root = el("article", { class: "view", "aria-label": trace.algorithm },
      el("header", {}, el(alone ? "h1" : "h2", {}, trace.algorithm), el("p", { class: "note" }, trace.subtitle)),
      this.story.root,
      el("div", { class: trace.pool || trace.parts ? "columns more" : "columns" },
        el("div", { class: "column place" }, this.scores.root, this.sram.root),
        el("div", { class: "column numbers" }, this.values.root, this.counters.root),
        el("div", { class: "column sources" }, this.code.root)));
    this.t = null;
  }

  show(t, quietly) {
    this.story.live.setAttribute("aria-live", quietly ? "off" : "polite");
    if (t === this.t) return;
    this.t = t;
    for (const each of this.panels) each.show(t);
  }

  /** Draws the same event again, as after a change of size or theme. */
  redraw() {
    this.scores.draw();
    this.values.show(this.t);
  }
}
