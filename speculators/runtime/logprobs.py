"""Log-probabilities that a request is told: of the model's own logits, before temperature and any constraint but a
grammar, which leaves the tokens that it forbids at minus infinity.

Shapes: T tokens, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from speculators.runtime.outputs import Logprob

# Rows whose log-probabilities are made at once: a prompt's would fill the memory.
_ROWS_AT_ONCE = 64


def token_logprobs(
    logits_TV: Tensor, token_ids: Sequence[int], num_likeliest: int, tokenizer: PreTrainedTokenizerBase | None
) -> list[dict[int, Logprob]]:
    """For each row the entry of its token, then those of the likeliest ones, by id; rank 1 is the likeliest.

    `logits_TV` may have more rows than there are tokens.
    """
    entries: list[dict[int, Logprob]] = []
    for start in range(0, len(token_ids), _ROWS_AT_ONCE):
        chosen = token_ids[start : start + _ROWS_AT_ONCE]
        logprobs_TV = logits_TV[start : start + len(chosen)].float().log_softmax(-1)
        ids_T1 = torch.tensor(chosen, device=logits_TV.device)[:, None]
        ids_TN = torch.cat([ids_T1, logprobs_TV.topk(num_likeliest).indices], 1)
        values_TN = logprobs_TV.gather(1, ids_TN)
        # Column by column: all at once would be N times the vocabulary.
        ranks_TN = torch.stack([(logprobs_TV > value_T[:, None]).sum(1) + 1 for value_T in values_TN.unbind(1)], 1)
        rows = zip(ids_TN.tolist(), values_TN.tolist(), ranks_TN.tolist(), strict=True)
        entries += [
            {
                token: Logprob(value, rank, None if tokenizer is None else str(tokenizer.decode([token])))
                for token, value, rank in zip(*row, strict=True)
            }
            for row in rows
        ]
    return entries
