// Makes elements, and puts numbers into words. Text from a trace only ever becomes text nodes or property values.

/** An element with properties (class, data, aria-… as attributes) and children: elements and text. */
function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made && !name.includes("-")) made[name] = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

/** An object's own value under a name that the trace chose, which may be one such as "constructor". */
const own = (object, name) => (Object.hasOwn(object, name) ? object[name] : undefined);

const grouped = new Intl.NumberFormat("en-US");
const count = (n) => grouped.format(n);
const plural = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;

const percent = (part, whole) => `${part ? ((100 * part) / whole).toPrecision(2) : 0} %`;

/** Bytes in binary units, three digits. */
function size(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 999.5 && unit < units.length - 1) [n, unit] = [n / 1024, unit + 1];
  return `${unit === 0 || n >= 99.95 ? Math.round(n) : n.toPrecision(3)} ${units[unit]}`;
}

/** A range of rows, counted from 0, with both ends included. */
function range(first, stop) {
  return stop - first === 1 ? `${count(first)}` : `${count(first)}–${count(stop - 1)}`;
}

/** A value of a register tile, four digits. */
function number(x) {
  if (x === undefined) return "·";
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x < 0 ? "−∞" : "∞";
  if (x === 0) return "0";
  const size = Math.abs(x);
  const text = size >= 1e5 || size < 1e-3 ? x.toExponential(2) : size >= 1000 ? x.toFixed(0) : x.toPrecision(4);
  return text.replace("-", "−").replace("e−", "e-").replace("e+", "e");
}

/** A list in words: "a, b and c". */
function listed(words) {
  return words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;
}

// -- words that explain themselves ------------------------------------------------------------------------------------

const tooltip = el("div", { class: "tooltip", id: "tooltip", role: "tooltip", hidden: true });

/** A word that shows its meaning on hover and focus. */
function term(text, meaning) {
  if (!meaning) return document.createTextNode(text);
  const word = el("button", { type: "button", class: "term", "aria-describedby": "tooltip" }, text);
  const show = () => {
    tooltip.textContent = meaning;
    tooltip.hidden = false;
    const box = word.getBoundingClientRect(), width = tooltip.offsetWidth, height = tooltip.offsetHeight;
    const below = box.bottom + 6 + height < innerHeight;
    tooltip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - width - 8))}px`;
    tooltip.style.top = `${below ? box.bottom + 6 : Math.max(4, box.top - height - 6)}px`;
  };
  const hide = () => (tooltip.hidden = true);
  word.addEventListener("pointerenter", show);
  word.addEventListener("pointerleave", hide);
  word.addEventListener("focus", show);
  word.addEventListener("blur", hide);
  word.addEventListener("click", show);
  word.addEventListener("keydown", (event) => event.key === "Escape" && hide());
  return word;
}

/** A tensor's name in its colour. */
function tensorName(name) {
  return el("span", { class: "tensor", "data-tensor": colourOf(name) }, name);
}

/** The colour of a tensor or buffer. The page's data say which names have one. */
const colourOf = (name) => own(colourOf.names, name) ?? "other";
colourOf.names = {};
