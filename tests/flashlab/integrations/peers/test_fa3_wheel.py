"""Handlers of XLA's interface get torch's tensors, stream and memory. Here they are functions in Python."""

from __future__ import annotations

import ctypes
import importlib.util
from ctypes import POINTER, c_int32, c_void_p, cast
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.integrations.peers import fa3_wheel
from flashlab.integrations.peers.fa3_wheel import Handler
from flashlab.measure import gradients, peers
from flashlab.verify import verify
from simulator.errors import Unavailable
from simulator.operations.backward import BACKWARD
from tests.flashlab.integrations.peers.wheel import Wheel, attributes, buffers, frame_at, installed

STREAM, DEVICE = 4711, 3


class Tensor:
    """What of a torch tensor is read."""

    def __init__(self, shape: tuple[int, ...], dtype: str, fill: Any = 0) -> None:
        kinds = {"bfloat16": "u2", "float32": "f4", "uint8": "u1", "int32": "i4"}
        self.array = np.full(shape, 0 if fill != fill else fill, kinds[dtype])
        self.shape, self.ndim, self.dtype, self.device = shape, len(shape), f"torch.{dtype}", "cpu"

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def is_contiguous(self) -> bool:
        return self.array.flags.c_contiguous

    def __getitem__(self, places: Any) -> Tensor:
        found = object.__new__(Tensor)
        found.array, found.dtype, found.device = self.array[places], self.dtype, self.device
        found.shape, found.ndim = found.array.shape, found.array.ndim
        return found


def empty(shape: Any, dtype: str, device: str) -> Tensor:
    return Tensor(shape if isinstance(shape, tuple) else (shape,), dtype.removeprefix("torch."))


def tensor(values: list[int], dtype: str, device: str) -> Tensor:
    return Tensor((len(values),), dtype, values)


TORCH: Any = SimpleNamespace(
    cuda=SimpleNamespace(current_stream=lambda: SimpleNamespace(cuda_stream=STREAM), current_device=lambda: DEVICE),
    empty=empty,
    tensor=tensor,
    full_like=lambda x, fill: Tensor(x.shape, x.dtype.removeprefix("torch."), fill),
    uint8="uint8",
    int32="int32",
    float32="float32",
)


class Callee:
    """A handler that notes what it is given, asks for all that it may, and refuses if `refuses` says why."""

    def __init__(self, refuses: bytes = b"") -> None:
        self.refuses = refuses
        self.function = ctypes.CFUNCTYPE(c_void_p, c_void_p)(self.called)

    @property
    def address(self) -> int:
        return cast(self.function, c_void_p).value or 0

    def called(self, address: int) -> int | None:
        frame = frame_at(address)
        api = cast(frame.api, POINTER(fa3_wheel._Api)).contents

        def ask(name: str, asked: Any) -> Any:
            answer = ctypes.CFUNCTYPE(c_void_p, c_void_p)(getattr(api, name))
            self.error = answer(ctypes.addressof(asked))
            return asked

        if self.refuses:
            ask("error", fa3_wheel._Error(0, None, self.refuses, 3))
            return self.error
        self.size, self.stage = frame.struct_size, frame.stage
        self.buffers = [*buffers(frame.arguments), *buffers(frame.results)]
        self.attributes = attributes(frame.attributes)
        self.stream = ask("stream", fa3_wheel._Answer(0, None, None, None)).value
        self.devices = [ask(name, fa3_wheel._Ordinal(0, None, None, -1)).value for name in ("run", "device")]
        self.block = ask("allocate", fa3_wheel._Memory(0, None, None, 1000, 16, None)).data
        ask("free", fa3_wheel._Freed(0, None, None, 1000, self.block))
        return None


def test_a_handler_gets_tensors_attributes_stream_and_memory() -> None:
    callee, q, out = Callee(), Tensor((1, 5, 2, 128), "bfloat16"), Tensor((1, 2, 5), "float32")
    handler = Handler(TORCH, callee.address)
    call = handler.prepare([q, q], [out], {"scale": 0.5, "causal": True, "splits": 1, "few": c_int32(7)})
    for _ in range(2):  # a call leaves nothing behind
        call()
        assert (callee.size, callee.stage) == (168, 3)
        assert callee.buffers == [(16, [1, 5, 2, 128], q.data_ptr())] * 2 + [(11, [1, 2, 5], out.data_ptr())]
        assert callee.attributes == [("causal", 1, 1), ("few", 4, 7), ("scale", 12, 0.5), ("splits", 5, 1)]
        assert (callee.stream, callee.devices) == (STREAM, [DEVICE] * 2)
        assert callee.block and not handler._memory


