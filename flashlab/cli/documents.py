"""The JSON documents that commands print with `--json`: a model of each, from which its published JSON Schema is made.

What is measured has its schema where it is measured, since files on record hold the same (`flashlab.measure.results`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel, create_model

from flashlab.cli.output import SCHEMA
from flashlab.measure import agreement, counter_report, fp8, sanitizers, speed
from flashlab.measure.results import Data
from flashlab.measure.verified import Verified
from simulator.fields import Field as ProblemField
from simulator.problem import FIELDS

Number = float | Literal["inf", "-inf", "nan"]
"""Infinities and NaN are text that Python's `float` reads."""


def _problem() -> type[Data]:
    """The fields of a problem, each with its help as the description."""

    def kind(known: ProblemField) -> Any:
        inner: Any = {tuple: tuple[int | None, int | None], list: tuple[tuple[int, int], ...]}.get(
            known.kind, known.kind
        )
        return inner if known.default is not None or known.follows else inner | None

    named: Any = {name: (Annotated[kind(x), Field(description=f"{x.help}.")], ...) for name, x in FIELDS.items()}
    return create_model("Problem", __base__=Data, __doc__="What is computed: sizes, dtype, masks.", **named)


Problem = _problem()


class Document(Data):
    """What every document has."""

    schema_: Annotated[
        int, Field(alias="schema", description="1. It rises when a key is removed or means another thing.")
    ]


class Hbm(Data):
    """Bytes requested from HBM: read, written, added by atomics; and the most that is taken at once."""

    read: int
    write: int
    atomic: int
    peak: int


class Sram(Data):
    """Bytes read from SRAM and written to it, and the most that a block takes."""

    read: int
    write: int
    peak: int


class Flops(Data):
    """FLOPs of matrix products, and all others. Exponentials are counted apart."""

    matmul: int
    other: int


class Dram(Data):
    """Bytes that reach DRAM: an estimate, and its two bounds."""

    estimate: int
    low: int
    high: int


class OfTensor(Data):
    """The bytes of one tensor."""

    hbm_read: int
    hbm_write: int
    hbm_atomic: int
    sram_read: int
    sram_write: int


class OfLaunch(Data):
    """The counts of one launch. `sram_peak` is what a block takes. What `inferred` rows of blocks cost follows from others."""

    name: str
    blocks: int
    warps: int
    sram_peak: int
    hbm_read: Annotated[int, Field(alias="hbm.read")]
    hbm_write: Annotated[int, Field(alias="hbm.write")]
    hbm_atomic: Annotated[int, Field(alias="hbm.atomic")]
    sram_read: Annotated[int, Field(alias="sram.read")]
    sram_write: Annotated[int, Field(alias="sram.write")]
    flops_matmul: int
    flops_other: int
    exp: int
    inferred: int


class Counts(Data):
    """What one algorithm moves and computes. `intensity` is FLOPs per requested byte."""

    algorithm: str
    problem: Problem  # pyright: ignore[reportInvalidTypeForm]
    tile: str
    device: str
    hbm: Hbm
    sram: Sram
    flops: Flops
    exp: int
    compulsory: int
    compulsory_read: int
    dram: Dram
    intensity: Number
    by_tensor: dict[str, OfTensor]
    launches: tuple[OfLaunch, ...]


class Count(Document, Counts):
    """The counts of an algorithm."""


class Error(Data):
    """How far a result is from naive attention in float64: the largest difference, and the 2-norm beside the result's."""

    max: Number
    relative: Number
    lse: Number | None


class Compared(Counts):
    """The counts of an algorithm, and its error, where there was data."""

    error: Error | None


class Compare(Document):
    """Algorithms side by side. `pictures` are the files of `--out`."""

    problem: Problem  # pyright: ignore[reportInvalidTypeForm]
    device: str
    tile: str | None
    lse: bool
    rows: tuple[Compared, ...]
    pictures: dict[str, str] = {}


class Numbers(Data):
    """An array in short: its shape, and the range of its `finite` elements."""

    shape: tuple[int, ...]
    dtype: str
    finite: int
    min: Number
    mean: Number
    max: Number


class Simulate(Document):
    """A run on data: each output in short under its own name, such as `out`; None for one that nobody asked for."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Numbers | None] = Field(init=False)  # pyright: ignore[reportIncompatibleVariableOverride]
    error: Error | dict[str, Error] | None
    """Of other operations than attention: each output's, by name."""
    counts: Counts


class Sweep(Document):
    """A row for each combination of the `axes`: a problem's fields and what `count` says of it, flat."""

    axes: tuple[str, ...]
    rows: tuple[dict[str, Any], ...]


