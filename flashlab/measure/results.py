"""Evidence as data: what a command measured, with the machine, the versions and the command that wrote it.

A result is one file of JSON Lines, `<kind>/<subject>[_<condition>]_<device>_<date>.jsonl` (`flashlab.base.jsonlines`). The
module that measures declares its `Kind`: the schema of the data, and how to put the data into a sentence and a table.
Documents draw their figures from the files (`latest`, `Kind.claim`, `Kind.markdown`), so that no measured number is ever
typed by hand.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from flashlab.base import jsonlines
from flashlab.base.files import check_file, parsed, plain, replace_file
from flashlab.base.version import __version__
from flashlab.measure import sources
from flashlab.run.arrays import cupy
from simulator.catalogue import CATALOGUE
from simulator.devices import DEVICES
from simulator.errors import UsageError
from simulator.problem import FP8

__all__ = [
    "FOLDER",
    "SCHEMA",
    "Content",
    "Data",
    "File",
    "Kind",
    "Result",
    "device_name",
    "environment",
    "find",
    "kinds",
    "latest",
    "load",
    "markdown_table",
    "save",
    "subject_of",
    "title",
]

SCHEMA = 3
"""The version of the files. It rises when a key changes its meaning or is removed, or when they are written in another way."""

READ = (2, SCHEMA)
"""The versions that `load` reads. A file of schema 2 is one JSON document. What it says is the same."""

FOLDER = Path("docs/results")
"""Where commands write, relative to the working directory."""

_CHECKOUT = Path(__file__).resolve().parents[2]
ROOMS = ("flashlab.measure", *(["studies"] if (_CHECKOUT / "studies" / "__main__.py").is_file() else []))
"""The packages whose modules may declare kinds. In a checkout that is all that was ever measured, whose results are there."""

_PACKAGES = (
    "numpy", "ml_dtypes", "cupy-cuda12x", "cupy-cuda13x", "torch", "jax", "triton", "nvidia-cuda-nvrtc-cu12",
    "nvidia-cuda-nvrtc", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "flash-attn-4", "nvidia-cutlass-dsl",
    "flashinfer-python", "nvidia-cudnn-frontend",
)  # fmt: skip

_OURS = ("flashlab", "simulator", "kernels_cu", "studies")  # packages that decide what is measured
_DIRTY = "-dirty"

Content = Mapping[str, Any]


class Data(BaseModel):
    """What was measured: the base of every kind's schema. Infinities and NaN are text, as `files.plain` writes them."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Gpu(Data):
    """The GPU of a measurement, as it describes itself. `memory` and `l2` are in bytes."""

    name: str
    compute_capability: str
    sms: int
    memory: int
    l2: int


class File(Data):
    """What a file of every kind holds besides its data."""

    schema_: Annotated[Literal[3], Field(alias="schema")]
    kind: str
    subject: str
    """What was measured, in a word or two. It is part of the file's name."""
    condition: str | None
    """What sets it apart from other measurements of the subject, such as another framework or another build of CuPy."""
    algorithms: tuple[str, ...]
    device: Gpu | None
    """None if it was measured on a CPU."""
    driver: str | None
    cuda_runtime: str | None
    nvrtc: str | None
    cudnn: str | None
    versions: dict[str, str]
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
    commit: str | None
    command: str
    kernels: dict[str, sources.Digest] = {}
    """The digests of the kernels that were measured, by algorithm. Where it has none, nobody knows which they were."""


