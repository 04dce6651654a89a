"""The catalogue has one row per algorithm. A new algorithm adds files of its name, and a row here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from simulator.config import Config
from simulator.devices import Device
from simulator.errors import Unavailable, UsageError, unknown
from simulator.formulas import cascade as cascade_formula
from simulator.formulas import flash1 as flash1_formula
from simulator.formulas import flash1_backward as flash1_backward_formula
from simulator.formulas import flash2 as flash2_formula
from simulator.formulas import flash2_backward as flash2_backward_formula
from simulator.formulas import flash2_backward_deterministic as flash2_backward_deterministic_formula
from simulator.formulas import flash3 as flash3_formula
from simulator.formulas import flash3_backward as flash3_backward_formula
from simulator.formulas import flash3_backward_deterministic as flash3_backward_deterministic_formula
from simulator.formulas import flash3_backward_wide as flash3_backward_wide_formula
from simulator.formulas import flash3_fp8 as flash3_fp8_formula
from simulator.formulas import flash3_paged as flash3_paged_formula
from simulator.formulas import flash_decoding as flash_decoding_formula
from simulator.formulas import mla as mla_formula
from simulator.formulas import mla_hopper as mla_hopper_formula
from simulator.formulas import mla_hopper_paged as mla_hopper_paged_formula
from simulator.formulas import mla_paged as mla_paged_formula
from simulator.formulas import online_softmax as online_softmax_formula
from simulator.formulas import paged as paged_formula
from simulator.formulas import softmax as softmax_formula
from simulator.formulas import standard as standard_formula
from simulator.formulas import standard_backward as standard_backward_formula
from simulator.misuse import undecorated
from simulator.names import DType
from simulator.operations.attention import ATTENTION
from simulator.operations.operation import Operation, always
from simulator.problem import COMMON_MASKS, FEATURES, FP8, OF_CACHES, SCORES, Problem, Tile
from simulator.program import Program
from simulator.programs import cascade as cascade_program
from simulator.programs import flash1 as flash1_program
from simulator.programs import flash1_backward as flash1_backward_program
from simulator.programs import flash2 as flash2_program
from simulator.programs import flash2_backward as flash2_backward_program
from simulator.programs import flash2_backward_deterministic as flash2_backward_deterministic_program
from simulator.programs import flash3 as flash3_program
from simulator.programs import flash3_backward as flash3_backward_program
from simulator.programs import flash3_backward_1 as flash3_backward_1_program
from simulator.programs import flash3_backward_2 as flash3_backward_2_program
from simulator.programs import flash3_backward_3 as flash3_backward_3_program
from simulator.programs import flash3_backward_deterministic as flash3_backward_deterministic_program
from simulator.programs import flash3_backward_wide as flash3_backward_wide_program
from simulator.programs import flash3_fp8 as flash3_fp8_program
from simulator.programs import flash3_paged as flash3_paged_program
from simulator.programs import flash_decoding as flash_decoding_program
from simulator.programs import mla as mla_program
from simulator.programs import mla_hopper as mla_hopper_program
from simulator.programs import mla_hopper_paged as mla_hopper_paged_program
from simulator.programs import mla_paged as mla_paged_program
from simulator.programs import online_softmax as online_softmax_program
from simulator.programs import paged as paged_program
from simulator.programs import softmax as softmax_program
from simulator.programs import standard as standard_program
from simulator.programs import standard_backward as standard_backward_program
from simulator.programs.cascade import cascade
from simulator.programs.flash1 import flash1
from simulator.programs.flash1_backward import flash1_backward
from simulator.programs.flash2 import flash2
from simulator.programs.flash2_backward import flash2_backward
from simulator.programs.flash2_backward_deterministic import flash2_backward_deterministic
from simulator.programs.flash2_triton import flash2_triton
from simulator.programs.flash3 import flash3
from simulator.programs.flash3_1 import flash3_1
from simulator.programs.flash3_2 import flash3_2
from simulator.programs.flash3_3 import flash3_3
from simulator.programs.flash3_backward import flash3_backward
from simulator.programs.flash3_backward_1 import flash3_backward_1
from simulator.programs.flash3_backward_2 import flash3_backward_2
from simulator.programs.flash3_backward_3 import flash3_backward_3
from simulator.programs.flash3_backward_deterministic import flash3_backward_deterministic
from simulator.programs.flash3_backward_wide import flash3_backward_wide
from simulator.programs.flash3_fp8 import flash3_fp8
from simulator.programs.flash3_paged import flash3_paged
from simulator.programs.flash_decoding import flash_decoding
from simulator.programs.mla import mla
from simulator.programs.mla_hopper import mla_hopper
from simulator.programs.mla_hopper_paged import mla_hopper_paged
from simulator.programs.mla_paged import mla_paged
from simulator.programs.online_softmax import online_softmax
from simulator.programs.paged import paged
from simulator.programs.softmax import softmax_merge, softmax_naive, softmax_online, softmax_safe
from simulator.programs.standard import standard
from simulator.programs.standard_backward import standard_backward
from simulator.support import Support, a_lane_per_key, few_rows, powers_of_two, warpgroups
from simulator.time.launch import Launch
from simulator.time.rates import Rates
from simulator.time.schedules import flash1 as flash1_schedule
from simulator.time.schedules import flash1_backward as flash1_backward_schedule
from simulator.time.schedules import flash2 as flash2_schedule
from simulator.time.schedules import flash2_backward as flash2_backward_schedule
from simulator.time.schedules import flash2_backward_deterministic as flash2_backward_deterministic_schedule
from simulator.time.schedules import flash3 as flash3_schedule
from simulator.time.schedules import flash3_1 as flash3_1_schedule
from simulator.time.schedules import flash3_2 as flash3_2_schedule
from simulator.time.schedules import flash3_3 as flash3_3_schedule
from simulator.time.schedules import flash3_backward as flash3_backward_schedule
from simulator.time.schedules import flash3_backward_1 as flash3_backward_1_schedule
from simulator.time.schedules import flash3_backward_2 as flash3_backward_2_schedule
from simulator.time.schedules import flash3_backward_3 as flash3_backward_3_schedule
from simulator.time.schedules import flash3_backward_deterministic as flash3_backward_deterministic_schedule
from simulator.time.schedules import flash3_backward_wide as flash3_backward_wide_schedule
from simulator.time.schedules import flash3_fp8 as flash3_fp8_schedule
from simulator.time.schedules import online_softmax as online_softmax_schedule
from simulator.time.schedules import standard as standard_schedule
from simulator.time.schedules import standard_backward as standard_backward_schedule

Formula = Callable[..., None]
"""`formula(book, problem, tile, config, *, lse)` fills a `Book` as the tile program does."""


Schedule = Callable[[Problem, Config, Rates], list[Launch]]
"""What the blocks of each launch do, and in which order they start. The prediction of time needs it."""


@dataclass(frozen=True)
class Kernel:
    """A launch on the GPU: the source file, its entry point, and the names of the arrays that it takes, in order.

    An array that the call doesn't have is passed as NULL (the LSE, unless it was asked for). An array in `boxes` is
    passed as a TMA descriptor, with the number of rows of its box: "rows" or "cols" of the tile, "head_dim", or "page", which
    is what of a page fits in a tile (where nothing does, the array itself is passed). `arch` is the architecture to compile
    for if it isn't the GPU's own. A `persistent` kernel may have fewer blocks than tiles. It is launched if `when(problem)`; with
    `parts`, only where a configuration takes heads in parts, or only where it doesn't. If it `waits`, its blocks read again and
    again how far others are. `language` is "cuda" (a `.cu` file of `kernels_cu`) or "triton" (a module of `flashlab/triton`).
    """

    source: str
    entry: str
    arguments: tuple[str, ...]
    boxes: tuple[tuple[str, str], ...] = ()
    arch: str | None = None
    persistent: bool = False
    language: str = "cuda"
    when: Callable[[Problem], bool] = always
    waits: bool = False
    parts: bool | None = None

    def settles(self, what: str) -> bool:
        """Does its source settle a count, such as "sram.read"? In Triton the compiler decides all but HBM's bytes.

        >>> import flashlab as fl
        >>> [fl.CATALOGUE[name].kernels[0].settles("sram.read") for name in ("flash2", "flash2_triton")]
        [True, False]
        """
        return self.language == "cuda" or what.startswith("hbm.")


@dataclass(frozen=True)
class Algorithm:
    """One row: an algorithm's tile program, formula, schedule and kernels. A user's own program has only the first.

    `about` has a sentence for each step, by launch, which the player shows. `follows` is the rung below, from which
    ladders are made. `atomics` are the outputs that atomics add up, so that their last bits may differ from run to run.
    `shown` is what its operation has under that name, where the algorithm is for something else.

    >>> import flashlab as fl
    >>> fl.CATALOGUE["flash1"].kernels[0].arguments
    ('q', 'k', 'v', 'o', 'l', 'm', 'out', 'lse')
    """

    name: str
    program: Program
    formula: Formula | None = None
    schedule: Schedule | None = None
    kernels: tuple[Kernel, ...] = ()
    support: Support = Support()
    about: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    follows: str | None = None
    atomics: tuple[str, ...] = ()
    shown: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The catalogue's rows are pickled by their names."""
        return (get, (self.name,)) if CATALOGUE.get(self.name) is self else super().__reduce_ex__(protocol)

    @property
    def operation(self) -> Operation:
        """The operation that the algorithm computes."""
        return self.program.operation

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """The dtypes that its kernels take."""
        return self.support.dtypes

    def launched(self, problem: Problem, config: Config | None = None) -> tuple[Kernel, ...]:
        """Those of its kernels that a problem takes, in the order of their launches; without a `config`, of any.

        >>> import flashlab as fl
        >>> p = fl.Problem(batch=1, heads=1, len_q=8, head_dim=64, dtype="float16", mask="dense")
        >>> [kernel.entry for kernel in fl.CATALOGUE["flash2"].launched(p)]
        ['pack_mask', 'flash2']
        """
        forms = (None, True, False) if config is None else (None, config.parts > 1)
        return tuple(kernel for kernel in self.kernels if kernel.when(problem) and kernel.parts in forms)

    @property
    def language(self) -> str | None:
        """The language of its kernels: "cuda" or "triton", or None for a program without kernels."""
        return self.kernels[0].language if self.kernels else None

    @property
    def arch(self) -> str | None:
        """The architecture that its kernels are compiled for. None is the GPU's own."""
        return next((kernel.arch for kernel in self.kernels if kernel.arch), None)

    def refusal(
        self, problem: Problem, device: Device | None = None, tile: Tile | None = None
    ) -> UsageError | Unavailable | None:
        """The error for a problem that the algorithm doesn't take, or None.

        Without a `device` this is about tile program and formula. With one it is also about the kernels on that device.
        """
        if (error := problem.unknown_mask(self.support.masks, self.name)) is not None:
            return error
        if (error := self.operation.refusal(problem, self.name)) is not None:
            return error
        if not self.kernels:  # a program without kernels takes any problem
            without = "one with a kernel (fl.simulate runs tile programs)"
            return None if device is None else UsageError("algorithm", self.name, without)
        return self.support.refusal(self.name, problem, device, tile)

    def refuses(self, problem: Problem, device: Device | None = None, tile: Tile | None = None) -> str | None:
        """Why the algorithm doesn't take a problem, as one line, or None if it does."""
        error = self.refusal(problem, device, tile)
        return None if error is None else str(error)

    def check(self, problem: Problem, device: Device | None = None, tile: Tile | None = None) -> None:
        """Raises the error that `refusal` returns, if any."""
        if (error := self.refusal(problem, device, tile)) is not None:
            raise error


