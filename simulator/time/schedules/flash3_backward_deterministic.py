"""flash3_backward_deterministic: the launches of flash3_backward, each key tile in a block of its own.

How long a block waits for its turn behind blocks of other SMs isn't modelled.
"""

from __future__ import annotations

from simulator.time.schedules.flash3_backward import launches

__all__ = ["launches"]