class Gpu(Data):
    """A GPU of the table, in bytes, bytes per second and FLOPs per second. `ridge` is FLOPs per byte, by dtype."""

    name: str
    title: str
    compute_capability: tuple[int, int]
    sms: int
    sram_per_block: int
    sram_per_sm: int
    l2: int
    bandwidth: float
    tensor_flops: float
    fp32_flops: float
    memory: int
    max_warps_per_sm: int
    source: str
    ridge: dict[str, float]


class Devices(Document):
    """The GPUs of the table."""

    devices: tuple[Gpu, ...]


class TimeOfLaunch(Data):
    """The predicted time of a launch in seconds. `balance` is the share of the SMs' places that are taken."""

    name: str
    seconds: float
    sm_seconds: float
    dram_seconds: float
    utilisation: dict[str, float]
    balance: float
    blocks_per_sm: int
    bound: str


class Time(Document):
    """A predicted time. `clock` is in hertz; `utilisation` is the share of the time in which a unit is busy. With `--claim`,
    `refused` says why that can't be true, or nothing."""

    algorithm: str
    tile: str
    device: str
    seconds: float
    clock: float
    utilisation: dict[str, float]
    bound: str
    launches: tuple[TimeOfLaunch, ...]
    refused: str | None = None


Line = tuple[str, int]
"""A line of a source: its file and its number."""


class Found(Data):
    """A misuse, or a remark: what kind, where, by which thread, to which bytes; `text` is the whole in a sentence."""

    kind: str
    message: str
    line: Line | None
    via: tuple[Line, ...]
    step: str
    block: tuple[int, int, int]
    thread: tuple[int, int, int]
    space: str
    tensor: str
    offset: int
    bytes: int
    times: int
    index: str
    other_line: Line | None
    other_block: tuple[int, int, int] | None
    other_thread: tuple[int, int, int] | None
    at: Line | None
    other_at: Line | None
    text: str


class Moved(Data):
    """What one kind of instruction of a step moved of a tensor."""

    step: str
    tensor: str
    space: str
    op: str
    instructions: int
    bytes: int
    sectors: int
    wavefronts: int
    ideal: int
    overlapped: int
    what: str


class Emulated(Data):
    """A launch on the emulator. `dropped` findings were too many to keep."""

    kernel: str
    moved: tuple[Moved, ...]
    findings: tuple[Found, ...]
    dropped: int
    plain: int
    flops: int
    exp: int
    shuffles: int
    notes: tuple[Found, ...]
    stopped: bool
    unfinished: bool


class EmulateAlgorithm(Document):
    """An algorithm's kernels on the emulator. `differences` are bytes that aren't the formula's.

    `numbers` says what is wrong with the results, or "right"; "not judged" of a run that was stopped."""

    passed: bool
    algorithm: str
    device: str
    problem: Problem  # pyright: ignore[reportInvalidTypeForm]
    tile: str
    launches: tuple[Emulated, ...]
    unwritten: dict[str, int]
    differences: tuple[str, ...]
    max_error: Number
    numbers: str


class EmulateFile(Document):
    """A kernel of a .cu file on the emulator. `unwritten` counts the elements that outputs lack."""

    passed: bool
    launch: Emulated
    unwritten: dict[str, int]
    notes: tuple[str, ...]


class ScriptLaunch(Data):
    """A launch by a script."""

    passed: bool
    launch: Emulated
    unwritten: dict[str, int]
    notes: tuple[str, ...]


class EmulateScript(Document):
    """A script whose kernels the emulator ran. `error` says what ended it, if anything did."""

    passed: bool
    launches: tuple[ScriptLaunch, ...]
    error: str | None


class Emulate(RootModel[EmulateAlgorithm | EmulateFile | EmulateScript]):
    """What the emulator found."""


class HostFound(Data):
    """A misuse of CUDA by host code, or a remark: what kind, on which line, of which array; `text` is the whole in a sentence."""

    kind: str
    message: str
    line: Line | None
    tensor: str
    offset: int
    times: int
    other_line: Line | None
    text: str


class LaunchOfProgram(Data):
    """All launches that one line of a program made with one grid, block and dynamic SRAM: how many `times`, and what they did."""

    kernel: str
    line: Line | None
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    sram: int
    times: int
    launch: Emulated


class Ran(Document):
    """A program on the emulator. A `status` of null: it never came to its end. `unwritten` counts the bytes that arrays lack."""

    passed: bool
    status: int | None
    printed: str
    launches: tuple[LaunchOfProgram, ...]
    findings: tuple[HostFound, ...]
    notes: tuple[HostFound, ...]
    unwritten: dict[str, int]