_SCORES = Kernel("standard", "standard_scores", ("q", "k", "s"))
_OUTPUT = Kernel("standard", "standard_output", ("p", "v", "out"))
_FORWARD = ("q", "k", "v", "out", "lse")
_REQUESTS = ("block_table", "seq_lens")
_PARTIAL = ("partial", "partial_m", "partial_l")
_TREE = (*_PARTIAL, "arrivals")
_OF_HEAD = ("sinks", "alibi_slopes")
_OFFSETS = ("offsets_q", "offsets_kv")
_PACK = Kernel(
    "mask",
    "pack_mask",
    ("mask", "block_mask", "mask_bits", "mask_tiles", *_OFFSETS, "offsets_mask"),
    when=lambda p: p.mask is not None,
)
_PACKED = ("mask_bits", "mask_tiles")
_DELTA = Kernel("flash2_backward", "flash2_backward_delta", ("out", "dout", "dlse", "delta", "dq_sum", "offsets_q"))
_SINKS = Kernel(
    "flash2_backward", "flash2_backward_sinks", ("sinks", "lse", "delta", "dsinks", "offsets_q"), when=lambda p: p.sinks
)
_CONVERT = Kernel("flash2_backward", "flash2_backward_convert", ("dq_sum", "dq", "offsets_q"))
_PARTS = ("dk_parts", "dv_parts")
_OPTIONAL = (*_OF_HEAD, *_OFFSETS, *_PACKED)
_ALL = (*COMMON_MASKS, *SCORES, "mask", "block_size", "lengths")
_BOXES = ("q", "rows"), ("k", "cols"), ("v", "cols")
_BACKWARD_ROWS = ("out", "dout", "dlse", "delta", "dq_sum", "dq", *_OFFSETS)
_BACKWARD_BOXES = ("q", "rows"), ("k", "cols"), ("v", "cols"), ("dout", "rows")
_HOPPER = Support(
    dtypes=("float16", "bfloat16"),
    only=(9, 0),
    tile=warpgroups,
    tiles=(None, Tile(64, 64), Tile(128, 48), Tile(128, 128), Tile(192, 64)),
)
_LATENT = Support(
    dtypes=("float16", "bfloat16"), least=(8, 0), masks=(*COMMON_MASKS, "soft_cap", "sinks", "lengths", "chunk"),
    head_dims=range(576, 577), head_dim_v=512, tile=mla_program.accepts, tiles=(None, Tile(16, 32), Tile(32, 64)),
    instead=None, same_queries="make a call for each number",
)  # fmt: skip
_LATENT_HOPPER = replace(_LATENT, only=(9, 0), tile=mla_hopper_program.accepts, tiles=(None,), instead="mla")
_HOPPER_BACKWARD = Support(
    dtypes=("float16", "bfloat16"), only=(9, 0), head_dims=range(1, 129), tile=flash3_backward_program.accepts,
    masks=(*COMMON_MASKS, "sinks", "lengths", "dropout", "dlse"), instead="flash2_backward",
)  # fmt: skip
_BACKWARD_RUNG = replace(_HOPPER_BACKWARD, masks=(*COMMON_MASKS, "dlse"), instead="flash3_backward")
_TRITON = Support(
    least=(8, 0), tile=powers_of_two, tiles=(None, Tile(16, 32), Tile(64, 64), Tile(128, 32), Tile(64, 128))
)


