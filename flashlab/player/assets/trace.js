// The data of the page, unpacked and indexed so that any step can be shown at once. Nothing here touches the page.

/** The bytes of a base64 text that was compressed with gzip. */
async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Floats of 24 bits, in three planes of bytes. */
function floats(planes) {
  const n = planes.length / 3, bits = new Uint32Array(n);
  for (let i = 0; i < n; i++) bits[i] = (planes[i] << 24) | (planes[n + i] << 16) | (planes[2 * n + i] << 8);
  return new Float32Array(bits.buffer);
}

/** Which of n indices a page keeps if it keeps `most` of them. */
function kept(n, most) {
  const count = Math.min(n, most ?? n);
  return Array.from({ length: count }, (_, i) => Math.floor((i * n) / count));
}

const KINDS = ["hbm.read", "hbm.write", "hbm.atomic", "sram.read", "sram.write"];
const CELL = { NOT_YET: 0, LOADED: 1, WORK: 2, DONE: 3, SKIPPED: 4, MISSED: 5 };

class Trace {
  constructor(data, values, [rows, cols, vector]) {
    Object.assign(this, data);
    this.values = values;
    this.length = data.events.length;
    this.thinning = { rows, cols, vector };
    this.names = data.names;
    this._index();
    this._count();
  }

  /** Which launch and block each event belongs to, and where its values lie. */
  _index() {
    this.launchOf = new Int32Array(this.length);
    this.blockOf = new Int32Array(this.length);
    this.inColumns = this.launches.map(() => false); // has a launch's grid more than one column of blocks?
    this.launches.forEach((launch, n) => this.launchOf.fill(n, launch.start, launch.stop));
    this.blocks = this.blocks.map(([i, j, start, stop, request]) => ({ i, j, start, stop, request: request < 0 ? null : request }));
    this.blocks.forEach((block, n) => {
      this.blockOf.fill(n, block.start, block.stop);
      this.inColumns[this.launchOf[block.start]] ||= block.j > 0;
    });
    let offset = 0;
    this.tiles = this.events.map((event) =>
      event[6].map(([name, rows, cols]) => {
        const vector = cols === 1;
        const keptRows = kept(rows, vector ? this.thinning.vector : this.thinning.rows);
        const keptCols = kept(cols, vector ? null : this.thinning.cols);
        const tile = { name: this.names[name], rows, cols, vector, keptRows, keptCols, offset };
        offset += keptRows.length * keptCols.length;
        return tile;
      }),
    );
    this.keyed = this.launches.map(({ start, stop }) => this.tiles.slice(start, stop).flat().some(({ name }) => name.endsWith("_j")));
  }

  /** The bytes moved up to and including each event, by tensor and kind, and from or to HBM in all. */
  _count() {
    this.counters = new Map();
    this.hbm = new Float64Array(this.length);
    this.events.forEach((event, t) => {
      for (const [tensor, , , , ...moved] of event[4])
        for (let m = 0; m < moved.length; m += 2) {
          const kind = this.names[moved[m]];
          this._counter(this.names[tensor], kind)[t] += moved[m + 1];
          if (kind.startsWith("hbm")) this.hbm[t] += moved[m + 1];
        }
    });
    for (const kinds of this.counters.values()) for (const each of kinds.values()) accumulate(each);
    accumulate(this.hbm);
  }

  _counter(tensor, kind) {
    if (!this.counters.has(tensor)) this.counters.set(tensor, new Map());
    const kinds = this.counters.get(tensor);
    if (!kinds.has(kind)) kinds.set(kind, new Float64Array(this.length));
    return kinds.get(kind);
  }

  /** Bytes of a kind that a tensor (null: all of them) has moved by the end of event t. */
  moved(tensor, kind, t) {
    if (t < 0) return 0;
    if (tensor !== null) return this.counters.get(tensor)?.get(kind)?.[t] ?? 0;
    let sum = 0;
    for (const kinds of this.counters.values()) sum += kinds.get(kind)?.[t] ?? 0;
    return sum;
  }

  /** A block as people name it: by its row, and by its column where there are several; by its request where a trace has several. */
  blockName({ i, j, start, request }) {
    return `${this.inColumns[this.launchOf[start]] ? `(${i}, ${j})` : i}${request === null ? "" : ` of request ${request}`}`;
  }

  stepName(t) {
    return this.names[this.events[t][0]];
  }

  /** Event t with its names spelled out. */
  at(t) {
    const [step, source, line, sram, transfers] = this.events[t];
    return {
      t, source, line,
      step: this.names[step],
      launch: this.launches[this.launchOf[t]],
      block: this.blocks[this.blockOf[t]],
      sram: this.srams[sram],
      transfers: transfers.map(([tensor, from, at, range, ...moved]) => ({
        tensor: this.names[tensor], source: from, line: at, range: range || null,
        moved: new Map(moved.flatMap((n, m) => (m % 2 ? [] : [[this.names[n], moved[m + 1]]]))),
      })),
      tiles: this.tiles[t],
    };
  }

