"""Time: a discrete-event model of the units of an SM, and blocks over SMs. The page docs/time.md says what it holds."""
