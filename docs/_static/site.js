// What the theme leaves out: the level of its captions, and wide code and tables that can be scrolled by keyboard.
document.addEventListener("DOMContentLoaded", () => {
  for (const caption of document.querySelectorAll("p.caption[role=heading]")) caption.ariaLevel = "2";
  const wide = () => {
    for (const box of document.querySelectorAll("pre, .table-wrapper"))
      if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
  };
  wide();
  addEventListener("resize", wide);
});
