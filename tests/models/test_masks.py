import torch

from speculators.models.masks import PackedMask


def by_hand(documents: list[int], window: int | None) -> list[list[bool]]:
    size = len(documents)
    return [
        [
            documents[q] >= 0 and documents[q] == documents[k] and k <= q and (window is None or q - k < window)
            for k in range(size)
        ]
        for q in range(size)
    ]


def test_dense_mask_is_document_causal_and_windowed() -> None:
    rows = [[0, 0, 0, 1, 1, 1, 1, -1], [2, 3, 3, 3, 3, 3, -1, -1]]
    for window in (None, 1, 2, 3):
        dense = PackedMask(window).dense(torch.tensor(rows))
        assert dense.tolist() == [by_hand(row, window) for row in rows]


def test_inside_one_document_the_short_form_is_the_same() -> None:
    index = torch.arange(7)
    for window in (None, 1, 4):
        mask = PackedMask(window)
        assert torch.equal(mask.in_document(index[:, None], index), mask.dense(torch.zeros(1, 7, dtype=torch.int64))[0])
