"""Backward passes from elsewhere: right ones pass, and a seeded mistake is found by the check that is meant for it."""

from __future__ import annotations

import importlib
import re
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.verify import Case, run_case, verify
from flashlab.verify.adapter import Failure
from flashlab.verify.foreign import foreign
from flashlab.verify.general import checks_of
from flashlab.verify.steps import Steps
from simulator.dtypes import Array
from simulator.operations.backward import BACKWARD

SMALL = fl.Problem(batch=1, heads=1, len_q=8, head_dim=16, dtype="float16")


def backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, causal: bool = False, scale: float | None = None,
    window: Any = None, mistake: str = "",
) -> tuple[Array, ...]:  # fmt: skip
    """The formulas in float32, with P and dS rounded as kernels round them; or with a mistake."""
    storage, group = q.dtype, q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    (b, _, rows, dim), (_, kv_heads, keys, _) = q.shape, k.shape
    spread = np.tile if mistake == "heads dealt in turn" else lambda x, n: np.repeat(x, n[1], 1)
    k32, v32 = (spread(x.astype(np.float32), (1, group, 1, 1)) for x in (k, v))
    q32, dout32, out32 = (x.astype(np.float32) for x in (q, dout, out))
    place = np.arange(keys) - np.arange(rows)[:, None] - (0 if mistake == "top-left" else keys - rows)
    left, right = (np.inf if side is None else side for side in window or (None, None))
    right = (0 if causal else right) + (mistake == "a key too many")
    hidden = (place > right) | (place < -left) | np.isneginf(lse)[..., None]
    exp = np.exp2 if mistake == "the LSE's base" else np.exp
    s = np.where(hidden, -np.inf, scale * (q32 @ k32.swapaxes(-1, -2)))
    p = exp(s - np.where(np.isneginf(lse), 0, lse)[..., None])
    rounded = p.astype(storage).astype(np.float32)
    delta = (dout32 * out32).sum(-1, keepdims=True) * (mistake != "no D")
    ds = (rounded if mistake == "dS from rounded P" else p) * (dout32 @ v32.swapaxes(-1, -2) - delta)
    ds = ds.astype(storage).astype(np.float32)
    dq, dk, dv = scale * (ds @ k32), ds.swapaxes(-1, -2) @ q32, rounded.swapaxes(-1, -2) @ dout32
    dk = dk if mistake == "dK without scale" else scale * dk
    dk, dv = (x.reshape(b, kv_heads, group, keys, dim).sum(2) for x in (dk, dv))
    if mistake == "noise":
        dq = dq * (1 + np.random.default_rng().uniform(0, 1e-3))
    if mistake == "writes":
        q[..., :1] = 0
    if mistake == "a row of padding":
        dv = dv + 0 * np.lib.stride_tricks.as_strided(v, (dim + 1,), (v.itemsize,))[-1].astype(np.float32)
    return tuple(x.astype(storage) for x in (dq, dk, dv))


def adapter(fn: Any = backward, **more: Any) -> fl.Adapter:
    return fl.Adapter(fn, operation="backward", **more)


def with_mistake(mistake: str) -> fl.Adapter:
    def wrong(
        dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool = False, scale: Any = None, window: Any = None
    ) -> Any:  # fmt: skip
        return backward(dout, q, k, v, out, lse, causal, scale, window, mistake)

    return adapter(wrong)


def checked(target: fl.Adapter, check: str, case: str, dtype: str = "float16") -> float | None:
    """One check of one of the problems that verification runs."""
    sizes: dict[str, Any] = {"batch": 1, "heads": 1, "head_dim": 64, "dtype": dtype}
    p = fl.Problem(**sizes | dict(BACKWARD.shapes[case]))
    subject = foreign(target, Steps())
    assert subject.refuses(p) is None
    return checks_of(BACKWARD)[check](subject, p, 0)


def test_a_right_one_passes() -> None:
    report = verify(adapter(), dtypes=["bfloat16"], checks=["rule", "equal_keys", "hidden"])
    assert report.verdict == "passed", report
    assert report.never_ran == ["soft cap", "sinks", "lengths", "dlse", "partial", "dropout"]
    assert report.place is not None and report.place[0].endswith("test_foreign.py")


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_right_one_passes_everything(dtype: Any) -> None:
    assert verify(adapter(), dtypes=[dtype]).verdict == "passed"


