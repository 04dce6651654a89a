// The page: controls, clock, keys, links, and one view per trace.

const DARK = "(prefers-color-scheme: dark)";
const SPEEDS = [["slow", 1], ["normal", 3], ["fast", 12], ["very fast", 40]];
const KEYS = [
  ["→ ←", "one step on, one back"], ["Shift → Shift ←", "next block, this block's beginning"],
  ["Shift Page Down, Shift Page Up", "next and previous step of the same name"], ["Shift Home, Shift End", "first and last step"], ["Space", "play, pause"],
];

class Player {
  constructor(root, data, traces) {
    Object.assign(this, { root, data, traces, glossary: data.glossary, registers: data.registers, theme: 0, timer: null });
    this.clocks = traces.length > 1 ? [byteClock(traces), stepClock(traces)] : [stepClock(traces)];
    this.clock = this.clocks[0];
    this.position = 0;
    this.lead = 0; // the trace that jumps refer to
    this.views = traces.map((trace) => new View(trace, this, traces.length === 1));
    this.root.replaceChildren(...this._page());
    this._listen();
    this._start(data.step);
  }

  // -- moving -----------------------------------------------------------------------------------------------------------

  go(position, { quietly = false, link = true } = {}) {
    this.position = Math.max(0, Math.min(this.clock.length - 1, position));
    const at = this.clock.at(this.position);
    this.views.forEach((view, n) => view.show(at[n], quietly));
    this._controls(at);
    if (link) this._remember();
    if (this.position === this.clock.length - 1) this.pause();
  }

  step(by) {
    this.pause();
    this.go(this.position + by);
  }

  /** Event t of a trace, wherever the clock has it. */
  jump(trace, t) {
    this.pause();
    this.go(this.clock.position(this.traces.indexOf(trace), t));
  }

  /** The event that the leading trace is at. */
  get now() {
    return this.clock.at(this.position)[this.lead];
  }

  get trace() {
    return this.traces[this.lead];
  }

  block(by) {
    const { blocks, blockOf } = this.trace, t = Math.max(0, this.now), n = blockOf[t];
    if (by > 0) return this.jump(this.trace, blocks[n + 1]?.start ?? this.trace.length - 1);
    this.jump(this.trace, t > blocks[n].start ? blocks[n].start : (blocks[n - 1]?.start ?? 0));
  }

  /** The next (or previous) step of a name. */
  named(name, by) {
    for (let t = this.now + by; t >= 0 && t < this.trace.length; t += by)
      if (this.trace.stepName(t) === name) return this.jump(this.trace, t);
  }

  play() {
    if (this.timer) return this.pause();
    if (this.position === this.clock.length - 1) this.go(0);
    const beat = () => {
      this.go(this.position + 1, { quietly: true, link: false });
      if (this.timer) this.timer = setTimeout(beat, 1000 / Number(this.speed.value));
    };
    this.timer = setTimeout(beat, 1000 / Number(this.speed.value));
    this._playing();
  }

  pause() {
    if (!this.timer) return;
    clearTimeout(this.timer);
    this.timer = null;
    this._playing();
    this._remember();
  }

  // -- links ------------------------------------------------------------------------------------------------------------

  get hash() {
    const clock = this.clocks.length > 1 ? `&clock=${this.clock.name}` : "";
    return `#step=${this.position + 1}${clock}`;
  }

  _remember() {
    try {
      history.replaceState(null, "", this.hash);
    } catch { /* a frame without an address of its own */ }
  }

  _start(step) {
    const asked = new URLSearchParams(location.hash.slice(1));
    const clock = this.clocks.find(({ name }) => name === asked.get("clock"));
    if (clock) this._switch(clock, false);
    const position = Number.parseInt(asked.get("step"), 10);
    // the step that Python names belongs to the first trace
    this.go(Number.isFinite(position) ? position - 1 : this.clock.position(0, Math.min(step, this.traces[0].length) - 1), { link: false });
  }

