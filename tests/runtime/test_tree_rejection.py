"""Verification of trees against the verifier's exact law, against plain Python, and against rules that are wrong."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from speculators.models.draft_tree import depths_of
from speculators.runtime.rejection import verify_greedy, verify_standard
from speculators.runtime.tree_rejection import verify_tree, verify_tree_greedy
from tests.runtime.laws import LEAST, LENGTH, P0, P, codes, compared, completed, drawn, markov_law

DRAWS = 200_000


@dataclass(frozen=True)
class Tree:
    """Drafts and the place of the draft that each continues, -1 for the last token."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]


TREES = {
    "two siblings": Tree((0, 1), (-1, -1)),
    "all tokens": Tree((2, 0, 1), (-1, -1, -1)),
    "four levels": Tree((1, 2, 0, 2, 1, 0, 0, 1), (-1, -1, 0, 0, 1, 2, 3, 5)),
    "one path": Tree((1, 0, 2), (-1, 0, 1)),
}
LAW_BEFORE, LAW_AFTER = torch.tensor(P0).float(), torch.tensor(P).float()


def laws_of(tree: Tree) -> Tensor:
    """The chain p's law at the root and after each node, [T, 3]."""
    return torch.stack([LAW_BEFORE, *(LAW_AFTER[token] for token in tree.tokens)])


def noise_of(tree: Tree, draws: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    coins = torch.rand(draws, 1 + len(tree.tokens), dtype=torch.float64, generator=generator)
    return coins, torch.empty(draws, 3).exponential_(generator=generator)


def emitted(tree: Tree, coins_NT: Tensor, noise_NV: Tensor) -> Tensor:
    """What `verify_tree` emits for many rows with the same tree, [N, S], padded with -1."""
    draws, laws_TV, levels = len(coins_NT), laws_of(tree), max(depths_of(tree.parents))
    window = torch.tensor([0, *tree.tokens])
    parents = torch.tensor([-1, *(parent + 1 for parent in tree.parents)]).expand(draws, -1)
    result = verify_tree(lambda at: laws_TV[at], window.expand(draws, -1), parents, levels, coins_NT, noise_NV)
    drafts_NS = torch.nn.functional.pad(window[result.places_BS[:, 1:]], (0, 1))
    kept_NS = torch.where(torch.arange(levels + 1) < result.num_accepted_B[:, None], drafts_NS, -1)
    return kept_NS.scatter(1, result.num_accepted_B[:, None], result.last_B[:, None])


def by_hand(
    tree: Tree, coins: Sequence[float], noise: Sequence[float], *, normalised: bool = True, excluded: bool = True
) -> list[int]:
    """One row in plain Python: siblings one after another, each from what the ones before have left.

    `normalised` False leaves out the division, `excluded` False draws the last token from the whole law: both wrong.
    """
    laws, tokens, at = laws_of(tree).double().numpy(), [], -1
    while True:
        p = laws[at + 1].copy()
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            if parent != at:
                continue
            share = p[token] / p.sum() if normalised else p[token]
            if coins[node + 1] < share:
                tokens.append(token)
                at = node
                break
            p[token] = 0
        else:
            weights = p if excluded and p.sum() > 0 else laws[at + 1]
            return [*tokens, int(np.argmax(weights / np.asarray(noise, dtype=np.float64)))]


def padded(rows: Sequence[Sequence[int]], width: int) -> Tensor:
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows])


def p_value(rows_NS: Tensor) -> float:
    """How likely first four tokens this far from the law of p are, where p goes on by itself."""
    tokens = torch.nn.functional.pad(rows_NS, (0, LENGTH), value=-1)[:, :LENGTH]
    return compared(codes(completed(tokens, 9), 3), markov_law())[2]


@pytest.mark.parametrize("name", TREES)
def test_what_is_emitted_follows_the_verifiers_law(name: str) -> None:
    tree = TREES[name]
    assert p_value(emitted(tree, *noise_of(tree, DRAWS))) > LEAST


@pytest.mark.parametrize("name", TREES)
def test_each_row_is_verified_as_by_hand(name: str) -> None:
    tree = TREES[name]
    coins, noise = noise_of(tree, 3000, seed=2)
    expected = [by_hand(tree, *row) for row in zip(coins.tolist(), noise.tolist(), strict=True)]
    found = emitted(tree, coins, noise)
    assert torch.equal(found, padded(expected, found.shape[1]))


