"""Defects of published kernels that the emulator found and a reader confirmed: where, why, a launch that shows it.

The words are ours, and none of the kernels' code is here. docs/found-in-public-kernels.md shows them with the results of kinds
`found` and `found-gpu`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEFECTS", "NUMBERS", "Defect", "command"]


@dataclass(frozen=True)
class Defect:
    """One true defect. `lines` are those that take part in it, by the file as it stood at the commit on record.

    `why` says what is wrong and what can come of it; `repair` what its authors could do. `arguments` are those of
    `flashlab emulate --arg`; `grid` and `block` are a launch that the file itself makes, or allows.
    """

    repository: str
    file: str
    kernel: str
    title: str
    lines: tuple[int, ...]
    why: str
    repair: str
    arguments: tuple[str, ...]
    grid: tuple[int, ...]
    block: tuple[int, ...]
    sram: int = 0


def command(defect: Defect, file: str) -> list[str]:
    """The words after `flashlab` that show a defect in a file."""
    sizes = {"--grid": defect.grid, "--block": defect.block}
    words = ["emulate", file, "--kernel", defect.kernel]
    words += [word for name, size in sizes.items() for word in (name, ",".join(map(str, size)))]
    if defect.sram:
        words += ["--sram", str(defect.sram)]
    return words + [word for text in defect.arguments for word in ("--arg", text)]


LLM, LEET, LEARN, TINY = "karpathy/llm.c", "xlite-dev/LeetCUDA", "gau-nernst/learn-cuda", "66RING/tiny-flash-attention"
SAMPLES = "NVIDIA/cuda-samples"


ROWS = ("out=float32[4,256]:out", "inp=float32[4,256]", "N=4", "C=256")
BACKWARD = (
    "dpreatt=float32[2,64,64]:zeros",
    "datt=float32[2,64,64]",
    "att=float32[2,64,64]",
    "B=1",
    "T=64",
    "C=32",
    "scale=0.25",
)
SUMS = ("input=float32[2,256]", "output=float32[2]:zeros", "M=2", "N=256", "TILE_SIZE=256")
TOKENS = ("x=float32[4,256]", "y=float32[4,256]:out", "N=1024")


DEFECTS = (
    Defect(
        LLM, "dev/cuda/softmax_forward.cu", "softmax_forward_kernel4", "The sum overwrites the maximum while warps still read it",
        (268, 288),
        "All threads read the row's maximum from `max_or_sum_storage[0]`. Then warp 0 writes its part of the sum to the same"
        " word. No barrier lies between. A warp that is late reads a sum where it wants the maximum, and its whole part of the"
        " row is wrong.",
        "`__syncthreads()` after `offset` is read, or a second array for the sums, as `softmax_forward_kernel7` has it.",
        ROWS, (4,), (128,), 4 * 4,
    ),
    Defect(
        LLM, "dev/cuda/attention_forward.cu", "attention_forward_fused1", "Lanes read what other lanes stored, without __syncwarp",
        (648, 655, 665, 674),
        "Lane 0 stores each score, and all lanes read them in the next pass. Then each lane stores its weights, and all lanes read"
        " all weights. Lanes of a warp may run apart since Volta, and a store is seen by another lane only after `__syncwarp()`."
        " A lane may read an old score or weight.",
        "`warp.sync()` between the passes.",
        ("out=float32[1,40,64]:out", "preatt=float32[1,2,40,40]:zeros", "att=float32[1,2,40,40]:zeros", "inp=float32[1,40,3,64]",
         "B=1", "T=40", "C=64", "NH=2"), (10, 2, 1), (128,),
    ),
    Defect(
        LLM, "dev/cuda/attention_backward.cu", "softmax_autoregressive_backward_kernel7<128>",
        "Warp 0 may clear a sum that another warp has stored", (651, 659),
        "Warp 0 sets all 32 words of `block_acc` to zero; each warp then stores its sum in its own word. No barrier lies between,"
        " so warp 0 may clear the sum of a warp that was faster, and that part of the row is missing.",
        "`block.sync()` after the words are cleared, or clear only those that no warp writes.",
        BACKWARD, (64, 2), (128,),
    ),
    Defect(
        LLM, "dev/cuda/attention_backward.cu", "softmax_autoregressive_backward_kernel8<128>",
        "The same, and again in each of its four rows", (691, 706),
        "As above. Besides, `block_acc` is used again for the next of the block's four rows without a barrier after its reads, so"
        " that a fast warp overwrites what a slow one has yet to add.",
        "As above, and `block.sync()` at the end of the loop.",
        BACKWARD, (16, 2), (128,),
    ),
    Defect(
        TINY, "flash_attention_cuda/standalone_src/flash_attention_v2_standalone.cu", "flash_attention_v2_kernel",
        "The row's maximum and sum change while the row's other threads still read them", (175, 177, 195, 196),
        "Both threads of a row read `sMax[ty]` and `sDenom[ty]` to rescale, and both write them afterwards, without a barrier"
        " between. The thread that comes late rescales by exp(0) = 1 and adds its sum twice.",
        "Keep both in registers: each thread computes them anyway. Or a barrier before they are written.",
        ("Q=float32[4,4]", "K=float32[4,4]", "V=float32[4,4]", "O=float32[4,4]:out", "seqlen=4", "smScale=0.5"), (1, 2), (2, 2),
    ),
    Defect(
        LEARN, "04_softmax/softmax.cu", "softmax_naive_kernel", "The second pass overwrites the broadcast word of the first",
        (38, 73),
        "`block_broadcast` hands the maximum around in `workspace[0]`. The next `block_reduce` stores each thread's sum to"
        " `workspace[tid]` at once. A thread that has yet to read the maximum reads a sum.",
        "`__syncthreads()` after the read in `block_broadcast`.",
        ("input=float32[4,256]", "output=float32[4,256]:out", "M=4", "N=256"), (4,), (256,), 256 * 4,
    ),
    Defect(
        LEARN, "03_sum/sum.cu", "sum_v4_kernel<1>", "volatile in place of __syncwarp", (154,),
        "In the last 32 elements each lane adds what a neighbour has stored, through a volatile pointer. volatile makes the"
        " compiler load anew; it doesn't make lanes go together. Since Volta a lane may read before its neighbour has stored,"
        " or after it has stored the next step's value.",
        "Approach 3 of the same file: `__shfl_down_sync`.",
        SUMS, (1, 2), (256,), 256 * 4,
    ),
    Defect(
        LEARN, "03_sum/sum.cu", "sum_v4_kernel<2>", "One __syncwarp where two are needed", (161,),
        "`shmem[tid] += shmem[tid + stride]` reads a word that another lane writes in the same step. `__syncwarp()` after the"
        " statement orders it with the next step, but nothing orders the read with the neighbour's write.",
        "Read into a register, `__syncwarp()`, add and store, `__syncwarp()`; or shuffles.",
        SUMS, (1, 2), (256,), 256 * 4,
    ),
    Defect(
        LEET, "kernels/softmax/softmax.cu", "online_safe_softmax_f32_per_token_kernel<256>",
        "32 threads read an array of 8", (351,),
        "`shared` has an element for each warp: 8. All 32 threads of the first warp read `shared[local_tid]`, past its end. What"
        " lies there is not used, by luck of `warp_reduce_md_op<8>`; where the array lies at the end of shared memory, the read"
        " faults.",
        "`local_tid < WAPR_NUM ? shared[local_tid] : MD{-FLT_MAX, 0}`.",
        TOKENS, (4,), (256,),
    ),
    Defect(
        LEET, "kernels/softmax/softmax.cu", "online_safe_softmax_f32x4_pack_per_token_kernel<64>",
        "32 threads read an array of 2", (392,),
        "As above, with 2 elements.", "As above.",
        TOKENS, (4,), (64,),
    ),
    Defect(
        LEET, "kernels/reduce/block_all_reduce.cu", "block_all_reduce_sum_i8x16_pack_i32_kernel<16>",
        "A shuffle of 32 lanes in a block of 16 threads", (691, 742),
        "Rows of 256 elements are summed by 16 threads, 16 elements each. The shuffles' mask names 32 lanes, and 16 of them"
        " don't exist. PTX leaves the result undefined.",
        "A mask of the lanes that are there, or no instance below 32 threads.",
        ("a=int8[512]", "y=int32[1]:zeros", "N=512"), (2,), (16,),
    ),
    Defect(
        LEET, "kernels/nms/nms.cu", "nms_kernel", "Threads read each other's verdicts without waiting", (32, 57),
        "A box is dropped where a box before it is kept and overlaps. The verdicts of the boxes before are read from `keep`, which"
        " other threads and blocks are writing. Nothing orders them, so a thread reads whatever was there: the result depends on"
        " the schedule.",
        "The verdicts are needed in order: one pass that writes the pairs that overlap as bits, one that walks through them.",
        ("boxes=float32[96,4]", "scores=float32[96]", "keep=int32[96]:zeros", "num_boxes=96", "iou_threshold=0.5"), (3,), (32,),
    ),
    Defect(
        SAMPLES, "Samples/2_Concepts_and_Techniques/reduction/reduction_kernel.cu", "reduce7<float, 128, true>",
        "Lanes that a mask leaves out are read", (78, 504),
        "Four threads of a block of 128 sum the four warps' sums; the mask of the shuffle names these four. The shuffle's steps of"
        " 16, 8 and 4 read lanes outside the mask, whose values PTX leaves undefined. They are added to lanes 0 to 3.",
        "Begin at half the number of lanes in the mask, and give that number as the shuffle's width.",
        ("g_idata=float32[512]", "g_odata=float32[2]:out", "n=512"), (2,), (128,), 5 * 4,
    ),
)  # fmt: skip
"""In the order of the page."""

NUMBERS = (
    Defect(
        LEET, "kernels/gelu/gelu.cu", "gelu_f16_kernel", "Infinity over infinity: GELU in float16 is NaN from 4.03 on",
        (45, 49),
        "tanh is computed as (exp(2u) − 1) / (exp(2u) + 1). From x = 4.03 on, exp(2u) is over 65,504, which is infinity in"
        " float16, and infinity over infinity is NaN. GELU of 5 is 5. `MAX_EXP_F16` is there to prevent it, but it clamps x,"
        " and not the exponent 2u. A GPU comes to the same: `hexp` rounds to float16, and the quotient of two infinities is NaN."
        " All four float16 kernels of the file call this function, those with half2 once for each part. Their own test draws"
        " from a normal distribution, where one value in 36,000 is over 4.03, and compares nothing.",
        "Clamp `inner * HALF_2` at `MAX_EXP_F16`; or compute tanh in float32, as the float32 kernels do.",
        ("x=float16[32]:full(5)", "y=float16[32]:out", "N=32"), (1,), (32,),
    ),
)  # fmt: skip
"""Defects of numbers: the emulator has no finding, but the outputs hold NaN."""
