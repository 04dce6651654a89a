// The race: one bar per program, which grows byte by byte. It plays once when it is first seen. Where motion is reduced, it stands
// at its end.

const element = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes))
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  made.append(...children);
  return made;
};
const bytes = (n) => n.toLocaleString("en");

/** What a program has moved once the clock shows `clock` bytes: in all, by tensor, and in which step it is. */
function moved(moves, clock) {
  const found = { all: 0, by: {}, step: "", done: true };
  for (const [step, tensor, n] of moves) {
    if (found.all + n > clock) return { ...found, done: false };
    found.all += n;
    found.by[tensor] = (found.by[tensor] ?? 0) + n;
    found.step = step;
  }
  return found;
}

const SECONDS = 8;
const kib = (n) => (n < 1024 ? `${n} bytes` : `${bytes(Math.round(n / 1024))} KiB`);

/** Who needed how many bytes, in a sentence. */
function result(programs) {
  const totals = programs.map(({ title, moves }) => ({ title, all: moves.reduce((sum, [, , n]) => sum + n, 0) }));
  const [least, most] = totals.sort((a, b) => a.all - b.all).filter((_, n, { length }) => n === 0 || n === length - 1);
  const times = Math.round(most.all / least.all);
  return [element("strong", {}, `${times} times fewer bytes: `), `${least.title} asked HBM for ${kib(least.all)}, ${most.title.toLowerCase()} for ${kib(most.all)}.`];
}

function race({ programs, kinds, problem }, heading) {
  const [longest] = programs.map(({ moves }) => moves).sort((a, b) => b.length - a.length);
  const clocks = [0];
  for (const [, , n] of longest) clocks.push(clocks.at(-1) + n);
  const total = clocks.at(-1);
  const lanes = programs.map(({ title, moves }) => {
    const track = element("div", { class: "track", "aria-hidden": "true" });
    const said = element("p", { class: "said" });
    return { title, moves, track, said };
  });
  const slider = element("input", {
    type: "range", min: 0, max: clocks.length - 1, value: 0, "aria-label": "The clock, in requests of standard attention", oninput: () => (stop(), show()),
  });
  const play = element("button", { type: "button", onclick: () => (timer ? stop() : start()) }, "Play");
  const verdict = element("p", { class: "verdict", "aria-live": "polite" }, ...result(programs));
  let timer = null;

  function show() {
    const clock = clocks[Number(slider.value)];
    for (const { moves, track, said } of lanes) {
      const { all, by, step, done } = moved(moves, clock);
      track.replaceChildren(
        ...Object.entries(by).map(([name, n]) => {
          const part = element("span");
          part.style.width = `${(100 * n) / total}%`;
          part.style.background = `var(--tensor-${kinds[name]})`;
          return part;
        }),
      );
      const parts = Object.entries(by).map(([name, n]) => `${name} ${bytes(n)}`).join(", ");
      said.textContent = `${bytes(all)} bytes${done ? ", done" : step ? `, step ${step}` : ""}${parts ? `: ${parts}` : ""}`;
    }
    slider.setAttribute("aria-valuetext", `${bytes(clock)} bytes`);
    verdict.hidden = Number(slider.value) < clocks.length - 1;
    if (timer && Number(slider.value) === clocks.length - 1) stop();
  }
  function start() {
    if (Number(slider.value) === clocks.length - 1) slider.value = 0;
    timer = setInterval(() => move(1), (1000 * SECONDS) / clocks.length);
    play.textContent = "Pause";
  }
  function stop() {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
  }
  function move(by) {
    slider.value = Number(slider.value) + by;
    show();
  }
  const press = (words, by) => element("button", { type: "button", onclick: () => (stop(), move(by)) }, words);
  const legend = element(
    "ul", { class: "legend" },
    ...[...new Set(lanes.flatMap(({ moves }) => moves.map(([, tensor]) => tensor)))].map((name) => {
      const dot = element("i");
      dot.style.background = `var(--tensor-${kinds[name]})`;
      return element("li", {}, dot, name);
    }),
  );
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) slider.value = clocks.length - 1;
  else {
    const seen = new IntersectionObserver(([{ isIntersecting }]) => isIntersecting && (seen.disconnect(), start()), { threshold: 0.6 });
    seen.observe(play);
  }
  show();
  return element(
    "section", { "aria-labelledby": "race-title" },
    element("h2", { id: "race-title" }, heading),
    element("p", {}, `${problem}. The clock counts the bytes that a program has asked HBM for: the one that needs fewer is done first. S and P are the table.`),
    ...lanes.flatMap(({ title, track, said }) => [element("p", {}, element("strong", {}, title)), track, said]),
    legend,
    verdict,
    element("div", { class: "controls" }, play, press("Back", -1), press("One step on", 1), slider),
  );
}
