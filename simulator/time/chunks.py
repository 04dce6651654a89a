"""How long a chunk of latent attention should be, by the model of time."""

from __future__ import annotations

from simulator.devices import Device
from simulator.names import DeviceName
from simulator.operations.latent import latent_problem
from simulator.problem import MOST_OF_CHUNK
from simulator.time.prediction import timeline

SHORTEST = 256
"""Keys of the shortest chunk that is looked at: four tiles."""


def latent_chunk(*, batch: int, heads: int, len_kv: int, device: Device | DeviceName = "h100") -> int:
    """The chunk with which `mla_hopper` is predicted to be fastest, in keys: pass it to `fl.mla` or `latent_problem`.

    Give it the fixed capacities of a server or of a plan, not what happens to be in a batch: so many requests of so many keys,
    with `heads` query heads. Then the bits of a request depend on these, on its own length and on nothing else.

    Raises `UsageError` for what isn't a size, and for a GPU on which the kernel doesn't run.

    >>> import flashlab as fl
    >>> [fl.latent_chunk(batch=n, heads=128, len_kv=m, device="h100") for n, m in ((64, 4096), (1, 65536))]
    [4096, 1024]
    """
    p, found, chunk = latent_problem(batch=batch, heads=heads, len_kv=len_kv), dict[int, float](), SHORTEST
    while not found or (chunk < 2 * p.len_kv and chunk <= MOST_OF_CHUNK):
        found[chunk] = timeline("mla_hopper", p.replace(chunk=chunk), device=device).seconds
        chunk *= 2
    return min(found, key=lambda chunk: found[chunk])
