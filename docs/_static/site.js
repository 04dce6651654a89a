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
