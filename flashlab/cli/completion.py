"""What a shell completes: names of algorithms, devices, checks. `flashlab --install-completion` sets a shell up for it.

Each is a function of the text that the user has begun. The names are imported only then. Where none fits, the shell
completes files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

Complete = Callable[[str], list[str]]


def one_of(names: Callable[[], Iterable[str]]) -> Complete:
    """Completes to one of the names. Of a list with commas it completes the last one."""

    def complete(incomplete: str) -> list[str]:
        before, comma, begun = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names() if name.startswith(begun)]

    return complete


def _algorithms() -> Iterable[str]:
    from simulator import CATALOGUE

    return CATALOGUE


def _devices() -> Iterable[str]:
    from simulator.devices import DEVICES

    return DEVICES


def _targets() -> Iterable[str]:
    from flashlab.verify.outsiders import OUTSIDERS

    return [*_algorithms(), *OUTSIDERS]


def _checks() -> Iterable[str]:
    from flashlab.verify import CHECKS
    from flashlab.verify.general import CHECKS as GENERAL

    return dict.fromkeys([*CHECKS, "search", *GENERAL])


def _peers() -> Iterable[str]:
    from flashlab.measure.peers import PEERS

    return [*PEERS, *_algorithms()]


def _dtypes() -> Iterable[str]:
    from simulator.problem import ITEMSIZE

    return ITEMSIZE


algorithms, devices, targets, checks, peers, dtypes = map(
    one_of, (_algorithms, _devices, _targets, _checks, _peers, _dtypes)
)
backends = one_of(lambda: ("simulator", "emulator", "gpu"))
