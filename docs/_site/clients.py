"""Writes the measured parts of docs/clients.md, and docs/pictures/clients_*.svg: `python -m docs._site.clients`."""

from __future__ import annotations

from docs._site import figures
from docs._site.blocks import replaced
from docs._site.decoding import ROOT
from docs._site.timed import link
from flashlab.base.files import replace_file
from flashlab.measure import results
from studies.clients import KIND

PAGE, PICTURES = ROOT / "docs" / "clients.md", ROOT / "docs" / "pictures"
BLOCKS = {
    "families": ("families", "cpu"), "families_gpu": ("families", "h100"), "train": ("train", "h100"), "speed": ("speed", "h100"),
    "profile": ("profile", "h100"),
}  # fmt: skip
"""By block: the part of the study, and where it ran."""
DRAWN = {"speed": "Bars of tokens per second.", "train": "Lines of losses, which lie on each other."}
"""The blocks with a picture, and what it shows."""


def found(name: str) -> results.Result | None:
    """The newest result of a block."""
    part, where = BLOCKS[name]
    every = results.find(ROOT / results.FOLDER, kind=KIND.name, device=where)
    return next((of for of in reversed(every) if of.data["part"] == part), None)


def block(name: str) -> str:
    of = found(name)
    if of is None:
        return "This was not measured yet.\n"
    data = KIND.schema.model_validate(of.data)
    said = KIND.headline(data)
    table = KIND.table(data).partition("\n\n")[0]  # of a profile, kernels have tables of their own, in the file's page
    shown = f"![{DRAWN[name]}](pictures/clients_{name}.svg)\n\n" if name in DRAWN else ""
    source = (
        f"*{results.title(of.content) or 'CPU'}, {of.content['date'][:10]}: `{of.content['command']}` ({link(of)}).*"
    )
    return f"{said[0].upper()}{said[1:]}.\n\n{shown}{table}\n\n{source}\n"


def pictures() -> dict[str, str]:
    """By file, as SVG: those of which there are results."""
    every = {name: of for name in DRAWN if (of := found(name)) is not None}
    drawn = {name: figures.of(of) for name, of in every.items()}
    return {f"clients_{name}.svg": shown.svg for name, shown in drawn.items() if shown is not None}


def blocks() -> dict[str, str]:
    return {name: block(name) for name in BLOCKS}


if __name__ == "__main__":
    replace_file(PAGE, replaced(PAGE.read_text(encoding="utf-8"), "clients", blocks()))
    for name, content in pictures().items():
        replace_file(PICTURES / name, content)
