"""A window on what a served draft attends to (vLLM-Ascend's `draft_window_size`)."""

import logging

from speculators.errors import SpeculatorsError
from speculators.models.decoder_draft import DecoderDraftModel
from speculators.models.draft_model import DraftModel

logger = logging.getLogger(__name__)

KEY = "draft_window_size"


def limit_draft_window(draft: DraftModel, window: int) -> None:
    """Let every attention layer of a served draft see at most the last `window` positions, the query's own included.

    A draft that was trained on short contexts then goes on seeing contexts that are short. Positions, the cache,
    training and the verifier's attention stay as they are. A layer that was trained with a window keeps it where it is
    narrower; where it is wider, a warning tells of it. Drafts whose attention is a layer of the verifier's, or that
    have none, are left as they are, with a warning. SpeculatorsError for a window that is no whole number of at least
    1.
    """
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise SpeculatorsError(f"{KEY}={window!r}: expected a whole number of tokens, at least 1")
    if not isinstance(draft, DecoderDraftModel):
        family = draft.config.speculators_model_type
        logger.warning("%s=%d is ignored: a draft of family %s has no attention layers of its own", KEY, window, family)
        return
    layers = [layer.self_attn for layer in draft.blocks()]
    wider = sorted({layer.window for layer in layers if layer.window is not None and layer.window > window})
    if wider:
        logger.warning(
            "%s=%d is below the window of %s that the draft was trained with: fewer drafts will be accepted; give at "
            "least %d, or leave it out",
            KEY,
            window,
            " and ".join(map(str, wider)),
            wider[-1],
        )
    for layer in layers:
        layer.serving_window = window if layer.window is None else min(layer.window, window)
