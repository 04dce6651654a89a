"""Trains the transformer of `model.py` on the text of `corpus.py`.

    python tools/sample/train.py corpus.npz --out checkpoint.pt --log flashlab/data/sample_training.json

It needs torch (2.5 or newer) and NumPy. It is seeded: two runs on one machine draw the same windows of text. Their
weights still differ a little, because the GPU's kernels do not fix the order of atomic sums.
"""

import argparse
import json
import math
import time
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from model import Config, Transformer


def loss_on(model: torch.nn.Module, text: torch.Tensor, context: int, device: str) -> float:
    """The mean loss in nats per token, over all whole windows of `text`, which lie side by side."""
    count = (len(text) - 1) // context
    x = text[: count * context].view(count, context)
    y = text[1 : count * context + 1].view(count, context)
    total = 0.0
    model.eval()
    with torch.no_grad():
        for a, b in zip(x.split(32), y.split(32), strict=True):
            with torch.autocast(device, torch.bfloat16):
                logits = model(a.to(device))
            total += F.cross_entropy(
                logits.float().flatten(0, 1), b.to(device).long().flatten(), reduction="sum"
            ).item()
    model.train()
    return total / (count * context)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", help="written by corpus.py")
    parser.add_argument("--out", default="checkpoint.pt", help="weights, float16")
    parser.add_argument("--log", default="sample_training.json")
    parser.add_argument("--steps", type=int, default=7000)
    parser.add_argument("--batch", type=int, default=32, help="windows per step")
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=250, help="steps between two measurements")
    parser.add_argument("--compile", action="store_true", help="use torch.compile: faster on a GPU")
    for field in fields(Config):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    given = parser.parse_args()

    config = Config(**{field.name: getattr(given, field.name) for field in fields(Config)})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(given.seed)
    torch.set_float32_matmul_precision("high")
    corpus = np.load(given.corpus)
    train, held = (torch.from_numpy(corpus[name].astype(np.int32)) for name in ("train", "held"))
    on_device = train.to(device)
    model = Transformer(config).to(device)
    forward = torch.compile(model) if given.compile else model

    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    others = [weight for weight in model.parameters() if weight.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=given.rate, betas=(0.9, 0.95), fused=device == "cuda")
    warm_up = min(200, given.steps // 5 + 1)

    def rate(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, given.steps - warm_up)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    draw = torch.Generator().manual_seed(given.seed)
    offsets = torch.arange(config.context + 1, device=device)
    curve: list[dict[str, float]] = []
    start, running = time.monotonic(), []
    for step in range(1, given.steps + 1):
        first = torch.randint(len(train) - config.context, (given.batch, 1), generator=draw).to(device)
        window = on_device[first + offsets]
        with torch.autocast(device, torch.bfloat16):
            logits = forward(window[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].long().flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        running.append(loss.detach())
        if step % given.every == 0 or step == given.steps:
            row = {
                "step": step,
                "train": round(torch.stack(running).mean().item(), 4),
                "held_out": round(loss_on(model, held, config.context, device), 4),
                "seconds": round(time.monotonic() - start, 1),
            }
            running.clear()
            curve.append(row)
            print(row, flush=True)

    # Round the weights first and measure again, so that the log's losses belong to the weights in the file.
    weights = {name: value.half() for name, value in model.state_dict().items()}
    model.load_state_dict(weights)
    torch.save({"config": asdict(config), "weights": {name: value.cpu() for name, value in weights.items()}}, given.out)
    log = {
        "text": f"CPython {corpus['python']}, standard library",
        "sha256": str(corpus["sha256"]),
        "train_tokens": len(train),
        "held_out_tokens": len(held),
        "config": asdict(config),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "seed": given.seed,
        "steps": given.steps,
        "batch": given.batch,
        "rate": given.rate,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "unit": "nats per token",
        "train_loss": round(loss_on(model, train[: len(held)], config.context, device), 4),
        "held_out_loss": round(loss_on(model, held, config.context, device), 4),
        "curve": curve,
    }
    Path(given.log).write_text(json.dumps(log, indent=1) + "\n")
    print({name: value for name, value in log.items() if name != "curve"})


if __name__ == "__main__":
    main()
