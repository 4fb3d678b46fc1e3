"""Trees of drafts against a search in plain Python over forced chains, and their writes against definitions."""

from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from speculators.models.cache import SlotCache
from speculators.models.draft_model import DraftContext
from speculators.models.draft_tree import TreeGrowth, TreeShape, TreeWrite, WindowTrees, depths_of, paths_of
from speculators.models.serving_window import limit_draft_window
from speculators.models.speculator import Speculator
from speculators.models.stepwise import StepwiseDraftModel
from tests.models.drafts import DRAFT_VOCAB, HIDDEN, VOCAB, random_speculator

ROWS = slice(1, 4)
# What the three rows are told, in two calls: lengths of their verified positions.
CALLS = ([5, 3, 4], [2, 1, 3])
VARIANTS = {
    "eagle": ("eagle", {}, None),
    "eagle of two layers": ("eagle", {"num_layers": 2, "embed_layernorm": True}, None),
    "eagle3": ("eagle3", {}, None),
    "eagle3 with norms": ("eagle3", {"norm_output": True, "norm_before_residual": False}, None),
    "eagle3 of two layers": ("eagle3", {"num_layers": 2}, None),
    "eagle3 in a window": ("eagle3", {}, 4),
}
SHAPES = (TreeShape(3, 4, 9), TreeShape(2, 3, 50), TreeShape(1, 3, 4), TreeShape(5, 1, 3), TreeShape(3, 2, 2))


def contexts(draft: StepwiseDraftModel, row: int | None = None) -> list[DraftContext]:
    """Both calls with an empty cache, of all rows or of one alone."""
    generator = torch.Generator().manual_seed(4)
    cache, starts, found = draft.make_cache(5), [0, 0, 0], []
    for lengths in CALLS:
        width = max(lengths)
        ids = torch.randint(VOCAB, (3, width), generator=generator)
        aux = torch.randn(3, width, 3 * HIDDEN, generator=generator)
        normed = torch.randn(3, width, HIDDEN, generator=generator)
        kept = slice(0, 3) if row is None else slice(row, row + 1)
        rows = ROWS if row is None else slice(0, 1)
        found.append(
            DraftContext(
                ids[kept], aux[kept], starts[kept], lengths[kept], cache, rows, normed_hidden_states_BTH=normed[kept]
            )
        )
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    return found


class Forced:
    """A sampler that follows a path of draft ids and keeps the logits that it is shown."""

    def __init__(self, path: Sequence[int]) -> None:
        self.path, self.logits = path, torch.empty(0)

    def __call__(self, logits_BD: Tensor, step: int) -> tuple[Tensor, None]:
        self.logits = logits_BD[0]
        return torch.tensor([self.path[step] if step < len(self.path) else 0]), None


def law_after(draft: StepwiseDraftModel, row: int) -> Callable[[tuple[int, ...]], list[float]]:
    """The probabilities of the draft's tokens after a path, by a chain of its own."""
    known: dict[tuple[int, ...], list[float]] = {}

    def law(path: tuple[int, ...]) -> list[float]:
        if path not in known:
            first, second = contexts(draft, row)
            draft.propose(first, 0, Forced(()))
            sampler = Forced(path)
            draft.propose(second, len(path) + 1, sampler)
            known[path] = sampler.logits.double().softmax(-1).tolist()
        return known[path]

    return law


def searched(law: Callable[[tuple[int, ...]], list[float]], shape: TreeShape) -> dict[tuple[int, ...], float]:
    """The paths of the tree and their probabilities."""
    found: dict[tuple[int, ...], float] = {}
    frontier: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(shape.depth):
        level = {}
        for path, probability in frontier.items():
            p = law(path)
            for token in sorted(range(len(p)), key=lambda one: -p[one])[: shape.top_k]:
                level[*path, token] = probability * p[token]
        found |= level
        frontier = {path: level[path] for path in sorted(level, key=lambda one: -level[one])[: shape.top_k]}
    return {path: found[path] for path in sorted(found, key=lambda one: -found[one])[: shape.total_token]}


def stepwise(speculator: Speculator) -> StepwiseDraftModel:
    assert isinstance(speculator.draft, StepwiseDraftModel)
    return speculator.draft


