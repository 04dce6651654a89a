"""What is computed (`Problem`), in which pieces (`Tile`), and which pieces the mask leaves."""

from __future__ import annotations

import inspect
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, starmap
from operator import index
from typing import Any, Final, NamedTuple, Self, TypedDict, TypeVar, cast, overload

import numpy as np

from simulator.dtypes import Array
from simulator.errors import Said, UsageError, unknown
from simulator.fields import Field, Follows, Lengths, Pair, described, fields_of
from simulator.lanes import Lanes, lanes_of, summed_over, ways
from simulator.names import DType

T = TypeVar("T")
_FEW = 16
"""Up to so many different sequences are counted one by one."""
MARGIN = 1024
"""More than a tile, and more than any factor of a count beside lengths, heads and head dim."""

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
"""Bytes of an element of each storage dtype."""
WIDTH = {**ITEMSIZE, "int32": 4, "uint32": 4, "int64": 8, "int8": 1, "uint8": 1, "bool": 1}
"""Bytes of an element of whatever an operand may hold: indices, lengths and masks are no storage dtypes."""
FP8: Final = "float8_e4m3fn"
"""Of 8 bits: 4 of exponent, 3 of mantissa, up to 448, no infinities. Only `flash3_fp8` computes in it; its output is bfloat16."""
DTYPES: tuple[DType, ...] = ("float32", "float16", "bfloat16")
"""What every other algorithm stores Q, K, V and its output in."""


MOST_REQUESTS = 1 << 20
"""The most requests of a batch in pages. Each is looked at by itself."""
CHUNKS_OF = 64
"""A chunk has a multiple of so many keys, as many as a tile."""
MOST_OF_TILE = 1 << 31
"""The most rows or columns of a tile."""
MOST_OF_CHUNK = 1 << 24
"""The most keys of a chunk: kernels count in 32 bits."""
MOST_DRAFTS = 32
"""The most drafts of a request: each query has a bit for each, in one word."""
CACHES = (FP8, "int8")
"""What K and V may be quantised to while Q keeps its 16 bits. A value is the element times its scale."""
SCALES = ("tensor", "head", "token", "channel")
"""What a scale of K may be for: all of it, a KV head, a key of a head, a column of a head. V has none for a column."""
MASK_FORMS = ("dense", "bits", "blocks")
"""The forms in which an array may say which keys a query sees: a boolean for each pair, a bit, or lists of blocks of pairs."""


