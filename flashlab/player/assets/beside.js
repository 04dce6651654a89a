// What is drawn with S: which page each stretch of keys lies in, the partial results of chunks of keys, and the pool of pages.

const PART = { NONE: 0, WRITTEN: 1, THERE: 2, READ: 3 };
const STRIP = 20, LEVEL = 34, LEAF = 16; // heights: of the line of pages, of a level of partial results, of one of their boxes

/** How much room S leaves below itself for the pages of its keys and for partial results. */
function roomBelow(trace) {
  return (trace.pool ? STRIP : 0) + (trace.parts ? LEVEL * (2 + Math.max(...trace.parts.boxes.map(([, , level]) => level))) : 0);
}

const BESIDE_COLOURS = ["ink", "muted", "line", "card", "cell-work", "cell-frame", "glyph-work", "tensor-o", "owner-0", "owner-1", "owner-2", "owner-3"];
const ownerColour = (colour, request) => colour[`owner-${request % 4}`];

/** A box with a text in its middle, if that fits. `lit`: what is read or written now. */
function labelled(context, [x, y, w, h], { fill, stroke, text, ink, lit, dashed, colour, size = 11 }) {
  context.beginPath();
  context.roundRect(x + 0.5, y + 0.5, Math.max(1, w - 1), h - 1, 3);
  context.fillStyle = lit ? colour["cell-work"] : fill;
  if (lit || fill) context.fill();
  context.setLineDash(dashed ? [3, 3] : []);
  context.lineWidth = lit ? 2 : 1;
  context.strokeStyle = lit ? colour["cell-frame"] : stroke;
  context.stroke();
  context.setLineDash([]);
  context.font = `600 ${size}px system-ui, sans-serif`;
  if (!text || context.measureText(text).width > w - 4) return;
  context.fillStyle = lit ? colour["glyph-work"] : ink;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(text, x + w / 2, y + h / 2 + 0.5);
}

/** Below S: for each page of keys its number in the pool. */
function drawPages(context, trace, place, y, now, colour) {
  const { pool } = trace, x = (key) => place.left + (Math.min(key, trace.len_kv) / trace.len_kv) * place.width;
  pool.tables[pool.own].forEach((page, n) => {
    const first = n * pool.size;
    labelled(context, [x(first), y, x(first + pool.size) - x(first), STRIP - 4], {
      fill: ownerColour(colour, pool.own), stroke: colour.muted, ink: colour.ink, text: `${page}`, lit: now.read.has(page), colour,
    });
  });
}

/** Below that: the partial results, each under its keys, joined to where they are merged. The lowest box is the output. */
function drawParts(context, trace, place, y, states, colour) {
  const { boxes } = trace.parts, levels = 1 + Math.max(...boxes.map(([, , level]) => level));
  const x = (key) => place.left + (key / trace.len_kv) * place.width;
  const box = ([first, stop, level]) => [x(first) + 2, y + 8 + level * LEVEL, x(stop) - x(first) - 4, LEAF];
  const root = [place.left + place.width / 2 - 30, y + 8 + levels * LEVEL, 60, LEAF];
  const said = { [PART.NONE]: "", [PART.WRITTEN]: "written", [PART.THERE]: "in HBM", [PART.READ]: "read" };
  boxes.forEach((each, n) => {
    const [bx, by, bw, bh] = box(each), above = boxes.find(([first, stop, level]) => level === each[2] + 1 && first <= each[0] && each[1] <= stop);
    const [px, py, pw] = above ? box(above) : root;
    context.beginPath();
    context.moveTo(bx + bw / 2, by + bh);
    context.lineTo(px + pw / 2, py);
    context.lineWidth = states[n] === PART.READ ? 3 : 1;
    context.strokeStyle = states[n] === PART.READ ? colour["cell-work"] : colour.muted;
    context.stroke();
  });
  const draw = (place, state, name) => labelled(context, place, {
    fill: state === PART.NONE ? colour.card : colour["tensor-o"], stroke: state === PART.NONE ? colour.muted : colour["tensor-o"],
    ink: state === PART.NONE ? colour.muted : colour.card, text: said[state] || name, dashed: state === PART.NONE,
    lit: state === PART.WRITTEN || state === PART.READ, colour,
  });
  boxes.forEach((each, n) => draw(box(each), states[n], ""));
  draw(root, states[boxes.length], "out");
}

/** The partial results in words. */
function partsSaid(trace, states) {
  const all = trace.parts.boxes.length, n = (state) => states.slice(0, all).filter((each) => each === state).length;
  const words = [[n(PART.WRITTEN), "written now"], [n(PART.READ), "read now"], [n(PART.THERE), "in HBM"]].filter(([some]) => some);
  return `${plural(all, "partial result")}: ${words.length ? listed(words.map(([some, what]) => `${some} ${what}`)) : "none yet"}.`;
}