MORE_QUERIES, SEVERAL = "more queries than keys, causal", "ragged, GQA, batch 2"


@pytest.mark.parametrize(
    ("mistake", "check", "case", "message"),
    [
        ("dK without scale", "rule", "aligned", "dk at"),
        ("dK without scale", "adjoint", "aligned", "<dk, X> is"),
        ("no D", "equal_keys", "aligned", "dq at"),
        ("dS from rounded P", "rule", "one query", "outliers inputs: dk at"),
        ("top-left", "key_sets", MORE_QUERIES, "dv at .*: query 63 doesn't see key 1"),
        ("top-left", "hidden", "keys that no query sees", "dk isn't 0 where nothing is seen"),
        ("a key too many", "key_sets", "causal", "query 0 doesn't see key 1, but dv says otherwise"),
        ("the LSE's base", "rule", "aligned", "dq at"),
        ("heads dealt in turn", "head_order", SEVERAL, "dq changes with the heads' order"),
        ("heads dealt in turn", "gqa", SEVERAL, "differs by"),
        ("noise", "determinism", "aligned", "dq of run 2 differs from run 1"),
        ("writes", "rule", "aligned", "q: it was changed"),
        ("a row of padding", "memory", "head dim 128, a scale", "dv changes where its inputs are padded"),
    ],
)
def test_a_mistake_is_found_by_its_check(mistake: str, check: str, case: str, message: str) -> None:
    checked(adapter(), check, case, "bfloat16")
    with np.errstate(all="ignore"), pytest.raises(Failure, match=message):
        checked(with_mistake(mistake), check, case, "bfloat16")


# conventions


