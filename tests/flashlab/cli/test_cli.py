"""The command line: what it prints, how it ends, and that it says what Python says."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.base import files
from flashlab.cli import app, main, options
from flashlab.measure import counters, problems, results, sanitizers, speed
from flashlab.run import tritonc
from flashlab.views import progress, tables
from simulator.problem import FIELDS
from tests.flashlab.cli.typed import document, one_line, run
from tests.tiers import examples

COMMANDS = [
    "lessons",
    "compare", "count", "simulate", "sweep", "trace", "devices", "verify", "audit-test", "bench", "fp8", "counters",
    "sanitize", "emulate", "time", "capture", "diff", "info", "cache", "serve", "parallel", "run",
]  # fmt: skip

MINE = '''
import flashlab as fl

@fl.program
def diagonal(m, q, k, v, problem, tile):
    """Every query sees its own key only: wrong wherever more are visible."""
    out = m.output("out")
    for block in m.launch("diagonal", rows=problem.row_tiles(tile), warps=4):
        block.step("copy")
        block.store(out, block.fetch(v, block.i, tile.rows), block.i, tile.rows)
    return out

def not_a_program():
    pass
'''


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "my_file.py"
    path.write_text(MINE)
    return f"{path}:diagonal"


# help and speed


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_examples_that_80_columns_hold(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = run(command, "--help").stdout
    _, _, examples = text.partition("Examples:")
    lines = [line.strip() for line in examples.splitlines() if line.strip()]
    assert len(lines) >= 2 and all(re.match(rf"flashlab {command}\b", line) for line in lines), lines


@pytest.mark.alike(3)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("cou", ["count", "counters"]),
        ("count flash2_t", ["flash2_triton"]),
        ("count flash2 --device h", ["h100", "h200"]),
        ("count flash2 --dtype b", ["bfloat16"]),
        ("sweep flash2 --dtype float16,b", ["float16,bfloat16"]),
        ("verify sdpa-f", ["sdpa-flash", "sdpa-flash-backward"]),
        ("verify flash2 --check rule,key_", ["rule,key_sets"]),
        ("bench flash2 --against cudnn,fa", ["cudnn,fa3", "cudnn,fa3-wheel", "cudnn,fa4"]),
        ("count my_fi", []),
    ],
)
def test_a_shell_completes(words: str, expected: list[str]) -> None:
    """As bash asks it, by the environment. Where nothing fits, the shell completes files."""
    asked = {
        "_FLASHLAB_COMPLETE": "complete_bash",
        "COMP_WORDS": f"flashlab {words}",
        "COMP_CWORD": str(len(words.split())),
    }
    done = subprocess.run(
        [sys.executable, "-m", "flashlab"], env=os.environ | asked, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, expected, "")


@pytest.mark.parametrize("words", [["compare"], ["count", "flash2"], ["count", "--help"]], ids=" ".join)
def test_a_terminal_without_columns_has_80(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["flashlab", *words])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # as whoever runs the tests has them
    shown: list[str] = []
    for columns in ("80", "0"):
        monkeypatch.setenv("COLUMNS", columns)
        with pytest.raises(SystemExit):
            main()
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and len(shown[0].splitlines()) > 5


@pytest.mark.skipif(sys.platform == "win32", reason="Windows deletes no folder that is in use")
def test_a_folder_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    said = one_line("emulate", "nowhere.cu", "--grid", 1, "--block", 1)
    assert said == "flashlab: the folder that this runs in is gone: No such file or directory\n"


@pytest.mark.parametrize("folder", ["/dev/null/x", "file", "file/below"])
def test_where_pictures_go_is_looked_at_first(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(fl, "compare", lambda *_, **__: pytest.fail("it is run"))
    path = tmp_path / folder
    assert f"--out = '{path}': expected a folder that can be written" in one_line("compare", "--out", path)


def test_what_is_refused_at_once_has_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """That a run takes a while is said of one that runs."""

    def refuses(*_: Any, **__: Any) -> None:
        raise fl.UsageError("memory", "a run", "less")

    monkeypatch.setattr(fl, "simulate", refuses)
    assert "memory = " in one_line("simulate", "flash2", "--len-q", 100_001, "--heads", 1, "--head-dim", 16)


def test_commands_are_those_of_the_design() -> None:
    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert {name.replace("_", "-") for name in names} == set(COMMANDS)


def test_version() -> None:
    assert run("--version").stdout.strip() == fl.__version__


def test_no_command_prints_the_help() -> None:
    result = run()
    assert "Usage" in result.stdout and result.stderr == ""


def test_help_loads_nothing_heavy() -> None:
    """What would make every command slow to start."""
    program = (
        "import sys; from flashlab.cli import app\n"
        "try: app(['--help'], prog_name='flashlab')\n"
        "except SystemExit: pass\n"
        "print([m for m in ('matplotlib', 'hypothesis', 'cupy', 'torch') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "flashlab", "count", "flash2", "--tile", "1x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("flashlab: tile = '1x'")


def test_a_reader_that_goes_away_is_no_crash() -> None:
    program = "from flashlab.cli import main; main()"
    command = f"{sys.executable} -c '{program}' devices | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


# what it says is what Python says


DEFAULT = fl.Problem(batch=1, heads=2, len_q=128, head_dim=64, dtype="float16", causal=True)


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_count_of_the_default_problem() -> None:
    assert document("count", "flash2") == {"schema": 1, **plain(fl.count("flash2", DEFAULT).to_dict())}


@examples(25)
@given(
    algorithm=st.sampled_from(sorted(fl.catalogue.of())), batch=st.integers(1, 3), kv_heads=st.integers(1, 3),
    group=st.integers(1, 4), len_q=st.integers(0, 5000), len_kv=st.none() | st.integers(0, 5000),
    head_dim=st.integers(1, 128), dtype=st.sampled_from(["float32", "float16", "float8_e4m3fn"]), causal=st.booleans(),
    window=st.none() | st.tuples(st.none() | st.integers(0, 99), st.none() | st.integers(0, 99)),
    tile=st.none() | st.sampled_from([(32, 64), (64, 64)]), device=st.sampled_from(["a100", "h100"]), lse=st.booleans(),
)  # fmt: skip
def test_every_option_reaches_the_formula(
    algorithm: str, batch: int, kv_heads: int, group: int, len_q: int, len_kv: int | None, head_dim: int, dtype: str,
    causal: bool, window: tuple[int | None, int | None] | None, tile: tuple[int, int] | None, device: str, lse: bool,
) -> None:  # fmt: skip
    words = [
        "--batch",
        batch,
        "--heads",
        kv_heads * group,
        "--kv-heads",
        kv_heads,
        "--len-q",
        len_q,
        "--head-dim",
        head_dim,
    ]
    words += ["--dtype", dtype, "--causal" if causal else "--no-causal", "--device", device, "--scale", 0.25]
    words += [] if len_kv is None else ["--len-kv", len_kv]
    words += [] if window is None else ["--window", ",".join(str(side).lower() for side in window)]
    words += [] if tile is None else ["--tile", f"{tile[0]}x{tile[1]}"]
    words += ["--lse"] if lse else []
    problem = fl.Problem(
        batch=batch, heads=kv_heads * group, kv_heads=kv_heads, len_q=len_q, len_kv=len_kv, head_dim=head_dim, dtype=dtype,
        causal=causal, window=window, scale=0.25,
    )  # fmt: skip
    try:
        expected = fl.count(algorithm, problem, tile=tile, device=device, lse=lse)
    except fl.UsageError as error:  # it doesn't fit, or the algorithm has another dtype
        assert str(error) in one_line("count", algorithm, *words)
        return
    assert document("count", algorithm, *words) == {"schema": 1, **plain(expected.to_dict())}


def test_the_default_dtype_is_one_that_the_algorithm_takes() -> None:
    found, eight = document("count", "flash3_fp8"), DEFAULT.replace(dtype="float8_e4m3fn")
    assert found == {"schema": 1, **plain(fl.count("flash3_fp8", eight).to_dict())}
    assert "expected float8_e4m3fn for flash3_fp8" in one_line("count", "flash3_fp8", "--dtype", "float16")


def test_what_is_given_is_taken_or_refused_and_the_rest_is_the_algorithms_own() -> None:
    latent = fl.latent_problem(heads=5, len_q=128, dtype="float16", causal=True)
    words = ("--heads", 5, "--head-dim", 576, "--head-dim-v", 512, "--kv-heads", 1)
    assert document("count", "mla", *words) == {"schema": 1, **plain(fl.count("mla", latent).to_dict())}
    served = fl.Problem(
        batch=2, heads=2, lengths=[(3, 40), (3, 7)], head_dim=64, dtype="float16", causal=True, page_size=16
    )
    found = document("count", "paged", "--lengths", "3:40,3:7")
    assert found == {"schema": 1, **plain(fl.count("paged", served).to_dict())}


def test_the_softmax_of_a_vector_has_its_length_for_a_head_dim() -> None:
    found = document("count", "softmax_safe", "--head-dim", 1000, "--dtype", "float32")
    assert found == {"schema": 1, **plain(fl.count("softmax_safe", length=1000).to_dict())}
    assert document("simulate", "softmax_online")["out"]["shape"] == [1, 64]
    assert "--len-q = 4: expected 1 for softmax_safe, or nothing" in one_line("count", "softmax_safe", "--len-q", 4)
    said = "expected one row of 64 elements, fl.count('softmax_safe', length=64, dtype='float16')"
    assert said in one_line("compare", "softmax_safe", "flash2")


def test_simulate_gives_numbers_and_counts() -> None:
    found = document("simulate", "flash1", "--len-q", 97, "--seed", 3, "--lse")
    problem = DEFAULT.replace(len_q=97)
    q, k, v = fl.random_inputs(problem, seed=3)
    expected = fl.simulate("flash1", q, k, v, causal=True, lse=True)
    assert found["counts"] == plain(expected.counts.to_dict())
    assert found["out"]["shape"] == [1, 2, 97, 64] and found["out"]["max"] == expected.out.max()
    assert found["error"]["relative"] < 1e-3 and found["error"]["lse"] < 1e-4


def test_simulate_with_rows_that_see_nothing_is_json() -> None:
    found = document("simulate", "flash2", "--len-q", 40, "--len-kv", 8, "--lse")
    assert found["lse"]["finite"] == 2 * 8 and found["error"]["lse"] < 1e-4
    assert document("simulate", "flash2", "--len-q", 0)["out"]["max"] == "nan"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_simulate_saves_out_and_lse(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "out.npz"
    assert str(path) in run("simulate", "flash2", "--dtype", dtype, "--lse", "--out", path).stdout
    expected = fl.simulate("flash2", *fl.random_inputs(DEFAULT.replace(dtype=dtype)), causal=True, lse=True)
    with np.load(path) as saved:
        np.testing.assert_array_equal(saved["out"].astype(np.float32), expected.out.astype(np.float32))
        np.testing.assert_array_equal(saved["lse"], expected.lse)


def test_compare_by_formula_is_all_algorithms() -> None:
    rows = document("compare")["rows"]
    assert [row["algorithm"] for row in rows] == fl.catalogue.names(DEFAULT)
    assert all(row["error"] is None for row in rows)
    assert rows[-1]["hbm"] == plain(fl.compare(DEFAULT).to_dict())["rows"][-1]["hbm"]


def test_compare_draws_and_prints_the_paths(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "pictures"
    printed = run("compare", "flash2", "--out", folder).stdout.splitlines()
    paths = [folder / f"{name}.png" for name in ("bytes", "lengths", "roofline")]
    assert printed[-3:] == [str(path) for path in paths]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert document("compare", "flash2", "--out", folder)["pictures"]["bytes"] == str(paths[0])


def test_sweep_prints_every_cell(tmp_path: Path) -> None:
    table, picture = tmp_path / "rows.csv", tmp_path / "rows.svg"
    words = ["sweep", "flash1", "flash2", "--len-q", "100,200", "--sram", "4096,232448", "--tile", "64x64,32x32"]
    found = document(*words, "--csv", table, "--plot", picture, "--y", "hbm_peak")
    assert len(found["rows"]) == 16 and found["axes"] == ["algorithm", "len_q", "sram_per_block", "tile"]
    assert sum(row["reason"] is not None for row in found["rows"]) >= 8
    assert len(table.read_text().splitlines()) == 17 and "<svg" in picture.read_text()
    printed = run(*words).stdout
    assert "needs 32,768 bytes" in printed or "bytes of SRAM per block" in printed


def test_trace_is_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    run("trace", "flash2", "--len-q", 100, "--head", "0,1", "--out", path)
    expected = fl.simulate(
        "flash2", *fl.random_inputs(DEFAULT.replace(len_q=100)), causal=True, tile=(32, 32), trace=(0, 1)
    ).trace
    assert expected is not None and path.read_text() == expected.to_json()
    assert run("trace", "flash2", "--len-q", 100, "--head", "0,1", "--json").stdout.strip() == expected.to_json()


def test_devices() -> None:
    found = document("devices")["devices"]
    assert [device["name"] for device in found] == list(fl.DEVICES)
    assert found[0]["ridge"]["float16"] == fl.DEVICES[found[0]["name"]].ridge("float16")
    text = run("devices").stdout
    assert all(device["title"] in text and device["source"] in text for device in found)


# a program of one's own


def test_algorithms_of_one_operation_have_its_defaults() -> None:
    """As one algorithm has: mla its head dims, and paged its pages. Others have those of attention."""
    for words in (("mla", "mla_hopper", "--chunk", "512,1024"), ("paged", "--len-kv", "512,1024")):
        rows = document("sweep", *words, "--device", "h200")["rows"]
        assert len(rows) == 2 * (len(words) - 2) and {row["reason"] for row in rows} == {None}
    assert document("compare", "mla", "mla_hopper", "--chunk", "512")["problem"]["head_dim"] == 576
    assert "1 × 16 heads (1 of K and V)" in run("sweep", "mla", "--heads", "16", "--chunk", "512,1024").stdout
    assert len(document("sweep", "flash2", "--heads", "8,16", "--kv-heads", "4")["rows"]) == 2
    run("sweep", "flash2", "--heads", "8,16", "--kv-heads", "4")
    latent, plain = document("sweep", "mla", "flash2")["rows"]
    assert latent["reason"] is not None and plain["reason"] is None


@pytest.mark.parametrize("command", ["count", "simulate", "compare", "sweep", "trace"])
def test_own_program_from_a_file(mine: str, command: str) -> None:
    assert "diagonal" in run(command, mine).stdout


def test_own_program_beside_ours(mine: str, tmp_path: Path) -> None:
    rows = document("compare", "flash2", mine, "--out", tmp_path)["rows"]
    assert [row["algorithm"] for row in rows] == ["flash2", "diagonal"]


def test_own_program_from_a_module(mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(mine.rpartition(":")[0]).parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_file", raising=False)
    assert document("count", "my_file:diagonal")["algorithm"] == "diagonal"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise ValueError('no\\nluck')", "ValueError: no luck"),
        ("import a_module_that_is_not_there", "a_module_that_is_not_there"),
        ("x = (", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit"),
        ("y = 1", "a name that"),
        ("x = 1", "a tile program"),
    ],
)
def test_broken_files_are_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(text)
    assert says in one_line("count", f"{path}:x")


def test_windows_paths_have_colons_too(tmp_path: Path) -> None:
    assert "no file C:\\nowhere\\mine.py" in one_line("count", "C:\\nowhere\\mine.py:x").replace("\\\\", "\\")


# errors


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "count flsh2",
            "algorithm = 'flsh2': expected one of standard, online_softmax, flash1, flash2, flash3_1,",
        ),
        ("compare flash2 falsh1", "did you mean flash1?"),
        ("sweep flash", "did you mean flash"),
        ("trace flash9", "did you mean flash"),
        ("simulate standrad", "did you mean standard?"),
        ("verify flsh2", "target = 'flsh2'"),
        ("count flash2 --device h10", "device = 'h10': expected one of t4, "),
        ("count flash2 --device h10", "(did you mean h100?)"),
        ("sweep flash2 --device h100,h10", "device = 'h10'"),
        ("count flash2 --tile 64y", "tile = '64y': expected rows x cols"),
        ("count flash2 --tile 0x64", "tile = '0x64'"),
        ("sweep flash2 --tile 64x64,9", "tile = '9'"),
        ("count flash1 --tile 1024x1024", "bytes of SRAM per block, and h100 has 232,448"),
        ("simulate flash1 --tile 1024x1024", "bytes of SRAM per block, and h100 has 232,448"),
        ("compare --tile 1024x1024", "bytes of SRAM per block, and h100 has 232,448"),
        ("count flash2 --dtype fp16", "dtype = 'fp16': expected one of float32"),
        ("count flash2 --heads 3 --kv-heads 2", "kv_heads = 2: expected a divisor of heads = 3"),
        ("count flash2 --len-q -1", "len_q = -1: expected an integer of at least 0"),
        ("count flash2 --len-q many", "--len-q"),
        ("count flash2 --scale nan", "scale = nan: expected a finite number"),
        ("count flash2 --window 128", "--window = '128': expected left,right"),
        ("count flash2 --window 1,2,3", "--window"),
        ("count flash2 --window -1,0", "window = -1"),
        ("count flash2 --lenq 4", "--lenq"),
        ("count", "Missing argument"),
        ("count flash2 flash1", "flash1"),
        ("cuont flash2", "count"),
        ("sweep flash2 --len-q 1,x", "--len-q = '1,x': expected values with commas between them"),
        ("sweep flash2 --sram 0", "sram_per_block = 0"),
        (
            "sweep flash2 --csv /nowhere/at/all.csv",
            "--csv = '/nowhere/at/all.csv': expected a file that can be written",
        ),
        ("sweep flash2 --plot rows.xyz", "--plot = 'rows.xyz': expected a name that ends in one of"),
        ("sweep flash2 --plot /nowhere.png --y algorithm", "--y = 'algorithm': expected a figure"),
        ("sweep flash2 --plot /nowhere.png --x length", "--x = 'length': expected one of"),
        ("simulate flash2 --out /nowhere/out.npz", "--out = '/nowhere/out.npz'"),
        ("trace flash2 --out /nowhere/trace.json", "--out = '/nowhere/trace.json'"),
        ("trace flash2 --head 0", "--head = '0': expected batch,head"),
        ("trace flash2 --head 0,5", "(batch, head) under (1, 2)"),
        ("trace flash2 --against flash1", "--html FILE"),
        ("emulate flsh2", "target = 'flsh2': expected one of standard, "),
        ("emulate mine --grid 1", "a file that ends in .cu"),
        ("emulate flash2 --grid 8", "--grid = '8': expected nothing: an algorithm brings its launches"),
        ("emulate nowhere.cu --block 128", "file = 'nowhere.cu': expected a CUDA source"),
        ("emulate nowhere.cu --grid 1 --block 128", "file = 'nowhere.cu': expected a CUDA source"),
        ("emulate nowhere.cu --grid 1 --block 128 --len-q 4", "--len-q"),
        ("emulate nowhere.cu --grid 1 --block 128 --tile 16x16", "--tile"),
        ("counters --backend cpu", "--backend = 'cpu': expected one of gpu, emulator, both"),
        ("compare --input q.npz --len-q 4", "--len-q = 4: expected nothing, the data says the shape"),
        ("compare --input q.npz --sample", "one of --input and --sample"),
        ("count nowhere.py:mine", "there is no file nowhere.py"),
        ("count nowhere_at_all:mine", "No module named 'nowhere_at_all'"),
        ("count os:path.join", "expected a tile program"),
        ("verify flash2 --layout bshd", "--layout"),
        ("verify flash2 --grid 8", "--grid"),
        ("verify mine.cu:mine --block 32", "file = 'mine.cu': expected a CUDA source"),
        ("verify flash2 --multiple 32", "--multiple = '32': expected none of them"),
        ("verify json:dumps", "target = json:dumps: expected a function that takes (q, k, v"),
        ("verify json:dumps --arg-names causal", "--arg-names = 'causal'"),
        ("verify json:dumps --operation backwards", "--operation = 'backwards': expected one of attention"),
        ("verify json:dumps --operation backward", "expected a function that takes (dout, q, k, v, out, lse"),
        ("verify json:dumps --operation gradients", "--framework = 'numpy': expected torch"),
        ("verify json:dumps --operation backward --atomics dx", "--atomics = 'dx': expected one of dq, dk, dv"),
        ("verify flash2 --operation backward", "--operation = 'backward': expected none of them"),
        ("verify json:dumps --arg-names causl=x", "--arg-names = 'causl': expected one of causal"),
        ("verify json:dumps --head-dims 0", "--head-dims = 0"),
        ("verify flash2 --format yaml", "--format = 'yaml': expected one of text, markdown, github, sarif"),
        ("verify flash2 --check everything", "checks = 'everything'"),
        ("verify flash2 --backend tpu", "backend = 'tpu'"),
        ("bench --causal --len-q 1k", "--len-q = '1k'"),
        ("bench --len-q 0", "len_q = 0: expected a number of tokens over 0"),
        ("fp8 --head-dim 128,4096", "head_dim = 4096: expected 1 to 2,048"),
        ("count mla --head-dim 64", "--head-dim = 64: expected 576 for mla, or nothing"),
        ("simulate mla_paged --kv-heads 2", "--kv-heads = 2: expected 1 for mla_paged, or nothing"),
        ("emulate mla --head-dim-v 576", "--head-dim-v = 576: expected 512 for mla, or nothing"),
        ("count cascade --page-size 4", "page_size = 4: expected None, or paged for pages, for cascade"),
        ("count cascade --lengths 4,5", "lengths[1] = (5, 5): expected len_q = 4 queries, as all requests have"),
        ("count paged --batch 3 --lengths 1:4,1:5", "lengths = 2 requests: expected 3, the batch"),
        ("counters --matrix --len-q 4", "--len-q = 4"),
        ("counters --matrix --only nothing", "--only = 'nothing': expected words from a problem's name, such as"),
        ("counters flash3_1 --l2", "algorithms = 'flash3_1': expected one that the L2 model has problems for"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(words: str, says: str) -> None:
    assert says in one_line(*words.split())


@pytest.mark.parametrize("command", ["compare", "simulate flash2", "trace flash2"])
def test_inputs_that_cannot_be_used(command: str, tmp_path: Path) -> None:
    def refused(name: str) -> str:
        return one_line(*command.split(), "--input", tmp_path / name)

    assert re.search("--input = .*nothing.npz.*there is none", refused("nothing.npz"))
    (tmp_path / "text.npz").write_text("text")
    assert "--input" in refused("text.npz")
    (tmp_path / "text.safetensors").write_text("text")
    assert "--input" in refused("text.safetensors")
    np.savez(tmp_path / "some.npz", q=np.zeros((1, 4, 8)), k=np.zeros((1, 4, 8)))
    assert "v missing among" in refused("some.npz")
    np.savez(tmp_path / "shape.npz", q=np.zeros((3, 4, 8)), k=np.zeros((2, 4, 8)), v=np.zeros((2, 4, 8)))
    assert "kv_heads = 2" in refused("shape.npz")
    np.savez(tmp_path / "nan.npz", **{name: np.full((1, 4, 8), np.nan) for name in "qkv"})
    assert "nan" in refused("nan.npz")


@pytest.mark.parametrize("ending", ["npz", "safetensors"])
def test_own_inputs(ending: str, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    problem = DEFAULT.replace(heads=4, kv_heads=2, len_q=70, len_kv=90, dtype="float32")
    q, k, v = fl.random_inputs(problem)
    path = tmp_path / f"mine.{ending}"
    if ending == "npz":
        np.savez(path, q=q, k=k, v=v)
    else:
        save_file({"q": q, "k": k, "v": v}, path, metadata={"causal": "false"})
    causal = ending == "npz"  # what the file says of itself; nothing: the default
    (row,) = document("compare", "flash2", "--input", path)["rows"]
    expected = fl.simulate("flash2", q, k, v, causal=causal)
    assert row["hbm"] == plain(expected.counts.to_dict())["hbm"] and row["problem"]["causal"] is causal
    assert row["error"]["relative"] < 1e-5
    assert document("simulate", "flash2", "--input", path)["out"]["max"] == expected.out.max()
    assert document("compare", "flash2", "--input", path, "--causal")["problem"]["causal"]
    np.savez(tmp_path / "wide.npz", q=q.astype(float), k=k.astype(float), v=v.astype(float))
    wide = run("compare", "flash2", "--input", tmp_path / "wide.npz", "--json")
    assert "float64 to float32" in wide.stderr and json.loads(wide.stdout)["problem"]["dtype"] == "float32"


def test_sample() -> None:
    found = document("compare", "--sample")
    assert found["problem"]["causal"] and found["problem"]["kv_heads"] == 2
    assert all(row["error"]["relative"] < 1e-3 for row in found["rows"])


def test_too_little_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise MemoryError("Unable to allocate 4 PiB")

    monkeypatch.setattr(fl, "simulate", refuse)
    assert "4 PiB" in one_line("simulate", "flash2")


def test_too_little_memory_on_a_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch and CuPy raise errors of their own, and torch's have several sentences."""
    told = type("OutOfMemoryError", (RuntimeError,), {"__module__": "torch"})

    def refuse(*_: Any, **__: Any) -> None:
        raise told("CUDA out of memory. Tried to allocate 9 GiB.\nSee the documentation.")

    monkeypatch.setattr(fl, "simulate", refuse)
    line = one_line("simulate", "flash2")
    assert "not enough memory on the GPU: CUDA out of memory. Tried to allocate 9 GiB." in line and "See" not in line