  async _link() {
    const inline = location.protocol === "about:"; // in a frame, which has no address and no clipboard
    const text = inline ? this.hash : location.href.split("#")[0] + this.hash;
    this.linkText.value = text;
    this.linkBox.hidden = false;
    this.linkText.select();
    if (inline) return (this.linkNote.textContent = "append it to the address of the saved page");
    try {
      await navigator.clipboard.writeText(text);
      this.linkNote.textContent = "copied";
    } catch {
      this.linkNote.textContent = "copy it from here";
    }
  }

  // -- the page ---------------------------------------------------------------------------------------------------------

  _page() {
    const parts = [...this._controlBars(), ...this._warnings()];
    if (this.traces.length > 1) parts.unshift(el("h1", {}, listed(this.traces.map(({ algorithm }) => algorithm)), el("span", { class: "note" }, " on one clock")));
    if (this.traces.length > 1) parts.push(this._race());
    return [...parts, el("div", { class: `views of-${this.traces.length}` }, this.views.map(({ root }) => root)), this._help(), tooltip];
  }

  _controlBars() {
    const button = (sign, label, act, extra = {}) => el("button", { type: "button", title: label, "aria-label": label, onclick: act, ...extra }, el("span", { "aria-hidden": "true" }, sign));
    this.playButton = button("▶", "Play", () => this.play(), { class: "play" });
    this.speed = el("select", { "aria-label": "Speed" }, SPEEDS.map(([name, n]) => el("option", { value: n, selected: n === 3 }, name)));
    this.slider = el("input", { type: "range", min: 1, "aria-label": "Step", oninput: () => (this.pause(), this.go(Number(this.slider.value) - 1)) });
    this.timeline = el("canvas", { class: "timeline", title: "Bytes requested from HBM, step by step", "aria-hidden": "true" });
    this.counter = el("output", { class: "counter" });
    this.blockSelect = el("select", { "aria-label": "Jump to a block", title: "Blocks by row tile, or by row and key tile", onchange: (event) => this._chosen(event.target.value) });
    this.stepSelect = el("select", { "aria-label": "Step name to jump to" });
    this.linkText = el("input", { type: "text", readOnly: true, "aria-label": "Link to this step" });
    this.linkNote = el("span", { class: "small", role: "status" });
    this.linkBox = el("span", { class: "link-box", hidden: true }, this.linkText, this.linkNote);
    this._fillJumps();
    const clock = this.clocks.length > 1
      ? el("label", {}, "Clock ", el("select", { onchange: (event) => this._switch(this.clocks[event.target.selectedIndex]) },
          [["bytes", "HBM bytes requested"], ["steps", "steps"]].map(([name, text]) => el("option", { value: name }, text))))
      : null;
    this.clockSelect = clock?.querySelector("select");
    const name = () => this.stepSelect.value.split(":");
    const seek = (by) => () => {
      const [which, ...rest] = name();
      this.lead = Number(which);
      this.named(rest.join(":"), by);
    };
    return [
      el("div", { class: "transport", role: "group", "aria-label": "Steps" },
        button("⇤", "First step", () => this.step(-Infinity)), button("←", "One step back", () => this.step(-1)),
        this.playButton, button("→", "One step on", () => this.step(1)), button("⇥", "Last step", () => this.step(Infinity)),
        el("div", { class: "scrubber" }, this.slider, this.timeline), this.counter),
      el("div", { class: "jumps", role: "group", "aria-label": "Jumps and settings" },
        clock,
        el("label", {}, "Speed ", this.speed),
        el("span", { class: "group" }, el("label", {}, "Block ", this.blockSelect), button("‹", "This block's beginning, or the block before", () => this.block(-1)), button("›", "Next block", () => this.block(1))),
        el("span", { class: "group" }, el("label", {}, "Step ", this.stepSelect), button("‹", "Previous step of this name", seek(-1)), button("›", "Next step of this name", seek(1))),
        el("span", { class: "group" }, el("button", { type: "button", onclick: () => this._link() }, "Link to this step"), this.linkBox)),
    ];
  }

