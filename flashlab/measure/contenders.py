"""What is timed in a cell of decoding: an algorithm's call, others' calls, and a kernel that only reads the same bytes.

All have one query for each head, bfloat16. The calls of a cell get the same queries and keys, and have to agree. `paged` has two
sorts of peers. Those of `paged_peers` get its requests and its pages. The others take no pages. They get other requests with as
many keys, evenly dealt. A quantised cache is timed beside the same requests in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from flashlab.measure import paged_peers, peers
from flashlab.run.arrays import cupy
from flashlab.run.cascade import cascade
from flashlab.run.latent import mla
from simulator import Problem
from simulator.catalogue import CATALOGUE
from simulator.errors import Unavailable, unknown
from simulator.names import Backend
from simulator.operations.latent import HEAD_DIM as LATENT
from simulator.operations.latent import HEAD_DIM_V, SCALE, latent_problem

__all__ = ["CELLS", "DRAFTS", "FEATURES", "Cell", "chosen", "contenders", "flops", "nbytes", "skewed"]

HEAD_DIM = 128
LONGEST = 28_000
DEVICE, BACKEND = "cuda", "gpu"  # a test has others
_PAGE = 64  # of latent rows for a peer that wants pages
_SHARED_PAGE = 16
_READ = r"""
extern "C" __global__ void read(const uint4* k, const uint4* v, unsigned* out, long long n) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  unsigned x = 0;
  long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 3 * step < n; i += 4 * step)
    for (const uint4* p : {k, v}) {
      const uint4 a = p[i], b = p[i + step], c = p[i + 2 * step], d = p[i + 3 * step];
      x ^= a.x ^ b.x ^ c.x ^ d.x ^ a.w ^ b.w ^ c.w ^ d.w;
    }
  for (; i < n; i += step) x ^= k[i].x ^ v[i].x;
  if (x == 12345) out[0] = x;  // never seen, but the compiler doesn't know
}
"""

Call = Callable[[], Any]
Calls = dict[str, Call]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is asked of a call: `len_kv` keys of each request, behind `len_prefix` that all share, or in pages.

    Where `longest` says so, `len_kv` is the mean of `skewed` lengths. K and V have 16 bits, or are of `kv_dtype`. `feature` is one
    of `FEATURES` that the call has. `chunk` is that of `fl.mla`."""

    batch: int
    heads: int
    kv_heads: int
    len_kv: int
    page_size: int | None = None
    longest: int | None = None
    len_prefix: int | None = None
    kv_dtype: str | None = None
    feature: str | None = None
    chunk: int | None = None


def _cells(*sizes: tuple[int, int, int, int], **more: Any) -> tuple[Cell, ...]:
    return tuple(Cell(batch=b, heads=h, kv_heads=g, len_kv=n, **more) for b, h, g, n in sizes)


def _latent_cells(**more: Any) -> tuple[Cell, ...]:
    """The cells in the algorithm's own chunks, and full batches once more in one chunk for each row: nothing is merged."""
    full = (64, 128, 1, 4096), (128, 16, 1, 2048)
    whole = (cell for n in full for cell in _cells(n, chunk=n[-1], **more))
    return (*_cells(full[0], (1, 128, 1, 65536), full[1], **more), *whole)


CELLS: Mapping[str, tuple[Cell, ...]] = {
    "flash_decoding": _cells(
        (1, 32, 8, 8192), (1, 32, 8, 65536), (16, 32, 8, 8192), (64, 32, 8, 4096), (64, 32, 32, 4096), (1, 64, 8, 131072)
    ),
    "paged": tuple(
        cell for size in (16, 1, 64) for cell in _cells((64, 32, 8, 4096), page_size=size, longest=LONGEST)
    ),
    "mla": _latent_cells(),
    "mla_paged": _latent_cells(page_size=_PAGE),
    "mla_hopper": _latent_cells(),
    "mla_hopper_paged": _latent_cells(page_size=_PAGE),
    "cascade": _cells((128, 32, 8, 256), len_prefix=32768),
}  # fmt: skip
"""What is timed, by algorithm."""

FEATURES = ("drafts", "soft_cap", "sinks")
"""What a call of `paged` may have, and is timed with and without: `DRAFTS` of each request, a soft cap, sinks."""
DRAFTS = 8