def test_a_bug_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(fl, "count", broken)
    assert isinstance(run("count", "flash2", code=1).exception, ZeroDivisionError)


# files


def test_output_files_are_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("x" * 100_000)
    path.chmod(0o640)
    run("sweep", "flash2", "--csv", path)
    assert path.read_text().startswith("algorithm,") and "x" * 50 not in path.read_text()
    assert os.name == "nt" or stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    assert "no space left on device" in one_line("sweep", "flash2", "--csv", path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name == "nt", reason="links and /dev/null are Unix's")
def test_links_are_followed_and_devices_written(tmp_path: Path) -> None:
    target, link = tmp_path / "target.csv", tmp_path / "link.csv"
    target.write_text("old")
    link.symlink_to(target)
    run("sweep", "flash2", "--csv", link)
    assert link.is_symlink() and target.read_text().startswith("algorithm,")
    run("sweep", "flash2", "--csv", "/dev/null")
    assert Path("/dev/null").is_char_device()


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert "is a folder" in one_line("sweep", "flash2", "--csv", tmp_path)


# what is judged


def test_verify_ends_with_0_or_1(mine: str) -> None:
    found = document("verify", "flash2", "--check", "key_sets", "--dtype", "float16")
    assert found["passed"] and found["target"] == "flash2"
    failed = document("verify", mine, "--check", "key_sets", "--dtype", "float16", code=1)
    assert not failed["passed"] and failed["counts"]["failed"]


