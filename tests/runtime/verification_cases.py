"""Verifications of random drafts, by Triton's kernels and by the readable reference.

    python -m tests.runtime.verification_cases [--device cpu] [--out out/kernels.json]

On a CPU, kernels run in Triton's interpreter, which TRITON_INTERPRET=1 asks for. Writes a line a kernel, shape and kind
of laws: kernel, drafts, rows, slots, vocabulary, laws, device, and whether what both emit is equal. Exit code 1 where
something is not.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speculators.runtime import rejection
from speculators.runtime.rejection import Verification

# Rows, drafts at most, vocabulary: one of everything, no drafts, more columns than a program handles, odd ones.
SHAPES = [(1, 1, 7), (2, 0, 13), (4, 9, 37), (3, 4, 1031), (8, 2, 1024), (5, 7, 129), (1, 0, 1031), (17, 2, 11)]
LAWS = ("plain", "zeros", "verifier one-hot", "draft above the verifier", "draft one-hot", "equal")


@dataclass(frozen=True)
class Case:
    """A call of a verification function, which the reference and the kernels both have."""

    function: str
    drafts: str
    arguments: tuple[Tensor | None, ...]

    def run(self, module: Any, device: str | torch.device = "cpu") -> Verification:
        """What a module's function makes of the arguments on a device."""
        function = getattr(module, self.function)
        return function(*self.on(device))

    def on(self, device: str | torch.device) -> list[Tensor | None]:
        """The arguments on a device."""
        return [None if one is None else one.to(device) for one in self.arguments]

    def agrees(self, module: Any, device: str | torch.device = "cpu") -> bool:
        """Whether a module's function emits on a device what the reference emits on the CPU, in the same dtypes."""
        found, expected = self.run(module, device), self.run(rejection)
        pairs = (
            (found.num_accepted_B, expected.num_accepted_B),
            (found.output_ids_BS, expected.output_ids_BS),
        )
        return all(one.dtype is other.dtype and torch.equal(one.cpu(), other) for one, other in pairs)


def sharp(law: Tensor) -> Tensor:
    """All of each law's mass on its likeliest token."""
    return torch.zeros_like(law).scatter_(-1, law.argmax(-1, keepdim=True), 1.0)


def batch(shape: tuple[int, int, int], laws: str = "plain", dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Arguments of a rule: laws of one kind, mixed lengths of which the first is full, -1 in some rows before the end.

    `dtype` is the draft's probabilities'.
    """
    rows, slots, vocab = shape
    generator = torch.Generator().manual_seed(rows + 10 * slots + vocab)
    scores = 2 * torch.randn(rows, slots + 1, vocab, generator=generator)
    other = scores[:, :-1] + torch.randn(rows, slots, vocab, generator=generator)
    target, draft = scores.softmax(-1), other.softmax(-1)
    ids = draft.reshape(-1, vocab).multinomial(1, generator=generator) if slots else torch.zeros(0, 1)
    ids = ids.view(rows, slots).long()
    if laws == "zeros":
        gone = torch.rand(2, rows, slots + 1, vocab, generator=generator) < 0.5
        target = scores.masked_fill(gone[0] & (scores < scores.amax(-1, keepdim=True)), -torch.inf).softmax(-1)
        # The draft gives what it drew something.
        gone[1, :, :-1].scatter_(2, ids[:, :, None], False)
        draft = other.masked_fill(gone[1, :, :-1], -torch.inf).softmax(-1)
    elif laws == "verifier one-hot":
        target = sharp(target)
    elif laws == "draft one-hot":
        draft = torch.zeros_like(draft).scatter_(2, ids[:, :, None], 1.0)
    elif laws == "draft above the verifier":
        # Everywhere, as of rows in coarse precision that sum to less than 1: nothing remains of p - q.
        target = torch.cat([0.5 * draft, target[:, -1:]], 1)
    elif laws == "equal":
        target = torch.cat([draft, target[:, -1:]], 1)
    lengths = torch.randint(0, slots + 1, (rows,), generator=generator)
    lengths[0] = slots
    ids[1::3, slots // 2 :] = -1
    coins = torch.rand(rows, slots, dtype=torch.float64, generator=generator)
    noise = torch.empty(rows, vocab).exponential_(generator=generator)
    return target, ids, lengths, draft.to(dtype), coins, noise


def cases(shape: tuple[int, int, int], laws: str = "plain") -> Iterator[Case]:
    """Every function of a shape; with more synthetic rates than drafts, as where drafts were cut."""
    target, ids, lengths, draft, coins, noise = batch(shape, laws)
    best = target.argmax(-1)
    # Likely tokens, of which many are kept.
    near = torch.where((torch.arange(shape[1]) % 3 < 2) & (ids >= 0), best[:, :-1], ids)
    rates = torch.linspace(1, 0.3, shape[1] + 2, dtype=torch.float64)
    yield Case("verify_greedy", "one-hot", (best, near, lengths))
    yield Case("verify_synthetic_greedy", "one-hot", (best, ids, lengths, coins, rates))
    for drafts, law, chosen in (("probabilistic", draft, ids), ("one-hot", None, near)):
        arguments = (target, chosen, lengths, law, coins, noise)
        yield Case("verify_standard", drafts, arguments)
        yield Case("verify_block", drafts, arguments)
        yield Case("verify_synthetic", drafts, (*arguments, rates))


def main() -> int:
    from speculators.runtime.kernels import verification

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("out/kernels.json"))
    args = parser.parse_args()
    lines = []
    for shape, laws in product(SHAPES, LAWS):
        for case in cases(shape, laws):
            place = dict(zip(("rows", "slots", "vocabulary"), shape, strict=True))
            named = {"kernel": case.function, "drafts": case.drafts, **place, "laws": laws, "device": args.device}
            lines.append({**named, "equal": case.agrees(verification, args.device)})
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(lines, indent=2) + "\n", encoding="utf-8")
    equal = sum(line["equal"] for line in lines)
    print(f"{equal} of {len(lines)} verifications are equal")
    return 0 if equal == len(lines) else 1


if __name__ == "__main__":
    sys.exit(main())
