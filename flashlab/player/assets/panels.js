// The panels of a view. Each is made once per trace and shows the event that it is told to.

function panel(page, trace, title, name, ...children) {
  const label = page.traces.length > 1 ? `${trace.algorithm}: ${title}` : title;
  return el("section", { class: `panel ${name}`, "aria-label": label }, el(page.traces.length > 1 ? "h3" : "h2", { class: "title" }, title), ...children);
}

const setTitle = (root, ...words) => root.querySelector(".title").replaceChildren(...words);

/** A fold whose content is made only while it is open. */
function fold(summary, fill) {
  const body = el("div", { class: "fold-body" });
  const details = el("details", {}, el("summary", {}, summary), body);
  const update = () => details.open && body.replaceChildren(...[fill()].flat());
  details.addEventListener("toggle", update);
  return { details, update };
}

function table(caption, head, rows) {
  return el("table", {},
    el("caption", { class: "unseen" }, caption),
    el("thead", {}, el("tr", {}, head.map((text) => el("th", { scope: "col" }, text)))),
    el("tbody", {}, rows.map(([first, ...rest]) =>
      el("tr", {}, el("th", { scope: "row" }, first), rest.map((cell) => el("td", {}, cell))))));
}

/** Puts wide content into a box of its own, which the keyboard can scroll too. */
const scroller = (label, ...children) => el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": label }, ...children);

// -- what happens -------------------------------------------------------------------------------------------------------

class Story {
  constructor(trace, page) {
    [this.trace, this.page] = [trace, page];
    this.name = el("span", { class: "step-name" });
    this.where = el("span", { class: "where" });
    this.about = el("p", { class: "about" });
    this.facts = el("ul", { class: "facts" });
    this.live = el("div", { "aria-live": "polite" }, this.about, this.facts);
    this.root = panel(page, trace, "What happens at this step", "story", this.live);
    this.root.querySelector(".title").classList.add("unseen");
    this.live.before(el("div", { class: "story-head" }, this.name, this.where));
  }

  show(t) {
    if (t < 0) {
      this.name.textContent = "not started";
      this.where.textContent = "";
      this.about.textContent = "Its first step requests more bytes than the clock shows.";
      return this.facts.replaceChildren();
    }
    const event = this.trace.at(t), { launch, block } = event;
    this.name.textContent = event.step || "(no step named yet)";
    const words = [`step ${count(t + 1)} of ${count(this.trace.length)}`];
    if (this.trace.launches.length > 1) words.push(`launch ${this.trace.launchOf[t] + 1} of ${this.trace.launches.length}: ${launch.name}`);
    words.push(`block ${this.trace.blockName(block)}, step ${t - block.start + 1} of its ${block.stop - block.start}`);
    if (t === this.trace.length - 1) words.push("the last step");
    this.where.textContent = words.join(" · ");
    this.about.textContent = own(launch.about, event.step) ?? this.trace.sources[event.source]?.steps[event.line]?.[1] ?? "";
    this.about.hidden = !this.about.textContent;
    this.facts.replaceChildren(...facts(this.trace, event).map((fact) => el("li", {}, fact)));
  }
}

/** What an event does, read off the trace: one line per kind of move, and one for what it computes. */
function facts(trace, event) {
  const moves = new Map();
  for (const transfer of event.transfers) {
    const way = wayOf(transfer.moved);
    const key = `${way} ${transfer.tensor}`;
    const move = moves.get(key) ?? { way, tensor: transfer.tensor, pieces: 0, bytes: 0, spans: null };
    move.pieces += 1;
    move.bytes += transfer.moved.get(COUNTED[way]) ?? 0;
    move.spans = united(move.spans, transfer.range);
    moves.set(key, move);
  }
  const lines = [];
  for (const way of Object.keys(COUNTED)) {
    const same = [...moves.values()].filter((move) => move.way === way);
    if (same.length) lines.push(sentence(trace, way, same));
  }
  if (event.tiles.length) {
    const made = event.tiles.flatMap((tile, n) => [n ? ", " : "", el("code", {}, tile.name), ` (${tile.rows} × ${tile.cols})`]);
    lines.push(["= ", "Computes in registers: ", ...made, "."]);
  }
  if (!lines.length) lines.push(["∅ ", "Moves no bytes and changes no register tile."]);
  else if (!event.transfers.length) lines.push(["∅ ", "Moves no bytes: all of it stays in registers."]);
  return lines.map(([sign, ...rest]) => [el("span", { class: "sign", "aria-hidden": "true" }, sign), el("span", {}, ...rest)]);
}

