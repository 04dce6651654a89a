"""`flashlab capture` saves q, k and v of a Hugging Face model, for every command that takes `--input`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashlab.cli import options, output
from flashlab.cli.options import Json
from flashlab.views import progress, tables
from simulator.errors import UsageError


def register(app: typer.Typer) -> None:
    options.add(
        app,
        capture,
        "flashlab capture Qwen/Qwen3-0.6B some-text.txt mine.safetensors",
        "flashlab capture ./model some-text.txt mine.safetensors --layer 12",
    )


def capture(
    model: Annotated[str, typer.Argument(help="A causal model on the Hugging Face Hub, or a folder with one.")],
    text: Annotated[str, typer.Argument(help="A text file for the model to read.")],
    out: Annotated[str, typer.Argument(help="The file to write; its name ends in .safetensors.")],
    layer: Annotated[int, typer.Option(help="The layer, counted from 0.")] = 0,
    tokens: Annotated[int, typer.Option(help="How many tokens to read from the start of the text.")] = 1024,
    heads: Annotated[
        str | None,
        typer.Option(metavar="FIRST:LAST", help="Query heads to keep, without LAST, in whole GQA groups; default all."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Round to float16, bfloat16 or float32; default the model's own dtype.")
    ] = None,
    json: Json = False,
) -> None:
    """Save q, k, v of one layer of a Hugging Face model. This needs PyTorch and Transformers."""
    from flashlab.integrations import transformers

    names = {"path": "OUT", "model": "MODEL", "text": "TEXT"}
    names |= {name: f"--{name}" for name in ("layer", "tokens", "heads", "dtype")}
    with options.spelled(**names):
        transformers.check_path(out)
        if Path(out).resolve() == Path(text).resolve():
            raise UsageError("path", out, "a file other than the text")
        chosen = _heads(heads)
        transformers.check_dtype(dtype)
        with progress.busy("capturing"):
            seen = transformers.capture_text(model, text, layer=layer, tokens=tokens)
            saved = transformers.save(seen, out, dtype, chosen)
    read = saved["q"].shape[-2]
    if read < tokens:
        output.remark(f"the text has {read:,} tokens, not {tokens:,}")
    if json:
        arrays = {name: {"shape": list(x.shape), "dtype": _dtype(x)} for name, x in saved.items()}
        output.document({"file": out, **arrays, "note": seen.note})
        return
    rows = [(name, " × ".join(map(str, x.shape)), _dtype(x)) for name, x in saved.items()]
    tables.table(f"layer {layer} of {model}", ("array", "batch × heads × length × head dim", "dtype"), rows)
    for name, value in seen.note.items():
        tables.line(f"{name}: {value}")
    tables.line(out)


def _heads(text: str | None) -> range | None:
    if text is None:
        return None
    try:
        first, last = map(int, text.split(":"))
    except ValueError:
        raise UsageError("heads", text, "FIRST:LAST, two head numbers, as in 0:4") from None
    return range(first, last)


def _dtype(x: object) -> str:
    return str(getattr(x, "dtype", "")).removeprefix("torch.")
