"""The cache's folder: entries are made once, whole, and made again where they are damaged; cleaning takes nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flashlab.base import cache

ROOT = Path(__file__).resolve().parents[3]
NAME = cache.digest("an entry")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_own", None)
    return tmp_path / "cache"


class Make:
    """Fills an entry, and counts how often."""

    def __init__(self, content: str = "content", slow: bool = False) -> None:
        self.content, self.slow, self.times = content, slow, 0

    def __call__(self, work: Path) -> None:
        self.times += 1
        assert list(work.iterdir()) == []
        (work / "a").write_text(self.content)
        if self.slow:
            time.sleep(0.05)  # others come in between
        (work / "b").write_text("b")


def test_it_is_the_systems_folder_unless_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FLASHLAB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert cache.folder() == tmp_path / "flashlab"
    assert cache.folder().name in ("flashlab", "Cache")


def test_an_entry_is_made_once(folder: Path) -> None:
    make = Make()
    first = cache.entry("compiled", NAME, make)
    assert cache.entry("compiled", NAME, make) == first == folder / "compiled" / NAME
    assert (make.times, (first / "a").read_text()) == (1, "content")
    assert cache.entry("compiled", cache.digest("another"), make) != first
    assert make.times == 2


def test_threads_wait_for_the_one_that_makes_it() -> None:
    make, begin = Make(slow=True), threading.Barrier(8)

    def one(_: int) -> Path:
        begin.wait()
        return cache.entry("compiled", NAME, make)

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(one, range(8)))
    assert (make.times, len(found)) == (1, 1)


PROCESS = """
import sys, time
from flashlab.base import cache

def make(work):
    (work / "a").write_text("content")
    time.sleep(0.1)
    (work / "b").write_text("b")

for _ in range(20):
    found = cache.entry("compiled", sys.argv[1], make)
    assert ((found / "a").read_text(), (found / "b").read_text()) == ("content", "b")
assert found.is_relative_to(cache.folder())
"""


@pytest.mark.parametrize("damaged", [False, True])
def test_processes_never_see_half_of_one(folder: Path, damaged: bool) -> None:
    if damaged:
        (cache.entry("compiled", NAME, Make()) / "a").write_text("conten")
    command = [sys.executable, "-W", "error", "-c", PROCESS, NAME]
    processes = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, said
    assert [path.name for path in (folder / "compiled").iterdir()] == [NAME]


@pytest.mark.parametrize("content", [b"", b"conten", b"Content", None])
@pytest.mark.parametrize("name", ["a", "b", "digests.json"])
def test_a_damaged_entry_is_made_anew(name: str, content: bytes | None) -> None:
    make = Make()
    file = cache.entry("emulator", NAME, make) / name
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    for _ in range(2):
        assert (cache.entry("emulator", NAME, make) / "a").read_text() == "content"
    assert make.times == 2


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such owners")
@pytest.mark.parametrize("which", ["the folder", "a file"])
def test_another_users_entry_is_made_anew(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes a library may write its digest, too, and what is in it would run with this user's rights."""
    path = cache.entry("compiled", NAME, Make("evil"))
    if os.geteuid() == 0:
        os.chown(path if which == "the folder" else path / "a", 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    make = Make()
    cache.entry("compiled", NAME, make)
    assert make.times == 1


def test_what_fails_leaves_nothing(folder: Path) -> None:
    def fails(work: Path) -> None:
        (work / "a").write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cache.entry("compiled", NAME, fails)
    assert list((folder / "compiled").iterdir()) == []
    assert (cache.entry("compiled", NAME, Make()) / "a").read_text() == "content"


def test_one_that_cannot_be_written_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHLAB_CACHE", str(tmp_path / "file"))
    make = Make()
    with pytest.warns(RuntimeWarning) as said:
        found = [cache.entry("compiled", name, make) for name in (NAME, NAME, cache.digest("another"))]
    assert [str(warning.message) for warning in said] == [
        f"can't keep compiled kernels in {tmp_path / 'file'} (Not a directory): set FLASHLAB_CACHE to a folder that can be written"
    ]
    assert make.times == 2 and found[0] == found[1]
    assert all((path / "a").read_text() == "content" for path in found)


def test_cleaning_takes_what_is_ours_and_no_more(folder: Path) -> None:
    sizes = 0
    for kind in ("compiled", "emulator", "runtime"):
        path = cache.entry(kind, NAME, Make(kind))
        sizes += sum(file.stat().st_size for file in path.iterdir())
    strangers = ["mine.txt", "compiled/notes.txt", "compiled/mine/a", f"compiled/{NAME}.txt", f"mine/{NAME}/a"]
    for name in strangers:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("a stranger's")
    for name in ("unfinished-made_now", "unfinished-long_ago"):
        (folder / "emulator" / name).mkdir()
    os.utime(folder / "emulator" / "unfinished-long_ago", (0, 0))
    assert cache.held() == cache.Held(str(folder), 4, sizes)
    assert cache.clean() == cache.Held(str(folder), 4, sizes)
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() or not any(path.iterdir())}
    assert left == {*strangers, "emulator/unfinished-made_now", "runtime"}
    assert cache.held() == cache.clean() == cache.Held(str(folder), 0, 0)
    make = Make()
    cache.entry("compiled", NAME, make)
    assert make.times == 1


def test_there_may_be_none_yet(folder: Path) -> None:
    assert cache.held() == cache.clean() == cache.Held(str(folder), 0, 0)
    assert not folder.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such lock")
def test_a_build_that_was_killed_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one that makes an entry deletes what nobody holds any more, and leaves what somebody makes."""
    monkeypatch.setenv("FLASHLAB_CACHE", str(tmp_path))
    script = "from flashlab.base import cache; cache.entry('emulator', '0' * 32, lambda work: (print('held', flush=True), input()))"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        (there,) = (tmp_path / "emulator").iterdir()
        os.utime(there, (0, 0))
        cache.entry("emulator", "1" * 32, lambda work: (work / "x").touch())
        assert there.exists()
        child.kill()
    os.utime(there, (0, 0))
    cache.entry("emulator", "2" * 32, lambda work: (work / "x").touch())
    assert sorted(path.name for path in (tmp_path / "emulator").iterdir()) == ["1" * 32, "2" * 32]
