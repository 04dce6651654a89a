"""The calls that `decoding` and `append` time: ours, other libraries', and a kernel that only reads the same bytes.

All is bfloat16 with a head dim of 128, but for latent attention. What can be done ahead is done ahead: plans, lists of pages,
graphs and scratch memory. So a call only queues kernels, and a CUDA graph can keep it. No page is copied: a pool is seen in the
order of axes that a library wants.

The contenders of a cell get the same queries and keys, and have to agree. Peers of `paged` that are in `IN_PAGES` get its requests
and its pages. The others take no pages, and get other requests with as many keys, evenly dealt. A quantised cache is timed beside
the same requests in bfloat16, and a feature beside the same call without.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from inspect import signature
from itertools import accumulate
from typing import Any

import numpy as np

from flashlab.integrations.peers import cudnn_graph
from flashlab.measure import peers
from flashlab.measure.results import Data
from flashlab.run.arrays import cupy
from flashlab.run.cascade import cascade
from flashlab.run.latent import mla
from simulator import Problem
from simulator.catalogue import CATALOGUE
from simulator.dtypes import numpy_dtype
from simulator.errors import Unavailable, unknown
from simulator.names import Backend
from simulator.operations.attention import ATTENTION
from simulator.operations.latent import HEAD_DIM as LATENT
from simulator.operations.latent import HEAD_DIM_V, SCALE, latent_problem

DEVICE = "cuda"  # a test has another one
BACKEND: Backend = "gpu"
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # heads are those of appends
NEW = 512
"""New tokens of each request of an append."""
LONGEST = 28_000
DRAFTS = 8
FEATURES = ("drafts", "soft_cap", "sinks")
"""What a call of `paged` may have: `DRAFTS` of each request, a soft cap, sinks."""
_PAGE, _SHARED_PAGE = 64, 16  # of latent rows for a peer that wants pages; of a shared prefix, and of the ladder
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
Arrays = dict[str, Any]


class Decode(Data):
    """One query for each head, and `len_kv` keys of each request, behind `len_prefix` that all share, or in pages.

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


class Append(Data):
    """Ragged requests with `mean` tokens on average: those of an append are in the cache, and `NEW` come to each. `skewed` lengths
    are lognormal. Without `page_size` keys lie one behind the other, and all tokens are new."""

    batch: int
    mean: int
    skewed: bool = True
    page_size: int | None = None

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """The queries and the keys of each request."""
        cached = lognormal(self.batch, self.mean) if self.skewed else [self.mean] * self.batch
        return [(n, n) if self.page_size is None else (NEW, n + NEW) for n in cached]

    @property
    def work(self) -> int:
        """FLOPs of the pairs that the mask leaves: n² / 2 of n new tokens with each other, and all with what is cached."""
        return 2 * HEAD_DIM * HEADS * sum(new * (2 * keys - new) for new, keys in self.lengths)


def _cells(*sizes: tuple[int, int, int, int], **more: Any) -> tuple[Decode, ...]:
    return tuple(Decode(batch=b, heads=h, kv_heads=g, len_kv=n, **more) for b, h, g, n in sizes)


def _latent_cells(**more: Any) -> tuple[Decode, ...]:
    """The cells in the algorithm's own chunks, and full batches once more in one chunk for each row: nothing is merged."""
    full = (64, 128, 1, 4096), (128, 16, 1, 2048)
    whole = (cell for n in full for cell in _cells(n, chunk=n[-1], **more))
    return (*_cells(full[0], (1, 128, 1, 65536), full[1], **more), *whole)


