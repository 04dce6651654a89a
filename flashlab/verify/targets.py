"""What `verify` was given, as a target: an algorithm on a backend, a tile program, a kernel of a file, or a function."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, cast

import simulator
from flashlab.verify.adapter import Adapter, CallableTarget, Failure, Refused, Target, TileShape, imported, named
from flashlab.verify.cases import EVERY_SCORE
from flashlab.verify.domain import Domain
from flashlab.verify.kernels import FileKernel, KernelTarget
from flashlab.verify.memory import frame_named
from flashlab.verify.outsiders import OUTSIDERS, outsider
from simulator import Problem, UsageError
from simulator.catalogue import CATALOGUE
from simulator.errors import SramOverflow, Unavailable, among, unknown
from simulator.names import AnyBackend, Backend, DeviceName
from simulator.operations.attention import ATTENTION
from simulator.problem import SCORES

BACKENDS = ("simulator", "emulator", "gpu")
UNCOMMON = {**EVERY_SCORE, "mask": "dense", "lengths": ((9, 6), (7, 10)), "dropout": 0.5}
"""The features that a tile program of one's own may not know, each with a value. The lengths are those of 16 queries and keys."""


def _check_tile(row: simulator.Algorithm, tile: TileShape, device: DeviceName, *, kernels: bool) -> None:
    """Raises `UsageError` for a tile that the algorithm takes in no problem: the smallest one is asked for."""
    if tile is None or row.formula is None:
        return
    p = Problem(batch=1, heads=1, len_q=16, head_dim=16, dtype=row.dtypes[0])
    small = next((one for one in (p, p.replace(head_dim=64)) if row.refusal(one) is None), None)
    if small is None:
        return
    simulator.count(row.name, small, tile=tile, device=device)
    if kernels:
        row.check(small, simulator.Device.named(device), simulator.Tile.parse(tile))


class SimulatorTarget(Target):
    """An algorithm or a tile program on the simulator."""

    backend = "simulator"
    # dims around multiples of the fragment's 16, tiles that divide nothing
    head_dims = (16, 17, 40, 64)
    tiles = (None, (16, 16), (32, 16), (16, 48), (20, 12))
    longest = 70

    def __init__(self, algorithm: Any, device: DeviceName, tile: TileShape, *, asked: bool = True) -> None:
        """`asked`: a program of one's own is asked what it knows, by running it."""
        self.algorithm, self.tile = algorithm, tile
        self.device: DeviceName = device
        self.row = simulator.catalogue.get(algorithm)
        self.name, self.frame = self.row.name, frame_named("numpy")
        if self.row.support.eight_bit:
            self.dtypes = self.row.dtypes
        self.domain = _domain(self.row)
        own = self.row is not CATALOGUE.get(self.name)  # nobody said what a program of one's own knows
        self.ignored = {feature for feature in UNCOMMON if own and asked and not self._minds(feature)}
        self.ignored |= {"kv_dtype"} if own else set()  # to multiply with no scale is no sign that it knows them
        known = [name for name in _scores(self.row) if name not in self.ignored]
        self.scores = tuple(itertools.chain(*(itertools.combinations(known, n) for n in range(len(known) + 1))))

    def check_options(self) -> None:
        _check_tile(self.row, self.tile, self.device, kernels=False)

    def _minds(self, feature: str) -> bool:
        """Does a program of one's own give another result with a feature than without? If not, it doesn't know it."""
        p = Problem(batch=1, heads=1, len_q=16, head_dim=16, dtype="float32")
        asked = p.replace(**{feature: UNCOMMON[feature]})
        arrays = ATTENTION.draw(asked)
        plain = {name: x for name, x in arrays.items() if ATTENTION.operand(name).when(p)}
        try:
            (out, _), (other, _) = self.call(asked, arrays), self.call(p, plain)
        except Exception:  # it takes no such problem, or refuses the feature
            return False
        return out.tobytes() != other.tobytes()

    def refuses(self, problem: Problem) -> str | None:
        for name in problem.applied:
            if name in self.ignored:
                return f"the program doesn't seem to know {name}"
        return self.row.refuses(problem)

    def call(
        self,
        problem: Problem,
        arrays: Mapping[str, Any],
        *,
        out: Any = None,
        tile: TileShape = None,
        scales: Any = None,
    ) -> tuple[Any, Any]:
        try:
            run = simulator.simulate(
                self.algorithm, **arrays, tile=self.tile or tile, device=self.device, lse=True, scales=scales,
                **problem.masks,
            )  # fmt: skip
        except SramOverflow as overflow:
            raise Refused(str(overflow)) from None
        return run.out, run.lse

    def check_bytes(self, problem: Problem, tile: TileShape) -> None:
        """Raise `Failure` if the run on data, the run on shapes and the formula (if there is one) don't count the same bytes."""
        where: dict[str, Any] = {"tile": self.tile or tile, "device": self.device, "lse": True}
        run = simulator.simulate(self.algorithm, **ATTENTION.draw(problem), **problem.masks, **where)
        ways = {
            "shapes": simulator.shape_run(self.algorithm, problem, **where),
            "formula": simulator.count(self.algorithm, problem, **where),
        }
        for name, counts in ways.items():
            if counts.launches != run.counts.launches:
                raise Failure(f"the {name} count {_difference(run.counts, counts)}")

    def source(self) -> str | None:
        return named(self.algorithm)

    def options(self) -> dict[str, Any]:
        return _given(device=None if self.device == "h100" else self.device, tile=self.tile and tuple(self.tile))