class Part(Data):
    """Something that some commands need: what was found of it, or how to get it."""

    name: str
    purpose: str
    found: str | None
    missing: str | None


class Info(Document):
    """What is installed and found here."""

    versions: dict[str, str]
    parts: tuple[Part, ...]


class Cache(Document):
    """The folder of compiled kernels, and what it holds, or held when it was cleaned."""

    folder: str
    entries: int
    bytes: int


class Difference(Data):
    """A place where two documents differ. A value that one lacks is text: (missing)."""

    where: str
    a: Any
    b: Any


class Diff(Document):
    """Two documents compared. Times aren't, unless a tolerance is given."""

    a: str
    b: str
    same: bool
    equal: int
    not_compared: int
    differences: tuple[Difference, ...]


class Shape(Data):
    """A saved array."""

    shape: tuple[int, ...]
    dtype: str


class Capture(Document):
    """What was saved of a model."""

    file: str
    q: Shape
    k: Shape
    v: Shape
    note: dict[str, Any]


class Lessons(Document):
    """The notebooks that were copied into a folder, and those that were there and stayed."""

    folder: str
    copied: tuple[str, ...]
    kept: tuple[str, ...]


class Source(Data):
    """The text of a program, and where it begins in its file."""

    first_line: int
    text: str


class TensorShape(Data):
    """A tensor in HBM, of one head."""

    rows: int
    cols: int
    dtype: str
    role: str
    vector: bool


class BufferShape(Data):
    """A buffer in SRAM, `copies` times."""

    rows: int
    cols: int
    dtype: str
    copies: int


class Transfer(Data):
    """Bytes that a step moved of a tensor, by `hbm.read` and the like, and which rows and columns."""

    tensor: str
    source: str
    line: int
    bytes: dict[str, int]
    rows: tuple[int, int] | None = None
    cols: tuple[int, int] | None = None
    plane: int | None = None


class Values(Data):
    """Numbers: little-endian float32 in base64."""

    shape: tuple[int, int]
    float32: str


class Event(Data):
    """A step of a block: the line, the bytes that are alive in SRAM, what was moved, and the values computed."""

    launch: str
    step: str
    block: tuple[int, int]
    source: str
    line: int
    sram: dict[str, int]
    transfers: tuple[Transfer, ...]
    request: int | None = None
    values: dict[str, Values] = {}


class Trace(Document):
    """Every step of one head. `head` is (batch, head). `pages` are those of each request, where K and V lie in pages."""

    algorithm: str
    head: tuple[int, int]
    problem: dict[str, Any]
    tile: tuple[int, int]
    device: str
    sram_limit: int
    sources: dict[str, Source]
    tensors: dict[str, TensorShape]
    buffers: dict[str, BufferShape]
    pages: tuple[tuple[int, ...], ...] = ()
    events: tuple[Event, ...]