const COUNTED = { load: "hbm.read", fetch: "hbm.read", use: "sram.read", put: "sram.write", store: "hbm.write", atomic: "hbm.atomic" };
const SIGNS = { load: "⇣ ", fetch: "⇣ ", use: "→ ", put: "← ", store: "⇡ ", atomic: "⇡ " };

function wayOf(moved) {
  if (moved.has("hbm.write")) return "store";
  if (moved.has("hbm.atomic")) return "atomic";
  if (moved.has("sram.read")) return "use";
  if (moved.has("sram.write")) return moved.has("hbm.read") ? "load" : "put";
  return moved.has("hbm.read") ? "fetch" : "use";
}

function united(a, b) {
  if (!a || !b) return a ?? b;
  return [Math.min(a[0], b[0]), Math.max(a[1], b[1]), Math.min(a[2], b[2]), Math.max(a[3], b[3])];
}

function sentence(trace, way, moves) {
  const what = moves.flatMap((move, n) => [
    n === 0 ? "" : n === moves.length - 1 ? " and " : ", ",
    tensorName(move.tensor), spanText(trace, move), ` (${plural(move.bytes, "byte")})`,
  ]);
  const words = {
    load: ["Loads from HBM into SRAM: ", ...what, "."],
    fetch: ["Reads from HBM into registers: ", ...what, "."],
    use: ["Reads from SRAM: ", ...what, "."],
    put: ["Puts into SRAM: ", ...what, "."],
    store: ["Writes to HBM: ", ...what, "."],
    atomic: ["Adds to HBM by atomics: ", ...what, "."],
  };
  return [SIGNS[way], ...words[way]];
}

function spanText(trace, { tensor, spans, pieces }) {
  if (!spans) return pieces > 1 ? ` ${pieces} times` : "";
  const shape = own(trace.tensors, tensor);
  const cols = shape && (spans[2] > 0 || spans[3] < shape.cols) ? `, columns ${range(spans[2], spans[3])}` : "";
  return ` ${spans[1] - spans[0] === 1 ? "row" : "rows"} ${range(spans[0], spans[1])}${cols}${pieces > 1 ? ` in ${pieces} pieces` : ""}`;
}

// -- S --------------------------------------------------------------------------------------------------------------------

class ScoresPanel {
  constructor(trace, page) {
    [this.trace, this.page] = [trace, page];
    this.canvas = el("canvas", { role: "img" });
    this.legend = el("ul", { class: "legend" });
    this.note = el("p", { class: "note" });
    this.table = fold("As a table", () => this._table());
    const masked = trace.mask[0] !== null || trace.mask[1] !== null;
    this.reading = el("p", { class: "small" }, "Bars at the edges: the rows of ", tensorName("q"), ", ", tensorName("k"), " and ", tensorName("v"), " that lie in SRAM.", masked ? " Dashed: the edge of the mask." : "");
    this.pool = trace.pool ? new PoolView(trace, page) : null;
    this.said = el("p", { class: "note", hidden: !trace.parts });
    this.root = panel(page, trace, "Scores", "scores", this.note, el("div", { class: "beside" }, el("div", { class: "grid" }, this.canvas, this.said), this.pool?.root), this.legend, this.reading, this.table.details);
    setTitle(this.root, term("S", page.glossary.S), ", the scores, tile by tile");
    this.swatches = STATES.map(({ label }) => {
      const swatch = el("canvas", { class: "swatch", "aria-hidden": "true" }), n = el("b");
      return { swatch, n, item: el("li", {}, swatch, ` ${label} `, n) };
    });
    this.legend.append(...this.swatches.map(({ item }) => item));
    this.canvas.addEventListener("click", (event) => this._jump(event));
    this.canvas.addEventListener("pointermove", (event) => this._tell(event));
  }

  show(t) {
    this.t = t;
    const launch = this.trace.launches[this.trace.launchOf[Math.max(t, 0)]];
    this.grid = launch.grid;
    this.states = this.trace.cells(t);
    this.pool?.show(t);
    if (this.trace.parts) this.said.textContent = partsSaid(this.trace, this.trace.partsAt(t));
    this.canvas.hidden = this.legend.hidden = this.reading.hidden = this.table.details.hidden = !this.grid;
    if (!this.grid) {
      this.note.textContent = `${launch.name} does not touch S, as far as the trace tells.`;
      return;
    }
    const { rows, cols, height, width } = this.grid;
    this.note.textContent = `${this.trace.launches.length > 1 ? `${launch.name}: ` : ""}${count(rows)} × ${plural(cols, "tile")} of ${height === 1 ? "1 query" : `${count(height)} queries`} × ${plural(width, "key")}.`;
    this.draw();
    this.table.update();
  }