DECODED: Mapping[str, tuple[Decode, ...]] = {
    "flash_decoding": _cells(
        (1, 32, 8, 8192), (1, 32, 8, 65536), (16, 32, 8, 8192), (64, 32, 8, 4096), (64, 32, 32, 4096), (1, 64, 8, 131072)
    ),
    "flash_decoding_1": _cells((1, 32, 8, 8192), (1, 32, 8, 65536), (16, 32, 8, 8192), (64, 32, 8, 4096)),
    "paged": tuple(x for size in (16, 1, 64) for x in _cells((64, 32, 8, 4096), page_size=size, longest=LONGEST)),
    "mla": _latent_cells(),
    "mla_paged": _latent_cells(page_size=_PAGE),
    "mla_hopper": _latent_cells(),
    "mla_hopper_paged": _latent_cells(page_size=_PAGE),
    "cascade": _cells((128, 32, 8, 256), len_prefix=32768),
}  # fmt: skip
APPENDED: Mapping[str, tuple[Append, ...]] = {
    "flash3_paged": tuple(Append(batch=16, mean=8192, page_size=size) for size in (16, 64, 1)),
    "flash3": (
        Append(batch=8, mean=2048, skewed=False), Append(batch=32, mean=1024), Append(batch=16, mean=4096),
        Append(batch=128, mean=256),
    ),
}  # fmt: skip
AGAINST: Mapping[str, tuple[str, ...]] = {
    "flash_decoding": ("sdpa-flash", "cudnn"),
    "flash_decoding_1": ("flash_decoding_2", "flash_decoding", "paged_1", "paged"),
    "paged": ("flash_decoding", "flashinfer", "flashinfer-batch", "cudnn-paged"),
    "mla": ("flashinfer",),
    "mla_paged": ("mla", "flashinfer"),
    "mla_hopper": ("mla", "flashinfer"),
    "mla_hopper_paged": ("mla_hopper", "flashinfer"),
    "cascade": ("flash_decoding", "paged", "flashinfer", "flashinfer-fa2"),
    "flash3_paged": ("flash3", "paged", "fa4", "flashinfer"),
    "flash3": ("fa4", "flashinfer"),
}
"""The peers of each algorithm that is timed, where nothing else is said."""


def check(algorithm: str, given: Sequence[str] | None) -> Sequence[str]:
    """The peers that are timed. Raises `UsageError` for one that an algorithm doesn't have, and for one that isn't timed."""
    if algorithm not in AGAINST:
        raise unknown("algorithm", algorithm, AGAINST)
    more = (*peers.PEERS, *CATALOGUE) if algorithm in ("flash_decoding", "paged") else ()  # as `flashlab bench`
    for name in given or ():
        if name not in (known := tuple(dict.fromkeys((*AGAINST[algorithm], *more)))):
            raise unknown("against", name, known)
    return AGAINST[algorithm] if given is None else given


def ready(algorithm: str, makers: Mapping[str, Callable[[], Call]], failed: dict[str, str]) -> Calls:
    """The calls, each of which was called once. A peer that isn't there or doesn't take the cell is left out; `failed` has why."""
    calls = Calls()
    for name, made in makers.items():
        try:
            call = made()
            call()  # some refuse only now
        except Exception as error:  # other libraries raise what they like
            if name == algorithm:
                raise
            failed[name] = reason(error)
        else:
            calls[name] = call
    return calls


def reason(error: Exception) -> str:
    """What an exception says, in one line."""
    said = str(error) if isinstance(error, Unavailable) else f"{type(error).__name__}: {' '.join(str(error).split())}"
    return said[:300]


def library(name: str, package: str = "flashinfer-python") -> Any:
    """A module of another library. Raises `Unavailable` where it isn't installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise Unavailable(f"{name} cannot be imported ({error}): pip install {package}") from None


# -- lengths and pages ----------------------------------------------------------------------------------------------


def lognormal(requests: int, mean: int, seed: int = 0) -> list[int]:
    """Skewed lengths with this mean: lognormal with σ = 1, as in traces of chats, and at least 1."""
    drawn = random.Random(seed)
    shares = [drawn.lognormvariate(0, 1) for _ in range(requests)]
    lengths = [max(1, round(x / sum(shares) * requests * mean)) for x in shares]
    lengths[lengths.index(max(lengths))] += requests * mean - sum(lengths)
    return lengths


def skewed(requests: int, mean: int) -> list[int]:
    """Lengths with this mean, of which few are long: the longest has `LONGEST` keys, and each the same share of the one before.

    >>> lengths = skewed(64, 4096)
    >>> max(lengths), sum(lengths) == 64 * 4096, sorted(lengths)[32]
    (28000, True, 846)
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        share = (low + high) / 2
        many = sum(LONGEST * share**i for i in range(requests)) < requests * mean
        low, high = (share, high) if many else (low, share)
    lengths = [round(LONGEST * low**i) for i in range(requests)]
    lengths[-1] += requests * mean - sum(lengths)
    return lengths