@pytest.mark.parametrize("name", VARIANTS)
def test_a_tree_is_the_one_that_a_search_finds(name: str) -> None:
    """Rows of different lengths, in a cache that holds the call before."""
    family, options, window = VARIANTS[name]
    speculator = random_speculator(family, **options)
    draft, ids = stepwise(speculator), speculator.draft.verifier_ids_D
    if window is not None:
        limit_draft_window(draft, window)
    for shape in SHAPES:
        first, second = contexts(draft)
        draft.propose(first, 0, Forced(()))
        proposal = draft.propose_tree(second, shape)
        assert proposal.parents_BK is not None
        for row in range(3):
            expected = searched(law_after(draft, row), shape)
            count = int(proposal.lengths_B[row])
            tokens, parents = proposal.token_ids_BK[row, :count].tolist(), proposal.parents_BK[row, :count].tolist()
            named = {tuple(path if ids is None else ids[list(path)].tolist()): p for path, p in expected.items()}
            paths = [tuple(path) for path in paths_of(tokens, parents)]
            assert set(paths) == set(named)
            assert count == len(expected)
            assert depths_of(parents) == sorted(map(len, paths))
            for place, path in enumerate(paths):
                assert parents[place] == (paths.index(path[:-1]) if path[:-1] else -1)
                siblings = [named[one] for one in paths if one[:-1] == path[:-1]]
                assert siblings == sorted(siblings, reverse=True)


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_with_all_children_a_tree_is_the_best_of_all_paths(family: str) -> None:
    draft = stepwise(random_speculator(family))
    first, second = contexts(draft)
    draft.propose(first, 0, Forced(()))
    law, ids = law_after(draft, 1), draft.verifier_ids_D
    size = len(law(()))
    assert size == {"eagle": VOCAB, "eagle3": DRAFT_VOCAB}[family]
    proposal = draft.propose_tree(second, TreeShape(size, 2, 30))
    assert proposal.parents_BK is not None
    worth = {(a,): p for a, p in enumerate(law(()))}
    worth |= {(a, b): law(())[a] * law((a,))[b] for a, b in product(range(size), repeat=2)}
    best = sorted(worth, key=lambda path: -worth[path])[:30]
    named = {tuple(path if ids is None else ids[list(path)].tolist()) for path in best}
    assert set(map(tuple, paths_of(proposal.token_ids_BK[1].tolist(), proposal.parents_BK[1].tolist()))) == named


def test_a_row_without_new_positions_has_no_tree() -> None:
    draft = stepwise(random_speculator())
    first, second = contexts(draft)
    draft.propose(first, 0, Forced(()))
    second.lengths = [2, 0, 3]
    assert draft.propose_tree(second, TreeShape(2, 2, 4)).lengths_B.tolist() == [4, 0, 4]


def test_of_equal_products_the_earlier_node_is_kept() -> None:
    """A certain child is no likelier than its parent: it never comes without it."""
    growth = TreeGrowth(torch.tensor([[0.0, 0.0, -1e9]]), 2)
    for _ in range(2):
        growth.grow(torch.tensor([[[0.0, -1e9, -1e9]] * 2]))
    for total in range(1, 10):
        _, parents = growth.best(total)
        assert depths_of(parents[0].tolist()) == sorted(depths_of(parents[0].tolist()))
        assert all(parent < place for place, parent in enumerate(parents[0].tolist()))
    assert growth.best(4)[1].tolist() == [[-1, -1, 0, 1]]


def test_a_token_sees_its_path_and_what_lies_before_the_tree() -> None:
    """By the definition of an ancestor; positions follow the levels, so a window ends where it would in a chain."""
    generator = torch.Generator().manual_seed(0)
    parents = [
        [-1 if i == 0 else int(torch.randint(-1, i, (1,), generator=generator)) for i in range(n)] for n in (9, 4, 0)
    ]
    write = WindowTrees.of(parents, torch.device("cpu")).write(slice(0, 3), [6, 3, 8])
    assert (write.starts, write.width, write.end) == ([6, 3, 8], 10, 18)
    for row, first in enumerate([6, 3, 8]):
        path_of = [[first]]
        for place, parent in enumerate(parents[row]):
            path_of.append([*path_of[parent + 1], first + 1 + place])
        for window in (None, 4):
            mask = write.mask(window)
            assert mask is not None
            for token, path in enumerate(path_of):
                seen = [*range(first), *path]
                assert mask[row, 0, token].nonzero()[:, 0].tolist() == (seen if window is None else seen[-window:])
                assert write.positions_BT[row, token] == first + len(path) - 1
        assert write.places_BT[row].tolist() == list(range(first, first + 10))


def test_a_later_level_is_written_behind_the_earlier_ones() -> None:
    seen = torch.tensor([[[True, False, True, False], [True, False, False, True]]])
    write = TreeWrite.of(slice(0, 1), [5], seen, torch.tensor([[0, 0, 1, 1]]))
    assert (write.starts, write.places_BT.tolist(), write.positions_BT.tolist()) == ([7], [[7, 8]], [[6, 6]])
    mask = write.mask()
    assert mask is not None
    assert mask[0, 0].int().tolist() == [[1] * 5 + [1, 0, 1, 0], [1] * 5 + [1, 0, 0, 1]]


def test_what_is_kept_is_moved_together() -> None:
    cache = SlotCache(1, 4, dtype=torch.float32, device=torch.device("cpu"))
    places = torch.arange(12.0).expand(4, 2, 12)[..., None] + 100 * torch.arange(4)[:, None, None, None]
    cache.keys[0], cache.values[0] = places.clone(), -places
    cache.keep(slice(1, 4), [2, 0, 5], [[0, 3, 4], [0], [0, 1]])
    expected = places.clone()
    expected[1, :, 3:5] = places[1, :, 5:7]
    assert torch.equal(cache.keys[0], expected)
    assert torch.equal(cache.values[0], -expected)