@pytest.mark.parametrize("wrong", ["normalised", "excluded"])
def test_wrong_rules_are_told_from_the_law(wrong: str) -> None:
    """A rule that does not normalise between siblings, or draws the last token from the whole law, is found out."""
    tree = TREES["four levels"]
    coins, noise = noise_of(tree, 20_000, seed=3)
    pairs = list(zip(coins.tolist(), noise.tolist(), strict=True))
    assert p_value(padded([by_hand(tree, *pair) for pair in pairs], 5)) > LEAST
    assert p_value(padded([by_hand(tree, *pair, **{wrong: False}) for pair in pairs], 5)) < 1e-12


def test_siblings_are_accepted_as_often_as_the_verifier_would_draw_them() -> None:
    """The first draft is kept with probability p(0) + p(1), as its two candidates are those tokens."""
    tree = TREES["two siblings"]
    kept = float((emitted(tree, *noise_of(tree, DRAWS, seed=5))[:, 1] >= 0).double().mean())
    rate = P0[0] + P0[1]
    assert abs(kept - rate) < 5 * np.sqrt(rate * (1 - rate) / DRAWS)


def test_a_chain_is_verified_as_the_standard_rule_does() -> None:
    """Drafts, coins and noise the same; where a row's chain is shorter, its window has padding."""
    rows = drawn("one-hot", 5000, 1)
    lengths = torch.arange(5000) % 4
    standard = verify_standard(rows.target_probs_NSV, rows.draft_ids_NK, lengths, None, rows.coins_NK, rows.noise_NV)
    window = torch.nn.functional.pad(rows.draft_ids_NK, (1, 0))
    parents = torch.where(torch.arange(4) <= lengths[:, None], torch.arange(4) - 1, -1)
    every, coins = torch.arange(5000), torch.nn.functional.pad(rows.coins_NK, (1, 0))
    tree = verify_tree(lambda at: rows.target_probs_NSV[every, at], window, parents, 3, coins, rows.noise_NV)
    assert torch.equal(tree.num_accepted_B, standard.num_accepted_B)
    assert torch.equal(tree.last_B, standard.output_ids_BS.gather(1, standard.num_accepted_B[:, None])[:, 0])


def test_greedy_keeps_the_path_of_argmaxes() -> None:
    """Window 7 | 5 6 | 1 2 (after 5) 3 (after 6) | 4 (after 2): the verifier says 5, then 2, then 4 or 9."""
    window = torch.tensor([[7, 5, 6, 1, 2, 3, 4]]).expand(4, -1)
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 4]]).expand(4, -1)
    targets = torch.full((4, 7), 8)
    targets[0, [0, 1, 4, 6]] = torch.tensor([5, 2, 4, 0])
    targets[1, [0, 1, 4]] = torch.tensor([5, 2, 9])
    targets[2, [0, 2]] = torch.tensor([6, 3])
    result = verify_tree_greedy(targets, window, parents, 3)
    assert result.places_BS.tolist() == [[0, 1, 4, 6], [0, 1, 4, 4], [0, 2, 5, 5], [0, 0, 0, 0]]
    assert result.num_accepted_B.tolist() == [3, 2, 2, 0]
    assert result.last_B.tolist() == [0, 9, 8, 8]
    # The first level alone; and a chain, as the rule for chains has it.
    assert verify_tree_greedy(targets, window, parents, 1).num_accepted_B.tolist() == [1, 1, 1, 0]
    chain, said = torch.tensor([[5, 2, 4]] * 2), torch.tensor([[5, 2, 4, 1], [5, 3, 4, 1]])
    plain = verify_greedy(said, chain, torch.tensor([3, 3]))
    tree = verify_tree_greedy(said, torch.tensor([[7, 5, 2, 4]] * 2), torch.tensor([[-1, 0, 1, 2]] * 2), 3)
    assert tree.num_accepted_B.tolist() == plain.num_accepted_B.tolist() == [3, 1]


def test_rounding_never_leaves_nothing_to_draw_from() -> None:
    """A law whose whole support are rejected siblings still gives a token of its support."""
    law = torch.tensor([[0.5, 0.5, 0.0]])
    window, parents = torch.tensor([[0, 0, 1]]), torch.tensor([[-1, 0, 0]])
    coins = torch.tensor([[0.0, 1.0, 1.0]], dtype=torch.float64)
    result = verify_tree(lambda at: law, window, parents, 1, coins, torch.tensor([[1.0, 2.0, 1e-30]]))
    assert (result.num_accepted_B.tolist(), result.last_B.tolist()) == ([0], [0])
