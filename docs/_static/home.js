// The first page: the race runs on arrival, and the row's tiles come one by one. Where motion is reduced, both show their end.
"use strict";
{
  const race = document.getElementById("race");
  const named = (words) => [...race.querySelectorAll("button")].find((each) => each.textContent === words);
  const tiles = RACE.row.scores.length / RACE.row.tile;
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) {
    for (let tile = 1; tile < tiles; ++tile) named("Next tile")?.click();
  } else {
    let left = tiles;
    const coming = setInterval(() => (--left > 0 ? named("Next tile")?.click() : clearInterval(coming)), 1600);
    race.addEventListener("pointerdown", () => clearInterval(coming)); // a reader took over
    race.addEventListener("keydown", () => clearInterval(coming));
  }
}
