// Canvases: the grid of S, and register tiles as heat maps. Colours come from the style sheet.

function colours(names) {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

/** Makes a canvas as large as it is shown, in CSS pixels, and returns its context. */
function prepared(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const w = Math.round(width * ratio), h = Math.round(height * ratio);
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

const STATES = [
  { key: "not-yet", label: "not yet", glyph: "·" },
  { key: "loaded", label: "loaded", glyph: "↓" },
  { key: "work", label: "in progress", glyph: "▶" },
  { key: "done", label: "done", glyph: "✓" },
  { key: "skipped", label: "skipped", glyph: "✕" },
  { key: "missed", label: "never visited", glyph: "!" },
];

/** Draws one cell of S: states differ by fill, pattern, frame and glyph. */
function drawCell(context, state, x, y, w, h, colour) {
  const gap = Math.min(1, Math.min(w, h) * 0.1);
  [x, y, w, h] = [x + gap, y + gap, w - 2 * gap, h - 2 * gap];
  const { key, glyph } = STATES[state];
  context.fillStyle = colour[`cell-${key}`];
  context.fillRect(x, y, w, h);
  if (state === CELL.LOADED) stripes(context, x, y, w, h, colour["cell-line"], 5);
  if (state === CELL.SKIPPED || state === CELL.MISSED) stripes(context, x, y, w, h, colour["cell-faint"], -7);
  if (state === CELL.WORK || state === CELL.MISSED) {
    const line = Math.min(3, Math.max(1, Math.min(w, h) / 8));
    context.lineWidth = line;
    context.strokeStyle = colour["cell-frame"];
    context.strokeRect(x + line / 2, y + line / 2, w - line, h - line);
  }
  const font = Math.min(18, Math.min(w, h) * 0.55);
  if (font >= 6) {
    context.fillStyle = colour[`glyph-${key}`];
    context.font = `600 ${font}px system-ui, sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(glyph, x + w / 2, y + h / 2 + font * 0.05);
  }
}

const CELL_COLOURS = [
  ...STATES.flatMap(({ key }) => [`cell-${key}`, `glyph-${key}`]), "cell-line", "cell-faint", "cell-frame",
];

function stripes(context, x, y, w, h, colour, step) {
  context.save();
  context.beginPath();
  context.rect(x, y, w, h);
  context.clip();
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  const gap = Math.abs(step);
  for (let d = -h; d < w; d += gap) {
    context.moveTo(x + d, step > 0 ? y + h : y);
    context.lineTo(x + d + h, step > 0 ? y : y + h);
  }
  context.stroke();
  context.restore();
}

const MARGIN = 26;

/** Where the cells of S lie on a canvas of a given width: as square as S is, within reason. */
function gridLayout(trace, grid, width) {
  const inner = width - MARGIN - 4;
  const ratio = Math.min(1.6, Math.max(0.35, (trace.len_q / trace.len_kv) || 1));
  const side = Math.min(inner, innerHeight < 820 ? 290 : 380); // a low window is a frame: leave room for the panels below
  const [w, h] = ratio > 1 ? [side / ratio, side] : [side, side * ratio];
  return { left: MARGIN, top: MARGIN, width: w, height: h, cw: (w * grid.width) / trace.len_kv, ch: (h * grid.height) / trace.len_q };
}

/** The grid of S with its cells, the mask's edge, and in the margins which rows of Q, K and V lie in SRAM. Below are the pages of the
 * keys, and partial results. */
function drawGrid(canvas, trace, grid, states, t, width) {
  const resident = trace.resident(t);
  const place = gridLayout(trace, grid, width);
  const context = prepared(canvas, width, place.top + place.height + 4 + roomBelow(trace));
  const colour = colours([...CELL_COLOURS, ...BESIDE_COLOURS, "mask", "tensor-q", "tensor-k", "tensor-v"]);
  const right = place.left + place.width, bottom = place.top + place.height;
  for (let row = 0; row < grid.rows; row++)
    for (let col = 0; col < grid.cols; col++) {
      const x = place.left + col * place.cw, y = place.top + row * place.ch;
      drawCell(context, states[row * grid.cols + col], x, y, Math.min(place.cw, right - x), Math.min(place.ch, bottom - y), colour);
    }
  drawMask(context, trace, place, colour.mask);
  context.fillStyle = colour.muted;
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "left";
  context.fillText(trace.prefix === null ? "keys →" : "the prefix's keys →", place.left, 6);
  if (trace.prefix !== null) {
    const x = place.left + (trace.prefix / trace.len_kv) * place.width;
    context.fillText("each one's own →", x + 3, 6);
    bar(context, colour.mask, x - 1, 1, 2, bottom);
    context.fillStyle = colour.muted;
  }
  context.save();
  context.translate(6, place.top);
  context.rotate(Math.PI / 2);
  context.fillText("queries →", 0, 0);
  context.restore();
  for (const [name, { at }] of resident) {
    const tensor = colourOf(name), along = own(trace.roles, name);
    const y = { k: 13, v: 19 }[tensor];
    if (y && along === "keys") bar(context, colour[`tensor-${tensor}`], place.left + (at[0] / trace.len_kv) * place.width, y, ((at[1] - at[0]) / trace.len_kv) * place.width, 5);
    if (tensor === "q" && along === "queries") bar(context, colour["tensor-q"], 15, place.top + (at[0] / trace.len_q) * place.height, 6, ((at[1] - at[0]) / trace.len_q) * place.height);
  }
  if (trace.pool) drawPages(context, trace, place, bottom + 4, trace.pagesAt(t), colour);
  if (trace.parts) drawParts(context, trace, place, bottom + 4 + (trace.pool ? STRIP : 0), trace.partsAt(t), colour);
}

function bar(context, colour, x, y, w, h) {
  context.fillStyle = colour;
  context.beginPath();
  context.roundRect(x, y, Math.max(2, w), Math.max(2, h), 2);
  context.fill();
}

/** The edges of the mask, each a straight line through the middle of its staircase. What lies beyond is masked out. */
function drawMask(context, trace, place, colour) {
  const [left, right, offset] = trace.mask;
  const x = (key) => place.left + (key / trace.len_kv) * place.width;
  context.save();
  context.beginPath();
  context.rect(place.left, place.top, place.width, place.height);
  context.clip();
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.setLineDash([4, 3]);
  context.beginPath();
  for (const edge of [left === null ? null : -left - 0.5, right === null ? null : right + 0.5]) {
    if (edge === null) continue;
    context.moveTo(x(offset + edge), place.top);
    context.lineTo(x(offset + edge + trace.len_q), place.top + place.height);
  }
  context.stroke();
  context.restore();
}

/** A register tile as a heat map, one pixel per value: one colour below 0, another above, grey if not finite. */
function drawHeat(canvas, trace, tile) {
  const rows = tile.keptRows.length, cols = tile.keptCols.length;
  [canvas.width, canvas.height] = [Math.max(1, cols), Math.max(1, rows)];
  if (!rows || !cols) return;
  const values = trace.values.subarray(tile.offset, tile.offset + rows * cols);
  const colour = colours(["heat-low", "heat-high", "heat-zero", "heat-none"]);
  const [low, high, zero, none] = ["heat-low", "heat-high", "heat-zero", "heat-none"].map((name) => rgb(colour[name]));
  const most = values.reduce((top, x) => (Number.isFinite(x) ? Math.max(top, Math.abs(x)) : top), 0) || 1;
  const image = new ImageData(cols, rows);
  values.forEach((x, n) => {
    const share = Number.isFinite(x) ? Math.sqrt(Math.abs(x) / most) : 1;
    const to = Number.isFinite(x) ? (x < 0 ? low : high) : none;
    for (let c = 0; c < 3; c++) image.data[4 * n + c] = zero[c] + (to[c] - zero[c]) * share;
    image.data[4 * n + 3] = 255;
  });
  canvas.getContext("2d").putImageData(image, 0, 0);
}

/** The bytes of each step as bars below the slider: one bar per step, or per pixel column if there are more steps. */
function drawTimeline(canvas, heights) {
  const width = canvas.parentElement.clientWidth - 16, height = 16;
  if (width <= 0) return;
  const context = prepared(canvas, width, height);
  context.fillStyle = colours(["accent"]).accent;
  const most = Math.max(...heights) || 1, step = width / heights.length;
  const columns = new Float64Array(Math.ceil(width));
  heights.forEach((bytes, n) => (columns[Math.floor(n * step)] = Math.max(columns[Math.floor(n * step)], bytes)));
  const wide = Math.max(1, step - 1);
  columns.forEach((bytes, x) => bytes && context.fillRect(x, height - Math.max(2, (height * bytes) / most), wide, height));
}

const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