def _rung(name: str, program: Program, schedule: Schedule, follows: str) -> Algorithm:
    """A rung of FlashAttention-3. All rungs move the same bytes, and differ in what runs beside what."""
    kernel = Kernel(name, name, _FORWARD, _BOXES, "sm_90a")
    about = {name: flash3_program.ABOUT}
    return Algorithm(name, program, flash3_formula.flash3, schedule, (kernel,), _HOPPER, about, follows)


def _backward_rung(
    name: str, program: Program, schedule: Schedule, about: Mapping[str, Mapping[str, str]], follows: str
) -> Algorithm:
    """A rung of the backward pass for Hopper. All of them move the same bytes, and have flash3_backward's first and last launch."""
    file, arch = "flash3_backward", "sm_90a"
    kernels = (
        Kernel(file, "flash3_backward_delta", (*_BACKWARD_ROWS, "order"), arch=arch),
        Kernel(name, name, ("q", "k", "v", "lse", "dout", "delta", "dq_sum", "dk", "dv"), _BACKWARD_BOXES, arch),
        Kernel(file, "flash3_backward_convert", ("dq_sum", "dq", "offsets_q"), arch=arch),
    )
    formula = flash3_backward_formula.rung(name)
    return Algorithm(name, program, formula, schedule, kernels, _BACKWARD_RUNG, about, follows, ("dq",))