  /** The states of the cells of S after event t, by row. */
  cells(t) {
    const launch = this.launches[this.launchOf[Math.max(t, 0)]];
    if (!launch.grid) return null;
    const states = new Uint8Array(launch.grid.rows * launch.grid.cols);
    for (let e = launch.start; e <= t; e++) {
      const changes = this.events[e][5];
      for (let c = 0; c < changes.length; c += 2) states[changes[c]] = changes[c + 1];
    }
    return states;
  }

  /** Where in S the rows of a tensor lie that event t moves: requests have their queries one below the other. */
  inS(tensor, [first, stop], t) {
    const role = own(this.roles, tensor), { request } = this.blocks[this.blockOf[t]];
    const by = role === "keys" ? this.firsts[tensor] : request === null ? 0 : request * this.each;
    return [first + by, stop + by];
  }

  /** The states of the partial results after event t, that of the output last. */
  partsAt(t) {
    return t < 0 ? this.parts.boxes.map(() => 0).concat(0) : this.parts.states[this.events[t][7]];
  }

  /** The pages of the pool that event t reads, and those of which a tile lies in SRAM. */
  pagesAt(t) {
    const { tensors, tables, own: request, size } = this.pool, read = new Set(), held = new Set();
    const add = (found, [first, stop]) => {
      for (let n = Math.floor(first / size); n * size < stop; n++) found.add(tables[request][n]);
    };
    if (t < 0) return { read, held };
    for (const [tensor, , , range, ...moved] of this.events[t][4])
      if (range && tensors.includes(this.names[tensor]) && moved.some((n, m) => m % 2 === 0 && this.names[n] === "hbm.read")) add(read, range);
    for (const [name, { range }] of this.resident(t)) if (tensors.includes(name)) add(held, range);
    return { read, held };
  }

  /** The first event at which a cell of S is loaded or worked on, in the launch of event t. */
  firstTouch(t, cell) {
    const { start, stop } = this.launches[this.launchOf[Math.max(t, 0)]];
    for (let e = start; e < stop; e++) {
      const changes = this.events[e][5];
      for (let c = 0; c < changes.length; c += 2)
        if (changes[c] === cell && [CELL.LOADED, CELL.WORK].includes(changes[c + 1])) return e;
    }
    return null;
  }

  /** The tile of each tensor that lies in SRAM after event t: [first row, after the last, first column, after the last]. */
  resident(t) {
    const found = new Map();
    if (t < 0) return found;
    for (let e = this.blocks[this.blockOf[t]].start; e <= t; e++)
      for (const [tensor, , , range, ...moved] of this.events[e][4])
        if (range && moved.some((n, m) => m % 2 === 0 && this.names[n] === "sram.write"))
          found.set(this.names[tensor], { range, at: this.inS(this.names[tensor], range, e), loaded: e === t });
    const alive = new Set(this.srams[this.events[t][3]].map(([name]) => name));
    for (const name of found.keys()) if (!alive.has(name)) found.delete(name);
    return found;
  }

  /** What the rows of a tensor in HBM are: a "query" or a "key" each, or something else. */
  rowsIn(tensor) {
    return { queries: "query", scores: "query", keys: "key" }[own(this.roles, tensor)];
  }

  /** What the rows of a register tile are. A program says _j of what belongs to keys. Beside such a tile lie others that may
   * be turned, keys down and queries across: their rows are just rows. */
  rowsOf(t, name) {
    if (name.endsWith("_j")) return "key";
    if (name.endsWith("_i")) return "query";
    return this.keyed[this.launchOf[t]] ? "row" : "query";
  }

  /** The first of the queries or keys that a block works on at event t; null if no transfer says so. */
  firstRow(t, noun) {
    for (let e = t; e >= this.blocks[this.blockOf[t]].start; e--)
      for (const [tensor, , , range] of this.events[e][4].toReversed())
        if (range && this.rowsIn(this.names[tensor]) === noun) return this.inS(this.names[tensor], range, e)[0];
    return null;
  }

  /** The register tiles of event t's block, of the queries or keys that it works on, by name, each with the tile that it
   * replaced. */
  registers(t) {
    const found = new Map();
    if (t < 0) return found;
    const first = { query: null, key: null };
    for (let e = this.blocks[this.blockOf[t]].start; e <= t; e++) {
      for (const [tensor, , , range] of this.events[e][4]) {
        const noun = range && this.rowsIn(this.names[tensor]);
        if (!noun || range[0] === first[noun]) continue;
        if (first[noun] !== null) // these belong to other rows
          for (const name of found.keys()) if ((this.rowsOf(e, name) === "key") === (noun === "key")) found.delete(name);
        first[noun] = range[0];
      }
      for (const tile of this.tiles[e]) {
        const before = found.get(tile.name)?.tile ?? null;
        found.set(tile.name, { tile, before, event: e, changed: e === t });
      }
    }
    return found;
  }

  /** The value of a tile at a row and column, or undefined if the page does not have it. */
  value(tile, row, col) {
    const r = tile.keptRows.indexOf(row), c = tile.keptCols.indexOf(col);
    return r < 0 || c < 0 ? undefined : this.values[tile.offset + r * tile.keptCols.length + c];
  }
}

function accumulate(numbers) {
  for (let i = 1; i < numbers.length; i++) numbers[i] += numbers[i - 1];
}