@dataclass(frozen=True)
class Result:
    """A result's file that was read: its path and its content."""

    path: Path
    content: Content

    @property
    def older(self) -> tuple[str, ...]:
        """Those of its algorithms whose kernels have changed since."""
        return tuple(name for name in self.algorithms if name in CATALOGUE and not self.of_today(name))

    def of_today(self, algorithm: str) -> bool:
        """Did it measure the kernels that an algorithm has today, by their text or by their PTX (`sources.Digest`)?"""
        measured = self.content.get("kernels", {}).get(algorithm)
        today = sources.today(self.path.parents[1]).get(algorithm)
        return measured is not None and today is not None and sources.Digest(**measured).same(today)

    @property
    def kind(self) -> str:
        return self.content["kind"]

    @property
    def subject(self) -> str:
        return self.content["subject"]

    @property
    def condition(self) -> str | None:
        return self.content["condition"]

    @property
    def algorithms(self) -> tuple[str, ...]:
        return tuple(self.content["algorithms"])

    @property
    def about(self) -> str:
        """Subject and condition, for a label.

        >>> Result(Path(), {"subject": "flash2", "condition": "torch"}).about
        'flash2 (torch)'
        """
        return self.subject if self.condition is None else f"{self.subject} ({self.condition})"

    @property
    def data(self) -> Content:
        """What was measured, as the report's `to_dict` returned it."""
        return self.content["data"]


D = TypeVar("D", bound=Data)


def _not_judged(data: Content, algorithm: str) -> None:
    """Of kinds that time or describe, and judge nothing."""
    del data, algorithm


@dataclass(frozen=True)
class Kind(Generic[D]):
    """A kind of result. The module that measures it declares one, and nothing else lists it.

    `title` is its heading on the site, which orders kinds by their titles. `holds` and `command` are its row in
    docs/results/README.md. `headline` puts the data into a sentence, and `table` into a Markdown table. `beside` holds
    the schemas of other files, by the subfolder of the kind's folder in which they lie.
    """

    name: str
    title: str
    holds: str
    command: str
    schema: type[D]
    headline: Callable[[D], str]
    table: Callable[[D], str]
    beside: Mapping[str, type[Data]] = field(default_factory=dict[str, "type[Data]"])
    passed: Callable[[Content, str], bool | None] = _not_judged
    """What the data say of one algorithm: did all that was judged of it hold? None where nothing was."""

    def data(self, result: Result) -> D:
        """A result's data, validated by the schema."""
        return self.schema.model_validate(result.data)

    def claim(self, result: Result) -> str:
        """The claim that a result supports, with its GPU and date, in one line."""
        where = f"{title(result.content) or 'CPU'}, {str(result.content['date'])[:10]}"
        return f"{self.headline(self.data(result))} ({where})"

    def markdown(self, result: Result) -> str:
        """The claim, with the table below it."""
        return f"{self.claim(result)}\n\n{self.table(self.data(result))}"

    @property
    def file(self) -> type[File]:
        """The schema of a whole file, its lines joined."""
        fields: Any = {"kind": (Literal[self.name], ...), "data": (self.schema, ...)}
        return create_model(self.name, __base__=File, **fields)

    def schemas(self) -> dict[str, dict[str, Any]]:
        """The JSON Schemas of the files in the kind's folder, by name."""
        models = {self.name: self.file, **{f"{self.name}-{name}": model for name, model in self.beside.items()}}
        return {name: published(model) for name, model in models.items()}