def _decoding(scales: bool, ragged: bool) -> Kernel:
    """The launch of Flash-Decoding, with scales of quantised K and V or without, for a ragged batch or a plain one."""
    further = (*_FORWARD, "sinks", *("k_scale", "v_scale") * scales, *("offsets_kv",) * ragged, *_TREE)
    return Kernel(
        "flash_decoding",
        "flash_decoding",
        further,
        persistent=True,
        when=lambda p: (p.quantized, p.ragged) == (scales, ragged),
    )


def _paged(scales: bool, drafts: bool) -> Kernel:
    """The launch of paged attention, with scales of quantised K and V or without, with a mask of drafts or without."""
    further = (*_FORWARD, "sinks", *("k_scale", "v_scale") * scales, *_REQUESTS, *("draft_mask",) * drafts, *_TREE)
    return Kernel(
        "flash_decoding", "paged", further, persistent=True, when=lambda p: (p.quantized, p.drafts) == (scales, drafts)
    )


def _cascade(*, lengths: bool) -> tuple[Kernel, ...]:
    """The launches of cascade, with own lengths of the requests or without."""
    entries = {
        "prefix": ("q", "k_prefix", "v_prefix", "partial", "partial_lse"),
        "suffix": ("q", "k", "v", "partial", "partial_lse"),
        "merge": ("partial", "partial_lse", "sinks", "out", "lse"),
    }
    own = ("seq_lens",) * lengths
    return tuple(
        Kernel("cascade", f"cascade_{entry}", (*each, *own), when=lambda p: (p.lengths is not None) == lengths)
        for entry, each in entries.items()
    )