def test_verify_prints_a_table_or_markdown() -> None:
    words = ["verify", "flash2", "--check", "key_sets", "--dtype", "float16"]
    assert "key_sets" in run(*words).stdout
    assert run(*words, "--format", "markdown").stdout.startswith("## flash2")


def test_verify_prints_what_other_programs_read(mine: str) -> None:
    words = ["verify", mine, "--check", "key_sets", "--dtype", "float16", "--format"]
    assert run(*words, "github", code=1).stdout.startswith("::error ")
    assert json.loads(run(*words, "sarif", code=1).stdout)["version"] == "2.1.0"


def test_verify_takes_a_narrow_kernel(tmp_path: Path) -> None:
    path = tmp_path / "narrow.py"
    path.write_text(
        "import flashlab as fl\n"
        "def attention(q, k, v, mask_future):\n"
        "    assert q.shape[2] == 1 and k.shape[2] % 32 == 0 < k.shape[2] and q.shape[3] == 128 and q.shape[1] == k.shape[1]\n"
        "    return fl.naive(q, k, v, causal=mask_future).out.astype(q.dtype)\n"
    )
    words = ["verify", f"{path}:attention", "--dtype", "float16", "--check", "rule,key_sets"]
    narrow = [
        "--arg-names",
        "causal=mask_future",
        "--head-dims",
        "128",
        "--multiple",
        "32",
        "--queries",
        "1",
        "--groups",
        "1",
    ]
    assert document(*words, *narrow)["verdict"] == "passed, LSE unchecked"


