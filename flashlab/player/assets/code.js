// The panel of the two sources: the tile program and the kernel, with the lines of the step marked in both.

class CodePanel {
  constructor(trace, page) {
    this.trace = trace;
    this.program = new Listing(page, trace, "Tile program");
    const triton = trace.kernels.some(({ name }) => name.endsWith(".py"));
    this.kernel = new Listing(page, trace, triton ? "Triton kernel" : "CUDA kernel");
    this.root = el("div", { class: "code" }, this.program.root, this.kernel.root);
  }

  show(t) {
    if (t < 0) return;
    const event = this.trace.at(t);
    this._program(event);
    this._kernel(event);
  }

  _program(event) {
    const source = this.trace.sources[event.source];
    if (!source || !source.text) return this.program.say(source ? `${source.name}()` : "", "Its source is not known: it was typed at a prompt.");
    const last = event.step ? (source.steps[event.line]?.[0] ?? event.line) : event.line;
    const here = event.transfers.filter((transfer) => transfer.source === event.source).map((transfer) => transfer.line);
    this.program.show(`${source.name}()`, source, [[event.line, last]], { moves: here });
    const inside = ({ source, line }) => source === event.source && line >= event.line && line <= last;
    const elsewhere = event.transfers.filter((transfer) => !inside(transfer) && this.trace.sources[transfer.source]);
    const lines = new Map(elsewhere.map((transfer) => [`${transfer.source}:${transfer.line}`, transfer]));
    this.program.remark([...lines.values()].map(({ source: from, line }) => {
      const { name, first, text } = this.trace.sources[from];
      return `${from === event.source ? "" : `${name}(), `}line ${line}, called from here: ${(text.split("\n")[line - first] ?? "").trim()}`;
    }));
  }

  _kernel(event) {
    const kernel = this.trace.kernels[event.launch.kernel ?? -1];
    if (!kernel) return this.kernel.say("", "No kernel is known for this program. fl.player(trace, kernel=\"my.cu\") shows one beside it.");
    const marks = own(kernel.marks, event.step) ?? [];
    const inTurn = marks.filter(([, , tag]) => !tag), ahead = marks.filter(([, , tag]) => tag);
    this.kernel.show(kernel.name, { first: 1, text: kernel.text }, inTurn.length ? inTurn : ahead, { also: inTurn.length ? ahead : [] });
    this.kernel.remark(!marks.length ? [`It has no mark step: ${event.step}`] : ahead.map(([first, last, tag]) => `also lines ${range(first, last + 1)}: ${tag}`));
  }
}

/** One source with line numbers; the marked lines are scrolled into sight. */
class Listing {
  constructor(page, trace, title) {
    this.file = el("span", { class: "file" });
    this.lines = el("span", { class: "lines" });
    this.pre = el("pre", { tabindex: "0", role: "group", "aria-label": `${title}, line by line` });
    this.notes = el("ul", { class: "remarks" });
    this.root = panel(page, trace, title, "listing", this.pre, this.notes);
    setTitle(this.root, title, " ", this.file, this.lines);
    this.made = new Map();
    this.marked = [];
  }

  say(file, text) {
    this.file.textContent = file;
    this.lines.textContent = "";
    this.current = null;
    this.pre.classList.add("empty");
    this.pre.replaceChildren(el("span", { class: "message" }, text));
    this.notes.replaceChildren();
  }

  remark(texts) {
    this.notes.replaceChildren(...texts.map((text) => el("li", {}, text)));
  }

  show(file, source, spans, { moves = [], also = [] }) {
    if (this.current !== source.text) {
      if (!this.made.has(source.text)) this.made.set(source.text, this._rows(source));
      this.pre.classList.remove("empty");
      this.pre.replaceChildren(...this.made.get(source.text));
      this.current = source.text;
    }
    const rows = this.made.get(source.text);
    this.file.textContent = file;
    this.lines.textContent = spans.length ? ` line${spans[0][0] === spans[0][1] ? "" : "s"} ${range(spans[0][0], spans[0][1] + 1)}` : "";
    for (const row of this.marked) row.classList.remove("on", "also", "move");
    this.marked = [];
    const mark = (line, name) => {
      const row = rows[line - source.first];
      if (row) {
        row.classList.add(name);
        this.marked.push(row);
      }
    };
    for (const [first, last] of spans) for (let line = first; line <= last; line++) mark(line, "on");
    for (const [first, last] of also) for (let line = first; line <= last; line++) mark(line, "also");
    for (const line of moves) mark(line, "move");
    if (spans.length) this._reveal(rows[spans[0][0] - source.first], rows[spans[0][1] - source.first]);
  }

  _reveal(first, last) {
    if (!first) return;
    const top = first.offsetTop, bottom = (last ?? first).offsetTop + first.offsetHeight, { scrollTop, clientHeight } = this.pre;
    if (top < scrollTop + 20 || bottom > scrollTop + clientHeight - 20)
      this.pre.scrollTop = Math.max(0, bottom - top < clientHeight ? (top + bottom - clientHeight) / 2 : top - 20);
  }

  _rows({ first, text }) {
    const lines = text.replace(/\n$/, "").split("\n");
    const indent = Math.min(...lines.filter((line) => line.trim()).map((line) => line.length - line.trimStart().length));
    return lines.map((line, n) => el("span", { class: "line" }, el("span", { class: "n", "aria-hidden": "true" }, String(first + n)), ...coloured(line.slice(Number.isFinite(indent) ? indent : 0)), "\n"));
  }
}

const TOKENS = /(\/\/.*|#(?!include|pragma|if|else|endif|define).*|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|\b(for|in|if|else|elif|return|def|and|or|not|while|const|constexpr|int|float|void|auto|bool|char|long|static|struct|template|lambda|None|True|False)\b|(\.step\("\w+"\))/g;

/** A line of code with comments, strings and keywords set apart. */
function coloured(line) {
  const parts = [];
  let end = 0;
  for (const found of line.matchAll(TOKENS)) {
    parts.push(line.slice(end, found.index));
    const kind = found[3] ? "mark" : found[2] ? "word" : /^(\/\/|#)/.test(found[1]) ? (/^(\/\/|#) step:/.test(found[1]) ? "mark" : "comment") : "text";
    parts.push(el("span", { class: kind }, found[0]));
    end = found.index + found[0].length;
  }
  parts.push(line.slice(end));
  return parts.filter(Boolean);
}
