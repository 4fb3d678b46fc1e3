"""The verifier's head as objectives compare with it: cut out once, and gone with the head that it was cut from."""

import pickle
from weakref import ref

import torch

from speculators.models.eagle3.model import Eagle3Model
from speculators.models.objective import TeacherHead
from tests.models.drafts import random_speculator, verifier_head


def eagle3_draft() -> Eagle3Model:
    draft = random_speculator("eagle3").draft
    assert isinstance(draft, Eagle3Model)
    return draft


def test_it_is_cut_out_once_and_holds_the_drafts_tokens() -> None:
    draft, verifier, teacher = eagle3_draft(), verifier_head(), TeacherHead()
    ids_D = draft.verifier_ids_D
    assert ids_D is not None
    head = teacher.over_draft_vocabulary(draft, verifier)
    assert torch.equal(head.weight, verifier.head.weight[ids_D])
    assert teacher.over_draft_vocabulary(draft, verifier) is head
    other = verifier.with_weight(2 * verifier.head.weight)
    assert torch.equal(teacher.over_draft_vocabulary(draft, other).weight, 2 * head.weight)


def test_nothing_outlives_the_verifiers_head() -> None:
    """Where its weight is gathered for one pass, a copy of its rows may not stay until the next."""
    draft, verifier, teacher = eagle3_draft(), verifier_head(), TeacherHead()
    cut = ref(teacher.over_draft_vocabulary(draft, verifier))
    assert cut() is not None
    del verifier
    assert cut() is None


def test_what_is_known_is_not_sent_along() -> None:
    draft, verifier, teacher = eagle3_draft(), verifier_head(), TeacherHead()
    head = teacher.over_draft_vocabulary(draft, verifier)
    sent = pickle.loads(pickle.dumps(teacher))
    assert sent == teacher
    assert torch.equal(sent.over_draft_vocabulary(draft, verifier).weight, head.weight)
