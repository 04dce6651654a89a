"""Standard attention with the online softmax: its configuration, the player's words, and its row of the catalogue."""

from __future__ import annotations

from simulator.algorithm import Algorithm, Kernel
from simulator.algorithms import standard
from simulator.formulas import online_softmax as formula
from simulator.programs.online_softmax import online_softmax
from simulator.time.schedules import online_softmax as schedule

ABOUT = {
    "online_softmax": {
        "online_pass": "One pass over the rows of S finds maximum and sum together: a sum is rescaled when the maximum rises.",
        "store_p": "Second pass: divide by the sum, and write P, the probabilities, to HBM.",
        "store_lse": "Write each row's log-sum-exp, m + log ℓ, to HBM: all that a backward pass needs to know of the softmax.",
    },
}
"""What each step of each launch is for, in a sentence or two: the player's words."""


online_softmax.configured(standard.configure)
ROW = Algorithm(
    "online_softmax",
    online_softmax,
    formula.online_softmax,
    schedule=schedule.launches,
    kernels=(standard.SCORES, Kernel("online_softmax", "online_softmax", ("s", "p", "lse")), standard.OUTPUT),
    about=standard.ABOUT | ABOUT,
    follows="standard",
    lesson="02_softmax",
)