def test_verify_takes_a_callable_with_its_conventions(tmp_path: Path) -> None:
    path = tmp_path / "theirs.py"
    path.write_text(
        "import numpy as np, flashlab as fl\n"
        "def attention(q, k, v, causal=False, scale=None, window=None):\n"
        "    swap = lambda x: np.ascontiguousarray(np.swapaxes(np.asarray(x), 1, 2))\n"
        "    ref = fl.naive(swap(q), swap(k), swap(v), causal=causal, scale=scale, window=window)\n"
        "    return swap(ref.out).astype(q.dtype)\n"
    )
    words = ["verify", f"{path}:attention", "--check", "key_sets", "--dtype", "float16", "--layout", "bshd"]
    assert document(*words)["verdict"] == "passed, LSE unchecked"
    assert document(*words[:-1], "bhsd", code=1)["verdict"] == "failed"


def report(passed: bool) -> Any:
    return SimpleNamespace(
        passed=passed,
        algorithms=["flash2"],
        to_dict=lambda: {"passed": passed},
        print=lambda: print("table"),
    )


@pytest.mark.parametrize("passed", [True, False])
@pytest.mark.parametrize(("command", "module"), [("bench", speed), ("counters", counters), ("sanitize", sanitizers)])
def test_gpu_commands_hand_over_their_verdict(
    command: str, module: Any, passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "run", lambda *_, **__: report(passed))
    assert run(command, code=0 if passed else 1).stdout == "table\n"
    assert document(command, code=0 if passed else 1)["passed"] is passed