def test_what_a_handler_refuses_is_raised() -> None:
    callee = Callee(b"Wrong number of arguments")
    with pytest.raises(RuntimeError, match="^Wrong number of arguments$"):
        Handler(TORCH, callee.address).prepare([], [], {})()


def test_a_handler_is_told_no_strides() -> None:
    callee, q = Callee(), Tensor((1, 2, 5, 128), "bfloat16")
    handler = Handler(TORCH, callee.address)
    turned = q[:, :, ::2]
    for tensors, results in (([turned], [q]), ([q], [turned])):
        with pytest.raises(ValueError, match="contiguous"):
            handler.prepare(tensors, results, {})


def test_a_wheel_that_is_not_there_and_other_head_dims_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match=r"^flash_attn3_jax_lib cannot be imported .*: pip install flash-attn3-jax$"):
        fa3_wheel.handler()
    with pytest.raises(Unavailable, match="flash_attn3_jax_lib"):
        peers.layout("fa3-wheel")
    monkeypatch.setattr(fa3_wheel.importlib, "import_module", lambda name: TORCH)
    q, lse = Tensor((1, 5, 2, 64), "bfloat16"), Tensor((1, 2, 5), "float32")
    with pytest.raises(Unavailable, match="^flash-attn3-jax has head dim 128 alone, not 64$"):
        fa3_wheel.prepare(q, q, q, True, 0.1)
    with pytest.raises(Unavailable, match="^flash-attn3-jax has head dim 128 alone, not 64$"):
        fa3_wheel.prepare_backward(q, q, q, q, q, lse, True, 0.1)


def pretended(monkeypatch: pytest.MonkeyPatch) -> Callee:
    """A handler that the wheel's passes are."""
    callee = Callee()
    monkeypatch.setattr(fa3_wheel.importlib, "import_module", lambda name: TORCH)
    monkeypatch.setattr(fa3_wheel, "handler", lambda name="flash_mha_fwd": asked(callee, name))
    return callee


def asked(callee: Callee, name: str) -> Handler:
    callee.name = name
    return Handler(TORCH, callee.address)