class Pages:
    """Where the keys of requests lie: pages of `size` in a random order, by a block table and by FlashInfer's lists."""

    def __init__(self, torch: Any, lengths: Sequence[int], size: int) -> None:
        counts, self.size = [-(-n // size) for n in lengths], size
        self.number = sum(counts)
        order = torch.randperm(self.number).int()
        table = torch.zeros((len(lengths), max(counts)), dtype=torch.int32)
        for line, own in zip(table, order.split(counts), strict=True):
            line[: len(own)] = own
        self.table, self.indices = table.to(DEVICE), order.to(DEVICE)
        self.lens, self.last = (_int32(torch, x) for x in (lengths, [(n - 1) % size + 1 for n in lengths]))
        self.starts, self.each = (_int32(torch, x) for x in ([*accumulate(counts, initial=0)], range(len(lengths) + 1)))


def _int32(torch: Any, numbers: Sequence[int]) -> Any:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def _pooled(torch: Any, x: Any, size: int) -> tuple[Any, Any]:
    """Rows `(batch, kv_heads, length, dim)` as pages `(pages, size, kv_heads, dim)`, and the table."""
    batch, heads, length, dim = x.shape
    count = -(-length // size)
    padded = torch.nn.functional.pad(x.transpose(1, 2), (0, 0, 0, 0, 0, count * size - length))
    table = torch.arange(batch * count, dtype=torch.int32, device=x.device).view(batch, count)
    return padded.reshape(batch * count, size, heads, dim), table


def _random(torch: Any, *shape: int) -> Any:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def _workspace(torch: Any, megabytes: int = 128) -> Any:
    return torch.empty(megabytes << 20, dtype=torch.uint8, device=DEVICE)


def _how(q: Any, **more: Any) -> Arrays:
    return {"sm_scale": HEAD_DIM**-0.5, "q_data_type": q.dtype, **more}


def _attention(**given: Any) -> Any:
    return import_module("flashlab.run.call").attention(**given, backend=BACKEND)


# -- decoding -------------------------------------------------------------------------------------------------------


def nbytes(algorithm: str, cell: Decode) -> int:
    """The bytes of all keys and values, each once."""
    keys = cell.batch * cell.len_kv + (cell.len_prefix or 0)
    width = LATENT if algorithm.startswith("mla") else 2 * cell.kv_heads * HEAD_DIM
    return (1 if cell.kv_dtype else 2) * keys * width


def flops(algorithm: str, cell: Decode) -> int:
    """FLOPs by the field's convention."""
    if algorithm.startswith("mla"):
        return CATALOGUE["mla"].operation.flops(latent_problem(batch=cell.batch, heads=cell.heads, len_kv=cell.len_kv))
    sizes: Arrays = {"batch": cell.batch, "heads": cell.heads, "kv_heads": cell.kv_heads, "head_dim": HEAD_DIM}
    sizes |= {"len_q": DRAFTS if cell.feature == "drafts" else 1, "len_kv": cell.len_kv + (cell.len_prefix or 0)}
    return CATALOGUE["flash_decoding"].operation.flops(Problem(**sizes, dtype="bfloat16"))


def contenders(torch: Any, algorithm: str, cell: Decode, against: Sequence[str], failed: dict[str, str]) -> Calls:
    """The calls of a cell on random inputs of their own: the algorithm's, then its peers', then `read`.

    Raises `RuntimeError` if outputs are too far apart (2 % of the spread of values), or where keys are in pages, another bit than
    `flash_decoding`'s on the gathered keys.
    """
    if algorithm == "paged" and not cell.kv_dtype and not cell.feature:
        return _requests(torch, algorithm, cell, against, failed)
    if algorithm == "paged":
        calls, read = (_quantized if cell.kv_dtype else _featured)(torch, algorithm, cell)
    else:
        call_of, read = drawn(torch, algorithm, cell)
        calls = ready(algorithm, {name: partial(call_of, name) for name in (algorithm, *against)}, failed)
    return {**agree(calls, cell), "read": plain_read(torch, *read)}


def drawn(torch: Any, algorithm: str, cell: Decode) -> tuple[Callable[..., Call], Sequence[Any]]:
    """Random inputs of a cell: what makes a contender's call on them, and the arrays that a plain read reads."""
    made = {"flash_decoding": _dealt, "flash_decoding_1": _ladder, "cascade": _shared}.get(algorithm, _latent)
    return made(torch, cell)


def agree(calls: Calls, cell: Decode) -> Calls:
    """The calls, after a look at what they return."""
    outs = {name: call().float() for name, call in calls.items()}
    names = list(outs)
    if off := [name for name in names[1:] if not float((outs[name] - outs[names[0]]).abs().max()) < 0.02]:
        raise RuntimeError(f"{' and '.join((names[0], *off))} differ at {cell!r}")
    return calls


def _dealt(torch: Any, cell: Decode) -> tuple[Callable[[str], Call], Sequence[Any]]:
    """Requests of one length, whose keys lie one behind the other."""
    k, v = (_random(torch, cell.batch, cell.kv_heads, cell.len_kv, HEAD_DIM) for _ in "kv")
    arrays = _random(torch, cell.batch, cell.heads, 1, HEAD_DIM), k, v
    return partial(_peer, arrays), arrays


def _ladder(torch: Any, cell: Decode) -> tuple[Callable[[str], Call], Sequence[Any]]:
    """The same requests for all rungs: keys one behind the other, and in pages of a random order."""
    _, arrays = _dealt(torch, cell)
    dense = dict(zip("qkv", arrays, strict=True))
    pooled = {name: _pooled(torch, dense[name], _SHARED_PAGE) for name in "kv"}
    table = pooled["k"][1]
    order = torch.randperm(table.numel(), device=DEVICE)
    pages = {name: pool[order].swapaxes(1, 2) for name, (pool, _) in pooled.items()}
    pages |= {
        "block_table": torch.argsort(order).int()[table.long()],
        "seq_lens": _int32(torch, [cell.len_kv] * cell.batch),
    }

    def call_of(name: str) -> Call:
        return partial(_attention, **dense | (pages if CATALOGUE[name].operation.in_pages else {}), algorithm=name)

    return call_of, arrays


def _peer(arrays: Sequence[Any], name: str) -> Call:
    q, k, v = (x.transpose(1, 2).contiguous() if peers.layout(name) == "bshd" else x for x in arrays)
    return peers.prepare(name, q, k, v, causal=False, scale=HEAD_DIM**-0.5)


def _skewed_requests(torch: Any, cell: Decode) -> tuple[Arrays, Pages]:
    """Requests of `skewed` lengths in a random order, in pages that lie anywhere."""
    mixed: list[int] = torch.randperm(cell.batch).tolist()
    pages = Pages(torch, [skewed(cell.batch, cell.len_kv)[i] for i in mixed], cell.page_size or 1)
    k, v = (_random(torch, pages.number, pages.size, cell.kv_heads, HEAD_DIM).transpose(1, 2) for _ in "kv")
    q = _random(torch, cell.batch, cell.heads, 1, HEAD_DIM)
    return {"q": q, "k": k, "v": v, "block_table": pages.table, "seq_lens": pages.lens}, pages


def _requests(torch: Any, algorithm: str, cell: Decode, against: Sequence[str], failed: dict[str, str]) -> Calls:
    """Calls over the same pages, after a look at the longest request, and calls on as many keys, evenly dealt."""
    (dealt, dense), (arrays, pages) = _dealt(torch, cell), _skewed_requests(torch, cell)
    b, longest = int(pages.lens.argmax()), int(pages.lens.max())
    mine = pages.table[b, : -(-longest // pages.size)].long()
    own = (arrays[x][mine].transpose(0, 1).flatten(1, 2)[None, :, :longest].contiguous() for x in "kv")
    alone = _attention(**dict(zip("qkv", (arrays["q"][b : b + 1], *own), strict=True)), algorithm="flash_decoding")
    if not torch.equal(_attention(**arrays)[b : b + 1], alone):
        raise RuntimeError(f"{algorithm} and flash_decoding differ at {cell!r}")

    def call_of(name: str) -> Call:
        if name == algorithm:
            return partial(_attention, **arrays, algorithm=algorithm)
        return IN_PAGES[name](torch, arrays, pages) if name in IN_PAGES else dealt(name)

    calls = ready(algorithm, {name: partial(call_of, name) for name in (algorithm, *against)}, failed)
    for same in ({algorithm, *IN_PAGES} & calls.keys(), calls.keys() - {algorithm, *IN_PAGES}):
        agree({name: call for name, call in calls.items() if name in same}, cell)
    return {**calls, "read": plain_read(torch, *dense)}


def _flashinfer(torch: Any, arrays: Arrays, pages: Pages) -> Call:
    """FlashInfer's call for decoding, on tensor cores: several queries share a head of the keys."""
    rows, pools, sizes, how = _rows(arrays)
    wrapper = library("flashinfer").BatchDecodeWithPagedKVCacheWrapper(_workspace(torch), "NHD", use_tensor_cores=True)
    wrapper.plan(pages.starts, pages.indices, pages.last, *sizes, pages.size, **how)
    out = torch.empty_like(rows)
    return lambda: wrapper.run(rows, pools, out=out).unsqueeze(2)


def _flashinfer_batch(torch: Any, arrays: Arrays, pages: Pages) -> Call:
    """FlashInfer's call for requests of all kinds: one persistent launch, whose plan deals out the lengths evenly."""
    rows, pools, sizes, how = _rows(arrays)
    wrapper = library("flashinfer").BatchAttention("NHD", rows.device)
    lists = pages.each, pages.starts, pages.indices, pages.lens
    wrapper.plan(*lists, *sizes, HEAD_DIM, pages.size, causal=False, **how)
    out, lse = torch.empty_like(rows), torch.empty(rows.shape[:2], dtype=torch.float32, device=rows.device)
    return lambda: wrapper.run(rows, pools, out=out, lse=lse)[0].unsqueeze(2)


def _rows(arrays: Arrays) -> tuple[Any, tuple[Any, ...], tuple[int, ...], Arrays]:
    """Queries, pools, sizes and options as FlashInfer wants them."""
    rows, pools = arrays["q"][:, :, 0], tuple(arrays[x].transpose(1, 2) for x in "kv")
    return rows, pools, (rows.shape[1], pools[0].shape[2], HEAD_DIM), _how(rows, kv_data_type=rows.dtype)


def _cudnn(torch: Any, arrays: Arrays, pages: Pages) -> Call:
    """cuDNN's graph of one operation, `sdpa`, whose K and V are pools and tables of pages."""
    batch, table = len(pages.table), pages.table.view(len(pages.table), 1, -1, 1)
    given = {name: arrays[name] for name in "qkv"} | {f"paged_attention_{x}_table": table for x in "kv"}
    lengths = {"seq_len_q": _int32(torch, [1] * batch), "seq_len_kv": pages.lens}
    given |= {name: x.view(batch, 1, 1, 1) for name, x in lengths.items()}
    out = torch.empty_like(arrays["q"])

    def sdpa(graph: Any, inputs: Arrays) -> list[Any]:
        room = table.shape[2] * pages.size  # all that a line of the table has room for
        how: Arrays = {"attn_scale": HEAD_DIM**-0.5, "generate_stats": False, "use_padding_mask": True}
        made, _ = graph.sdpa(**inputs, **how, paged_attention_max_seq_len_kv=room)
        return [made]

    run = cudnn_graph.planned(given, [out], sdpa)

    def call() -> Any:
        run()
        return out

    return call


_Maker = Callable[[Any, Arrays, Pages], Call]
IN_PAGES: dict[str, _Maker] = {"flashinfer": _flashinfer, "flashinfer-batch": _flashinfer_batch, "cudnn-paged": _cudnn}
"""The peers of `paged` that get its pages. So `flashinfer` is another call here than beside `flash_decoding`."""


def _quantized(torch: Any, algorithm: str, cell: Decode) -> tuple[Calls, Sequence[Any]]:
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
    return calls, [packed[x] for x in "qkv"]


def _featured(torch: Any, algorithm: str, cell: Decode) -> tuple[Calls, Sequence[Any]]:
    """Requests with a feature, and the same requests without. Drafts are a chain, which is a causal mask."""
    arrays, _ = _skewed_requests(torch, cell)
    given, without = dict[str, Any](), dict[str, Any]()
    if cell.feature == "drafts":
        arrays["q"] = _random(torch, cell.batch, cell.heads, DRAFTS, HEAD_DIM)
        words = _int32(torch, [2 ** (i + 1) - 1 for i in range(DRAFTS)])
        given, without = {"draft_mask": words.expand(cell.batch, -1).contiguous()}, {"causal": True}
    elif cell.feature == "soft_cap":
        given = {"soft_cap": 1000.0}  # large beside the scores, so the outputs can be compared
    else:
        given = {"sinks": torch.full((cell.heads,), -9.0, dtype=torch.float32, device=DEVICE)}  # small beside the keys
    both = {algorithm: given, "without": without}
    calls: Calls = {name: partial(_attention, **arrays, **more, algorithm=algorithm) for name, more in both.items()}
    return calls, [arrays[x] for x in "qkv"]


def _latent(torch: Any, cell: Decode) -> tuple[Callable[..., Call], Sequence[Any]]:
    """A latent cache in one piece, and in pages of a random order."""
    q, rows = _random(torch, cell.batch, cell.heads, 1, LATENT), _random(torch, cell.batch, 1, cell.len_kv, LATENT)
    pool, table = _pooled(torch, rows, cell.page_size or _PAGE)
    order = torch.randperm(len(pool), device=DEVICE)
    pool, table = pool[order], torch.argsort(order).int()[table.long()]
    lengths = _int32(torch, [cell.len_kv] * cell.batch)

    def call_of(name: str, chunk: int | None = cell.chunk) -> Call:
        if name == "flashinfer":
            return _flashinfer_latent(torch, q, pool, table, lengths)
        how: Arrays = {"chunk": chunk, "algorithm": name, "backend": BACKEND}
        if CATALOGUE[name].operation.in_pages:
            return lambda: mla(q, pool.swapaxes(1, 2), block_table=table, seq_lens=lengths, **how)
        return lambda: mla(q, rows, **how)

    return call_of, (q, *rows.flatten().chunk(2))


def _flashinfer_latent(torch: Any, q: Any, pool: Any, table: Any, lengths: Any) -> Call:
    batch, heads = q.shape[:2]
    starts = _int32(torch, range(batch + 1))
    wrapper = library("flashinfer.mla").BatchMLAPagedAttentionWrapper(_workspace(torch))
    parts = HEAD_DIM_V, LATENT - HEAD_DIM_V
    lists = starts, starts * table.shape[1], table.flatten(), lengths
    wrapper.plan(*lists, heads, *parts, pool.shape[1], False, SCALE, q.dtype, q.dtype)
    queries, caches = [x.contiguous() for x in q[:, :, 0].split(parts, -1)], pool[:, :, 0].split(parts, -1)
    return lambda: wrapper.run(*queries, *caches).unsqueeze(2)


def _shared(torch: Any, cell: Decode) -> tuple[Callable[[str], Call], Sequence[Any]]:
    """A prefix and each request's own keys. `flash_decoding` has a copy of the prefix for each request, `paged` has the prefix's
    pages once, but reads them for each request."""
    before, size = cell.len_prefix or 0, cell.kv_heads * HEAD_DIM
    if before % _SHARED_PAGE:
        raise RuntimeError(f"len_prefix = {before}: expected a multiple of {_SHARED_PAGE}, or its last page has gaps")
    q = _random(torch, cell.batch, cell.heads, 1, HEAD_DIM)
    halves = _random(torch, 2 * (before + cell.batch * cell.len_kv) * size).chunk(2)  # one piece, to be read
    prefixes = [x[: before * size].view(1, cell.kv_heads, before, HEAD_DIM) for x in halves]
    own = [x[before * size :].view(cell.batch, cell.kv_heads, cell.len_kv, HEAD_DIM) for x in halves]

    def in_pages() -> tuple[list[Any], Any, Any]:
        pools = [[_pooled(torch, x, _SHARED_PAGE) for x in pair] for pair in zip(prefixes, own, strict=True)]
        first, rest = (table for _, table in pools[0])
        return [torch.cat([a, b]) for (a, _), (b, _) in pools], first, rest + first.numel()

    def whole() -> Call:
        k, v = (torch.cat([p.expand(cell.batch, -1, -1, -1), x], 2) for p, x in zip(prefixes, own, strict=True))
        return partial(_attention, q=q, k=k, v=v, algorithm="flash_decoding")

    def paged() -> Call:
        (k, v), first, rest = in_pages()
        table = torch.cat([first.expand(cell.batch, -1), rest], 1).contiguous()
        lengths = _int32(torch, [before + cell.len_kv] * cell.batch)
        return partial(_attention, q=q, k=k.swapaxes(1, 2), v=v.swapaxes(1, 2), block_table=table, seq_lens=lengths)

    makers: Mapping[str, Callable[[], Call]] = {
        "cascade": lambda: lambda: cascade(q, *own, *prefixes, backend=BACKEND),
        "flash_decoding": whole,
        "paged": paged,
        "flashinfer": lambda: _flashinfer_shared(torch, q, cell, *in_pages()),
        "flashinfer-fa2": lambda: _flashinfer_shared(torch, q, cell, *in_pages(), backend="fa2"),
    }
    return lambda name: makers[name](), (q, *halves)


def _flashinfer_shared(
    torch: Any, q: Any, cell: Decode, pools: Any, first: Any, rest: Any, backend: str = "auto"
) -> Call:
    """On Hopper FlashInfer itself chooses FA3's kernels, which don't split the keys. Its cascade has no argument that says so."""
    last = [(n - 1) % _SHARED_PAGE + 1 for n in (cell.len_prefix or 0, cell.len_kv)]
    each, rows = _int32(torch, range(cell.batch + 1)), q[:, :, 0]
    wrapper = library("flashinfer.cascade").MultiLevelCascadeAttentionWrapper(2, _workspace(torch), "NHD")
    for level in wrapper._batch_prefill_wrappers:
        level._backend = backend
    starts = [_int32(torch, [0, cell.batch]), each], [_int32(torch, [0, first.numel()]), each * rest.shape[1]]
    lasts = [_int32(torch, [last[0]]), _int32(torch, [last[1]] * cell.batch)]
    sizes = cell.heads, cell.kv_heads, HEAD_DIM, _SHARED_PAGE
    wrapper.plan(*starts, [first.flatten(), rest.flatten()], lasts, *sizes, **_how(q))
    return lambda: wrapper.run(rows, tuple(pools)).unsqueeze(2)


def plain_read(torch: Any, q: Any, k: Any, v: Any) -> Call:
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


# -- appends --------------------------------------------------------------------------------------------------------


class Batch:
    """The arrays of a cell of appends: queries, keys and values one behind the other, and where asked for in pages."""

    def __init__(self, torch: Any, cell: Append) -> None:
        self.torch, self.cell = torch, cell
        torch.manual_seed(0)
        queries, keys = zip(*cell.lengths, strict=True)
        self.q, self.k, self.v = (
            torch.randn((sum(n), heads, HEAD_DIM), device=DEVICE).to(torch.bfloat16)
            for n, heads in ((queries, HEADS), (keys, KV_HEADS), (keys, KV_HEADS))
        )
        self.starts_q, self.starts_kv = (_int32(torch, [*accumulate(x, initial=0)]) for x in (queries, keys))
        self.longest = max(queries), max(keys)
        if cell.page_size is None:
            return
        self.pages = pages = Pages(torch, keys, cell.page_size)
        pools = [x.new_full((pages.number * pages.size, *x.shape[1:]), float("nan")) for x in (self.k, self.v)]
        for b, n in enumerate(keys):  # the rest of each last page stays NaN
            key, first = torch.arange(n, device=DEVICE), int(self.starts_kv[b])
            at = pages.table[b].long()[key // pages.size] * pages.size + key % pages.size
            for pool, x in zip(pools, (self.k, self.v), strict=True):
                pool[at] = x[first : first + n]
        self.pools = [x.view(-1, pages.size, *x.shape[1:]) for x in pools]

    def call(self, name: str) -> Call:
        """A contender's call, which returns `(queries of all requests, heads, head_dim)`."""
        if name in ("fa4", "flashinfer"):
            return self._fa4() if name == "fa4" else self._flashinfer()
        if name == "flash3":
            rows = {x: getattr(self, x).transpose(0, 1)[None] for x in "qkv"}
            call = partial(_attention, **rows, algorithm=name, lengths=self.cell.lengths, causal=True)
            return lambda: call()[0].transpose(0, 1)
        q = self.q.view(self.cell.batch, NEW, HEADS, HEAD_DIM).transpose(1, 2)
        k, v = (pool.transpose(1, 2) for pool in self.pools)
        given = {"q": q, "k": k, "v": v, "block_table": self.pages.table, "seq_lens": self.pages.lens}
        call = partial(_attention, **given, algorithm=name, causal=True)
        return lambda: call().transpose(1, 2).reshape(self.q.shape)

    def _fa4(self) -> Call:
        attention = library("flash_attn.cute.interface", "flash-attn-4").flash_attn_varlen_func
        longest = dict(zip(("max_seqlen_q", "max_seqlen_k"), self.longest, strict=True))
        given: Arrays = {name: n for name, n in longest.items() if name in signature(attention).parameters}
        arrays = [self.q, self.k, self.v] if self.cell.page_size is None else [self.q, *self.pools]
        if self.cell.page_size is None:
            given |= {"cu_seqlens_k": self.starts_kv}
        else:
            given |= {"seqused_k": self.pages.lens, "page_table": self.pages.table}
        given |= {"cu_seqlens_q": self.starts_q, "causal": True, "softmax_scale": HEAD_DIM**-0.5}

        def run() -> Any:
            found = attention(*arrays, **given)
            return found if hasattr(found, "dtype") else found[0]  # some return the LSE, too

        return run

    def _flashinfer(self) -> Call:
        prefill, workspace = library("flashinfer"), _workspace(self.torch, 512)
        sizes, known = (HEADS, KV_HEADS, HEAD_DIM), _how(self.q, causal=True)
        if self.cell.page_size is None:
            wrapper = prefill.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3")
            wrapper.plan(self.starts_q, self.starts_kv, *sizes, **known)
            return lambda: wrapper.run(self.q, self.k, self.v)
        wrapper, pages = prefill.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa3"), self.pages
        wrapper.plan(self.starts_q, pages.starts, pages.indices, pages.last, *sizes, pages.size, **known)
        return lambda: wrapper.run(self.q, tuple(self.pools))

    def check(self, name: str, out: Any) -> None:
        """Raise `RuntimeError` unless the rule holds for the first head of the shortest request."""
        lengths = self.cell.lengths
        b = min(range(len(lengths)), key=lambda i: lengths[i][1])
        (queries, keys), first, key = lengths[b], int(self.starts_q[b]), int(self.starts_kv[b])
        cut = ((self.q, first, queries), (self.k, key, keys), (self.v, key, keys), (out, first, queries))
        *inputs, found = (self._numpy(x[at : at + n, 0])[None, None] for x, at, n in cut)
        p = Problem(batch=1, heads=1, len_q=queries, len_kv=keys, head_dim=HEAD_DIM, dtype="bfloat16", causal=True)
        arrays = dict(zip("qkv", inputs, strict=True))
        truth = ATTENTION.judge(p, arrays)
        off = np.linalg.norm(found.astype(np.float64) - truth["out"], axis=-1)
        if not (off <= ATTENTION.bounds(p, arrays, truth)["out"]).all():
            raise RuntimeError(f"{name} breaks the rule at {self.cell!r}")

    def _numpy(self, x: Any) -> Any:
        return x.contiguous().view(self.torch.int16).cpu().numpy().view(numpy_dtype("bfloat16"))