def test_counters_asks_for_the_problem_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(counters, "run", lambda cases, **_: asked.extend(cases) or report(True))
    run("counters", "flash1", "flash2", "--len-q", 1000, "--no-causal", "--tile", "64x64", "--lse")
    problem = DEFAULT.replace(len_q=1000, causal=False)
    assert [(c.algorithm, c.problem, c.tile, c.lse) for c in asked] == [
        (name, problem, (64, 64), True) for name in ("flash1", "flash2")
    ]
    asked.clear()
    run("counters", "flash2", "flash3", "--l2", "--only", "L2 blind")
    every = [c for c in problems.l2_problems() if c.algorithm in ("flash2", "flash3")]
    assert asked == [c for c in every if "L2 blind" in c.name] and 0 < len(asked) < len(every)


@pytest.mark.parametrize("here", [True, False])
def test_kernels_in_triton_are_asked_for_where_triton_is(here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def compiler() -> None:
        if not here:
            raise fl.Unavailable("no Triton here: get one")

    monkeypatch.setattr(counters, "run", lambda cases, **_: asked.extend(cases) or report(True))
    monkeypatch.setattr(tritonc, "compiler", compiler)
    done = run("counters", "--matrix")
    assert asked == problems.matrix(fl.catalogue.with_kernels(language=None if here else "cuda"))
    assert done.stderr == ("" if here else "not run: flash2_triton (no Triton here: get one)\n")


def test_bench_asks_for_the_cells_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(speed, "run", lambda *names, **more: asked.update(more, names=names) or report(True))
    run(
        "bench",
        "flash1",
        "--against",
        "fa4,cudnn",
        "--dtype",
        "float16",
        "--head-dim",
        "64",
        "--len-q",
        "1024",
        "--causal",
    )
    assert asked["names"] == ("flash1", ["fa4", "cudnn"])
    assert asked["cells"] == [speed.Cell("float16", 64, True, 1024)]


@pytest.mark.parametrize(
    ("against", "kind"),
    [("sdpa-flash,cudnn", "bench"), ("sdpa-flash,flash2", "bench"), ("flash2,flash3_1,flash3_2", "ladder")],
)
def test_a_ladder_has_several_rungs(against: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[str] = []
    monkeypatch.setattr(speed, "run", lambda *_, **__: report(True))
    monkeypatch.setattr(results, "save", lambda of, *_, **__: kept.append(of.name))
    run("bench", "flash3", "--against", against, "--save", ".")
    assert kept == [kind]


@pytest.mark.parametrize(
    ("option", "line"),
    [("--against nosuch", "against = 'nosuch'"), ("--seconds nan", "seconds = nan"), ("--seconds 0", "seconds = 0.0")],
)
def test_bench_looks_at_its_options_before_it_looks_for_torch(
    option: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise fl.Unavailable("no torch here")

    monkeypatch.setattr(speed, "_torch", missing)
    assert line in one_line("bench", "flash2", *option.split())
    assert "no torch here" in one_line("bench", "flash2")


def test_without_the_tools_it_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise fl.Unavailable("no GPU here: get one")

    for command, module in (("bench", speed), ("counters", counters), ("sanitize", sanitizers)):
        monkeypatch.setattr(module, "run", missing)
        assert "no GPU here: get one" in one_line(command)


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["simulate", "flash2"], "--out"),
        (["sweep", "flash2"], "--csv"),
        (["sweep", "flash2"], "--plot"),
        (["trace", "flash2"], "--out"),
        (["trace", "flash2"], "--html"),
        (["time", "flash2"], "--trace"),
        (["time", "flash2"], "--plot"),
    ],
)
def test_an_output_replaces_only_its_kind(tmp_path: Path, words: list[str], option: str) -> None:
    """A typing error must not cost anybody a source."""
    path = tmp_path / "kernel.cu"
    path.write_text("mine")
    assert f"{option} = '{path}': expected a new file, or one that ends in ." in one_line(*words, option, path)
    assert "--force" in one_line(*words, option, path)
    assert path.read_text() == "mine" and list(tmp_path.iterdir()) == [path]
    assert "(no such file or directory)" in one_line(*words, option, tmp_path / "no" / "x.png")
    if words[0] == "simulate":
        run(*words, option, path, "--force")
        assert path.read_bytes()[:2] == b"PK"


