// The panel of register tiles: heat maps of the matrices, and a table of m, l and the like beside one matrix's rows.

const WINDOW = { rows: 16, cols: 8 }; // the most that are shown at once

class ValuesPanel {
  constructor(trace, page) {
    [this.trace, this.page] = [trace, page];
    this.chosen = null;
    this.first = { row: 0, col: 0 };
    this.maps = el("div", { class: "maps", role: "group", "aria-label": "Which matrix the table shows" });
    this.pagers = el("div", { class: "pagers" });
    this.box = scroller("Values in registers");
    this.note = el("p", { class: "note" });
    this.root = panel(page, trace, "Registers", "values", this.note, this.maps, this.pagers, this.box);
    setTitle(this.root, "Values in ", term("registers", page.glossary.registers));
    this.buttons = new Map();
    this.rowPager = new Pager("rows", "row", WINDOW.rows, this);
    this.colPager = new Pager("columns", "col", WINDOW.cols, this);
    this.pagers.append(this.rowPager.root, this.colPager.root);
  }

  show(t) {
    this.t = t;
    const all = [...this.trace.registers(t).values()];
    this.matrices = all.filter(({ tile }) => !tile.vector);
    this.matrix = this._choice();
    this.noun = this.matrix ? this.trace.rowsOf(t, this.matrix.tile.name) : "query";
    this.vectors = all.filter(({ tile }) => tile.vector && this.trace.rowsOf(t, tile.name) === this.noun);
    this.note.textContent = all.length ? "What just changed is bold, with ▲ where it rose and ▼ where it fell." : "Nothing computed yet in this block.";
    this._maps();
    this._table();
  }

  /** The matrix that was asked for, or else the one that changed last. */
  _choice() {
    const asked = this.matrices.find(({ tile }) => tile.name === this.chosen);
    return asked ?? this.matrices.reduce((last, entry) => (last && last.event > entry.event ? last : entry), null);
  }

  _maps() {
    this.maps.hidden = !this.matrices.length;
    const shown = this.matrices.map((entry) => {
      const { tile, changed } = entry;
      if (!this.buttons.has(tile.name)) this.buttons.set(tile.name, this._button(tile.name));
      const { button, canvas, shape, badge } = this.buttons.get(tile.name);
      button.setAttribute("aria-pressed", String(tile.name === this.chosen));
      button.classList.toggle("shown", entry === this.matrix);
      button.classList.toggle("changed", changed);
      badge.textContent = changed ? "changed" : "";
      shape.textContent = `${tile.rows} × ${tile.cols}`;
      if (canvas.drawn !== tile || canvas.theme !== this.page.theme) {
        drawHeat(canvas, this.trace, tile);
        [canvas.drawn, canvas.theme] = [tile, this.page.theme];
      }
      return button;
    });
    if (shown.length !== this.maps.children.length || shown.some((button, n) => this.maps.children[n] !== button)) this.maps.replaceChildren(...shown);
  }

  _button(name) {
    const canvas = el("canvas", { class: "heat", "aria-hidden": "true" });
    const shape = el("span", { class: "small" }), badge = el("span", { class: "badge" });
    const button = el("button", {
      type: "button", class: "map", title: [own(this.page.registers, name), "Press to keep it in the table, again to follow what changes."].filter(Boolean).join(" "),
      onclick: () => {
        this.chosen = this.chosen === name ? null : name;
        this.show(this.t);
      },
    }, canvas, el("code", {}, name), shape, badge);
    return { button, canvas, shape, badge };
  }

  _table() {
    const rows = Math.max(0, ...[...this.vectors, ...(this.matrix ? [this.matrix] : [])].map(({ tile }) => tile.rows));
    const cols = this.matrix ? this.matrix.tile.keptCols : [];
    this.box.hidden = !rows;
    this._fill(rows, cols);
    for (let tries = 0; tries < 3 && this._narrow(); tries++) this._fill(rows, cols);
  }