def _latent_hopper(*, ragged: bool) -> tuple[Kernel, ...]:
    """The launches of latent attention on Hopper, for a ragged batch or for a plain one."""
    further = "lse", "sinks", *("offsets_kv",) * ragged, *_PARTIAL
    return (
        Kernel("mla_hopper", "mla_hopper", ("q", "latent", "out", *further), (("latent", "cols"),), "sm_90a", persistent=True,
               when=lambda p: p.ragged == ragged),
        Kernel("mla_hopper", "mla_hopper_merge", ("out", *further), arch="sm_90a",
               when=lambda p: p.ragged == ragged and mla_hopper_program.merges(p, mla_hopper_program.TILE)),
    )  # fmt: skip


def _hopper_backward(*, waits: bool = False) -> tuple[Kernel, ...]:
    """The launches of the backward pass for Hopper. If it `waits`, the blocks of the main one take turns."""
    file, arch = "flash3_backward", "sm_90a"
    order = "turns" if waits else "order"
    boxes = _BACKWARD_BOXES
    main = ("q", "k", "v", "lse", "dout", "delta", "dq_sum", "dq"), (*_OFFSETS, "rng_state", "drawn", order)
    return (
        Kernel(file, "flash3_backward_delta", (*_BACKWARD_ROWS, order), arch=arch),
        *(
            Kernel(file, file, (*main[0], *sums, *main[1]), boxes, arch, persistent=True, parts=parts, waits=waits)
            for parts, sums in ((False, ("dk", "dv")), (True, _PARTS))
        ),
        *(() if waits else (Kernel(file, "flash3_backward_convert", ("dq_sum", "dq", "offsets_q"), arch=arch),)),
        Kernel(file, "flash3_backward_parts", (*_PARTS, "dk", "dv"), arch=arch, parts=True),
        Kernel(
            file,
            "flash3_backward_sinks",
            ("sinks", "lse", "delta", "dsinks", "offsets_q"),
            arch=arch,
            when=lambda p: p.sinks,
        ),
    )


