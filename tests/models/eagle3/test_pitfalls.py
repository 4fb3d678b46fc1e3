"""Every combination of an EAGLE-3 draft's flags, from training to its directory and back (pitfall 9)."""

from itertools import product
from pathlib import Path

import pytest
import torch

from speculators.models.speculator import Speculator
from tests.models.drafts import HIDDEN, random_speculator, verifier_weights

NORMS = [{"norm_before_fc": False}, {"norm_before_fc": True}, {"norm_before_fc": False, "fc_norm": True}]
IDS = [[3], [2, 4, 5], [0, 2, 5, 8]]


@pytest.mark.parametrize("ids", IDS, ids=len)
@pytest.mark.parametrize("hidden_size", [None, 16])
def test_every_combination_of_flags_survives_its_directory(
    ids: list[int], hidden_size: int | None, tmp_path: Path
) -> None:
    """`fc` reads as many states of the verifier's width as there are ids, whatever the flags (pitfall 9)."""
    for number, (norms, residual, output, layer_type) in enumerate(
        product(NORMS, (False, True), (False, True), ("llama", "qwen3"))
    ):
        flags = {**norms, "norm_before_residual": residual, "norm_output": output}
        speculator = random_speculator(aux_layer_ids=ids, hidden_size=hidden_size, layer_type=layer_type, **flags)
        folder = tmp_path / str(number)
        speculator.save_pretrained(folder, torch.float32)
        loaded = Speculator.from_pretrained(folder).attach_verifier(verifier_weights())
        assert {key: getattr(loaded.config, key) for key in flags} == flags
        assert loaded.config.aux_layer_ids == ids
        assert loaded.draft.get_parameter("fc.weight").shape == (hidden_size or HIDDEN, len(ids) * HIDDEN)
        tensors = speculator.draft.state_dict()
        assert loaded.draft.state_dict().keys() == tensors.keys()
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in loaded.draft.state_dict().items())