def test_an_output_is_never_an_input(tmp_path: Path) -> None:
    q, k, v = fl.random_inputs(fl.Problem(batch=1, heads=1, len_q=4, head_dim=16, dtype="float16"))
    given, link = tmp_path / "x.npz", tmp_path / "link.npz"
    np.savez(given, q=q, k=k, v=v)
    link.symlink_to(given)
    kept = given.read_bytes()
    for out in (given, link, tmp_path / "." / "x.npz"):
        assert "expected another file than the input" in one_line(
            "simulate", "flash2", "--input", given, "--out", out, "--force"
        )
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    assert "another file than the input" in one_line("simulate", f"{mine}:diagonal", "--out", mine, "--force")
    assert given.read_bytes() == kept and mine.read_text() == MINE


def test_a_place_for_results_is_looked_at_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    ran: list[object] = []
    monkeypatch.setattr(fl, "verify", lambda *_, **__: ran.append(1))
    for words in (["--save", tmp_path / "file"], ["--save", tmp_path, "--condition", "a/b"]):
        assert words[-2] in one_line("verify", "flash2", *words)
    assert not ran


def test_a_report_that_cannot_be_kept_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise fl.UsageError("output", "x.json", "a file that can be written (no space left on device)")

    monkeypatch.setattr(results, "save", full)
    found = run("verify", "flash2", "--check", "key_sets", "--dtype", "float16", "--save", tmp_path, code=2)
    assert "flash2 on simulator: passed" in found.stdout and "no space left on device" in found.stderr


