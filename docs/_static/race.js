// The rest of docs/race.md: a row's m, ℓ and O, and a blank. docs/_site/race.py makes RACE, with the race itself before it.
"use strict";

const short = (x) => (Number.isFinite(x) ? x.toFixed(4) : String(x)).replace("-", "−");

// -- a row ----------------------------------------------------------------------------------------------------------

/** The state of the row after each tile: what came, m, the factor, ℓ and O. `factor` corrects the old sums from the second tile on. */
function walk(factor) {
  const { scores, values, tile } = RACE.row;
  const states = [];
  for (let first = 0; first < scores.length; first += tile) {
    const old = states.at(-1);
    const s = scores.slice(first, first + tile);
    const m = Math.max(old?.m ?? -Infinity, ...s);
    const f = old ? factor(old.m, m) : 0;
    const p = s.map((x) => Math.exp(x - m));
    const l = (old ? old.l * f : 0) + p.reduce((a, b) => a + b);
    const o = (old ? old.o * f : 0) + p.reduce((sum, x, n) => sum + x * values[first + n], 0);
    states.push({ before: old?.m, m, f, l, o });
  }
  return states;
}
const right = (before, m) => Math.exp(before - m);

function chart(tiles) {
  const { scores, tile } = RACE.row;
  const [low, high] = [Math.min(...scores), Math.max(...scores)];
  const y = (score) => 8 + (84 * (high - score)) / (high - low);
  const shapes = scores.slice(0, tiles * tile).map(
    (score, n) => `<rect x="${10 * n + 1}" y="${y(score)}" width="8" height="${96 - y(score)}" fill="var(--tensor-s)" opacity="${n % (2 * tile) < tile ? 1 : 0.6}"/>`,
  );
  for (const [n, { m }] of walk(right).slice(0, tiles).entries())
    shapes.push(`<path d="M${10 * tile * n} ${y(m)} h${10 * tile}" stroke="currentColor" stroke-width="2"/>`);
  return `<svg viewBox="0 0 ${10 * scores.length} 100" aria-hidden="true">${shapes.join("")}</svg>`;
}

function row() {
  const states = walk(right);
  const picture = element("div");
  const body = element("tbody");
  const said = element("p", { "aria-live": "polite" });
  let tiles = 1;
  function show() {
    picture.innerHTML = chart(tiles);
    body.replaceChildren(
      ...states.slice(0, tiles).map(({ m, f, l, o }, n) =>
        element("tr", {}, ...[String(n + 1), short(m), n ? short(f) : "–", short(l), short(o), short(o / l)].map((x) => element("td", {}, x))),
      ),
    );
    said.textContent =
      tiles < states.length
        ? `Tile ${tiles} of ${states.length} has come.`
        : `All tiles have come. O / ℓ is ${short(states.at(-1).o / states.at(-1).l)}, and attention in float64 gives ${short(RACE.row.truth)}.`;
  }
  const press = (words, to) => element("button", { type: "button", onclick: () => ((tiles = Math.min(to(), states.length)), show()) }, words);
  const head = ["tile", "m", "factor", "ℓ", "O", "O / ℓ"];
  show();
  return element(
    "section", { "aria-labelledby": "row-title" },
    element("h2", { id: "row-title" }, "2. One row, as tiles come"),
    element("p", {}, `Query ${RACE.row.query} of FlashAttention-2. A bar is a score, and the line is m, the largest so far. ℓ sums e^(s − m), and O sums e^(s − m) times the first column of V.`),
    picture,
    element("div", { class: "table-wrapper", tabindex: "0", role: "region", "aria-label": "The row's numbers" },
      element("table", {}, element("thead", {}, element("tr", {}, ...head.map((x) => element("th", { scope: "col" }, x)))), body)),
    said,
    element("div", { class: "controls" }, press("Next tile", () => tiles + 1), press("From the start", () => 1)),
  );
}

// -- the blank ------------------------------------------------------------------------------------------------------