CATALOGUE = {
    row.name: row
    for row in (
        Algorithm(
            "standard", standard, standard_formula.standard, standard_schedule.launches,
            (_SCORES, Kernel("standard", "standard_softmax", ("s", "p", "lse", "rng_state")), _OUTPUT),
            Support(masks=(*COMMON_MASKS, "dropout", "dlse")), about=standard_program.ABOUT,
        ),
        Algorithm(
            "online_softmax", online_softmax, online_softmax_formula.online_softmax, online_softmax_schedule.launches,
            (_SCORES, Kernel("online_softmax", "online_softmax", ("s", "p", "lse")), _OUTPUT),
            about=standard_program.ABOUT | online_softmax_program.ABOUT, follows="standard",
        ),
        Algorithm(
            "flash1", flash1, flash1_formula.flash1, flash1_schedule.launches,
            (Kernel("flash1", "flash1", ("q", "k", "v", "o", "l", "m", "out", "lse")),),
            about=flash1_program.ABOUT, follows="online_softmax",
        ),
        Algorithm(
            "flash2", flash2, flash2_formula.flash2, flash2_schedule.launches,
            (_PACK, Kernel("flash2", "flash2", (*_FORWARD, *_OPTIONAL, "rng_state"))), Support(masks=(*_ALL, "dropout")),
            about=flash2_program.ABOUT, follows="flash1",
        ),
        _rung("flash3_1", flash3_1, flash3_1_schedule.launches, "flash2"),
        _rung("flash3_2", flash3_2, flash3_2_schedule.launches, "flash3_1"),
        _rung("flash3_3", flash3_3, flash3_3_schedule.launches, "flash3_2"),
        Algorithm(
            "flash3", flash3, flash3_formula.flash3, flash3_schedule.launches,
            (_PACK, Kernel("flash3", "flash3", (*_FORWARD, *_OPTIONAL, "rng_state", "drawn"), _BOXES, "sm_90a", persistent=True)),
            replace(_HOPPER, masks=(*_ALL, "dropout")), {"flash3": flash3_program.ABOUT}, "flash3_3",
        ),
        Algorithm(
            "flash3_fp8", flash3_fp8, flash3_fp8_formula.flash3_fp8, flash3_fp8_schedule.launches,
            (Kernel("flash3_fp8", "flash3_fp8_transpose", ("v", "v_t"), arch="sm_90a"),
             Kernel("flash3_fp8", "flash3_fp8", ("q", "k", "v_t", "q_scale", "k_scale", "v_scale", "out", "lse", "drawn"),
                    (("q", "rows"), ("k", "cols"), ("v_t", "head_dim")), "sm_90a", persistent=True)),
            Support(dtypes=(FP8,), only=(9, 0), masks=(*COMMON_MASKS, "exact_lse"), tile=flash3_fp8_program.accepts,
                    tiles=(None, *flash3_fp8_program.TILES[1:])),
            flash3_fp8_program.ABOUT, "flash3",
        ),
        Algorithm(
            "flash2_triton", flash2_triton, flash2_formula.flash2,
            kernels=(Kernel("flash2_triton", "flash2", _FORWARD, language="triton"),), support=_TRITON,
            about=flash2_program.ABOUT, follows="flash2",
        ),
        Algorithm(
            "flash_decoding", flash_decoding, flash_decoding_formula.flash_decoding, None,
            tuple(_decoding(scales, ragged) for scales in (False, True) for ragged in (False, True)),
            Support(masks=(*COMMON_MASKS, "soft_cap", "sinks", "lengths", *OF_CACHES), tile=few_rows,
                    tiles=(None, Tile(16, 16), Tile(32, 32)), same_queries="use flash2 or flash3"),
            about=flash_decoding_program.ABOUT, follows="flash2", shown={"len_q": 2, "len_kv": 256, "tile": "16x16"},
        ),
        Algorithm(
            "paged", paged, paged_formula.paged, None,
            tuple(_paged(scales, drafts) for scales in (False, True) for drafts in (False, True)),
            Support(masks=(*COMMON_MASKS, "soft_cap", "sinks", "lengths", *OF_CACHES, "drafts"), tile=a_lane_per_key,
                    tiles=(None, Tile(16, 16), Tile(32, 32)), instead="flash_decoding"),
            about=paged_program.ABOUT, follows="flash_decoding",
        ),
        Algorithm(
            "flash3_paged", flash3_paged, flash3_paged_formula.flash3_paged, None,
            (Kernel("flash3_paged", "flash3_paged", (*_FORWARD, "sinks", *_REQUESTS, "drawn"),
                    (("q", "rows"), ("k", "page"), ("v", "page")), "sm_90a", persistent=True),),
            replace(_HOPPER, masks=(*COMMON_MASKS, "soft_cap", "sinks", "lengths"), tile=flash3_paged_program.accepts,
                    tiles=(None, Tile(64, 64), Tile(128, 48), Tile(64, 128)), instead="paged"),
            about=flash3_paged_program.ABOUT, follows="flash3",
            shown={"batch": 2, "lengths": [(128, 192), (128, 160)], "page_size": 16, "pages": 28, "tile": "64x48"},
        ),
        Algorithm(
            "mla", mla, mla_formula.mla, None,
            (Kernel("mla", "mla", ("q", "latent", "out", "lse", "sinks", *_TREE), persistent=True, when=lambda p: not p.ragged),
             Kernel("mla", "mla", ("q", "latent", "out", "lse", "sinks", "offsets_kv", *_TREE), persistent=True,
                    when=lambda p: p.ragged)),
            _LATENT, about=mla_program.ABOUT, follows="flash_decoding",
        ),
        Algorithm(
            "mla_paged", mla_paged, mla_paged_formula.mla_paged, None,
            (Kernel("mla", "mla_paged", ("q", "latent", "out", "lse", "sinks", *_REQUESTS, *_TREE), persistent=True),),
            replace(_LATENT, instead="mla"),
            about=mla_paged_program.ABOUT, follows="mla",
        ),
        Algorithm(
            "mla_hopper", mla_hopper, mla_hopper_formula.mla_hopper, None,
            (*_latent_hopper(ragged=False), *_latent_hopper(ragged=True)),
            _LATENT_HOPPER, about=mla_hopper_program.ABOUT, follows="mla",
        ),
        Algorithm(
            "mla_hopper_paged", mla_hopper_paged, mla_hopper_paged_formula.mla_hopper_paged, None,
            (Kernel("mla_hopper", "mla_hopper_paged", ("q", "latent", "out", "lse", "sinks", *_REQUESTS, *_PARTIAL),
                    (("latent", "page"),), "sm_90a", persistent=True),
             Kernel("mla_hopper", "mla_hopper_paged_merge", ("out", "lse", "sinks", "seq_lens", *_PARTIAL), arch="sm_90a")),
            replace(_LATENT_HOPPER, instead="mla_paged"),
            about=mla_hopper_paged_program.ABOUT, follows="mla_hopper",
        ),
        Algorithm(
            "cascade", cascade, cascade_formula.cascade, None,
            (*_cascade(lengths=False), *_cascade(lengths=True)),
            Support(dtypes=("float16", "bfloat16"), least=(8, 0), masks=(*COMMON_MASKS, "soft_cap", "sinks", "lengths"),
                    tile=cascade_program.accepts, tiles=(None, Tile(16, 16), Tile(32, 32)), instead=None),
            about=cascade_program.ABOUT, follows="flash_decoding",
        ),
        Algorithm(
            "standard_backward", standard_backward, standard_backward_formula.standard_backward,
            standard_backward_schedule.launches,
            tuple(Kernel("standard_backward", f"standard_backward_{entry}", arguments) for entry, arguments in (
                ("p", ("q", "k", "lse", "p")), ("dv", ("p", "dout", "dv", "rng_state")), ("dp", ("dout", "v", "dp")),
                ("ds", ("out", "dout", "dlse", "p", "dp", "ds", "rng_state")), ("dq", ("ds", "k", "dq")),
                ("dk", ("ds", "q", "dk")))),
            Support(masks=(*COMMON_MASKS, "dropout", "dlse")), about=standard_backward_program.ABOUT,
        ),
        Algorithm(
            "flash1_backward", flash1_backward, flash1_backward_formula.flash1_backward, flash1_backward_schedule.launches,
            (Kernel("flash1_backward", "flash1_backward",
                    ("q", "k", "v", "out", "lse", "dout", "dlse", "dq_sum", "dq", "dk", "dv", "rng_state")),),
            Support(masks=(*COMMON_MASKS, "dropout", "dlse")), about=flash1_backward_program.ABOUT, follows="standard_backward",
        ),
        Algorithm(
            "flash2_backward", flash2_backward, flash2_backward_formula.flash2_backward, flash2_backward_schedule.launches,
            (_DELTA,
             Kernel("flash2_backward", "flash2_backward",
                    ("q", "k", "v", "lse", "dout", "delta", "dq_sum", "dk", "dv", *_OFFSETS, "rng_state")),
             _CONVERT, _SINKS),
            Support(masks=(*COMMON_MASKS, "soft_cap", "sinks", "lengths", "dropout", "dlse")),
            flash2_backward_program.ABOUT, "flash1_backward", ("dq",),
        ),
        Algorithm(
            "flash2_backward_deterministic", flash2_backward_deterministic,
            flash2_backward_deterministic_formula.flash2_backward_deterministic, flash2_backward_deterministic_schedule.launches,
            (_DELTA,
             Kernel("flash2_backward_deterministic", "flash2_backward_deterministic",
                    ("q", "k", "v", "lse", "dout", "delta", "dq_sum", "dk", "dv", *_OFFSETS, "rng_state", "drawn", "number",
                     "turns"), waits=True),
             _CONVERT, _SINKS),
            Support(masks=(*COMMON_MASKS, "soft_cap", "sinks", "lengths", "dropout", "dlse"), instead="flash2_backward"),
            flash2_backward_deterministic_program.ABOUT, "flash2_backward",
        ),
        _backward_rung(
            "flash3_backward_1", flash3_backward_1, flash3_backward_1_schedule.launches, flash3_backward_1_program.ABOUT,
            "flash2_backward",
        ),
        _backward_rung(
            "flash3_backward_2", flash3_backward_2, flash3_backward_2_schedule.launches, flash3_backward_2_program.ABOUT,
            "flash3_backward_1",
        ),
        _backward_rung(
            "flash3_backward_3", flash3_backward_3, flash3_backward_3_schedule.launches, flash3_backward_3_program.ABOUT,
            "flash3_backward_2",
        ),
        Algorithm(
            "flash3_backward", flash3_backward, flash3_backward_formula.flash3_backward, flash3_backward_schedule.launches,
            _hopper_backward(), _HOPPER_BACKWARD,
            flash3_backward_program.ABOUT, "flash3_backward_3", ("dq",),
        ),
        Algorithm(
            "flash3_backward_deterministic", flash3_backward_deterministic,
            flash3_backward_deterministic_formula.flash3_backward_deterministic, flash3_backward_deterministic_schedule.launches,
            _hopper_backward(waits=True),
            replace(_HOPPER_BACKWARD, masks=(*COMMON_MASKS, "sinks", "dropout", "dlse"), instead="flash2_backward_deterministic"),
            flash3_backward_deterministic_program.ABOUT, "flash3_backward",
        ),
        Algorithm(
            "flash3_backward_wide", flash3_backward_wide, flash3_backward_wide_formula.flash3_backward_wide,
            flash3_backward_wide_schedule.launches,
            (Kernel("flash3_backward_wide", "flash3_backward_wide_delta", ("out", "dout", "dlse", "delta"), arch="sm_90a"),
             Kernel("flash3_backward_wide", "flash3_backward_wide_dkv",
                    ("q", "k", "v", "lse", "dout", "delta", "dk", "dv", *_OFFSETS),
                    (("q", "cols"), ("k", "cols"), ("v", "cols"), ("dout", "cols")), "sm_90a"),
             Kernel("flash3_backward_wide", "flash3_backward_wide_dq", ("q", "k", "v", "lse", "dout", "delta", "dq", *_OFFSETS),
                    (("q", "rows"), ("k", "cols"), ("v", "cols"), ("dout", "rows")), "sm_90a"),
             Kernel("flash3_backward_wide", "flash3_backward_wide_sinks", ("sinks", "lse", "delta", "dsinks", "offsets_q"),
                    arch="sm_90a", when=lambda p: p.sinks)),
            Support(dtypes=("float16", "bfloat16"), only=(9, 0), tile=flash3_backward_wide_program.accepts,
                    masks=(*COMMON_MASKS, "sinks", "lengths", "dlse"), instead="flash2_backward"),
            flash3_backward_wide_program.ABOUT, "flash3_backward",
        ),
        Algorithm("softmax_naive", softmax_naive, softmax_formula.softmax_naive, about=softmax_program.ABOUT),
        Algorithm("softmax_safe", softmax_safe, softmax_formula.softmax_safe, about=softmax_program.ABOUT),
        Algorithm("softmax_online", softmax_online, softmax_formula.softmax_online, about=softmax_program.ABOUT),
        Algorithm("softmax_merge", softmax_merge, softmax_formula.softmax_merge, about=softmax_program.ABOUT),
    )
}  # fmt: skip
"""Every algorithm by name."""