def test_results_are_kept(tmp_path: Path) -> None:
    words = ["verify", "flash2", "--check", "key_sets", "--dtype", "float16", "--save", tmp_path]
    run(*words)
    (path,) = tmp_path.glob("verify/flash2_*.jsonl")
    assert results.load(path).kind == "verify"
    assert "--force" in one_line(*words)
    run(*words, "--force")
    run(*words, "--condition", "again")
    (path,) = tmp_path.glob("verify/flash2_again_*.jsonl")
    assert results.load(path).condition == "again"


# tables


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("command", ["compare", "count flash1", "devices", "sweep flash1 flash2 --len-q 64,128"])
def test_tables_fit_the_terminal(command: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = run(*command.split()).stdout.splitlines()
    tables = [line for line in lines if any(edge in line for edge in "┃╇│┼")]
    assert tables and all(len(line.rstrip()) <= width for line in tables)
    assert not any("…" in line for line in tables), "nothing is cut"


def test_markup_in_a_name_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    tables.table("t", ("name", "n"), [("[red]mine[/red]", "1")])
    assert "[red]mine[/red]" in capsys.readouterr().out


def test_progress_passes_everything_on_and_prints_nothing_to_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress.track("things")(range(3))) == [0, 1, 2]
    with progress.busy("work") as tick:
        tick(None)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


