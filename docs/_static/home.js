// The first page: the race runs on arrival, and the row's tiles come one by one. Where motion is reduced, both show their end.
"use strict";
{
  const race = document.getElementById("race");
  const named = (words) => [...race.querySelectorAll("button")].find((each) => each.textContent === words);
  const clock = race.querySelector('input[type="range"]');
  const [textbook, flash] = RACE.programs.map(({ moves }) => moves.reduce((sum, [, , n]) => sum + n, 0));
  const end = () => {
    if (clock.value !== clock.max) return setTimeout(end, 500);
    document.getElementById("race-end").textContent = `${(textbook / flash).toFixed(1)} times fewer bytes, and the same numbers.`;
  };
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) {
    clock.value = clock.max;
    clock.dispatchEvent(new Event("input"));
    for (let tile = 1; tile < RACE.row.scores.length / RACE.row.tile; ++tile) named("Next tile")?.click();
  } else {
    if (clock.value === "0") named("Play")?.click();
    let tiles = RACE.row.scores.length / RACE.row.tile;
    const coming = setInterval(() => (--tiles > 0 ? named("Next tile")?.click() : clearInterval(coming)), 1600);
    race.addEventListener("pointerdown", () => clearInterval(coming)); // a reader took over
    race.addEventListener("keydown", () => clearInterval(coming));
  }
  end();
}