  draw() {
    this.pool?.draw();
    if (!this.grid) return;
    const room = this.canvas.parentElement.clientWidth;
    if (room <= 0) return;
    drawGrid(this.canvas, this.trace, this.grid, this.states, this.t, room);
    const numbers = STATES.map((_, state) => this.states.reduce((n, each) => n + (each === state), 0));
    const colour = colours(CELL_COLOURS);
    this.swatches.forEach(({ swatch, n, item }, state) => {
      drawCell(prepared(swatch, 18, 18), state, 0, 0, 18, 18, colour);
      n.textContent = count(numbers[state]);
      item.hidden = state === CELL.MISSED && !numbers[state];
    });
    const said = STATES.map(({ label }, state) => `${numbers[state]} ${label}`).filter((_, state) => numbers[state]);
    this.canvas.setAttribute("aria-label", `S as a grid of ${this.grid.rows} by ${this.grid.cols} tiles: ${said.join(", ")}`);
  }

  _cell(event) {
    const place = gridLayout(this.trace, this.grid, this.canvas.clientWidth);
    const box = this.canvas.getBoundingClientRect();
    const col = Math.floor((event.clientX - box.left - place.left) / place.cw);
    const row = Math.floor((event.clientY - box.top - place.top) / place.ch);
    return row >= 0 && col >= 0 && row < this.grid.rows && col < this.grid.cols ? { row, col } : null;
  }

  _tell(event) {
    const cell = this._cell(event);
    const { height, width } = this.grid, { len_q, len_kv } = this.trace;
    this.canvas.style.cursor = cell ? "pointer" : "";
    this.canvas.title = cell
      ? `queries ${range(cell.row * height, Math.min(len_q, (cell.row + 1) * height))}, ` +
        `keys ${range(cell.col * width, Math.min(len_kv, (cell.col + 1) * width))}: ${STATES[this.states[cell.row * this.grid.cols + cell.col]].label}`
      : "";
  }

  _jump(event) {
    const cell = this._cell(event);
    const t = cell && this.trace.firstTouch(this.t, cell.row * this.grid.cols + cell.col);
    if (t !== null && t !== undefined) this.page.jump(this.trace, t);
  }

  /** One row per row of tiles; tiles of the same state are shown as ranges. */
  _table() {
    const { rows, cols, height } = this.grid;
    const shown = STATES.map(({ label }, state) => ({ label, state })).filter(({ state }) => this.states.includes(state));
    const body = Array.from({ length: rows }, (_, row) => {
      const line = this.states.subarray(row * cols, (row + 1) * cols);
      const queries = range(row * height, Math.min(this.trace.len_q, (row + 1) * height));
      return [queries, ...shown.map(({ state }) => runs(line, state) || "–")];
    });
    return scroller("Tiles of S by state", table("Tiles of S, numbered from 0 along the keys, by state", ["queries", ...shown.map(({ label }) => label)], body));
  }
}

function runs(line, state) {
  const found = [];
  for (let n = 0; n < line.length; n++) {
    if (line[n] !== state) continue;
    const start = n;
    while (line[n + 1] === state) n++;
    found.push(range(start, n + 1));
  }
  return found.join(", ");
}

// -- SRAM -----------------------------------------------------------------------------------------------------------------

class SramPanel {
  constructor(trace, page) {
    [this.trace, this.page] = [trace, page];
    this.total = el("p", { class: "note" });
    this.bar = el("div", { class: "sram-bar", role: "img" });
    this.map = el("ul", { class: "sram-map" });
    this.table = fold("As a table", () => this._table());
    this.root = panel(page, trace, "SRAM", "sram", this.total, this.bar, this.map, this.table.details);
    setTitle(this.root, term("SRAM", page.glossary.SRAM), " of this ", term("block", page.glossary.block));
  }