@pytest.mark.parametrize("slow", [True, False])
def test_a_bar_shows_after_a_second(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer that shows it is asked for one second; here it rings at once where the work is slow, else never."""
    import rich.progress
    from rich.console import Console

    class Timer:
        def __init__(self, seconds: float, ring: Callable[[], None]) -> None:
            asked.append(seconds)
            self.start = ring if slow else lambda: None

        def cancel(self) -> None: ...
        def join(self) -> None: ...

    asked, shown = list[float](), list[bool]()
    start = rich.progress.Progress.start
    monkeypatch.setattr(progress.threading, "Timer", Timer)
    monkeypatch.setattr(rich.progress.Progress, "start", lambda self: (shown.append(True), start(self)))
    with open(os.devnull, "w") as written:
        monkeypatch.setattr(progress, "console", lambda _: Console(file=written, force_terminal=True))
        assert list(progress.track("things")(range(2))) == [0, 1]
    assert (asked, shown) == ([1.0], [True] if slow else [])


@given(value=st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists))
def test_json_is_json_whatever_the_numbers(value: Any) -> None:
    text = json.dumps(files.plain({"x": value}), allow_nan=False)
    assert isinstance(json.loads(text), dict)


@given(left=st.none() | st.integers(0, 10**6), right=st.none() | st.integers(0, 10**6))
def test_windows_round_trip(left: int | None, right: int | None) -> None:
    text = FIELDS["window"].text((left, right))
    assert options.pair("--window", text) == options.pair("--window", text.replace(",", ", ").upper()) == (left, right)


def test_progress_is_silent_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """True shows how far a long call is, and counts what it does; anything else that is no wrapper is refused."""
    from rich.console import Console

    written = io.StringIO()
    monkeypatch.setattr(progress, "console", lambda _: Console(file=written, force_terminal=True))
    timer = partial(SimpleNamespace, daemon=True, cancel=int, join=int)
    monkeypatch.setattr(progress.threading, "Timer", lambda _, show: timer(start=show))
    p = fl.Problem(batch=1, heads=1, len_q=64, head_dim=16, dtype="float16")
    calls: dict[str, Callable[..., Any]] = {
        "cells": lambda **more: fl.sweep("flash2", p, len_q=[64, 128], **more),
        "algorithms": lambda **more: fl.compare(p, algorithms=["flash1", "flash2"], **more),
        "checks": lambda **more: fl.verify("flash2", checks=["gqa"], dtypes=["float16"], **more),
    }
    for label, call in calls.items():
        call()
        assert written.getvalue() == ""
        call(progress=True)
        assert label in written.getvalue()
        written.seek(0), written.truncate()
        with pytest.raises(fl.UsageError, match="^progress = 'yes': expected True"):
            call(progress="yes")
    seen: list[Any] = []
    calls["cells"](progress=lambda items: (seen.append(x) or x for x in items))
    assert len(seen) == 2 and written.getvalue() == ""
