// What the theme leaves out: the level of its captions, wide code and tables that can be scrolled by keyboard, and players
// that are light or dark as the page is. A player's frame is sandboxed, so it is told by a message.
document.addEventListener("DOMContentLoaded", () => {
  for (const caption of document.querySelectorAll("p.caption[role=heading]")) caption.ariaLevel = "2";
  const wide = () => {
    for (const box of document.querySelectorAll("pre, .table-wrapper"))
      if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
  };
  wide();
  addEventListener("resize", wide);
  const tell = (frame) => frame.contentWindow.postMessage({ theme: document.body.dataset.theme ?? "auto" }, "*");
  const frames = [...document.querySelectorAll("iframe[srcdoc]")];
  for (const frame of frames) frame.addEventListener("load", () => tell(frame));
  frames.forEach(tell); // those that have loaded
  new MutationObserver(() => frames.forEach(tell)).observe(document.body, { attributeFilter: ["data-theme"] });
});
// The table of all that was measured: only the rows that have each word are shown.
document.addEventListener("DOMContentLoaded", () => {
  const filter = document.getElementById("filter");
  if (!filter) return;
  const rows = [...document.querySelectorAll("#files tbody tr")];
  const texts = rows.map((row) => [...row.cells].map((cell) => cell.textContent).join(" ").toLowerCase());
  const status = document.querySelector(".files [role=status]");
  const show = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((row, n) => (shown += !(row.hidden = !words.every((word) => texts[n].includes(word)))));
    status.textContent = `${shown} ${shown === 1 ? "file" : "files"}`;
  };
  filter.addEventListener("input", show);
  show(); // a browser may keep what was typed
});
// The theme's two bars at the sides are landmarks, and each needs a name of its own. Its page of search results has no title.
document.addEventListener("DOMContentLoaded", () => {
  const results = document.getElementById("search-results");
  if (results && !document.querySelector("article h1")) results.insertAdjacentHTML("beforebegin", "<h1>Search</h1>");
  for (const [bar, name] of [["sidebar-drawer", "All pages"], ["toc-drawer", "On this page"]]) {
    const found = document.querySelector(`aside.${bar}`);
    if (found) found.ariaLabel = name;
  }
});