  /** Blocks and step names, each with its trace. */
  _fillJumps() {
    const several = this.traces.length > 1;
    const fill = (select, options) => select.append(...this.traces.map((trace, which) => {
      const made = options(trace).map(([value, text]) => el("option", { value: `${which}:${value}` }, text));
      return several ? el("optgroup", { label: trace.algorithm }, made) : made;
    }).flat());
    fill(this.blockSelect, (trace) => trace.blocks.map((block, n) => {
      const launch = trace.launches.length > 1 ? `${trace.launches[trace.launchOf[block.start]].name} ` : "";
      return [n, `${launch}${trace.blockName(block)}`];
    }));
    fill(this.stepSelect, (trace) => [...new Set(trace.events.map(([step]) => trace.names[step]))].map((name) => [name, name || "(unnamed)"]));
  }

  _chosen(value) {
    const [which, n] = value.split(":").map(Number);
    this.lead = which;
    this.jump(this.traces[which], this.traces[which].blocks[n].start);
  }

  _switch(clock, moving = true) {
    const [which, t] = [this.lead, this.clock.at(this.position)[this.lead]];
    this.clock = clock;
    this._timeline();
    this.clockSelect.value = clock.name;
    if (moving) this.go(clock.position(which, Math.max(0, t)));
  }

  _controls(at) {
    const total = this.clock.length, trace = this.trace, t = Math.max(0, at[this.lead]);
    this.slider.max = total;
    this.slider.value = this.position + 1;
    this.slider.setAttribute("aria-valuetext", `step ${this.position + 1} of ${total}: ${trace.stepName(t) || "unnamed"}`);
    this.counter.textContent = this.clock.name === "bytes" ? `${size(Math.max(...at.map((e, n) => (e < 0 ? 0 : this.traces[n].hbm[e]))))} of HBM` : `${count(this.position + 1)} / ${count(total)}`;
    this.blockSelect.value = `${this.lead}:${trace.blockOf[t]}`;
    this.stepSelect.value = `${this.lead}:${trace.stepName(t)}`;
    this.linkBox.hidden = true;
    this.racers?.forEach(({ text, fill }, n) => {
      const { hbm, length } = this.traces[n], now = at[n] < 0 ? 0 : hbm[at[n]];
      fill.style.width = `${(100 * now) / (this.most || 1)}%`;
      text.textContent = `${size(now)} of ${size(hbm[length - 1])}${at[n] === length - 1 ? " ✓ finished" : ""}`;
    });
  }

  _timeline() {
    const heights = Array.from({ length: this.clock.length }, () => 0);
    let before = this.traces.map(() => -1);
    heights.forEach((_, position) => {
      const at = this.clock.at(position);
      at.forEach((t, n) => (heights[position] += t === before[n] ? 0 : this.traces[n].hbm[t] - (this.traces[n].hbm[t - 1] ?? 0)));
      before = at;
    });
    drawTimeline(this.timeline, heights);
  }

  _playing() {
    const label = this.timer ? "Pause" : "Play";
    this.playButton.setAttribute("aria-label", label);
    this.playButton.title = label;
    this.playButton.firstChild.textContent = this.timer ? "❚❚" : "▶";
  }

  /** How much each trace has requested from HBM, on one scale. */
  _race() {
    this.most = Math.max(...this.traces.map(({ hbm, length }) => hbm[length - 1]));
    this.racers = this.traces.map((trace) => {
      const fill = el("i", { class: "fill" }), whole = el("i", { class: "whole" }), text = el("span", { class: "small" });
      whole.style.width = `${(100 * trace.hbm[trace.length - 1]) / (this.most || 1)}%`;
      return { root: el("li", {}, el("b", {}, trace.algorithm), el("span", { class: "lane" }, whole, fill), text), fill, text };
    });
    return el("section", { class: "panel race", "aria-label": "Requested from HBM" }, el("h2", { class: "title" }, "Requested from ", term("HBM", this.glossary.HBM), " so far"), el("ul", {}, this.racers.map(({ root }) => root)));
  }