/** The value of an expression in m_old and m_new, as a function of the two. Throws `SyntaxError` for what it can't read. */
function parse(text) {
  const tokens = text.replace(/−/g, "-").replace(/[·×]/g, "*").replace(/\*\*/g, "^").match(/\d+\.?\d*|\.\d+|[A-Za-z_][\w.]*|[-+*/^()]|\S/g) ?? [];
  let at = 0;
  const take = (...wanted) => (wanted.includes(tokens[at]) ? tokens[at++] : null);
  const wrong = () => {
    throw new SyntaxError(at < tokens.length ? `I can't read “${tokens[at]}” there` : "Something is missing at the end");
  };
  const expect = (token) => take(token) ?? wrong();
  const sum = () => {
    let left = product();
    for (let sign; (sign = take("+", "-")); ) {
      const [a, b, plus] = [left, product(), sign === "+"];
      left = (...m) => (plus ? a(...m) + b(...m) : a(...m) - b(...m));
    }
    return left;
  };
  const product = () => {
    let left = signed();
    for (let sign; (sign = take("*", "/")); ) {
      const [a, b, times] = [left, signed(), sign === "*"];
      left = (...m) => (times ? a(...m) * b(...m) : a(...m) / b(...m));
    }
    return left;
  };
  const signed = () => {
    if (!take("-")) return power();
    const inner = signed();
    return (...m) => -inner(...m);
  };
  const power = () => {
    const base = atom();
    if (!take("^")) return base;
    const exponent = signed();
    return (...m) => base(...m) ** exponent(...m);
  };
  const atom = () => {
    if (take("(")) {
      const inner = sum();
      expect(")");
      return inner;
    }
    const token = tokens[at];
    if (/^[\d.]/.test(token ?? "")) return at++, () => Number(token);
    if (take("m_old")) return (before) => before;
    if (take("m_new")) return (_, after) => after;
    if (take("e")) return () => Math.E;
    if (take("exp", "np.exp", "math.exp")) {
      expect("(");
      const inner = sum();
      expect(")");
      return (...m) => Math.exp(inner(...m));
    }
    return wrong();
  };
  const found = sum();
  if (at < tokens.length) wrong();
  return found;
}

const PAIRS = [[-1, 2], [0, 0.5], [1.25, 3], [-3, -1]];
const same = (f, g) => PAIRS.every(([a, b]) => Math.abs(f(a, b) - g(a, b)) <= 1e-9 * Math.abs(g(a, b)));

const MISTAKES = {
  "exp(m_new - m_old)": "The sign is turned. The new maximum is larger, so the old sums have to shrink, and this makes them grow.",
  "1": "The old sums hold e^(s − m_old), the new ones e^(s − m_new). They are in different units, and can't be added as they are.",
  "m_old / m_new": "The sums hold powers of e, not maxima. A quotient of maxima corrects no power.",
  "exp(-m_new)": "The old sums hold e^(−m_old) already. It has to be taken out before e^(−m_new) goes in.",
  "exp(m_old)": "This takes the old maximum out of the sums, but doesn't put the new one in.",
  "m_old - m_new": "That is the exponent. The factor is e to its power.",
};

/** Whether an answer is right, and what to say: the number that comes out, and why. */
function judge(text) {
  let factor;
  try {
    factor = parse(text);
  } catch (error) {
    return { passed: false, said: `${error.message}. Write with m_old, m_new, exp( ), numbers and + - * / ^.` };
  }
  const last = walk(factor).at(-1);
  const out = `With this factor the row ends at ${short(last.o / last.l)}; attention in float64 gives ${short(RACE.row.truth)}.`;
  if (same(factor, right))
    return { passed: true, said: `Right. ${out} e^(s − m_old) times e^(m_old − m_new) is e^(s − m_new), so old and new fit together.` };
  const known = Object.keys(MISTAKES).find((mistake) => same(factor, parse(mistake)));
  const { before, m } = walk(right)[1];
  const why = known ? MISTAKES[known] : `From m_old = ${short(before)} to m_new = ${short(m)} it is ${short(factor(before, m))}, and should be ${short(right(before, m))}.`;
  return { passed: false, said: `Not yet. ${out} ${why}` };
}

function blank() {
  const typed = element("input", { type: "text", id: "blank", autocomplete: "off", autocapitalize: "off", spellcheck: "false" });
  const verdict = element("p", { role: "status" });
  const answer = (text) => {
    const { passed, said } = judge(text);
    verdict.textContent = said;
    verdict.dataset.passed = String(passed);
  };
  const choices = ["exp(m_new - m_old)", "exp(m_old - m_new)", "1", "m_old / m_new"].map((text) =>
    element("label", {}, element("input", { type: "radio", name: "factor", onchange: () => ((typed.value = text), answer(text)) }), " ", element("code", {}, text)),
  );
  const code = "m_new = max(m_old, s.max())\nl = l * FACTOR + exp(s - m_new).sum()\nO = O * FACTOR + exp(s - m_new) @ v";
  return element(
    "section", { "aria-labelledby": "blank-title" },
    element("h2", { id: "blank-title" }, "3. One blank"),
    element("p", {}, "m has risen from m_old to m_new. The old ℓ and O were made with m_old. Which factor corrects them?"),
    element("pre", {}, code),
    element("form", { onsubmit: (event) => (event.preventDefault(), answer(typed.value)) },
      element("fieldset", {}, element("legend", {}, "Pick one"), ...choices),
      element("label", { for: "blank" }, "or type it"),
      element("div", { class: "controls" }, typed, element("button", { type: "submit" }, "Check"))),
    verdict,
  );
}

document.getElementById("race").replaceChildren(race(RACE, "1. The race"), row(), blank());
