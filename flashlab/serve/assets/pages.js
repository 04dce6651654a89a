"use strict";
(() => {
  const day = JSON.parse(document.getElementById("data").textContent);
  const get = (id) => document.getElementById(id);
  const FREE = -1, KEPT = -2, TONES = 8, PACE = 260;
  const many = day.blocks > 500;

  const make = (tag, text, name) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (name) made.className = name;
    return made;
  };
  const drawn = (tag, attributes) => {
    const made = document.createElementNS(get("chart").namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  };
  const plural = (n, one) => `${n.toLocaleString("en")} ${one}${n === 1 ? "" : "s"}`;
  const time = (s) => (s >= 1 ? `${s.toFixed(2)} s` : `${(s * 1e3).toFixed(2)} ms`);
  const nbytes = (n) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let i = 0;
    while (n >= 999.5 && i < 4) { n /= 1024; i += 1; }
    return `${i ? n.toFixed(n < 10 ? 2 : n < 100 ? 1 : 0) : n} ${units[i]}`;
  };

  // whose each block is, before the first step and after the steps that were played
  const owner = new Int32Array(day.blocks).fill(FREE), owners = new Int32Array(day.blocks);
  const before = []; // of each step that was played: what its changes replaced
  let at = -1, timer = null;

  const pool = get("pool");
  pool.classList.toggle("small", many);
  const cells = Array.from({ length: day.blocks }, (_, block) => {
    const cell = make("li", block ? "" : "∅", block ? "cell" : "cell null");
    pool.append(cell);
    return cell;
  });
  cells[0].title = "page 0: the null page";

  const paint = (block, changed) => {
    const cell = cells[block], who = owner[block], n = owners[block];
    cell.className = "cell" + (who >= 0 ? " owned" : who === KEPT ? " kept" : "") + (n > 1 ? " shared" : "") + (changed ? " changed" : "");
    cell.replaceChildren();
    if (who >= 0) {
      cell.dataset.tone = who % TONES;
      cell.append(String(who));
      if (n > 1) cell.append(make("small", `×${n}`));
    } else delete cell.dataset.tone;
    const whose = who >= 0 ? `request ${who}${n > 1 ? ` and ${plural(n - 1, "other")}` : ""}` : who === KEPT ? "free, its tokens can be found" : "free";
    cell.title = `page ${block}: ${whose}`;
  };

  const forward = () => {
    at += 1;
    const undo = [];
    const changes = day.steps[at].changes;
    for (let i = 0; i < changes.length; i += 3) {
      const block = changes[i];
      undo.push([block, owner[block], owners[block]]);
      owner[block] = changes[i + 1];
      owners[block] = changes[i + 2];
    }
    before.push(undo);
  };
  const backward = () => {
    for (const [block, who, n] of before.pop().reverse()) { owner[block] = who; owners[block] = n; }
    at -= 1;
  };

  // pages in use and pages that can be found, at the end of each step
  const used = [], found = [];
  while (at + 1 < day.steps.length) {
    forward();
    let own = 0, kept = 0;
    for (let block = 1; block < day.blocks; block += 1) { own += owner[block] >= 0; kept += owner[block] === KEPT; }
    used.push(own);
    found.push(kept);
  }
  while (at >= 0) backward();

  const chart = get("chart"), wide = 600 / day.steps.length;
  const area = (top, bottom, name) => {
    const y = (n) => 96 - (90 * n) / Math.max(1, day.blocks - 1);
    let path = "";
    top.forEach((n, i) => { path += `M${i * wide} ${y(bottom[i])}V${y(n)}H${(i + 1) * wide}V${y(bottom[i])}Z`; });
    chart.append(drawn("path", { d: path, class: name }));
  };
  area(used, used.map(() => 0), "used");
  area(used.map((n, i) => n + found[i]), used, "found");
  const now = drawn("line", { y1: 0, y2: 96, class: "now" });
  chart.append(now);

  const body = get("requests"), lines = new Map(), firstStep = new Map(), lastStep = new Map();
  day.steps.forEach((step, i) => {
    for (let n = 0; n < step.parts.length; n += 3) {
      if (!firstStep.has(step.parts[n])) firstStep.set(step.parts[n], i);
      lastStep.set(step.parts[n], i);
    }
  });
  const lineOf = (number) => {
    if (!lines.has(number)) {
      const line = make("tr"), head = make("th"), chip = make("span", number, "chip");
      chip.dataset.tone = number % TONES;
      head.scope = "row";
      head.append(chip);
      const parts = [make("td"), make("td"), make("td")];
      line.append(head, ...parts);
      lines.set(number, { line, parts });
    }
    return lines.get(number);
  };

  const show = () => {
    const step = day.steps[at], changed = new Set();
    for (let i = 0; i < step.changes.length; i += 3) changed.add(step.changes[i]);
    for (let block = 1; block < day.blocks; block += 1) paint(block, changed.has(block));
    const new_ = new Map(), held = new Map();
    for (let i = 0; i < step.parts.length; i += 3) {
      new_.set(step.parts[i], step.parts[i + 1]);
      held.set(step.parts[i], step.parts[i + 2]);
    }
    const shown = [];
    day.requests.forEach((request, number) => {
      if (request.seconds > step.begin) return;
      const computing = new_.has(number), over = lastStep.get(number) < at;
      const tokens = new_.get(number);
      const state = computing ? (tokens > 1 ? "reads its prompt" : tokens ? "answers" : "rests") : over ? "answered" : firstStep.get(number) < at ? "waits: preempted" : "waits";
      const { line, parts } = lineOf(number);
      line.className = computing ? "working" : "idle";
      parts[0].textContent = state;
      parts[1].textContent = held.get(number) || "–";
      parts[2].textContent = tokens ? `+${tokens}` : "";
      shown.push([over ? 2 : computing ? 0 : 1, number, line]);
    });
    shown.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    body.replaceChildren(...shown.slice(0, 200).map((each) => each[2]));
    const prompts = [...new_.values()].filter((n) => n > 1).length;
    get("said").textContent = step.said || (
      `${plural(new_.size, "request")} ${new_.size === 1 ? "computes" : "compute"} ${plural(step.tokens, "token")}: ${plural(prompts, "prompt")} or parts of one, and ${plural(new_.size - prompts, "answer")}.` +
      (step.preempted ? ` No page was left: ${plural(step.preempted, "request")} had to give its pages back.` : "") +
      (step.waiting ? ` ${plural(step.waiting, "request")} ${step.waiting === 1 ? "waits" : "wait"}.` : ""));
    get("facts").textContent = (step.said ? "" :
      `It begins at ${time(step.begin)} and takes ${time(step.seconds)} by prediction: ${plural(step.launches, "launch").replace("launchs", "launches")}, ${nbytes(step.nbytes)} of HBM. `) +
      `${plural(step.blocks, "page")} in use, ${plural(step.tables - step.blocks, "page")} saved by sharing, ${plural(step.wasted, "row")} without a token.`;
    get("lines").textContent = changed.size ? `${plural(changed.size, "page")} changed hands in this step.` : "No page changed hands in this step.";
    get("counter").textContent = `step ${at + 1} of ${day.steps.length}`;
    get("at").value = at;
    now.setAttribute("x1", (at + 0.5) * wide);
    now.setAttribute("x2", (at + 0.5) * wide);
  };

  const go = (to) => {
    const wanted = Math.min(Math.max(to, 0), day.steps.length - 1);
    while (at < wanted) forward();
    while (at > wanted) backward();
    show();
  };
  const stop = () => {
    clearInterval(timer);
    timer = null;
    get("play").textContent = "▶ Play";
    get("play").setAttribute("aria-label", "Play");
  };
  const play = () => {
    if (timer) { stop(); return; }
    if (at === day.steps.length - 1) go(0);
    get("play").textContent = "⏸ Pause";
    get("play").setAttribute("aria-label", "Pause");
    timer = setInterval(() => { if (at >= day.steps.length - 1) stop(); else go(at + 1); }, PACE);
  };
  const by = { first: () => go(0), back: () => go(at - 1), next: () => go(at + 1), last: () => go(day.steps.length - 1) };
  for (const [id, move] of Object.entries(by)) get(id).addEventListener("click", () => { stop(); move(); });
  get("play").addEventListener("click", play);
  get("at").max = day.steps.length - 1;
  get("at").addEventListener("input", (event) => { stop(); go(Number(event.target.value)); });
  document.addEventListener("keydown", (event) => {
    if (event.target.tagName === "INPUT" || event.target.tagName === "BUTTON" && event.key === " ") return;
    const moves = { ArrowLeft: by.back, ArrowRight: by.next, Home: by.first, End: by.last, " ": play };
    if (moves[event.key]) { event.preventDefault(); if (event.key !== " ") stop(); moves[event.key](); }
  });
  go(Math.min(day.opens, day.steps.length - 1));
})();
