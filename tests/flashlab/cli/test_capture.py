"""`flashlab capture`: what it refuses before it loads anything, and a whole capture of a tiny model on disk."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import flashlab as fl
from flashlab.cli import app

WORDS = ["the", "open", "bracket", "closes", "what", "it", "began"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "some-text.txt"
    path.write_text(" ".join(WORDS[i % 7] for i in range(12)), encoding="utf-8")
    return path


def run(*words: object) -> Any:
    return CliRunner().invoke(app, ["capture", *map(str, words)])


def one_line(*words: object) -> str:
    result = run(*words)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("flashlab: ") and result.stderr.count("\n") == 1
    return result.stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["mine.bin"], "OUT = 'mine.bin': expected a file whose name ends in .safetensors"),
        (["a.safetensors", "--heads", "4"], "--heads = '4': expected FIRST:LAST"),
        (["a.safetensors", "--dtype", "float61"], "--dtype = 'float61': expected one of float16"),
        (["a.safetensors", "--tokens", "0"], "--tokens = 0: expected at least 1"),
    ],
)
def test_what_cannot_be_is_refused_first(given: list[str], said: str, text: Path):
    assert said in one_line("some/model", text, *given)


def test_a_text_that_is_not_there():
    assert "TEXT = 'gone.txt': expected a text file that can be read" in one_line(
        "some/model", "gone.txt", "a.safetensors"
    )


def test_the_text_is_not_overwritten(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    path.write_text("words", encoding="utf-8")
    assert "a file other than the text" in one_line("some/model", path, path)
    assert path.read_text(encoding="utf-8") == "words"


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_without_a_library_it_says_how_to_get_it(library: str, text: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, library, None)
    assert "pip install torch transformers" in one_line("some/model", text, "a.safetensors")


def tiny(folder: Path) -> Path:
    """A Llama of two layers and its tokenizer, of seven words, as `save_pretrained` leaves them."""
    torch, transformers, tokenizers = map(importlib.import_module, ("torch", "transformers", "tokenizers"))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, WORDS[0]))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=8,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.transformers
def test_a_model_from_a_folder(tmp_path: Path, text: Path):
    model, out = tiny(tmp_path / "model"), tmp_path / "mine.safetensors"
    result = run(model, text, out, "--layer", 1, "--tokens", 8, "--heads", "0:2", "--dtype", "float16", "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["schema"] == 1 and said["file"] == str(out)
    assert said["q"] == {"shape": [1, 2, 8, 16], "dtype": "float16"}
    assert said["k"] == said["v"] == {"shape": [1, 1, 8, 16], "dtype": "float16"}
    assert said["note"] == {"layer": "1", "scale": "0.25", "causal": "true", "model": str(model)}
    q, k, _ = data = fl.load_inputs(out)
    assert q.dtype == k.dtype == np.float16 and q.shape == (1, 2, 8, 16)
    assert data.causal is True and data.note == said["note"]

    result = run(model, text, out, "--tokens", 100)  # for people, all heads, and more tokens than there are
    assert result.exit_code == 0, result.output
    assert "1 × 4 × 12 × 16" in result.stdout and "scale: 0.25" in result.stdout
    assert result.stderr.endswith("the text has 12 tokens, not 100\n")
    assert "--layer = 2: expected 0 to 1" in run(model, text, out, "--layer", 2).stderr


@pytest.mark.transformers
def test_a_model_that_is_not_there(tmp_path: Path, text: Path):
    (tmp_path / "empty").mkdir()
    assert "MODEL = " in one_line(tmp_path / "empty", text, tmp_path / "a.safetensors")
