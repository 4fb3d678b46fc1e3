"""What the loss over a large vocabulary takes: chunk by chunk, against whole tensors of tokens by vocabulary.

    python benchmarks/loss_memory.py [--vocabulary 150000] [--tokens 256 512 1024 4096] [--steps 3]

Each row is one process: draft states of three unrolled steps a token against the verifier's states, divergence and its
gradient by the draft's states, in float32 on one thread. Its peak is that of the process (ru_maxrss) above what it had
before, with heads and states in place. The dense form runs where it fits into half of the free memory; elsewhere its
peak is that of the largest that ran, in proportion to the tokens, and is marked as such.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from speculators.models.losses import Head, TokenLoss

RESULT = Path(__file__).resolve().parent / "results" / "loss_memory.json"
# Of the dense form: teacher and draft logits, their logarithms, probabilities and gradients.
DENSE_TENSORS = 6


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def dense_loss(hidden: torch.Tensor, head: torch.Tensor, teacher: torch.Tensor, steps: int) -> torch.Tensor:
    log_p = (teacher @ head.T).log_softmax(-1)
    terms = []
    for part in hidden.chunk(steps):
        log_q = (part @ head.T).log_softmax(-1)
        terms.append((log_p.exp() * (log_p - log_q)).sum(-1))
    return torch.cat(terms).mean()


def measure(form: str, vocabulary: int, tokens: int, steps: int, width: int, chunk_rows: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(steps * tokens, width, generator=generator).requires_grad_()
    teacher = torch.randn(tokens, width, generator=generator)
    head = torch.randn(vocabulary, width, generator=generator) / width**0.5
    rows = torch.arange(tokens).repeat(steps)
    before, started = peak_mib(), time.perf_counter()
    if form == "dense":
        loss = dense_loss(hidden, head, teacher, steps)
    else:
        loss = TokenLoss({"kl_div": 1.0}, chunk_rows)(hidden, Head(head), teacher, Head(head), rows).loss.mean()
    loss.backward()
    seconds = time.perf_counter() - started
    return {
        "form": form,
        "tokens": tokens,
        "peak_mib": round(peak_mib() - before, 1),
        "seconds": round(seconds, 2),
        "loss": float(loss),
        "gradient_norm": float(hidden.grad.norm()),
        "measured": True,
    }


def free_mib() -> float:
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) / 1024


def in_a_process(args: argparse.Namespace, form: str, tokens: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--form", form, "--tokens", str(tokens), "--vocabulary", str(args.vocabulary)]
    command += ["--steps", str(args.steps), "--width", str(args.width), "--chunk-rows", str(args.chunk_rows)]
    row: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return row


def table(args: argparse.Namespace) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    largest: dict[str, Any] | None = None
    for tokens in sorted(args.tokens):
        found.append(in_a_process(args, "chunked", tokens))
        needed = DENSE_TENSORS * args.steps * tokens * args.vocabulary * 4 / 2**20
        if needed < free_mib() / 2:
            largest = in_a_process(args, "dense", tokens)
            found.append(largest)
        elif largest is not None:
            peak = largest["peak_mib"] * tokens / largest["tokens"]
            found.append({"form": "dense", "tokens": tokens, "peak_mib": round(peak, 1), "measured": False})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 4096])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--width", type=int, default=64, help="hidden size of draft and verifier")
    parser.add_argument("--chunk-rows", type=int, default=128)
    parser.add_argument("--form", choices=["chunked", "dense"], help="measure one row here, and print it")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    if args.form:
        row = measure(args.form, args.vocabulary, args.tokens[0], args.steps, args.width, args.chunk_rows)
        print(json.dumps(row))
        return
    rows = table(args)
    settings = {name: getattr(args, name) for name in ("vocabulary", "steps", "width", "chunk_rows")}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({**settings, "torch": torch.__version__, "rows": rows}, indent=2) + "\n")
    print("| form | tokens | peak MiB | seconds | |\n|---|---|---|---|---|")
    for row in rows:
        mark = "" if row["measured"] else "in proportion"
        print(f"| {row['form']} | {row['tokens']} | {row['peak_mib']:,.0f} | {row.get('seconds', '')} | {mark} |")


if __name__ == "__main__":
    main()