  show(t) {
    const limit = this.trace.sram_limit;
    this.alive = t < 0 ? [] : this.trace.srams[this.trace.events[t][3]];
    const used = this.alive.reduce((sum, [, bytes]) => sum + bytes, 0);
    const share = percent(used, limit);
    this.total.textContent = `${count(used)} of ${count(limit)} bytes in use (${share}), as ${this.trace.device} has them.`;
    this.bar.setAttribute("aria-label", `${share} of the block's SRAM is in use`);
    this.bar.replaceChildren(...this.alive.map(([name, bytes]) => {
      const part = el("span", { class: "part", "data-tensor": colourOf(name), title: `${name}: ${count(bytes)} bytes` });
      part.style.width = `${(100 * bytes) / limit}%`;
      return part;
    }));
    const resident = this.trace.resident(t), event = t < 0 ? null : this.trace.at(t);
    this.holds = this.alive.map(([name, bytes]) => ({ name, bytes, ...this._held(name, resident.get(name), event) }));
    this.map.replaceChildren(...this.holds.map(({ name, bytes, shape, content, doing }) => {
      const box = el("li", { class: `buffer ${doing ? "busy" : ""}`, "data-tensor": colourOf(name) },
        el("b", {}, name), el("span", {}, ` ${count(bytes)} B`),
        el("span", { class: "small" }, [shape, content].filter(Boolean).join(", ")),
        el("span", { class: "doing" }, doing || " "));
      box.style.flexGrow = bytes;
      return box;
    }));
    if (!this.alive.length) this.map.replaceChildren(el("li", { class: "buffer empty" }, "nothing yet"));
    this.table.update();
  }

  _held(name, held, event) {
    const buffer = own(this.trace.buffers, name);
    const shape = buffer ? `${buffer.copies > 1 ? `${buffer.copies} copies of ` : ""}${buffer.rows} × ${buffer.cols} ${buffer.dtype}` : "";
    const moved = event?.transfers.filter((transfer) => transfer.tensor === name) ?? [];
    const doing = [
      moved.some((each) => each.moved.has("sram.write")) ? "↓ filled now" : "",
      moved.some((each) => each.moved.has("sram.read")) ? "→ read now" : "",
    ].filter(Boolean).join(" ");
    return { shape, content: held ? `holds rows ${range(held.range[0], held.range[1])}` : "", doing };
  }

  _table() {
    const rows = this.holds.map(({ name, bytes, shape, content, doing }) => [name, count(bytes), percent(bytes, this.trace.sram_limit), [shape, content].filter(Boolean).join(", "), doing || "–"]);
    return scroller("Buffers in SRAM", table("Buffers in SRAM", ["buffer", "bytes", "of the limit", "content", "at this step"], rows));
  }
}

// -- byte counters --------------------------------------------------------------------------------------------------------

class CountersPanel {
  constructor(trace, page) {
    this.trace = trace;
    this.kinds = KINDS.filter((kind) => kind !== "hbm.atomic" || trace.moved(null, kind, trace.length - 1));
    const title = (kind) => [term(kind.slice(0, kind.indexOf(".")).toUpperCase(), page.glossary[kind.slice(0, kind.indexOf(".")).toUpperCase()]), ` ${kind.slice(kind.indexOf(".") + 1)}`];
    this.rows = [null, ...trace.counters.keys()].map((tensor) => ({ tensor, cells: this.kinds.map(() => {
      const total = el("span", { class: "total" }), added = el("span", { class: "added" }), meter = tensor === null ? el("span", { class: "meter" }, el("i")) : null;
      return { total, added, meter, cell: el("td", {}, total, added, meter) };
    }) }));
    const body = this.rows.map(({ tensor, cells }) => el("tr", { class: tensor === null ? "sum" : null },
      el("th", { scope: "row" }, tensor === null ? "all" : tensorName(tensor)), cells.map(({ cell }) => cell)));
    this.root = panel(page, trace, "Bytes moved so far", "counters",
      el("p", { class: "note" }, "Bytes requested by this head since the beginning; + is what this step adds."),
      scroller("Bytes moved so far", el("table", {},
        el("caption", { class: "unseen" }, "Bytes moved so far, by tensor and level"),
        el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "tensor"), this.kinds.map((kind) => el("th", { scope: "col" }, title(kind))))),
        el("tbody", {}, body))));
  }

  show(t) {
    for (const { tensor, cells } of this.rows)
      cells.forEach(({ total, added, meter, cell }, n) => {
        const now = this.trace.moved(tensor, this.kinds[n], t), step = now - this.trace.moved(tensor, this.kinds[n], t - 1);
        total.textContent = count(now);
        added.textContent = step ? `+${count(step)}` : "";
        cell.classList.toggle("changed", step > 0);
        cell.classList.toggle("zero", !now);
        if (meter) meter.firstChild.style.width = `${(100 * now) / (this.trace.moved(null, this.kinds[n], this.trace.length - 1) || 1)}%`;
      });
  }
}