def of(operation: Operation = ATTENTION) -> dict[str, Algorithm]:
    """The algorithms of an operation, by name.

    >>> from simulator.operations.softmax import SOFTMAX
    >>> list(of(SOFTMAX))
    ['softmax_naive', 'softmax_safe', 'softmax_online', 'softmax_merge']
    """
    return {name: row for name, row in CATALOGUE.items() if row.operation is operation}


def with_kernels(operation: Operation | None = None, language: str | None = None) -> list[str]:
    """The algorithms that have kernels, of one operation or of all, in one language or in any.

    >>> with_kernels()[:2], with_kernels(language="triton")
    (['standard', 'online_softmax'], ['flash2_triton'])
    """
    return [
        row.name
        for row in CATALOGUE.values()
        if row.kernels and operation in (None, row.operation) and language in (None, row.language)
    ]


def ladder(top: str, bottom: str) -> list[str]:
    """The rungs from `bottom` up to `top`, by what each row follows. Raises `UsageError` if `bottom` isn't below `top`.

    >>> ladder("flash3", "flash2")
    ['flash2', 'flash3_1', 'flash3_2', 'flash3_3', 'flash3']
    >>> ladder("flash3_backward", "flash2_backward")[1:]
    ['flash3_backward_1', 'flash3_backward_2', 'flash3_backward_3', 'flash3_backward']
    """
    rungs = [top]
    while rungs[0] != bottom:
        below = get(rungs[0]).follows
        if below is None:
            raise UsageError("bottom", bottom, f"a rung below {top}")
        rungs.insert(0, below)
    return rungs


def names(problem: Problem, operation: Operation = ATTENTION) -> list[str]:
    """The algorithms of an operation that take a problem.

    >>> import flashlab as fl
    >>> names(fl.Problem(batch=1, heads=1, len_q=8, head_dim=64, dtype="float8_e4m3fn"))
    ['flash3_fp8']
    """
    return [row.name for row in of(operation).values() if row.refusal(problem) is None]


def get(algorithm: str | Program) -> Algorithm:
    """The row of an algorithm by name, or a new row for a user's own tile program. Raises `UsageError`."""
    if isinstance(algorithm, Program):
        own = Algorithm(algorithm.name, algorithm, support=Support(masks=FEATURES))
        return next((row for row in CATALOGUE.values() if row.program is algorithm), own)
    undecorated(algorithm)
    if not isinstance(algorithm, str) or algorithm not in CATALOGUE:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise unknown("algorithm", algorithm, CATALOGUE)
    return CATALOGUE[algorithm]
