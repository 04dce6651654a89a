"""Time: a discrete-event model of an SM's units, and of blocks over SMs. docs/time.md says how far to trust it."""
