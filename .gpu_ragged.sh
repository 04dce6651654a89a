#!/bin/bash
# Verifies, counts and times ragged batches of flash3_backward on an H200. Run in the repository root on a machine with CuPy and torch:
# bash .gpu_ragged.sh [folder]. Some 15 minutes; each step by itself is under 10.
set -x
R=${1:-docs/results}
export PYTHONPATH=$PWD
mkdir -p "$R"

# 1. Does it hang, or compute nonsense? One small problem of each form: persistent blocks (d 64: static, drawn), a block each (d 96, 128).
timeout 120 python3 - <<'PY'
import numpy as np, cupy as cp, flashlab as fl
from simulator.operations.backward import BACKWARD
L = [700, 3, (1400, 1500), 0, (0, 40), 129, (700, 90)]
for d in (40, 64, 96, 128):
    for causal in (False, True):
        for lengths in (L, [512] * 6):
            for dtype in ("float16", "bfloat16"):
                p = fl.Problem(batch=1, heads=8, kv_heads=2, lengths=lengths, head_dim=d, dtype=dtype, causal=causal, sinks=causal)
                arrays = BACKWARD.draw(p)
                plans = [fl.plan(name, p, backend="gpu") for name in ("flash3_backward", "flash2_backward")]
                if dtype == "bfloat16":  # CuPy has no bfloat16: torch
                    import torch
                    given = {n: torch.from_numpy(np.asarray(x, np.float32)).cuda().to(torch.bfloat16 if str(x.dtype) == "bfloat16" else torch.float32)
                             if x.dtype.kind not in "iu" else torch.from_numpy(x).cuda() for n, x in arrays.items()}
                    one, two = ({n: x.float().cpu().numpy() for n, x in plan.run(given).items()} for plan in plans)
                else:
                    given = {n: cp.asarray(x) for n, x in arrays.items()}
                    one, two = ({n: cp.asnumpy(x).astype(np.float32) for n, x in plan.run(given).items()} for plan in plans)
                off = {n: float(np.abs(one[n] - two[n]).max() / max(1e-9, np.abs(two[n]).max())) for n in one}
                print(d, causal, dtype, len(lengths), off, "OK" if max(off.values()) < 0.02 else "WRONG", flush=True)
PY

# 2. Verify: all probes, by the rule, between NaNs (`sequences` among them).
timeout 590 python3 -m flashlab verify flash3_backward --backend gpu --save "$R" --force

# 3. Count: ragged problems alone first, then all.
timeout 300 python3 -m flashlab counters flash3_backward --only sequences
timeout 590 python3 -m flashlab counters flash3_backward --save "$R" --force

# 4. Time: the drawn cells, four of which are ragged up to head dim 128. Before: 0.35 to 0.53 x FA4, by flash2_backward.
timeout 590 python3 -m flashlab bench flash3_backward --odd --against fa4,cudnn,flash2_backward --save "$R" --force

# 5. Is a plain batch as fast as before? And the sanitizers, on sequences.
timeout 300 python3 -m flashlab bench flash3_backward --head-dim 64,128 --against flash2_backward
timeout 590 python3 -m flashlab sanitize flash3_backward