def _difference(a: Any, b: Any) -> str:
    for x, y in zip(a.launches, b.launches, strict=False):
        for entry in sorted({*x.ledger, *y.ledger}):
            if x.ledger.get(entry, 0) != y.ledger.get(entry, 0):
                where = f"launch {x.name}, step {entry.step}: {entry.what} of {entry.tensor}"
                return f"{y.ledger.get(entry, 0):,} bytes, the run on data {x.ledger.get(entry, 0):,} ({where})"
    return "launches, SRAM or FLOPs otherwise than the run on data does"


class AttentionTarget(Target):
    """One of our kernels through `flashlab.attention`, on a GPU or on the CPU emulator."""

    bitwise = True

    def __init__(
        self, algorithm: str, backend: Backend, framework: str, device: DeviceName | None, tile: TileShape
    ) -> None:
        self.name, self.backend, self.tile = algorithm, backend, tile
        self.device: DeviceName | None = device
        self.frame = frame_named(framework)
        self.takes_out = framework in ("cupy", "torch")
        self.longest = 300 if backend == "gpu" else 70
        self.row = CATALOGUE[algorithm]
        self.scores = tuple(dict.fromkeys([(), _scores(self.row)]))
        self.tiles = self.row.support.tiles
        if self.row.support.eight_bit:
            self.dtypes = self.row.dtypes
        self.domain = _domain(self.row)

    def check_options(self) -> None:
        if self.backend == "emulator":
            _check_tile(self.row, self.tile, self.device or "h100", kernels=True)

    def refuses(self, problem: Problem) -> str | None:
        if self.backend == "gpu":
            from flashlab.run.devices import current_device  # only where a kernel is launched

            device = current_device()
        else:
            device = simulator.Device.named(self.device or "h100")
        error = self.row.refusal(problem, device)
        if isinstance(error, Unavailable):
            raise error
        return None if error is None else str(error)

    def call(
        self,
        problem: Problem,
        arrays: Mapping[str, Any],
        *,
        out: Any = None,
        tile: TileShape = None,
        scales: Any = None,
    ) -> tuple[Any, Any]:
        from flashlab.run.call import attention  # only where a kernel is launched

        try:
            return attention(
                **arrays, algorithm=self.name, lse=True, out=out, tile=self.tile or tile, backend=cast("Backend", self.backend),
                device=self.device, scales=scales, **problem.masks,
            )  # fmt: skip
        except SramOverflow as overflow:
            raise Refused(str(overflow)) from None

    def source(self) -> str | None:
        return repr(self.name)

    def options(self) -> dict[str, Any]:
        return _given(
            backend=self.backend, framework=self.frame.name, device=self.device, tile=self.tile and tuple(self.tile)
        )

    def footprint(self, problem: Problem) -> Iterable[int]:
        counts = simulator.count(self.name, problem, tile=self.tile, device=self.device or "h100", lse=True)
        return [spec.nbytes for spec in counts.tensors.values() if spec.role != "input"]


def target_of(
    target: Any,
    backend: AnyBackend,
    *,
    device: DeviceName | None = None,
    tile: TileShape = None,
    framework: str | None = None,
) -> Target:
    """What `verify` was given, as a target: a name, a tile program, `package:function`, an `Adapter`, a callable, or a target."""
    among("backend", backend, BACKENDS)
    if isinstance(target, Target):
        return target
    if isinstance(target, Adapter):
        return _adapted(target)
    if isinstance(target, str):
        if target in OUTSIDERS:
            return _adapted(outsider(target))
        if ":" in target:
            return CallableTarget(Adapter(imported(target), framework or "numpy", name=target))
    elif not isinstance(target, simulator.Program):
        return _adapted(Adapter(target, framework or "numpy"))
    if backend == "simulator":
        return SimulatorTarget(_known(target), device or "h100", tile)
    if not isinstance(target, str):
        raise UsageError(
            "backend", backend, "'simulator' for a tile program: only algorithms of the catalogue have kernels"
        )
    _known(target)
    return AttentionTarget(target, backend, framework or ("cupy" if backend == "gpu" else "numpy"), device, tile)


def _adapted(adapter: Adapter) -> Target:
    if adapter.operation != "attention":
        raise UsageError(
            "operation", adapter.operation, "attention: other operations have no single cases, only fl.verify"
        )
    return KernelTarget(adapter, adapter.fn) if isinstance(adapter.fn, FileKernel) else CallableTarget(adapter)


def _scores(row: simulator.Algorithm) -> tuple[str, ...]:
    """What may change the scores in an algorithm of ours."""
    return tuple(name for name in SCORES if name in row.support.masks)


def _domain(row: simulator.Algorithm) -> Domain:
    """The problems that an algorithm of ours is for: any, which it may refuse, or where it takes so many queries only, those."""
    most = row.support.queries
    return Domain() if most is None else Domain(dtype=row.dtypes, len_q=range(most + 1), masks=row.support.masks)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _known(algorithm: Any) -> Any:
    if isinstance(algorithm, str) and algorithm not in CATALOGUE:
        raise unknown("target", algorithm, [*CATALOGUE, *OUTSIDERS, "package:function"])
    return algorithm