  _warnings() {
    const [rows, cols, vector] = this.data.thinning, words = [];
    const limit = this.data.limit < 1e6 ? `${Math.round(this.data.limit / 1e3)} KB` : `${this.data.limit / 1e6} MB`;
    if (vector !== null) words.push(`Over the size limit of ${limit}, this page keeps ${vector ? `${plural(vector, "row")} of each vector and no values` : "no values at all"} of matrices; bytes and steps are complete.`);
    else if (rows === 0) words.push(`Over the size limit of ${limit}, this page keeps no values of matrices; vectors such as m and ℓ are complete, and so are bytes and steps.`);
    else if (rows !== null) words.push(`Over the size limit of ${limit}, values are thinned: of each matrix, accumulators included, at most ${rows} rows × ${cols} columns are kept. Vectors such as m and ℓ are complete, and so are bytes and steps.`);
    for (const trace of this.traces)
      if (trace.length < trace.all) words.push(`Only the first ${count(trace.length)} of ${count(trace.all)} steps of ${trace.algorithm} fit in here. Save the player to a file to get all of them.`);
    return words.map((text) => el("p", { class: "warning", role: "note" }, text));
  }

  _help() {
    const list = (items) => el("dl", {}, items.map(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]));
    return el("footer", {},
      el("details", {}, el("summary", {}, "Keys"), list(KEYS.map(([keys, text]) => [el("kbd", {}, keys), text]))),
      el("details", {}, el("summary", {}, "What the words mean"), list(Object.entries(this.glossary))));
  }

  // -- input ------------------------------------------------------------------------------------------------------------

  _listen() {
    addEventListener("keydown", (event) => this._key(event));
    addEventListener("hashchange", () => this._start(1));
    const redraw = () => {
      this.views.forEach((view) => view.redraw());
      this._timeline();
    };
    let width = 0;
    new ResizeObserver(([{ contentRect }]) => {
      if (contentRect.width !== width) redraw(); // the height changes with the steps
      width = contentRect.width;
    }).observe(this.root);
    const changed = () => {
      this.theme += 1;
      redraw();
    };
    matchMedia(DARK).addEventListener("change", changed);
    const dark = [...document.styleSheets[0].cssRules].find((rule) => rule.media?.mediaText === DARK);
    const asked = new Map([["auto", DARK], ["light", "not all"], ["dark", "all"]]);
    addEventListener("message", ({ source, data }) => { // the page around a frame says what it looks like
      if (source !== parent || !asked.has(data?.theme)) return;
      dark.media.mediaText = asked.get(data.theme);
      document.documentElement.style.colorScheme = data.theme === "auto" ? "" : data.theme;
      changed();
    });
  }

  _key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    const on = event.target, slider = on === this.slider;
    if (on.matches?.("select, textarea, input:not([type=range])")) return;
    if (event.key === " " && on.matches?.("button, summary")) return;
    const inside = !slider && on.matches?.(".scroll, pre"); // which scroll by these keys
    const acts = {
      "ArrowRight": () => this.step(1),
      "ArrowLeft": () => this.step(-1),
      "Shift ArrowRight": () => this.block(1),
      "Shift ArrowLeft": () => this.block(-1),
      "Shift PageDown": () => this.named(this.trace.stepName(Math.max(0, this.now)), 1), // without Shift these scroll
      "Shift PageUp": () => this.named(this.trace.stepName(Math.max(0, this.now)), -1),
      "Shift Home": () => this.step(-Infinity),
      "Shift End": () => this.step(Infinity),
      " ": () => this.play(),
    };
    const act = acts[`${event.shiftKey ? "Shift " : ""}${event.key}`];
    if (!act || inside) return;
    event.preventDefault();
    act();
  }
}

async function boot() {
  const root = document.getElementById("player");
  try {
    if (typeof DecompressionStream === "undefined") throw new Error("this browser is too old to unpack it (2023 or newer will do)");
    const blobs = await Promise.all(Array.from(document.querySelectorAll("script.data"), (script) => unpacked(script.textContent)));
    const read = (blob) => JSON.parse(new TextDecoder().decode(blob));
    const data = read(blobs.shift()), traces = [];
    colourOf.names = data.colours;
    while (blobs.length) traces.push(new Trace(read(blobs.shift()), floats(blobs.shift()), data.thinning));
    new Player(root, data, traces);
    root.dataset.ready = "";
  } catch (error) {
    root.replaceChildren(el("p", { class: "boot", role: "alert" }, `The trace cannot be shown: ${error.message}`));
    throw error;
  }
}

boot();