def test_what_atomics_add_up_may_differ_in_its_last_bits() -> None:
    def shaky(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> Any:
        dq, dk, dv = backward(dout, q, k, v, out, lse)
        return dq * q.dtype.type(1 + 2**-10 * np.random.default_rng().integers(2)), dk, dv

    for check in ("determinism", "head_order"):
        checked(adapter(shaky, atomics="dq"), check, "aligned")
    with pytest.raises(Failure, match="dq of run 2"):
        for _ in range(20):
            checked(adapter(shaky), "determinism", "aligned")
    rough = adapter(
        lambda *given: [x * (1 + np.random.default_rng().uniform(0, 1)) for x in backward(*given)], atomics="dq"
    )
    with pytest.raises(Failure, match="dq changes with the heads' order: it at .* differs by"):
        checked(rough, "head_order", "aligned")


def test_it_is_given_the_lse_by_its_own_conventions() -> None:
    """With the logarithm to base 2, and +inf for rows without keys; arrays lie as (batch, length, heads, head_dim)."""

    def theirs(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, is_causal: bool, sm_scale: float) -> Any:
        assert not np.isneginf(lse).any()
        natural = np.where(np.isinf(lse), -np.inf, lse * np.float32(np.log(2))).astype(np.float32)
        dout, q, k, v, out = (x.swapaxes(1, 2) for x in (dout, q, k, v, out))
        return [x.swapaxes(1, 2) for x in backward(dout, q, k, v, out, natural, is_causal, sm_scale)]

    told = adapter(theirs, layout="bshd", lse="2", empty_lse=np.inf)
    for case in (MORE_QUERIES, SEVERAL, "a negative scale, causal"):
        for check in ("rule", "memory"):
            checked(told, check, case)


def test_a_gradient_of_the_lse_is_passed_by_its_name() -> None:
    def with_dlse(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool = False, dlse: Any = None) -> Any:
        # D - dlse is the sum of dout * (out - dlse * dout / |dout|^2)
        if dlse is not None:
            wide, own = dout.astype(np.float32), out.astype(np.float32)
            out = own - (dlse / (wide**2).sum(-1))[..., None] * wide
        return backward(dout, q, k, v, out, lse, causal)

    checked(adapter(with_dlse), "rule", "a gradient of the LSE", "float32")
    report = verify(adapter(with_dlse), dtypes=["float16"], checks=["hidden"])
    assert report.passed and "dlse" not in report.never_ran


def test_sizes_are_moved_into_its_domain_and_the_rest_is_not_run() -> None:
    def few(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool = False) -> Any:
        assert q.shape[1] == k.shape[1] and q.shape[2] and k.shape[2] and q.shape[3] == 64
        return backward(dout, q, k, v, out, lse, causal)

    domain = fl.Domain(dtype="float16", head_dim=64, groups=1, empty=False)
    report = verify(adapter(few, domain=domain, causal="top-left"), checks=["hidden"])
    assert report.verdict == "passed" and {row.dtype for row in report.rows} == {"float16"}
    assert "ragged, batch 2, shaped" in {row.case for row in report.rows}  # its grouped heads were taken away
    assert len({(row.problem, row.dtype) for row in report.rows if row.status == "passed"}) == report.counts["passed"]
    reasons = {row.detail for row in report.rows if row.status == "not run"}
    assert reasons == {
        "it aligns a causal mask top-left, and the lengths differ",
        "dropout of a backward pass has no convention here",
        "sinks of a backward pass have no convention here",
        *(f"the function takes no {name}" for name in ("window", "scale", "lengths", "dlse")),
    }


def test_what_it_refuses_is_not_run() -> None:
    def refuses(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool = False) -> Any:
        if causal:
            raise NotImplementedError("no causal mask yet")
        return backward(dout, q, k, v, out, lse)

    report = verify(adapter(refuses), dtypes=["float16"], checks=["hidden"])
    assert report.passed and "causal" in report.never_ran
    assert "NotImplementedError: no causal mask yet" in {row.detail for row in report.rows}


# bad input


def two(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> Any:
    return q, k


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fl.Adapter(backward, operation="backwards"), "operation = 'backwards': expected one of attention"),
        (lambda: adapter(atomics="dp"), "atomics = 'dp': expected one of dq, dk, dv"),
        (
            lambda: fl.Adapter(backward, atomics=["dq"]),
            "atomics = 'dq': expected none of them: the operation attention",
        ),
        (lambda: fl.Adapter(backward, operation="gradients"), "framework = 'numpy': expected torch: its autograd"),
        (lambda: verify(adapter(two), dtypes=["float16"]), "expected a backward pass that returns (dq, dk, dv)"),
        (lambda: verify(adapter(lambda q, k, v: q)), "expected a function that takes (dout, q, k, v, out, lse)"),
        (lambda: verify(adapter(), full=True), "full = True: expected False: backward has no long or wide problems"),
        (lambda: verify(adapter(), checks=["split"]), "checks = 'split': expected one of rule, determinism"),
        (
            lambda: run_case(adapter(), Case(problem=SMALL), check="split"),
            "check = 'split': expected one of rule, determinism",
        ),
        (lambda: run_case("flash2", Case(problem=SMALL), check="split"), "check = 'split': expected one of rule"),
        (lambda: verify(adapter(), dtypes=["float8_e4m3fn"]), "dtypes = 'float8_e4m3fn': expected one of float32"),
    ],
)
def test_bad_input_is_one_line(make: Any, message: str) -> None:
    with pytest.raises(fl.UsageError, match=re.escape(message)) as error:
        make()
    assert "\n" not in str(error.value)


# torch, by its autograd


def torch() -> Any:
    return importlib.import_module("torch")


def by_formula(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
    attention = importlib.import_module("torch.nn.attention")
    with attention.sdpa_kernel(attention.SDPBackend.MATH):
        return torch().nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=True
        )


def differentiable(fn: Any, **more: Any) -> fl.Adapter:
    domain = fl.Domain(empty=False)
    return fl.Adapter(fn, "torch", operation="gradients", causal="top-left", domain=domain, **more)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("dtype", "checks"),
    [("bfloat16", ["rule", "adjoint", "equal_keys", "key_sets"]), ("float16", ["rule"]), ("float32", ["equal_keys"])],
)
def test_gradients_that_autograd_finds_pass(dtype: Any, checks: list[str]) -> None:
    report = verify(differentiable(by_formula), dtypes=[dtype], checks=checks)
    assert report.verdict == "passed", report