def output_dtype(dtype: str) -> str:
    """The output's dtype for operands of a storage dtype: the same, or bfloat16 where that has 8 bits only."""
    return "bfloat16" if dtype == FP8 else dtype


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is at least n: `round_up(40, 16) == 48`."""
    return -(-n // multiple) * multiple


def row_bytes(elements: int, itemsize: int) -> int:
    """Bytes in which a row of `elements` lies in HBM: padded to 16."""
    return round_up(elements * itemsize, 16)


class Tile(NamedTuple):
    """`Tile(rows, cols)`: Br rows of queries by Bc columns of keys.

    >>> Tile.parse("64x32")
    Tile(rows=64, cols=32)
    """

    rows: int
    cols: int

    @classmethod
    def parse(cls, tile: Tile | tuple[int, int] | str) -> Tile:
        """A tile from `Tile`, a pair, or text as in "64x64"."""
        accepted = "rows x cols, whole numbers of at least 1 each, as in (64, 64) or '64x64'"
        try:
            pair = tile.lower().split("x") if isinstance(tile, str) else tile
            rows, cols = (int(n) if isinstance(n, str) else index(n) for n in pair)
        except (TypeError, ValueError):
            raise UsageError("tile", tile, accepted) from None
        if rows < 1 or cols < 1:
            raise UsageError("tile", tile, accepted)
        if max(rows, cols) > MOST_OF_TILE:
            raise UsageError("tile", tile, f"{accepted}, and up to 2^31")
        return cls(rows, cols)

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}"


@dataclass(frozen=True)
class Visits(Sequence[int]):
    """The walk of a row tile under a mask that an array says: the key tiles that it sees, in the order of `around`.

    `around` is the walk that causal mask and window alone would leave. In `mixed` key tiles some pairs are visible and
    some are hidden. In the others that it sees all are visible.

    >>> walk = Visits(range(4), (0, 3), frozenset({3}))
    >>> list(walk), list(reversed(walk)), 3 in walk.mixed
    ([0, 3], [3, 0], True)
    """

    around: range
    tiles: tuple[int, ...]
    mixed: frozenset[int]

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[int, ...]: ...
    def __getitem__(self, place: int | slice) -> int | tuple[int, ...]:
        return self.tiles[place]

    def __len__(self) -> int:
        return len(self.tiles)


Walk = range | Visits
"""The key tiles over which a row tile walks, in order."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Problem:
    """The shapes of one attention call; the only way shapes are said here.

    Queries are `(batch, heads, len_q, head_dim)`, keys `(batch, kv_heads, len_kv, head_dim)`, values
    `(batch, kv_heads, len_kv, head_dim_v)`. What is left out (or None) follows: `kv_heads` the heads, `len_kv` the
    `len_q`, `head_dim_v` the `head_dim`, `scale` 1/sqrt(head_dim); fields read as what they come to. Masks are aligned
    bottom-right: `window=(left, right)` is inclusive around key `i + len_kv - len_q`, either side may be None, and `causal`
    makes right 0. Problems that ask for the same are equal, however they were said.

    A score is `scale` times the product of a query and a key. `soft_cap` bounds it, cap * tanh(score / cap). With `alibi`,
    slope * abs(i + len_kv - len_q - j) is then taken from it (arXiv 2108.12409). With `sinks`, each row's denominator has one
    exponential more, that of its head's logit. Slopes and sinks are operands. So is a `mask`, which all batches and heads share: a
    pair is visible if neither it, nor `causal`, nor `window` hides it. A "dense" one has a boolean for each pair. One of "bits"
    has them one behind the other, query by query, eight to a byte, the lowest first; each sequence of a ragged batch begins
    with a byte of its own. One of "blocks" is an array `block_mask`: for each row of blocks of `block_size` pairs (queries, keys)
    how many of them are visible, and which ones.

    K and V may be quantised: of a `kv_dtype` of 8 bits, with operands `k_scale` and `v_scale` that they are multiplied with.
    Fields of these names say what each scale is for: "tensor", "head", "token" or (of K) "channel". Without, a scale is 1.

    Where keys are split into chunks and partial results added up, `chunk` says how many keys a chunk has. The order of additions
    depends on it, and with it the last bits; on nothing else that lies beside a request.

    With `dlse` a backward pass gets a gradient of the LSE, too. With `partial` it leaves dK and dV in float32, as it has them: they
    are parts of sums, over ranks say, that are rounded once at the end.

    Where P is rounded to 8 bits, the LSE may be that of the rounded weights. With `exact_lse` it is that of the weights before
    they are rounded. `out` is the same, to the bit.

    `dropout` is the rate at which weights become 0. It is rounded to a multiple of 1/256: of a random byte's values, `kept`
    keep a weight, which is multiplied by 256 / kept. So nothing is biased. Seed and offset of the random bytes are an
    operand, `rng_state`.

    A ragged batch has `lengths`, the queries and keys of each sequence (one number where they are as many). The sequences lie
    one behind the other in the rows of a batch of 1, as `cu_seqlens` of other libraries says it: `len_q` and `len_kv` are the
    sums. A query sees keys of its own sequence alone, in which masks and ALiBi are aligned.

    With a `page_size`, K and V lie in a pool of `pages`, `(pages, kv_heads, page_size, head_dim)`, and the operand `block_table`
    says which pages each request has. There are `batch` requests, each with `len_q` queries. `len_kv` is the most keys that the
    table has room for. Of how many keys a request has, `lengths` tell, one pair a request: `[(1, 4000), (1, 28000)]`. Without
    them each has `len_kv`.

    Where requests have different numbers of new tokens, `varlen` puts the queries of all of them one behind the other: q is `(1,
    heads, len_q, head_dim)`, and the operand `cu_seqlens_q` says where each request's begin. `len_q` is the sum, and each pair of
    `lengths` has its own queries. Without lengths they are shared out evenly.

    With `drafts`, the last `len_q` keys of each request are guesses, of which each query made one. They form a tree, so a query
    sees its ancestors alone. The operand `draft_mask`, `(batch, len_q)`, has a word of 32 bits for each query: bit j shows the
    j-th draft, key `len_kv - len_q + j`. Earlier keys are visible. As under a `mask`, `causal` and `window` hide what they hide.

    With a `len_prefix`, all requests of the batch begin with the same keys, which operands `k_prefix` and `v_prefix` hold once.
    `len_kv` are then the keys that each request has of its own. If requests have different ones, `lengths` say how many, a pair a
    request, and `len_kv` is the most that there is room for. Query i sits at key `len_prefix + n - len_q + i` of a request with n
    own keys, and what is visible left of that reaches into the prefix. `causal`, and what is visible to the right, is about own
    keys: all of the prefix comes before them.

    Raises `UsageError` naming the field for anything out of range.

    >>> p = Problem(batch=1, heads=8, kv_heads=2, len_q=128, head_dim=64, dtype="float16", causal=True)
    >>> p.kv_heads, p.len_kv, p.scale, p.right
    (2, 128, 0.125, 0)
    >>> p.replace(len_q=256).len_kv, p == p.replace(len_kv=128)
    (256, True)
    >>> ragged = Problem(batch=1, heads=8, lengths=[100, (1, 300), 7], head_dim=64, dtype="float16", causal=True)
    >>> ragged.len_q, ragged.len_kv, ragged.visible_keys(100)
    (108, 407, range(100, 400))
    >>> paged = Problem(batch=2, heads=8, lengths=[(1, 40), (1, 300)], head_dim=64, dtype="float16", page_size=16)
    >>> paged.len_q, paged.len_kv, paged.pages
    (1, 300, 22)
    """

    batch: int = described("Sequences", axis="batch", least=1)
    heads: int = described("Query heads", axis="heads", least=1)
    kv_heads: Follows[int] = described(
        "Key and value heads", axis="KV heads", least=1, default=Follows(lambda p: p.heads, "as many as the query's")
    )
    len_q: Follows[int] = described(
        "Queries per head",
        axis="queries",
        unit="tokens",
        default=Follows(lambda p: p.queries_of_lengths, "the sum of the lengths"),
    )
    len_kv: Follows[int] = described(
        "Keys per head",
        axis="keys",
        unit="tokens",
        default=Follows(lambda p: p.keys_of_lengths, "as many as queries, or the sum of the lengths"),
    )
    head_dim: int = described("Elements per query and key", axis="head dim", least=1)
    head_dim_v: Follows[int] = described(
        "Elements per value", axis="head dim of V", least=1, default=Follows(lambda p: p.head_dim, "the head dim")
    )
    dtype: DType = described(f"Storage dtype: {', '.join(DTYPES)}, or {FP8} for flash3_fp8", among=ITEMSIZE)
    causal: bool = described("Mask out later keys", default=False, aliases=("is_causal",))
    window: Pair | None = described(
        "Keys visible left and right, as in 128,0; none for all", default=None, aliases=("window_size",)
    )
    scale: Follows[float] = described(
        "Factor of the scores",
        default=Follows(lambda p: 1 / math.sqrt(p.head_dim), "1/sqrt(head dim)"),
        aliases=("softmax_scale", "sm_scale"),
    )
    soft_cap: float | None = described(
        "Bound of the scores, cap·tanh(score/cap); 0 or none for none",
        default=None,
        aliases=("softcap", "logits_soft_cap"),
        none=0.0,
    )
    sinks: bool = described(
        "A logit per head that joins the denominators",
        default=False,
        aliases=("s_aux", "learnable_sink", "attention_sinks"),
        operand="sinks",
    )
    alibi: bool = described("Scores fall with the distance", default=False, operand="alibi_slopes")
    mask: str | None = described(
        f"How an array says which keys a query sees: {', '.join(MASK_FORMS)}",
        default=None,
        among=MASK_FORMS,
        operand="mask",
    )
    block_size: Follows[Pair] = described(
        "Queries and keys of a block, where lists of blocks say what is visible",
        least=1,
        default=Follows(lambda _: (128, 128), "128,128"),
    )
    lengths: Lengths | None = described(
        "Lengths of a ragged batch's sequences, n or queries:keys, as in 100,200:300", default=None
    )
    page_size: int | None = described(
        "Keys per page, for K and V in pages", axis="page size", unit="tokens", default=None, least=1
    )
    len_prefix: int | None = described(
        "Keys of a prefix that all requests share", axis="prefix", unit="tokens", default=None
    )
    pages: Follows[int] = described(
        "Pages in the pool",
        axis="pages",
        default=Follows(lambda p: p.pages_of_lengths, "as many as the lengths need"),
    )
    dlse: bool = described("A gradient of the LSE comes beside the output's", default=False, operand="dlse")
    partial: bool = described("Leave dK and dV unrounded, in float32, as parts of sums", default=False)
    dropout: float | None = described(
        "Share of the weights that is dropped, in steps of 1/256; 0 or none for none", default=None, none=0.0
    )
    kv_dtype: Follows[str] = described(
        f"Dtype of K and V: the storage dtype, or {' or '.join(CACHES)} for K and V quantised",
        among=(*ITEMSIZE, "int8"),
        default=Follows(lambda p: p.dtype, "the storage dtype"),
        operand="k",
    )
    k_scale: str | None = described(
        f"What each scale of K is for: {', '.join(SCALES)}", default=None, among=SCALES, operand="k_scale"
    )
    v_scale: str | None = described(
        f"What each scale of V is for: {', '.join(SCALES[:-1])}", default=None, among=SCALES[:-1], operand="v_scale"
    )
    exact_lse: bool = described("LSE of the weights before they are rounded to 8 bits", default=False)
    chunk: int | None = described(
        "Keys of a chunk, where keys are split and results added up; none for the algorithm's own",
        default=None,
        least=1,
    )
    varlen: bool = described(
        "Queries of all requests lie one behind the other, over pages", default=False, operand="cu_seqlens_q"
    )
    drafts: bool = described(
        "The last keys are drafts, of which each query sees those that its word's bits say",
        default=False,
        operand="draft_mask",
    )

    def __post_init__(self) -> None:
        if isinstance(self.__dict__["len_q"], Lanes) or isinstance(self.__dict__["len_kv"], Lanes):
            return  # each of the sequences has been checked
        for name, known in FIELDS.items():
            object.__setattr__(self, name, known.checked(self.__dict__[name]))
        if self.heads % self.kv_heads:
            raise UsageError("kv_heads", self.kv_heads, f"a divisor of heads = {self.heads}")
        if self.dropout is not None and not 1 <= self.kept <= 255:
            raise UsageError(
                "dropout",
                self.dropout,
                "0 or None for none, or a number from 0.002 to 0.998, so that 1 to 255 of 256 are kept",
            )
        if self.kv_dtype not in (self.dtype, *CACHES) or (self.quantized and self.dtype not in DTYPES[1:]):
            raise UsageError("kv_dtype", self.kv_dtype, f"{self.dtype}, or of 16-bit queries {' or '.join(CACHES)}")
        for name in ("k_scale", "v_scale"):
            if getattr(self, name) is not None and not self.quantized:
                raise UsageError(name, getattr(self, name), f"None for K and V of {self.kv_dtype}")
        if None in self.block_size:
            raise UsageError("block_size", self.block_size, "a pair (queries, keys), each an integer of at least 1")
        if self.mask != "blocks" and self.block_size != FIELDS["block_size"].left_out(self):
            raise UsageError("block_size", self.block_size, "nothing: only a mask of blocks has them")
        if self.len_prefix is not None and self.page_size is not None:
            raise UsageError("len_prefix", self.len_prefix, "None with a page_size")
        if self.lengths is None and self.__dict__["len_q"] is None:
            raise UsageError("len_q", None, "an integer of at least 0, or lengths")
        if self.chunk is not None and (self.chunk % CHUNKS_OF or self.chunk > MOST_OF_CHUNK):
            raise UsageError("chunk", self.chunk, f"None, or a multiple of {CHUNKS_OF} up to {MOST_OF_CHUNK:,}")
        if self.varlen and (self.page_size is None or self.drafts):
            raise UsageError("varlen", True, "False without a page_size, and with drafts")
        if self.drafts and self.page_size is None:
            raise UsageError("drafts", True, "False without a page_size")
        if self.drafts and self.len_q > MOST_DRAFTS:
            raise UsageError("len_q", self.len_q, f"at most {MOST_DRAFTS} with drafts: a word has as many bits")
        if self.page_size is None and self.pages:
            raise UsageError("pages", self.pages, "None without a page_size")
        if self.page_size is not None and self.batch > MOST_REQUESTS:
            raise UsageError("batch", self.batch, f"at most {MOST_REQUESTS:,} requests with a page_size")
        if self.ragged:
            self._check_ragged()
        elif self.lengths is not None:
            self._check_requests()

    def _check_ragged(self) -> None:
        if self.mask == "blocks":
            raise UsageError("mask", self.mask, "dense, bits or None with lengths")
        if self.dropout is not None:
            raise UsageError("dropout", self.dropout, "None with lengths")
        if self.batch != 1:
            raise UsageError("batch", self.batch, "1 with lengths: the sequences lie in the rows of one batch")
        rows, keys = self.spans[-1]
        for name, total, words in (("len_q", rows.stop, "queries"), ("len_kv", keys.stop, "keys")):
            if getattr(self, name) != total:
                raise UsageError("lengths", Said(f"{total:,} {words} in all"), f"{getattr(self, name):,}, the {name}")

    def _check_requests(self) -> None:
        if len(self._lengths) != self.batch:
            raise UsageError("lengths", Said(f"{len(self._lengths):,} requests"), f"{self.batch:,}, the batch")
        len_q, len_kv = self.len_q, self.len_kv  # which may follow from all lengths
        if self.varlen:
            if (total := sum(queries for queries, _ in self._lengths)) != len_q:
                raise UsageError("lengths", Said(f"{total:,} queries in all"), f"{len_q:,}, the len_q")
            if (most := max(keys for _, keys in self._lengths)) > len_kv:
                raise UsageError("lengths", Said(f"{most:,} keys"), f"up to len_kv = {len_kv:,}")
            return
        for i, (queries, keys) in enumerate(self._lengths):
            if queries != len_q or keys > len_kv:
                accepted = f"len_q = {len_q:,} queries, as all requests have, and up to len_kv = {len_kv:,} keys"
                raise UsageError(f"lengths[{i}]", (queries, keys), accepted)

    @classmethod
    def checked(cls, problem: Any) -> Self:
        """The problem itself. Raises `UsageError` for anything else, arrays above all."""
        if not isinstance(problem, cls):
            raise UsageError("problem", type(problem).__name__, "a Problem; fl.simulate takes arrays")
        return problem

    @property
    def given(self) -> dict[str, Any]:
        """The fields as they were given; what was left to follow isn't among them."""
        return {name: self.__dict__[name] for name in FIELDS if self.__dict__[name] is not None}

    @property
    def masks(self) -> Masks:
        """What its arrays don't say, as keywords of `simulate`, `attention`, `naive` and their like."""
        return {name: getattr(self, name) for name in MASKS}  # pyright: ignore[reportReturnType]

    @property
    def applied(self) -> dict[str, Any]:
        """Those of its `FEATURES` that are not as when left out.

        >>> p = Problem(batch=1, heads=1, len_q=8, head_dim=64, dtype="float16", window=(3, 0), scale=0.125)
        >>> p.applied
        {'window': (3, 0)}
        """
        said = {name: getattr(self, name) for name in FEATURES}
        return {name: value for name, value in said.items() if value != FIELDS[name].left_out(self)}

    @property
    def words(self) -> list[str]:
        """`applied` in words, as in ["causal", "window 128,0", "scale 0.3"]."""
        return [FIELDS[name].said(value) for name, value in self.applied.items()]

    def unknown_mask(self, known: Collection[str], by: str) -> UsageError | None:
        """The error for a mask that applies and that `by` knows nothing of, for it would compute without; else None."""
        for name, value in self.applied.items():
            if name not in known:
                return UsageError(name, value, f"nothing: {by} knows {', '.join(known)}")
        return None

    def replace(self, **changes: object) -> Self:
        """A copy with some fields changed; what was left out still follows, and None leaves a field out."""
        for name in changes:
            if name not in FIELDS:
                raise unknown("field", name, sorted(FIELDS))
        return type(self)(**{**self.given, **changes})  # pyright: ignore[reportArgumentType]

    def _key(self) -> tuple[Any, ...]:
        plain = [getattr(self, name) for name in FIELDS if name not in ("causal", "window", "k_scale", "v_scale")]
        only = {"head": "tensor"} if self.kv_heads == 1 else {}  # a scale for the only head is one for all
        return (*plain, self.left, self.right, *(only.get(form or "", form) for form in (self.k_scale, self.v_scale)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Problem) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        said = ", ".join(f"{name}={value!r}" for name, value in self.given.items() if value is not False)
        return f"Problem({said})"

    @cached_property
    def spans(self) -> tuple[tuple[range, range], ...]:
        """Where each sequence of a ragged batch lies: its rows of q, and those of k and v. Plain problems have one span.

        >>> p = Problem(batch=1, heads=1, lengths=[5, (0, 3), (2, 1)], head_dim=8, dtype="float16")
        >>> p.spans
        ((range(0, 5), range(0, 5)), (range(5, 5), range(5, 8)), (range(5, 7), range(8, 9)))
        """
        if not self.ragged:
            return ((range(self.len_q), range(self.len_kv)),)
        cuts = (accumulate([pair[side] for pair in self._lengths], initial=0) for side in (0, 1))
        return tuple(zip(*(starmap(range, pairwise(cut)) for cut in cuts), strict=True))  # pyright: ignore[reportReturnType]

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Queries and keys of each of its `sequences`."""
        if self.lengths is not None:
            return self._lengths
        if self.varlen:
            each, more = divmod(self.len_q, self.batch)
            return tuple((each + (b < more), self.len_kv) for b in range(self.batch))
        return ((self.len_q, self.len_kv),) * (self.batch if self.apart else 1)

    @cached_property
    def sequences(self) -> tuple[Self, ...]:
        """Each sequence of a ragged batch, as a ragged batch of one; each request of a batch in pages, alone. A plain problem is
        its own.

        What is said of rows, tiles and keys below, `visible_keys` apart, is meant of one of them.
        """
        if not self.apart:
            return (self,)
        once = {pair: self.sequence(*pair) for pair in set(self.pairs)}
        return tuple(once[pair] for pair in self.pairs)

    @cached_property
    def different(self) -> dict[Self, int]:
        """Its different `sequences`, as they first come, and how many there are of each.

        >>> p = Problem(batch=1, heads=1, lengths=[5, 3, 5], head_dim=8, dtype="float16")
        >>> [(one.len_q, n) for one, n in p.different.items()]
        [(5, 2), (3, 1)]
        """
        if not self.apart:
            return {self: 1}
        return {self.sequence(*pair): n for pair, n in Counter(self.pairs).items()}

    def sequence(self, queries: int, keys: int) -> Self:
        """A ragged batch, or a batch in pages, of one sequence with so many queries and keys."""
        pages = None if self.page_size is None else self.pages
        return self.replace(batch=1, lengths=((queries, keys),), len_q=queries, len_kv=keys, pages=pages)

    def of_sequences(self, evaluate: Callable[[Self], T]) -> list[tuple[T, int | Array]]:
        """What a formula says of each different sequence, and how many there are of it. Of many, those that go one way through the
        formula are evaluated together: as a problem whose lengths are lanes (simulator.lanes), and so is what the formula says.

        >>> p = Problem(batch=1, heads=1, lengths=range(1, 100), head_dim=8, dtype="float16")
        >>> [(keys.tolist()[:3], len(times)) for keys, times in p.of_sequences(lambda one: 2 * one.len_kv)]
        [([2, 4, 6], 99)]
        """
        pairs, times = self._different_pairs
        if len(pairs) <= _FEW:
            return [(evaluate(one), n) for one, n in self.different.items()]
        widest = self.heads * max(self.head_dim, self.head_dim_v) * MARGIN
        small = (pairs + MARGIN).astype(float).prod(axis=1) * widest < 2.0**62

        def together(lanes: Array) -> T:
            if len(lanes) == 1:
                return evaluate(self.sequence(*pairs[lanes[0]].tolist()))
            return evaluate(self._lanes(pairs[lanes], exact=bool(small[lanes].all())))

        sides = [np.flatnonzero(side) for side in (small, ~small) if side.any()]
        return [(found, times[lanes]) for side in sides for lanes, found in ways(side, together)]

    def total(self, evaluate: Callable[[Self], int]) -> int:
        """The sum of a number of each sequence.

        >>> Problem(batch=1, heads=1, lengths=range(100), head_dim=8, dtype="float16").total(lambda one: one.len_kv // 2)
        2450
        """
        return sum(summed_over(n, times) for n, times in self.of_sequences(evaluate))

    @property
    def alike(self) -> bool:
        """Have all of its sequences the same lengths?"""
        return len(self._different_pairs[0]) <= 1

    @cached_property
    def pairs_in_numpy(self) -> Array:
        """`pairs` as an array (sequences, 2)."""
        return np.array(self.pairs, np.int64).reshape(-1, 2)

    @cached_property
    def _different_pairs(self) -> tuple[Array, Array]:
        """The different ones of `pairs`, as they first come, and how many there are of each."""
        found = Counter(self.pairs)
        return np.array(list(found), np.int64).reshape(-1, 2), np.array(list(found.values()), np.int64)

    def _lanes(self, pairs: Array, *, exact: bool) -> Self:
        """Many sequences as one problem. Queries that all have alike stay a number."""
        one = self.sequence(*pairs[0].tolist())
        len_q, len_kv = (lanes_of(side, exact=exact) for side in pairs.T)
        if (pairs[:, 0] == pairs[0, 0]).all():
            len_q = one.len_q
        return one.with_lanes(len_q=len_q, len_kv=len_kv, lengths=((len_q, len_kv),))

    def with_lanes(self, **lengths: Any) -> Self:
        """This problem with lengths that have lanes. Nothing is checked."""
        many = object.__new__(type(self))
        many.__dict__.update({name: self.__dict__[name] for name in FIELDS} | lengths)
        return many

    def requests(self, places: Sequence[int]) -> Self:
        """Some of the requests of a batch, in this order. They have as much room for keys as all have.

        >>> p = Problem(batch=2, heads=8, lengths=[(1, 4), (1, 9)], len_prefix=100, head_dim=64, dtype="float16")
        >>> p.requests([0]).seq_lens, p.requests([0]).len_kv
        ((4,), 9)
        """
        lengths = None if self.lengths is None else [self._lengths[b] for b in places]
        return self.replace(batch=len(places), lengths=lengths, len_kv=self.len_kv)

    @property
    def ragged(self) -> bool:
        """Do sequences lie one behind the other in the rows of a batch of 1?"""
        return self.lengths is not None and self.page_size is None and self.len_prefix is None

    @property
    def apart(self) -> bool:
        """Is it computed and counted sequence by sequence?"""
        return self.ragged or self.page_size is not None

    @property
    def gathered(self) -> Self:
        """The plain problem that a request in pages is, once its keys lie one behind the other.

        >>> Problem(batch=1, heads=8, lengths=[(1, 40)], head_dim=64, dtype="float16", page_size=16).gathered
        Problem(batch=1, heads=8, len_q=1, len_kv=40, head_dim=64, dtype='float16')
        """
        mask = "dense" if self.drafts else self.mask
        return self.replace(
            len_q=self.len_q,
            len_kv=self.len_kv,
            lengths=None,
            page_size=None,
            pages=None,
            drafts=False,
            varlen=False,
            mask=mask,
        )

    @cached_property
    def seq_lens(self) -> tuple[int, ...]:
        """The keys of each request of a batch in pages. With a prefix, those that it has of its own."""
        return tuple([keys for _, keys in self._lengths]) if self.lengths is not None else (self.len_kv,) * self.batch

    @property
    def rows_batch(self) -> int:
        """The batches of q and the output: one, where the queries of requests lie one behind the other."""
        return 1 if self.varlen else self.batch

    @property
    def cu_seqlens_q(self) -> tuple[int, ...]:
        """Where the queries of each sequence begin, and where the last ones end.

        >>> sizes = {"batch": 2, "heads": 1, "head_dim": 8, "dtype": "float16", "page_size": 4}
        >>> Problem(**sizes, lengths=[(5, 20), (1, 70)], varlen=True).cu_seqlens_q
        (0, 5, 6)
        """
        return tuple(accumulate((queries for queries, _ in self.pairs), initial=0))

    @property
    def table_pages(self) -> int:
        """The pages that a block table has room for, per request."""
        return 0 if self.page_size is None else -(-self.len_kv // self.page_size)

    @cached_property
    def pages_of_lengths(self) -> int:
        """The pages that all requests need together, if none shares any."""
        return 0 if self.page_size is None else int((-(-self.pairs_in_numpy[:, 1] // self.page_size)).sum())

    @property
    def sequences_of_lengths(self) -> int:
        """How many sequences lie one behind the other: one, without lengths."""
        return self.batch if self.varlen else len(self._lengths) if self.ragged else 1

    @property
    def queries_of_lengths(self) -> int:
        """The `len_q` that lengths say: their sum, or in pages each request's."""
        if self.varlen:
            return sum(queries for queries, _ in self._lengths)
        return self.spans[-1][0].stop if self.ragged else self._lengths[0][0]

    @property
    def keys_of_lengths(self) -> int:
        """The `len_kv` that follows: the sum of the lengths, or in pages the longest. Without lengths it is `len_q`."""
        if self.lengths is None:
            return self.len_q
        return self.spans[-1][1].stop if self.ragged else max(self.seq_lens)

    @cached_property
    def padded(self) -> Self:
        """The plain problem that has room for a ragged batch: as many sequences, each as long as the longest.

        >>> Problem(batch=1, heads=1, lengths=[5, (0, 30), (2, 1)], head_dim=8, dtype="float16").padded
        Problem(batch=3, heads=1, len_q=5, len_kv=30, head_dim=8, dtype='float16')
        """
        if not self.ragged:
            return self
        len_q, len_kv = self._different_pairs[0].max(axis=0).tolist()
        return self.replace(batch=len(self._lengths), lengths=None, len_q=len_q, len_kv=len_kv)

    @property
    def _lengths(self) -> tuple[tuple[int, int], ...]:
        return cast("tuple[tuple[int, int], ...]", self.lengths)

    @property
    def offsets(self) -> int:
        """How many offsets say where sequences begin: one per sequence, and that of the end."""
        return self.sequences_of_lengths + 1

    @cached_property
    def bit_spans(self) -> tuple[range, ...]:
        """Which bytes of a mask of bits each sequence has. Plain problems have one span.

        >>> Problem(batch=1, heads=1, lengths=[5, (0, 3), (2, 9)], head_dim=8, dtype="float16", mask="bits").bit_spans
        (range(0, 4), range(4, 4), range(4, 7))
        """
        cuts = accumulate((-(-(len(rows) * len(keys)) // 8) for rows, keys in self.spans), initial=0)
        return tuple(starmap(range, pairwise(cuts)))

    @property
    def bit_bytes(self) -> int:
        """The bytes of a mask of bits. Those of each sequence begin with a byte."""
        if self.sequences_of_lengths > 1:
            return self.total(lambda one: one.bit_bytes)
        return -(-self.len_q * self.len_kv // 8)

    @property
    def block(self) -> Tile:
        """A block of a mask of blocks, as a tile."""
        return Tile(*cast("tuple[int, int]", self.block_size))

    @property
    def row_blocks(self) -> int:
        """Rows of blocks of a mask."""
        return self.row_tiles(self.block)

    @property
    def block_list(self) -> int:
        """Numbers that a mask has for each row of blocks: how many are visible, and room for all of them."""
        return 1 + self.key_tiles(self.block)

    @property
    def operand_dtype(self) -> str:
        """The dtype in which the tensor cores multiply: beside a quantised cache float16, which holds every element of 8 bits.

        >>> p = Problem(batch=1, heads=8, len_q=1, len_kv=64, head_dim=64, dtype="bfloat16")
        >>> p.operand_dtype, p.replace(kv_dtype="int8").operand_dtype
        ('bfloat16', 'float16')
        """
        return "float16" if self.quantized else self.dtype

    @property
    def quantized(self) -> bool:
        """Are K and V of 8 bits, and Q of 16?

        >>> Problem(batch=1, heads=8, len_q=1, len_kv=64, head_dim=64, dtype="float16", kv_dtype="int8").quantized
        True
        """
        return self.kv_dtype != self.dtype

    @property
    def kv_itemsize(self) -> int:
        """Bytes of an element of K and V."""
        return WIDTH[self.kv_dtype]

    @property
    def whole(self) -> int:
        """The axis of a scale for all of an array: one."""
        return 1

    @property
    def rng_words(self) -> int:
        """The numbers of `rng_state`: the seed and the offset."""
        return 2

    @property
    def kept(self) -> int:
        """How many of a random byte's 256 values keep a weight, all of them without dropout.

        >>> Problem(batch=1, heads=1, len_q=8, head_dim=64, dtype="float16", dropout=0.1).kept
        230
        """
        return 256 if self.dropout is None else round(256 * (1 - self.dropout))

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the storage dtype."""
        return ITEMSIZE[self.dtype]

    @property
    def out_dtype(self) -> str:
        """The output's dtype: the storage dtype, or bfloat16 where that has 8 bits only."""
        return output_dtype(self.dtype)

    @property
    def offset(self) -> int:
        """The key that query 0 is aligned with: `len_kv - len_q`."""
        return self.len_kv - self.len_q

    @property
    def left(self) -> int | None:
        """Keys visible before the aligned one; None for all."""
        return None if self.window is None else self.window[0]

    @property
    def right(self) -> int | None:
        """Keys visible after the aligned one; None for all."""
        if self.causal:
            return 0
        return None if self.window is None else self.window[1]

    @property
    def transposed(self) -> Self:
        """The problem in which keys take the place of queries: a key sees the queries that see it.

        >>> p = Problem(batch=1, heads=1, len_q=3, len_kv=5, head_dim=8, dtype="float16", causal=True)
        >>> [list(p.transposed.visible_keys(j)) for j in range(p.len_kv)]
        [[0, 1, 2], [0, 1, 2], [0, 1, 2], [1, 2], [2]]
        """
        window = None if self.left is None and self.right is None else (self.right, self.left)
        lengths = None if self.lengths is None else [(keys, queries) for queries, keys in self._lengths]
        return self.replace(len_q=self.len_kv, len_kv=self.len_q, lengths=lengths, causal=False, window=window)

    def visible_keys(self, row: int) -> range:
        """The keys that query `row` attends to."""
        at = bisect_right(self.spans, row, key=lambda span: span[0].start) - 1
        (rows, keys), alone = self.spans[at], self.sequences[at]
        seen = alone.keys_of_rows(row - rows.start, row - rows.start)
        return range(keys.start + seen.start, keys.start + seen.stop)

    def keys_of_rows(self, first: int, last: int) -> range:
        """The keys that any of the queries first..last (inclusive) attends to; one contiguous range."""
        start = 0 if self.left is None else max(0, first + self.offset - self.left)
        stop = self.len_kv if self.right is None else min(self.len_kv, last + self.offset + self.right + 1)
        return range(start, max(start, stop))

    def row_tiles(self, tile: Tile) -> int:
        """Tr, the number of row tiles."""
        return -(-self.len_q // tile.rows)

    def key_tiles(self, tile: Tile) -> int:
        """Tc, the number of key tiles."""
        return -(-self.len_kv // tile.cols)

    def tiles_of_row(self, i: int, tile: Tile) -> range:
        """The key tiles that the mask leaves to row tile i; the others hold no visible pair."""
        first = i * tile.rows
        keys = self.keys_of_rows(first, min(first + tile.rows, self.len_q) - 1)
        return range(keys.start // tile.cols, -(-keys.stop // tile.cols)) if keys else range(0)


FIELDS: dict[str, Field] = fields_of(Problem)
"""What is known of each field, by name."""
SIZES = tuple(name for name, known in FIELDS.items() if known.axis)
"""The fields that size an axis of some operand."""
FEATURES = tuple(name for name, known in FIELDS.items() if not known.axis and name != "dtype")
"""What a problem asks for beside sizes and dtype: masks, the scale, what changes the scores."""
MASKS = tuple(name for name in FEATURES if not FIELDS[name].operand)
"""Those that a caller says by keywords. The others are said by passing an array."""
COMMON_MASKS = ("causal", "window", "scale")
"""The features that every algorithm knows."""
OF_CACHES = ("kv_dtype", "k_scale", "v_scale")
"""The features of K and V that are quantised."""
SCORES = ("soft_cap", "sinks", "alibi")
"""The features that change the scores. Those who know a mask needn't know them."""


class Masks(TypedDict, total=False):
    """`MASKS` as keywords of a call, for type checkers."""

    causal: bool
    window: Pair | None
    scale: float | None
    soft_cap: float | None
    block_size: Pair | None
    lengths: Lengths | None
    partial: bool
    dropout: float | None
    exact_lse: bool
    chunk: int | None


F = TypeVar("F", bound=Callable[..., Any])


def spell_masks(function: F) -> F:
    """Shows `MASKS` in the signature of a function that takes them by `**masks`, or among others by `**named`."""
    signature = inspect.signature(function)
    *plain, rest = signature.parameters.values()
    masks = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=known.default, annotation=known.annotation)
        for name, known in FIELDS.items()
        if name in MASKS
    ]
    shown = [*plain, *masks, *([] if rest.name == "masks" else [rest])]
    function.__signature__ = signature.replace(parameters=shown)  # pyright: ignore[reportFunctionMemberAccess]
    return function