class ServedModel(Data):
    """The attention layers that were counted. `weights` are bytes that each step reads beside."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    weights: int


class Spread(Data):
    """Seconds: the mean, the median and the 99th percentile."""

    mean: float
    p50: float
    p99: float


class ServeSummary(Data):
    """The numbers of a day. `busy` are the seconds of all steps. `waste` is the share of owned rows without a token, `saved` the
    share of pages that sharing saves: both over time. `nbytes` are bytes of HBM, `kv_bytes` those of K and V that are read."""

    requests: int
    steps: int
    seconds: float
    busy: float
    first_token: Spread
    per_token: Spread
    prompt_tokens: int
    answer_tokens: int
    computed: int
    reused: int
    recomputed: int
    preempted: int
    launches: int
    peak_blocks: int
    peak_bytes: int
    peak_bytes_unshared: int
    waste: float
    saved: float
    nbytes: int
    kv_bytes: int


class ServeBound(Data):
    """The least that the tokens need, with all pages free."""

    steps: int
    tokens: int
    kv_bytes: int
    seconds: float


class ServedRequest(Data):
    """A request that was answered. `seconds` is when it came; `first_token` and `per_token` are seconds, predicted."""

    name: str
    seconds: float
    prompt: int
    answer: int
    first_token: float
    per_token: float
    reused: int
    recomputed: int
    preempted: int


class ServeStep(Data):
    """A step. `blocks` are pages that somebody owns, `tables` the entries of all tables, `wasted` rows without a token."""

    begin: float
    seconds: float
    requests: int
    tokens: int
    launches: int
    nbytes: int
    kv_bytes: int
    waiting: int
    preempted: int
    blocks: int
    tables: int
    wasted: int


class Serve(Document):
    """What became of a trace. Times are predicted, in seconds; `rate` is the measurement that they follow from."""

    trace: str
    backend: str
    device: str
    num_blocks: int
    block_size: int
    policy: str
    model: ServedModel
    rate: str
    summary: ServeSummary
    bound: ServeBound
    requests: tuple[ServedRequest, ...]
    steps: tuple[ServeStep, ...]


class OfRank(Data):
    """What a rank sends, receives and launches: bytes, and FLOPs of matrix products."""

    rank: int
    sent: int
    received: int
    launches: int
    flops_matmul: int
    hbm_read: int
    hbm_write: int


class LinkBytes(Data):
    """Bytes between two ranks, as `rank` sees them."""

    rank: int
    peer: int
    step: str
    tensor: str
    what: Literal["link.sent", "link.received"]
    bytes: int


class Waited(Data):
    """How many seconds a rank waits for a peer."""

    rank: int
    peer: int
    seconds: float


class RankSpan(Data):
    """What a rank does from `begin` to `end`, in seconds."""

    rank: int
    what: Literal["forward", "backward", "waits", "sends"]
    begin: float
    end: float
    peer: int | None
    step: str


class LinkRates(Data):
    """FLOPs and bytes per second and seconds at which times are predicted, and where they are from."""

    forward: float
    backward: float
    reading: float
    launch: float
    link: float
    latency: float
    network: float
    network_latency: float
    per_host: int | None
    source: str


class RanksOverTime(Data):
    """Predicted seconds: in all, of each rank, and who waits for whom. `busy` is the share in which ranks compute."""

    seconds: float
    busy: float
    computes: tuple[float, ...]
    waits: tuple[float, ...]
    waited_for: tuple[Waited, ...]
    spans: tuple[RankSpan, ...]


class ParallelScheme(Data):
    """A scheme. `error` is how far its results on data are from one rank's, over the largest; None where there is no data."""

    scheme: str
    layout: str
    ranks: tuple[OfRank, ...]
    links: tuple[LinkBytes, ...]
    error: float | None
    predicted: RanksOverTime


class SchemeNotRun(Data):
    """A scheme that can't share the problem."""

    scheme: str
    reason: str


class Parallel(Document):
    """What ranks send and compute, and when. `alone` is how many seconds one GPU takes, predicted."""

    problem: Problem  # pyright: ignore[reportInvalidTypeForm]
    alone: float | None
    runs: tuple[ParallelScheme, ...]
    not_run: tuple[SchemeNotRun, ...]
    rates: LinkRates


def _measured(schema: type[Data]) -> type[Data]:
    """The document of a measurement: its data, with the schema's number where the data has none."""
    if "schema_" in schema.model_fields:
        return schema
    return create_model(schema.__name__, __base__=(schema, Document), __doc__=schema.__doc__)


class AuditedKernel(Data):
    """A wrong kernel: "caught", "passes" or "not run". `telling` is an input that would have caught it."""

    fault: str
    kind: str
    status: Literal["caught", "passes", "not run"]
    calls: int
    telling: str


class AuditTest(Document):
    """What a test lets pass. `beside` calls went to the function itself, since wrong kernels don't know what they ask for."""

    test: str
    passed: bool
    counts: dict[str, int]
    beside: int
    seconds: float
    rows: tuple[AuditedKernel, ...]


class Counters(RootModel[_measured(counter_report.Counted) | _measured(agreement.Agreed)]):  # pyright: ignore[reportInvalidTypeArguments]
    """Counters beside the formula; with `--backend both`, the emulator beside the GPU."""


DOCUMENTS: Mapping[str, type[BaseModel]] = {
    "lessons": Lessons,
    "compare": Compare,
    "count": Count,
    "simulate": Simulate,
    "sweep": Sweep,
    "trace": Trace,
    "devices": Devices,
    "verify": Verified,
    "audit-test": AuditTest,
    "bench": _measured(speed.Bench),
    "counters": Counters,
    "sanitize": _measured(sanitizers.Sanitized),
    "fp8": _measured(fp8.Eight),
    "emulate": Emulate,
    "run": Ran,
    "time": Time,
    "serve": Serve,
    "parallel": Parallel,
    "capture": Capture,
    "diff": Diff,
    "info": Info,
    "cache": Cache,
}
"""The document of each command."""


def json_schema(command: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a command's document."""
    dialect = "https://json-schema.org/draft/2020-12/schema"
    body = DOCUMENTS[command].model_json_schema(by_alias=True)
    return {"$schema": dialect, **body, "title": f"flashlab {command} --json, schema {SCHEMA}"}