class _Published(GenerateJsonSchema):
    """Makes the JSON Schema of what `files.plain` writes: a float may be a word that Python's `float` reads."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # a field's name is enough

    def float_schema(self, schema: core_schema.FloatSchema) -> dict[str, Any]:
        return {"anyOf": [super().float_schema(schema), {"enum": ["inf", "-inf", "nan"]}]}


def published(model: type[BaseModel]) -> dict[str, Any]:
    """A model as JSON Schema (draft 2020-12)."""
    return {"$schema": _Published.schema_dialect, **model.model_json_schema(schema_generator=_Published)}


def kinds(*rooms: str) -> dict[str, Kind[Any]]:
    """The kinds that modules of these packages (by default flashlab's) declare, by name, in the order of titles.

    >>> kinds("flashlab.measure")["verify"].title
    'Numbers: against float64'
    """
    declared: dict[str, Kind[Any]] = {}
    for module in map(importlib.import_module, _declaring(rooms or ROOMS)):
        found = [cast("Kind[Any]", each) for each in vars(module).values() if isinstance(each, Kind)]
        declared |= {kind.name: kind for kind in found}
    return dict(sorted(declared.items(), key=lambda item: item[1].title))


def _declaring(rooms: Iterable[str]) -> Iterator[str]:
    """The modules that declare a kind, by name. Only these are imported: others may need what isn't installed."""
    for room in rooms:
        spec = importlib.util.find_spec(room)
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in sorted(Path(folder).rglob("*.py")):
                if re.search(
                    r"(?m)^(?:\w+ = |class \w+\()(?:results\.)?(?:Kind|Study)[\[(]", path.read_text(encoding="utf-8")
                ):
                    yield ".".join((room, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__")


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown.

    >>> print(markdown_table(("kernel", "ms"), [("flash2", "0.4")]))
    | kernel | ms |
    | --- | --- |
    | flash2 | 0.4 |
    """
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def device_name(title: str | None) -> str:
    """The short name of a GPU that calls itself `title`, or "cpu" for None.

    >>> device_name("NVIDIA H200"), device_name("NVIDIA GeForce RTX 2080 Ti"), device_name(None)
    ('h200', 'geforce-rtx-2080-ti', 'cpu')
    """
    if title is None:
        return "cpu"
    words = re.findall(r"[a-z0-9]+", title.lower())
    if "a100" in words:
        return "a100-80" if "80gb" in words else "a100-40"
    known = [word for word in words if word in DEVICES]
    return known[0] if known else "-".join(word for word in words if word != "nvidia")


def subject_of(algorithms: Sequence[str]) -> str:
    """A short name for the algorithms that were measured.

    >>> subject_of(["flash2"]), subject_of(["flash3_1", "flash3_2", "flash3_3", "flash3"]), subject_of(list(CATALOGUE))
    ('flash2', 'flash3_1-to-flash3', 'all')
    """
    rows = list(CATALOGUE)
    if len(algorithms) > 1 and set(algorithms) <= set(rows):
        chosen = sorted(map(rows.index, algorithms))
        if len(chosen) == len(rows):
            return "all"
        if {rows[i] for i in chosen} == {name for name in rows if FP8 not in CATALOGUE[name].dtypes}:
            return "16-bit"
        if chosen == list(range(chosen[0], chosen[-1] + 1)) and len(chosen) > 2:
            return f"{rows[chosen[0]]}-to-{rows[chosen[-1]]}"
    return "-".join(algorithms) if len(algorithms) < 3 else f"{algorithms[0]}-and-{len(algorithms) - 1}-more"


def title(content: Content) -> str | None:
    """What the GPU of a result calls itself, or None for a CPU."""
    device: Content | None = content["device"]
    return None if device is None else device["name"]


def environment() -> dict[str, Any]:
    """The machine and the versions of a measurement. What isn't there is None or left out."""
    device = _device()
    return {
        "device": device,
        "driver": _line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda_runtime": _quietly(_cupy_version, "runtime"),
        "nvrtc": _quietly(_cupy_version, "nvrtc"),
        "cudnn": _quietly(_cudnn),
        "versions": _versions(),
        "date": _now(),
        "commit": _commit(),
        "command": _command(sys.argv),
    }


def save(
    kind: Kind[Any],
    algorithms: Sequence[str],
    data: Content,
    *,
    subject: str | None = None,
    condition: str | None = None,
    folder: str | Path = FOLDER,
    replace: bool = False,
    about: Content | None = None,
    dirty: bool = False,
) -> Path:
    """Write what a command measured into a file, and return its path.

    `subject` is `subject_of(algorithms)` by default. `about` stands in for `environment()`, for what was measured
    elsewhere or earlier. Raises `UsageError` if a file of that name exists (unless `replace`), for a checkout whose sources
    were changed since its commit (unless `dirty`), and for data that the kind's schema refuses. Such data are kept beside the
    file, under the suffix `.refused`.
    """
    subject = subject_of(algorithms) if subject is None else subject
    where = environment() if about is None else about
    measured = {*algorithms, *_beside(data)}
    content = plain(
        {
            "schema": SCHEMA,
            "kind": kind.name,
            "subject": subject,
            "condition": condition,
            "algorithms": list(algorithms),
            **where,
            "kernels": {name: asdict(x) for name, x in sources.today(folder).items() if name in measured},
            "data": data,
        }
    )
    text = json.dumps(content, allow_nan=False)
    named: Any = {"subject": subject, "condition": condition, "folder": folder}
    path = place(kind, algorithms, **named, replace=replace, about=where, dirty=dirty)
    try:
        kind.file.model_validate_json(text)
    except ValidationError as wrong:
        first = wrong.errors()[0]
        kept = replace_file(path.with_suffix(".refused"), text, argument="output")  # measuring it may have taken hours
        expected = f"what the schema of {kind.name} allows ({first['msg']}); the data are in {kept}"
        raise UsageError(".".join(map(str, first["loc"])), first["input"], expected) from None
    return replace_file(path, jsonlines.written(content), argument="output")


def place(
    kind: Kind[Any],
    algorithms: Sequence[str],
    *,
    subject: str | None = None,
    condition: str | None = None,
    folder: str | Path = FOLDER,
    replace: bool = False,
    about: Content | None = None,
    dirty: bool = False,
) -> Path:
    """The file that `save` with the same arguments writes today. Its folder is made.

    What could be in the way is found here, before hours of measuring. Raises `UsageError` for that, as `save` does.
    """
    subject = subject_of(algorithms) if subject is None else subject
    for argument, name in (
        *(("algorithms", name) for name in algorithms),
        ("subject", subject),
        ("condition", condition),
    ):
        if name is not None and not re.fullmatch(r"[\w.-]+", name):
            raise UsageError(argument, name, "a name of letters, digits, '_', '.' and '-'")
    known = {"device": _device(), "date": _now(), "commit": _commit()} if about is None else about
    if str(known.get("commit")).endswith(_DIRTY) and not dirty:
        raise UsageError(
            "commit", known["commit"], "sources as they were committed, or --dirty to save what changed ones measured"
        )
    path = Path(folder) / kind.name / name_of({"subject": subject, "condition": condition, **known})
    if path.exists() and not replace:
        raise UsageError("output", str(path), "a file that isn't there yet, or --force to replace it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError("folder", str(folder), f"a folder that can be created ({error.strerror})") from None
    check_file(path, argument="output")
    return path


def _beside(data: Content) -> Iterator[str]:
    """The other algorithms that rows are of, such as the rungs beside a kernel."""
    for row in data.get("rows") or ():
        if isinstance(row, Mapping):
            found = cast("Content", row)
            yield from filter(None, (found.get("peer"), found.get("algorithm")))


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def name_of(content: Content) -> str:
    """The name of a result's file."""
    parts = (content["subject"], content["condition"], device_name(title(content)), content["date"][:10])
    return "_".join(part for part in parts if part is not None) + ".jsonl"


def load(path: str | Path) -> Result:
    """Read a result. Raises `UsageError` for a file that is none."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        content = jsonlines.joined(text) if path.suffix == ".jsonl" else parsed(text)
    except (OSError, ValueError) as error:
        raise UsageError("path", str(path), f"a result that can be read ({type(error).__name__})") from None
    keys = {each.alias or name for name, each in File.model_fields.items() if each.is_required()} | {"data"}
    if not isinstance(content, dict) or content.get("schema") not in READ or not keys <= content.keys():  # pyright: ignore
        known = " or ".join(map(str, READ))
        raise UsageError("path", str(path), f"a result of schema {known}, with the keys {', '.join(sorted(keys))}")
    return Result(path, cast("Content", content))


def find(
    folder: str | Path = FOLDER, *, kind: str | None = None, algorithm: str | None = None, device: str | None = None
) -> list[Result]:
    """The results in a folder that match, of any condition, oldest first.

    With `algorithm`, those of the kernels that it has today come last: no newer result of older kernels hides them.
    """
    found = (path for suffix in ("json", "jsonl") for path in Path(folder).glob(f"{kind or '*'}/*.{suffix}"))
    paths = sorted(path for path in found if path.parent.name != "schema")  # which the site's build makes
    return sorted(
        (
            r
            for r in map(load, paths)
            if (algorithm is None or algorithm in r.algorithms) and device in (None, device_name(title(r.content)))
        ),
        key=lambda r: (algorithm is not None and r.of_today(algorithm), str(r.content["date"])),
    )


def latest(
    kind: str,
    folder: str | Path = FOLDER,
    *,
    algorithm: str | None = None,
    device: str | None = None,
    condition: str | None = None,
) -> Result | None:
    """The newest result of a kind under this condition (None: under no particular one), or None if there is none.

    With `algorithm`, one of the kernels that it has today comes before any newer one of older kernels.
    """
    found = [r for r in find(folder, kind=kind, algorithm=algorithm, device=device) if r.condition == condition]
    return found[-1] if found else None


def _commit() -> str | None:
    """The commit of the checkout that is used, with "-dirty" where a source of ours was changed since. None without one."""
    commit = _line("git", "-C", str(_CHECKOUT), "rev-parse", "--short", "HEAD")
    changed = _line("git", "-C", str(_CHECKOUT), "status", "--porcelain", "--untracked-files=no", "--", *_OURS)
    return f"{commit}{_DIRTY}" if commit and changed else commit


def _device() -> dict[str, Any] | None:
    """The GPU as CuPy or torch sees it, or None without one."""
    return _quietly(_cupy_device) or _quietly(_torch_device)


def _cupy_device() -> dict[str, Any]:
    runtime = cupy().cuda.runtime
    p = runtime.getDeviceProperties(runtime.getDevice())
    capability, memory = (p["major"], p["minor"]), p["totalGlobalMem"]
    return _device_facts(p["name"].decode(), capability, p["multiProcessorCount"], memory, p["l2CacheSize"])


def _torch_device() -> dict[str, Any]:
    p = importlib.import_module("torch").cuda.get_device_properties()
    return _device_facts(p.name, (p.major, p.minor), p.multi_processor_count, p.total_memory, p.L2_cache_size)


def _device_facts(name: str, capability: tuple[int, int], sms: int, memory: int, l2: int) -> dict[str, Any]:
    return {
        "name": name,
        "compute_capability": f"{capability[0]}.{capability[1]}",
        "sms": sms,
        "memory": memory,
        "l2": l2,
    }


def _cupy_version(part: str) -> str:
    cuda = cupy().cuda
    if part == "nvrtc":
        major, minor = cuda.nvrtc.getVersion()
    else:
        number = cuda.runtime.runtimeGetVersion()
        major, minor = number // 1000, number % 1000 // 10
    return f"{major}.{minor}"


def _cudnn() -> str:
    return str(importlib.import_module("torch").backends.cudnn.version())


def _versions() -> dict[str, str]:
    versions = {"python": sys.version.split()[0]}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["flashlab"] = importlib.metadata.version("flashlab-attention")
    if "flashlab" not in versions:
        versions["flashlab"] = __version__
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    for tool in ("ncu", "compute-sanitizer"):
        if number := _tool_version(tool):
            versions[tool] = number
    return versions


@functools.cache
def _tool_version(tool: str) -> str | None:
    if shutil.which(tool) is None:
        return None
    said = _output(tool, "--version") or ""
    match = re.search(r"\d{4}(?:\.\d+)+", said)
    return match[0] if match else None


def _command(argv: list[str]) -> str:
    """The running command as one would type it, without absolute folders of this machine."""
    program, module = Path(argv[0]).name, getattr(sys.modules["__main__"], "__spec__", None)
    name = "" if module is None else module.name.removesuffix(".__main__")
    if program == "flashlab" or name == "flashlab":
        words = ["flashlab"]
    else:
        words = ["python", "-m", name] if name else [program]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        words = ["torchrun", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"], *words[1:]]
    return shlex.join([*words, *(Path(x).name if Path(x).is_absolute() else x for x in argv[1:])])


def _line(*command: str) -> str | None:
    """The first line that a command prints, or None if it fails or isn't there."""
    said = (_output(*command) or "").strip()
    return said.splitlines()[0] if said else None


def _output(*command: str) -> str | None:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        return done.stdout if not done.returncode else None
    return None


def _quietly(ask: Callable[..., Any], *arguments: Any) -> Any:
    """The answer of `ask`, or None if it raises: a missing or broken library must not stop a report."""
    try:
        return ask(*arguments)
    except Exception:
        return None