def operands(batch: int, len_q: int, len_kv: int, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
    queries, keys = (batch, len_q, heads, 128), (batch, len_kv, kv_heads, 128)
    shapes = (queries, queries, keys, keys, queries)
    return *(Tensor(shape, "bfloat16") for shape in shapes), Tensor((batch, heads, len_q), "float32")


BOTH = [
    ("is_causal", 1, 1), ("max_seqlen_k_has_value", 1, 1), ("max_seqlen_q_has_value", 1, 1), ("sm_margin", 5, 0),
    ("softcap", 12, 0.0), ("softmax_scale_has_value", 1, 1), ("softmax_scale_val", 12, 0.5),
]  # fmt: skip
"""Attributes of both passes: names, types and values."""


def test_the_backward_pass_is_called_as_the_wheel_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    callee = pretended(monkeypatch)
    dout, q, k, v, out, lse = given = operands(2, 70, 90, 4, 2)
    found = fa3_wheel.prepare_backward(*given, True, 0.5, (None, 3))()
    assert callee.name == "flash_mha_bwd" and len(callee.buffers) == 15
    assert callee.buffers[:6] == [
        *((16, list(x.shape), x.data_ptr()) for x in (dout, q, k, v, out)), (11, [2, 4, 70], lse.data_ptr())
    ]  # fmt: skip
    assert [(dtype, shape) for dtype, shape, _ in callee.buffers[6:10]] == [(4, [0])] * 4
    assert callee.buffers[10:13] == [(16, list(x.shape), x.data_ptr()) for x in found]
    assert [list(x.shape) for x in found] == [[2, 70, 4, 128], [2, 90, 2, 128], [2, 90, 2, 128]]
    assert [(dtype, shape) for dtype, shape, _ in callee.buffers[13:]] == [(11, [2, 4, 128])] * 2
    own = ("deterministic", 1, 0), ("max_seqlen_k_val", 5, 90), ("max_seqlen_q_val", 5, 70)
    window = ("window_size_left", 5, -1), ("window_size_right", 5, 3)
    assert callee.attributes == sorted([*BOTH, *own, *window])


@pytest.mark.parametrize(("length", "rows"), [(0, 1), (1, 80), (65, 128), (128, 160), (1024, 1040), (16384, 16400)])
def test_the_rows_of_a_workspace_fill_tiles_of_64_and_of_80(
    monkeypatch: pytest.MonkeyPatch, length: int, rows: int
) -> None:
    callee = pretended(monkeypatch)
    fa3_wheel.prepare_backward(*operands(1, length, length, 1, 1), False, 0.5)()
    assert [shape for _, shape, _ in callee.buffers[13:]] == [[1, 1, rows]] * 2
    assert rows >= -(-length // 64) * 64 and rows >= -(-length // 80) * 80


def test_both_passes_take_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    callee, lengths = pretended(monkeypatch), [(30, 5), (0, 40), (40, 45)]
    offsets: list[list[int]] = []
    made = TORCH.tensor
    monkeypatch.setattr(TORCH, "tensor", lambda values, **how: (offsets.append(values), made(values, **how))[1])
    given = operands(1, 70, 90, 4, 2)
    found = fa3_wheel.prepare_backward(*given, True, 0.5, lengths=lengths)()
    assert offsets == [[0, 30, 30, 70], [0, 5, 45, 90], []]
    assert [shape for _, shape, _ in callee.buffers[:10]] == [
        *([n, h, 128] for n, h in ((70, 4), (70, 4), (90, 2), (90, 2), (70, 4))), [4, 70], [4], [4], [0], [0],
    ]  # fmt: skip
    assert [dtype for dtype, _, _ in callee.buffers[6:10]] == [4] * 4
    # a tile for each sequence, and whole tiles in all: 70 + 3 · 64 makes 320 rows, and 70 + 3 · 80 makes 320, too
    assert [shape for _, shape, _ in callee.buffers[10:]] == [[70, 4, 128], *[[90, 2, 128]] * 2, *[[4, 320]] * 2]
    assert [x.shape for x in found] == [(1, 70, 4, 128), (1, 90, 2, 128), (1, 90, 2, 128)]
    said = {name: value for name, _, value in callee.attributes}
    assert (said["max_seqlen_q_val"], said["max_seqlen_k_val"]) == (40, 45)

    out, lse = fa3_wheel.prepare(*given[1:4], True, 0.5, (7, None), lengths)()
    assert callee.name == "flash_mha_fwd" and len(callee.buffers) == 25
    kinds = [dtype for dtype, _, _ in callee.buffers[:21]]
    assert kinds == [16] * 6 + [4] * 8 + [16] * 2 + [4] + [11] * 3 + [4]
    assert [shape for _, shape, _ in callee.buffers[3:21]] == [[0]] * 3 + [[4]] * 2 + [[0]] * 13
    shapes = [shape for _, shape, _ in callee.buffers[21:]]
    assert shapes == [[70, 4, 128], [4, 70], [1, 1, 1, 1], [1, 1, 1]]
    assert [x.data_ptr() for x in (out, lse)] == [data for _, _, data in callee.buffers[21:23]]
    assert (out.shape, lse.shape) == ((1, 70, 4, 128), (1, 4, 70))
    said = {name: value for name, _, value in callee.attributes}
    assert (said["max_seqlen_q"], said["max_seqlen_k"]) == (40, 45)
    assert (said["window_size_left"], said["window_size_right"]) == (7, -1)
    assert set(BOTH) < set(callee.attributes) and len(callee.attributes) == 16


def test_a_peer_returns_the_output_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    callee = pretended(monkeypatch)
    _, q, k, v, *_ = operands(1, 70, 90, 4, 2)
    call = peers.prepare("fa3-wheel", q, k, v, causal=True, scale=0.5)
    assert call().data_ptr() == callee.buffers[21][2] and set(BOTH) < set(callee.attributes)


@pytest.mark.torch
def test_the_wheel_itself_reads_the_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses another number of arguments, and another name or type of an attribute, before it asks for a GPU."""
    torch = import_module("torch")
    if importlib.util.find_spec("flash_attn3_jax_lib") is None or torch.cuda.is_available():
        pytest.skip("needs the wheel flash-attn3-jax, and no GPU: a kernel would be given a CPU's memory")
    given = Handler.__init__
    monkeypatch.setattr(Handler, "__init__", lambda self, _, address: given(self, TORCH, address))
    q, k, lse = (torch.zeros(shape).bfloat16() for shape in ((1, 33, 4, 128), (1, 70, 2, 128), (1, 4, 33)))
    for lengths in (None, [(30, 60), (3, 10)]):
        with pytest.raises(RuntimeError, match="CUDA driver"):
            fa3_wheel.prepare(q, k, k, True, 0.1, (3, None), lengths)()
        with pytest.raises(RuntimeError, match="CUDA driver"):
            fa3_wheel.prepare_backward(q, q, k, k, q, lse.float(), True, 0.1, (3, None), lengths)()
    with pytest.raises(RuntimeError, match="Wrong number of arguments: expected 10 but got 1"):
        fa3_wheel.handler("flash_mha_bwd").prepare([q], [q], {})()


# With torch's tensors, on a CPU: what a stand-in of the wheel computes passes all checks, and nothing is misread on the way.


@pytest.mark.torch
def test_both_passes_of_the_wheel_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = installed(monkeypatch)
    report = verify("fa3-wheel-backward", dtypes=["bfloat16"], checks=["rule", "gqa", "sequences", "memory"])
    assert report.verdict == "passed" and not wheel.wrong, (report.failed[:3], wheel.wrong[:3])
    said = {row.detail for row in report.rows if row.status == "not run"}
    assert report.counts["passed"] > 50 and {x.rpartition(" ")[2] for x in said} == {
        "soft_cap",
        "dlse",
        "partial",
        "here",
    }
    assert peers.layout("fa3-wheel") == "bshd"
    report = verify("fa3-wheel", dtypes=["float16"], checks=["rule", "ragged", "key_sets"])
    assert report.verdict == "passed" and not wheel.wrong, (report.failed[:3], wheel.wrong[:3])


@pytest.mark.torch
def test_a_wheel_that_drops_the_window_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, but for one thing: then it must fail, or the wheel isn't what was judged."""
    problem = Wheel.problem
    monkeypatch.setattr(Wheel, "problem", staticmethod(lambda *given: problem(*given).replace(window=None)))
    installed(monkeypatch)
    report = verify("fa3-wheel-backward", dtypes=["bfloat16"], checks=["rule"])
    assert {row.case for row in report.failed} == {"window, shaped", "keys that no query sees, shaped"}


@pytest.mark.torch
@pytest.mark.parametrize("lengths", [None, [(33, 33), (7, 7), (50, 50)]])
def test_the_backward_pass_is_timed_on_its_own_output_and_lse(monkeypatch: pytest.MonkeyPatch, lengths: Any) -> None:
    wheel, torch = installed(monkeypatch), import_module("torch")
    sizes: dict[str, Any] = {"len_q": 90} if lengths is None else {"lengths": lengths}
    p = fl.Problem(batch=1, heads=4, kv_heads=2, head_dim=128, dtype="float16", causal=True, **sizes)
    given = {name: torch.from_numpy(x) for name, x in BACKWARD.draw(p).items() if name in ("q", "k", "v", "dout")}
    call, out, lse = gradients._PEERS["fa3-wheel"](SimpleNamespace(problem=p, torch=torch, **given))  # pyright: ignore[reportArgumentType]
    found = dict(zip(("dq", "dk", "dv"), call(), strict=True))
    assert wheel.calls == 2 and not wheel.wrong
    assert max(gradients.errors(p, {**given, "out": out, "lse": lse}, found)) < 1
    assert max(gradients.errors(p.replace(causal=False), {**given, "out": out, "lse": lse}, found)) > 1