AGAINST: Mapping[str, tuple[str, ...]] = {
    "flash_decoding": ("sdpa-flash", "cudnn"),
    "paged": ("flash_decoding", *paged_peers.PEERS),
    "mla": ("flashinfer",),
    "mla_paged": ("mla", "flashinfer"),
    "mla_hopper": ("mla", "flashinfer"),
    "mla_hopper_paged": ("mla_hopper", "flashinfer"),
    "cascade": ("flash_decoding", "paged", "flashinfer", "flashinfer-fa2"),
}
"""The peers that each algorithm has, where nothing else is said. Those of mla and cascade have no others."""
_ANY_PEER = ("flash_decoding", "paged")


def _in_pages(algorithm: str, name: str) -> bool:
    """Whether a peer of `paged` gets its pages. So `flashinfer` is another call here than beside `flash_decoding`."""
    return algorithm == "paged" and name in paged_peers.PEERS


def chosen(algorithm: str, given: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """The peers that are timed, and a line for each that isn't installed.

    Raises `UsageError` for an unknown one, and `Unavailable` for one that was asked for and isn't installed.
    """
    found, lines = list[str](), list[str]()
    more = (*peers.PEERS, *CATALOGUE) if algorithm in _ANY_PEER else ()
    known = tuple(dict.fromkeys((*AGAINST[algorithm], *more)))
    for name in AGAINST[algorithm] if given is None else given:
        if name not in known:
            raise unknown("against", name, known)
        try:
            if _in_pages(algorithm, name):
                paged_peers.check(name)
            elif algorithm in _ANY_PEER:
                peers.layout(name)
            elif name.startswith("flashinfer"):
                paged_peers.flashinfer()
        except Unavailable as error:
            if given is not None:
                raise
            lines.append(f"not run: {name} ({error})")
        else:
            found.append(name)
    return found, lines


def nbytes(algorithm: str, cell: Cell) -> int:
    """The bytes of all keys and values, each once.

    >>> nbytes("mla", CELLS["mla"][1]) == 65536 * 576 * 2
    True
    """
    keys = cell.batch * cell.len_kv + (cell.len_prefix or 0)
    return (
        (1 if cell.kv_dtype else 2) * keys * (LATENT if algorithm.startswith("mla") else 2 * cell.kv_heads * HEAD_DIM)
    )


def flops(algorithm: str, cell: Cell) -> int:
    """FLOPs by the field's convention."""
    if algorithm.startswith("mla"):
        return CATALOGUE["mla"].operation.flops(latent_problem(batch=cell.batch, heads=cell.heads, len_kv=cell.len_kv))
    whole = cell.len_kv + (cell.len_prefix or 0)
    return CATALOGUE["flash_decoding"].operation.flops(
        Problem(
            batch=cell.batch, heads=cell.heads, kv_heads=cell.kv_heads, len_q=DRAFTS if cell.feature == "drafts" else 1,
            len_kv=whole, head_dim=HEAD_DIM, dtype="bfloat16",
        )
    )  # fmt: skip


def contenders(
    torch: Any, algorithm: str, cell: Cell, against: Sequence[str], failed: dict[str, str] | None = None
) -> Calls:
    """The calls of a cell on random inputs of their own: the algorithm's, then its peers', then `read`.

    A peer of `paged_peers` that doesn't take the cell is left out, and `failed` is told why. Raises `RuntimeError` if outputs are
    too far apart (2 % of the spread of values), or where keys are in pages, another bit than `flash_decoding`'s on the gathered
    keys.
    """
    if algorithm == "paged":
        return _requests(torch, algorithm, cell, against, {} if failed is None else failed)
    maker = {"flash_decoding": _plain, "cascade": _shared}.get(algorithm, _latent)
    return maker(torch, algorithm, cell, against)


def _agree(calls: Calls, cell: Cell) -> Calls:
    """The calls, after a look at what they return."""
    outs = {name: call().float() for name, call in calls.items()}
    first, *others = outs
    off = [name for name in others if not float((outs[name] - outs[first]).abs().max()) < 0.02]
    if off:
        raise RuntimeError(f"{' and '.join((first, *off))} differ at {cell}")
    return calls


def _random(torch: Any, *shape: int) -> Any:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def _backend() -> Backend:
    return "gpu" if BACKEND == "gpu" else "emulator"


def _attention(**given: Any) -> Any:
    return import_module("flashlab.run.call").attention(**given, backend=_backend())


def _plain(torch: Any, algorithm: str, cell: Cell, against: Sequence[str]) -> Calls:
    q, k, v = _drawn(torch, cell)
    return {
        **_agree({name: _peer(name, q, k, v) for name in (algorithm, *against)}, cell),
        "read": _read(torch, q, k, v),
    }


def _requests(torch: Any, algorithm: str, cell: Cell, against: Sequence[str], failed: dict[str, str]) -> Calls:
    if cell.kv_dtype:
        return _quantized(torch, algorithm, cell)
    if cell.feature:
        return _featured(torch, algorithm, cell)
    q, k, v = _drawn(torch, cell)
    dealt = {name: _peer(name, q, k, v) for name in against if not _in_pages(algorithm, name)}
    arrays, own = _paged_call(torch, algorithm, cell)
    same = {algorithm: own}
    for name in against:
        if _in_pages(algorithm, name):
            try:
                same[name] = paged_peers.prepare(name, torch, arrays)
            except Unavailable as error:
                failed[name] = str(error)
    made = _agree(same, cell) | (_agree(dealt, cell) if dealt else {})
    return {name: made[name] for name in (algorithm, *against) if name in made} | {"read": _read(torch, q, k, v)}


def _quantized(torch: Any, algorithm: str, cell: Cell) -> Calls:
    """Requests with a scale for each head of a quantised cache, and the same requests with those values in bfloat16."""
    whole, _ = _skewed_requests(torch, cell)
    packed, dtype = dict(whole), getattr(torch, cell.kv_dtype or "")
    largest = 127 if dtype == torch.int8 else 448
    for name in "kv":
        scale = whole[name].abs().amax((0, 2, 3)).float() / largest
        x = whole[name].float() / scale[:, None, None]
        packed[name] = (x.round() if dtype == torch.int8 else x).to(dtype)
        packed[f"{name}_scale"] = scale
        whole[name] = (packed[name].float() * scale[:, None, None]).bfloat16()
    both = {algorithm: packed, "bfloat16": whole}
    calls: Calls = {name: partial(_attention, **given, algorithm=algorithm) for name, given in both.items()}
    return {**_agree(calls, cell), "read": _read(torch, packed["q"], packed["k"], packed["v"])}


def _featured(torch: Any, algorithm: str, cell: Cell) -> Calls:
    """Requests with a feature, and the same requests without. Drafts are a chain, which is a causal mask."""
    arrays, _ = _skewed_requests(torch, cell)
    numbers: dict[str, Any] = {"dtype": torch.int32, "device": DEVICE}
    given: dict[str, Any] = {}
    without: dict[str, Any] = {}
    if cell.feature == "drafts":
        arrays["q"] = _random(torch, cell.batch, cell.heads, DRAFTS, HEAD_DIM)
        words = torch.tensor([2 ** (i + 1) - 1 for i in range(DRAFTS)], **numbers)
        given, without = {"draft_mask": words.expand(cell.batch, -1).contiguous()}, {"causal": True}
    elif cell.feature == "soft_cap":
        given = {"soft_cap": 1000.0}  # large beside the scores, so the outputs can be compared
    else:
        given = {"sinks": torch.full((cell.heads,), -9.0, dtype=torch.float32, device=DEVICE)}  # small beside the keys
    calls: Calls = {
        name: partial(_attention, **arrays, **more, algorithm=algorithm)
        for name, more in ((algorithm, given), ("without", without))
    }
    return {**_agree(calls, cell), "read": _read(torch, arrays["q"], arrays["k"], arrays["v"])}


def _latent(torch: Any, algorithm: str, cell: Cell, against: Sequence[str]) -> Calls:
    """A latent cache in one piece, and in pages of a random order."""
    q, rows = _random(torch, cell.batch, cell.heads, 1, LATENT), _random(torch, cell.batch, 1, cell.len_kv, LATENT)
    pool, table = _pooled(torch, rows, cell.page_size or _PAGE)
    order = torch.randperm(len(pool), device=DEVICE)
    pool, table = pool[order], torch.argsort(order).int()[table.long()]
    lengths = torch.full((cell.batch,), cell.len_kv, dtype=torch.int32, device=DEVICE)

    def call_of(name: str) -> Call:
        if name == "flashinfer":
            return _flashinfer_latent(torch, q, pool, table, lengths)
        if CATALOGUE[name].operation.in_pages:
            paged: dict[str, Any] = {"block_table": table, "seq_lens": lengths}
            return lambda: mla(q, pool.swapaxes(1, 2), **paged, chunk=cell.chunk, algorithm=name, backend=_backend())
        return lambda: mla(q, rows, chunk=cell.chunk, algorithm=name, backend=_backend())

    halves = rows.flatten().chunk(2)
    return {**_agree({name: call_of(name) for name in (algorithm, *against)}, cell), "read": _read(torch, q, *halves)}


def _shared(torch: Any, algorithm: str, cell: Cell, against: Sequence[str]) -> Calls:
    """A prefix and each request's own keys. `flash_decoding` has a copy of the prefix for each request, `paged` has the prefix's
    pages once, but reads them for each request."""
    before = cell.len_prefix or 0
    q, group = _random(torch, cell.batch, cell.heads, 1, HEAD_DIM), (cell.kv_heads, HEAD_DIM)
    every = _random(torch, 2 * (before + cell.batch * cell.len_kv) * cell.kv_heads * HEAD_DIM)  # one piece, to be read
    halves = every.chunk(2)
    prefixes = [x[: before * cell.kv_heads * HEAD_DIM].view(1, group[0], before, group[1]) for x in halves]
    own = [x[before * cell.kv_heads * HEAD_DIM :].view(cell.batch, group[0], cell.len_kv, group[1]) for x in halves]

    def whole() -> Call:
        k, v = (torch.cat([p.expand(cell.batch, -1, -1, -1), x], 2) for p, x in zip(prefixes, own, strict=True))
        return lambda: _attention(q=q, k=k, v=v, algorithm="flash_decoding")

    def in_pages() -> tuple[list[Any], Any, Any]:
        pools = [[_pooled(torch, x, _SHARED_PAGE) for x in pair] for pair in zip(prefixes, own, strict=True)]
        first, rest = (table for _, table in pools[0])
        return [torch.cat([a, b]) for (a, _), (b, _) in pools], first, rest + first.numel()

    def paged() -> Call:
        (k, v), first, rest = in_pages()
        if before % _SHARED_PAGE:
            raise RuntimeError(
                f"len_prefix = {before}: expected a multiple of {_SHARED_PAGE}, or its last page has gaps"
            )
        table = torch.cat([first.expand(cell.batch, -1), rest], 1).contiguous()
        lengths = torch.full((cell.batch,), before + cell.len_kv, dtype=torch.int32, device=DEVICE)
        return lambda: _attention(q=q, k=k.swapaxes(1, 2), v=v.swapaxes(1, 2), block_table=table, seq_lens=lengths)

    makers: dict[str, Callable[[], Call]] = {
        "cascade": lambda: lambda: cascade(q, *own, *prefixes, backend=_backend()),
        "flash_decoding": whole,
        "paged": paged,
        "flashinfer": lambda: _flashinfer_shared(torch, q, cell, *in_pages()),
        "flashinfer-fa2": lambda: _flashinfer_shared(torch, q, cell, *in_pages(), backend="fa2"),
    }
    return {**_agree({name: makers[name]() for name in (algorithm, *against)}, cell), "read": _read(torch, q, *halves)}


def _pooled(torch: Any, x: Any, size: int) -> tuple[Any, Any]:
    """Rows `(batch, kv_heads, length, dim)` as pages `(pages, size, kv_heads, dim)`, and the table."""
    batch, heads, length, dim = x.shape
    count = -(-length // size)
    padded = torch.nn.functional.pad(x.transpose(1, 2), (0, 0, 0, 0, 0, count * size - length))
    table = torch.arange(batch * count, dtype=torch.int32, device=x.device).view(batch, count)
    return padded.reshape(batch * count, size, heads, dim), table


def skewed(requests: int, mean: int) -> list[int]:
    """Lengths with this mean, of which few are long: the longest has `LONGEST` keys, and each the same share of the one before.

    >>> lengths = skewed(64, 4096)
    >>> max(lengths), sum(lengths) == 64 * 4096, sorted(lengths)[32]
    (28000, True, 846)
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        share = (low + high) / 2
        low, high = (
            (share, high) if sum(LONGEST * share**i for i in range(requests)) < requests * mean else (low, share)
        )
    lengths = [round(LONGEST * low**i) for i in range(requests)]
    lengths[-1] += requests * mean - sum(lengths)
    return lengths


def _skewed_requests(torch: Any, cell: Cell) -> tuple[dict[str, Any], list[int]]:
    """Requests of `skewed` lengths in a random order, in pages that lie anywhere, and their lengths."""
    page_size = cell.page_size or 1
    lengths = torch.tensor(skewed(cell.batch, cell.len_kv))[torch.randperm(cell.batch)]
    counts = (lengths + page_size - 1) // page_size
    order = torch.randperm(int(counts.sum())).int()
    table = torch.zeros((cell.batch, int(counts.max())), dtype=torch.int32)
    for line, own in zip(table, order.split(counts.tolist()), strict=True):
        line[: len(own)] = own
    q = _random(torch, cell.batch, cell.heads, 1, HEAD_DIM)
    k, v = (_random(torch, len(order), page_size, cell.kv_heads, HEAD_DIM) for _ in "kv")
    arrays = {"q": q, "k": k.transpose(1, 2), "v": v.transpose(1, 2)}
    return arrays | {"block_table": table.to(DEVICE), "seq_lens": lengths.int().to(DEVICE)}, lengths.tolist()


def _paged_call(torch: Any, algorithm: str, cell: Cell) -> tuple[dict[str, Any], Call]:
    """Such requests and a call on them, after a look at the longest."""
    arrays, lengths = _skewed_requests(torch, cell)
    b, longest = lengths.index(max(lengths)), max(lengths)
    pages = arrays["block_table"][b, : -(-longest // (cell.page_size or 1))].long()
    own = (arrays[x][pages].transpose(0, 1).flatten(1, 2)[None, :, :longest].contiguous() for x in "kv")
    alone = _attention(**dict(zip("qkv", (arrays["q"][b : b + 1], *own), strict=True)), algorithm="flash_decoding")
    if not torch.equal(_attention(**arrays)[b : b + 1], alone):
        raise RuntimeError(f"{algorithm} and flash_decoding differ at {cell}")
    return arrays, lambda: _attention(**arrays, algorithm=algorithm)


def _drawn(torch: Any, cell: Cell) -> tuple[Any, Any, Any]:
    k, v = (_random(torch, cell.batch, cell.kv_heads, cell.len_kv, HEAD_DIM) for _ in "kv")
    return _random(torch, cell.batch, cell.heads, 1, HEAD_DIM), k, v


def _peer(name: str, q: Any, k: Any, v: Any) -> Call:
    q, k, v = (x.transpose(1, 2).contiguous() if peers.layout(name) == "bshd" else x for x in (q, k, v))
    return peers.prepare(name, q, k, v, causal=False, scale=HEAD_DIM**-0.5)


def _workspace(torch: Any) -> Any:
    return torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE)


def _flashinfer_latent(torch: Any, q: Any, pool: Any, table: Any, lengths: Any) -> Call:
    paged_peers.flashinfer()
    batch, heads = q.shape[:2]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE)
    wrapper = import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper(_workspace(torch))
    wrapper.plan(
        starts, starts * table.shape[1], table.flatten(), lengths, heads, HEAD_DIM_V, LATENT - HEAD_DIM_V, pool.shape[1],
        False, SCALE, q.dtype, q.dtype,
    )  # fmt: skip
    queries = [x.contiguous() for x in q[:, :, 0].split([HEAD_DIM_V, LATENT - HEAD_DIM_V], -1)]
    caches = pool[:, :, 0].split([HEAD_DIM_V, LATENT - HEAD_DIM_V], -1)
    return lambda: wrapper.run(*queries, *caches).unsqueeze(2)


def _flashinfer_shared(
    torch: Any, q: Any, cell: Cell, pools: Any, first: Any, rest: Any, backend: str = "auto"
) -> Call:
    """On Hopper FlashInfer itself chooses FA3's kernels, which don't split the keys. Its cascade has no argument that says so."""
    paged_peers.flashinfer()
    numbers: dict[str, Any] = {"dtype": torch.int32, "device": DEVICE}
    each = torch.arange(cell.batch + 1, **numbers)
    last = [(n - 1) % _SHARED_PAGE + 1 for n in (cell.len_prefix or 0, cell.len_kv)]
    wrapper = import_module("flashinfer.cascade").MultiLevelCascadeAttentionWrapper(2, _workspace(torch), "NHD")
    for level in wrapper._batch_prefill_wrappers:
        level._backend = backend
    wrapper.plan(
        [torch.tensor([0, cell.batch], **numbers), each],
        [torch.tensor([0, first.numel()], **numbers), each * rest.shape[1]],
        [first.flatten(), rest.flatten()],
        [torch.full((n,), size, **numbers) for n, size in zip((1, cell.batch), last, strict=True)],
        cell.heads, cell.kv_heads, HEAD_DIM, _SHARED_PAGE, sm_scale=HEAD_DIM**-0.5, q_data_type=q.dtype,
    )  # fmt: skip
    rows = q[:, :, 0]
    return lambda: wrapper.run(rows, tuple(pools)).unsqueeze(2)


def _read(torch: Any, q: Any, k: Any, v: Any) -> Call:
    """A kernel that does nothing but read two arrays."""
    if BACKEND != "gpu":
        return lambda: None
    cp = cupy()
    kernel, n = cp.RawKernel(_READ, "read"), k.numel() * k.element_size() // 16
    blocks = 4 * torch.cuda.get_device_properties().multi_processor_count

    def call() -> None:
        with cp.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            kernel((blocks,), (512,), (k.data_ptr(), v.data_ptr(), q.data_ptr(), n))

    return call