@pytest.mark.torch
@pytest.mark.parametrize("check", ["gqa", "key_order", "head_order", "memory", "hidden", "determinism"])
def test_the_built_in_sdpa_passes_the_other_checks(check: str) -> None:
    report = verify("sdpa-backward", dtypes=["bfloat16"], checks=[check])
    assert report.verdict == "passed", report
    assert any("positive scales" in row.detail for row in report.rows)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("mistake", "check", "case", "message"),
    [
        ("dK without scale", "rule", "aligned", "dk at"),
        ("no D", "equal_keys", "aligned", "dq at"),
        ("no D", "rule", "one query", "dq at|dk at"),
        ("a key too many", "key_sets", "causal", "query 0 doesn't see key 1"),
        ("a rough output", "rule", "aligned", "of its forward pass out at"),
    ],
)
def test_a_mistake_of_an_autograd_function_is_found(mistake: str, check: str, case: str, message: str) -> None:
    class Attention(torch().autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
            given = {name: x.float().numpy() for name, x in (("q", q), ("k", k), ("v", v))}
            found = fl.naive(**given, causal=causal, scale=scale)
            out = torch().from_numpy(found.out).to(q.dtype)
            lse = torch().from_numpy(found.lse.astype(np.float32))
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.masks = causal, scale
            return (out * 1.02 if mistake == "a rough output" else out), lse

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            given = [x.float().numpy() for x in (grads[0], *ctx.saved_tensors)]
            found = backward(*given, *ctx.masks, mistake=mistake)
            return (*(torch().from_numpy(x).to(grads[0].dtype) for x in found), None, None)

    def fn(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
        return Attention.apply(q, k, v, causal, scale)

    with np.errstate(all="ignore"), pytest.raises(Failure, match=message):
        checked(differentiable(fn, lse="e"), check, case, "bfloat16")


@pytest.mark.torch
def test_an_autograd_function_that_is_right_passes_and_one_without_a_gradient_is_refused() -> None:
    with pytest.raises(fl.UsageError, match="expected a function whose output torch's autograd can differentiate"):
        verify(differentiable(lambda q, k, v: by_formula(q, k, v, False, 1.0).detach()), dtypes=["float32"])
    with pytest.raises(Failure, match="dk: autograd finds no way to it"):
        checked(
            differentiable(lambda q, k, v: q * v.sum() * 0 + by_formula(q, k.detach(), v, False, 0.125)),
            "rule",
            "aligned",
        )


@pytest.mark.torch
def test_an_operator_that_is_given_out_and_lse() -> None:
    """torch's backward pass for CPUs."""
    op = torch().ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def on_a_cpu(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool, scale: float) -> Any:
        return op(dout, q, k, v, out, lse, 0.0, causal, scale=scale)

    domain = fl.Domain(groups=1, empty=False)
    told = fl.Adapter(on_a_cpu, "torch", operation="backward", causal="top-left", domain=domain)
    report = verify(told, dtypes=["bfloat16"], checks=["rule", "equal_keys"])
    assert report.verdict == "passed", report


@pytest.mark.torch
@pytest.mark.parametrize("name", ["sdpa-flash-backward", "cudnn-backward"])
def test_torchs_operators_are_called_with_arguments_that_they_take(name: str) -> None:
    """Tensors without data: torch checks the arguments and says the shapes, with no GPU."""
    fn = importlib.import_module("flashlab.verify.outsiders").outsider(name).fn
    made: Any = {"device": "meta", "dtype": torch().bfloat16}
    q, k = torch().empty((2, 4, 33, 64), **made), torch().empty((2, 4, 70, 64), **made)
    lse = torch().empty((2, 4, 33), device="meta")
    found = fn(q, q, k, k, q, lse, causal=False, scale=0.1)
    assert [tuple(x.shape) for x in found] == [(2, 4, 33, 64), (2, 4, 70, 64), (2, 4, 70, 64)]