// -- the pool -------------------------------------------------------------------------------------------------------------

class PoolView {
  constructor(trace, page) {
    [this.trace, this.page] = [trace, page];
    const { pool } = trace;
    this.canvas = el("canvas", { role: "img" });
    this.legend = el("ul", { class: "legend" }, pool.tables.map((_, request) => el("li", {}, el("i", { class: "owner", "data-owner": request % 4 }), `request ${request}${request === pool.own ? ", this trace" : ""}`)),
      el("li", {}, el("i", { class: "owner", "data-owner": "free" }), "free"), el("li", {}, el("i", { class: "owner", "data-owner": "read" }), "read now"));
    this.note = el("p", { class: "note", role: "status" });
    this.table = fold("The block table", () => scroller("The block table", table("The pages of each request, in the order of its keys", ["request", "pages"], pool.tables.map((pages, request) => [`${request}`, pages.join(", ")]))));
    this.root = el("div", { class: "pool" }, el("p", { class: "small" }, term("The pool", page.glossary.page), `: ${plural(pool.pages, "page")} of ${plural(pool.size, "key")}. Below a page's number are the keys of its request that lie there.`), this.canvas, this.note, this.legend, this.table.details);
    this.owners = new Map(pool.tables.flatMap((pages, request) => pages.map((number, n) => [number, { request, first: n * pool.size }])));
    this.canvas.addEventListener("click", (event) => this._jump(event));
    this.canvas.addEventListener("pointermove", (event) => this._tell(event));
  }

  show(t) {
    this.t = t;
    this.now = this.trace.pagesAt(t);
    const read = [...this.now.read], held = [...this.now.held].filter((page) => !this.now.read.has(page));
    const pages = (some) => `${some.length === 1 ? "page" : "pages"} ${listed(some.map(String))}`;
    this.note.textContent = read.length ? `Reads ${pages(read)}.` : held.length ? `${pages(held).replace("p", "P")} ${held.length === 1 ? "lies" : "lie"} in SRAM.` : "No page is read.";
    this.canvas.setAttribute("aria-label", `The pool of ${this.trace.pool.pages} pages. ${this.note.textContent}`);
    this.table.update();
  }

  _layout() {
    const { pool } = this.trace, width = Math.min(this.root.clientWidth, 460);
    const cols = Math.max(1, Math.min(pool.pages, Math.floor(width / 52))), side = width / cols;
    return { width, cols, w: side, h: 34 };
  }

  draw() {
    const { width, cols, w, h } = this._layout(), { pool } = this.trace;
    if (width <= 0) return;
    const context = prepared(this.canvas, width, h * Math.ceil(pool.pages / cols)), colour = colours(BESIDE_COLOURS);
    for (let page = 0; page < pool.pages; page++) {
      const [x, y] = [(page % cols) * w, Math.floor(page / cols) * h], owner = this.owners.get(page), lit = this.now.read.has(page);
      labelled(context, [x + 1, y + 1, w - 2, h - 2], {
        fill: owner && ownerColour(colour, owner.request), stroke: this.now.held.has(page) ? colour["cell-frame"] : colour.line, dashed: !owner, ink: colour.ink, lit, colour,
      });
      context.fillStyle = lit ? colour["glyph-work"] : owner ? colour.ink : colour.muted;
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.font = "600 13px system-ui, sans-serif";
      context.fillText(`${page}`, x + w / 2, y + (owner ? h * 0.34 : h / 2));
      if (!owner) continue;
      context.font = "10px system-ui, sans-serif";
      context.fillText(this._keys(owner), x + w / 2, y + h * 0.72);
    }
  }

  _keys({ request, first }) {
    const { pool } = this.trace;
    return range(first, Math.min(first + pool.size, pool.lengths[request]));
  }

  _page(event) {
    const { cols, w, h } = this._layout(), box = this.canvas.getBoundingClientRect();
    const col = Math.floor((event.clientX - box.left) / w), page = Math.floor((event.clientY - box.top) / h) * cols + col;
    return col < cols && page < this.trace.pool.pages ? page : null;
  }

  _tell(event) {
    const page = this._page(event), owner = this.owners.get(page);
    this.canvas.style.cursor = owner?.request === this.trace.pool.own ? "pointer" : "";
    this.canvas.title = page === null ? "" : `page ${page}: ${owner ? `keys ${this._keys(owner)} of request ${owner.request}` : "free"}`;
  }

  _jump(event) {
    const page = this._page(event), { trace } = this;
    for (let t = 0; page !== null && t < trace.length; t++) if (trace.pagesAt(t).read.has(page)) return this.page.jump(trace, t);
  }
}