  /** Shows no more columns than have room. From step to step they only get fewer, so that the table doesn't jump. */
  _narrow() {
    const room = this.box.clientWidth, names = [...this.vectors, this.matrix].map((entry) => entry?.tile.name).join();
    if (this.fitted?.room !== room || this.fitted.names !== names) this.fitted = { room, names, cols: WINDOW.cols };
    const heads = [...this.box.querySelectorAll("th.matrix")], left = this.box.getBoundingClientRect().left;
    const fit = heads.filter((head) => head.getBoundingClientRect().right - left <= room + 0.5).length;
    if (room && fit < heads.length) this.fitted.cols = Math.max(1, fit);
    return this.colPager.window !== (this.colPager.window = this.fitted.cols);
  }

  _fill(rows, cols) {
    this.rowPager.fit(rows);
    this.colPager.fit(cols.length);
    const { request } = this.t < 0 ? { request: null } : this.trace.blocks[this.trace.blockOf[this.t]];
    const first = this.t < 0 ? null : this.trace.firstRow(this.t, this.noun);
    const all = this.noun === "key" ? this.trace.len_kv : request === null ? this.trace.len_q : (request + 1) * this.trace.each;
    const columns = cols.slice(this.first.col, this.first.col + this.colPager.window);
    const head = el("tr", {},
      el("th", { scope: "col" }, this.noun),
      this.vectors.map(({ tile, changed }) => el("th", { scope: "col", class: changed ? "changed" : null }, term(tile.name, own(this.page.registers, tile.name)))),
      columns.map((col) => el("th", { scope: "col", class: `matrix${this.matrix.changed ? " changed" : ""}` }, `${this.matrix.tile.name}[${col}]`)));
    const body = [];
    for (let row = this.first.row; row < Math.min(rows, this.first.row + WINDOW.rows); row++) {
      const outside = first !== null && first + row >= all;
      body.push(el("tr", { class: outside ? "outside" : null },
        el("th", { scope: "row", title: outside ? `beyond the last ${this.noun}` : null }, count((first ?? 0) + row)),
        this.vectors.map((entry) => this._cell(entry, row, 0)),
        columns.map((col) => this._cell(this.matrix, row, col))));
    }
    this.box.replaceChildren(el("table", {}, el("caption", { class: "unseen" }, `Values in registers, one row per ${this.noun}`), el("thead", {}, head), el("tbody", {}, body)));
  }

  _cell({ tile, before, changed }, row, col) {
    if (row >= tile.rows) return el("td", {});
    const now = this.trace.value(tile, row, col);
    const old = changed && before && before.rows === tile.rows && before.cols === tile.cols ? this.trace.value(before, row, col) : undefined;
    const differs = changed && !(old === now || (Number.isNaN(old) && Number.isNaN(now)));
    const arrow = !differs || old === undefined ? "" : now > old ? "▲" : now < old ? "▼" : "";
    return el("td", { class: `${differs ? "changed" : ""}${Number.isNaN(now) ? " nan" : ""}`, title: old === undefined ? null : `was ${number(old)}` },
      arrow ? el("span", { class: "arrow" }, arrow) : null, number(now));
  }
}

/** Two buttons that move a window over rows or columns, hidden where all fit in. */
class Pager {
  constructor(noun, axis, window, owner) {
    Object.assign(this, { noun, axis, window, owner });
    this.text = el("span", {});
    const move = (by) => () => {
      owner.first[axis] = Math.max(0, owner.first[axis] + by * this.window);
      owner.show(owner.t);
    };
    this.back = el("button", { type: "button", "aria-label": `earlier ${noun}`, onclick: move(-1) }, "‹");
    this.on = el("button", { type: "button", "aria-label": `later ${noun}`, onclick: move(1) }, "›");
    this.root = el("span", { class: "pager" }, this.back, this.text, this.on);
  }

  fit(n) {
    const { first } = this.owner;
    if (first[this.axis] >= n) first[this.axis] = Math.max(0, n - this.window);
    const begin = first[this.axis], end = Math.max(begin + 1, Math.min(n, begin + this.window));
    this.text.textContent = `${this.noun} ${range(begin, end)} of ${count(n)}`;
    this.root.hidden = n <= this.window && !begin;
    this.back.disabled = begin === 0;
    this.on.disabled = end >= n;
  }
}
