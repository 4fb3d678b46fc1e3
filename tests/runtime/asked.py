"""Requests that methods are asked, and what a verifier answers to them by itself."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from speculators.runtime.evaluate import first_differences, top2_gap
from speculators.runtime.llm import LLM
from speculators.runtime.outputs import RequestOutput
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.verifier import Verifier
from tests.runtime.served import Directories
from tests.tiny_models import SENTENCES

# What ends an answer: its length, one of its stop tokens, one of its stop texts, or the token that ends a sequence.
ENDS = ("length", "stop token", "stop text", "end of sequence")
Answer = tuple[list[int], str, str]
# Texts for verifiers that read them: repetitive ones first and last, pieces of sentences between. At the places of
# `QUESTIONS` a request goes through the chat template and is free to end by itself.
TEXTS = (
    "a b a b a b a b",
    "one two three " * 3 + "one",
    "The",
    *(sentence[: 4 + 17 * place % 60] for place, sentence in enumerate(SENTENCES * 2)),
    "ha " * 9,
    "10, 20",
    "for i in range(3): print(i)\n" * 4,
    "so it goes " * 5,
)
QUESTIONS = {
    3: "What is the capital of France? Answer in one word.",
    7: "What is 2+2? Answer with a number only.",
    11: "What is the capital of France? Answer in one word.",
    15: "What is 3+4? Answer with a number only.",
}


@dataclass
class Asked:
    """Requests of a verifier, and what it answers to them by itself."""

    made: Directories
    kind: str
    answers: dict[int, list[Answer]] = field(default_factory=dict)

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Mixed lengths, some of them repetitive; more than the largest batch."""
        if self.kind in self.made.given:
            llm = self.alone(1)
            return [
                llm.chat_token_ids([{"role": "user", "content": QUESTIONS[place]}])
                if place in QUESTIONS
                else llm.prompt_ids(text)[1]
                for place, text in enumerate(TEXTS)
            ]
        most = 37
        mixed = [[(3 + 7 * i + j * (i + 2)) % most + 2 for j in range(1 + (5 * i) % 17)] for i in range(12)]
        repetitive = [[5, 9] * 4, [11, 12, 13] * 3 + [11], [4], [30] * 9, [7, 8], [20, 21, 22] * 8, [6, 6, 7] * 5]
        return [*repetitive[:3], *mixed, *repetitive[3:]]

    @cached_property
    def params(self) -> list[SamplingParams]:
        """Ends by length, by a token, by a text and by the model's own end, anywhere in a window of drafts."""
        lengths = [3 + (7 * i) % 17 for i in range(19)]
        if self.kind in self.made.given:
            lengths = [16 if i in QUESTIONS else 3 + (5 * i) % 14 for i in range(19)]
        free = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
        ends = []
        for place, output in enumerate(self.alone(3).generate(self.prompts, free, use_tqdm=False)):
            first, text = output.outputs[0].token_ids, output.outputs[0].text
            more: dict[str, Any] = {}
            if place % 4 == 1:
                more["stop_token_ids"] = [first[len(first) // 2]]
            if place % 4 == 2 and len(text) > 3:
                more["stop"] = [text[len(text) // 2 :][:2]]
            ends.append(
                SamplingParams(temperature=0, max_tokens=free[place].max_tokens, ignore_eos=place % 2 == 0, **more)
            )
        return ends

    def alone(self, batch: int) -> LLM:
        """The verifier without drafts."""
        return LLM(self.made.verifier(self.kind), dtype="float32", max_model_len=96, max_num_seqs=batch)

    def count_of(self, batch: int) -> int:
        """How many requests are asked at a batch size: more than run at once, so that one starts as another ends."""
        return ({1: 4, 3: 7} if self.kind in self.made.given else {1: 5, 3: 9}).get(batch, 19)

    def told(self, llm: LLM, count: int) -> list[Answer]:
        """Tokens, text and end of the first `count` answers."""
        outputs = llm.generate(self.prompts[:count], self.params[:count], use_tqdm=False)
        return [(output.outputs[0].token_ids, output.outputs[0].text, _end(output)) for output in outputs]

    def plain(self, count: int) -> list[Answer]:
        """What the verifier answers without drafts, three requests at a time."""
        if count not in self.answers:
            self.answers[count] = self.told(self.alone(3), count)
            found = {end for _, _, end in self.answers[count]}
            if self.kind in self.made.given and count == len(self.prompts) and found != set(ENDS):
                raise AssertionError(f"{self.kind}: answers end by {sorted(found)} alone; choose prompts that show all")
        return self.answers[count]

    def differences(self, found: Sequence[Answer]) -> list[str]:
        """Where answers differ from plain ones, and how far the verifier's two likeliest logits lie apart there."""
        plain = self.plain(len(found))
        places = first_differences([ids for ids, *_ in plain], [ids for ids, *_ in found])
        if found == plain:
            return []
        verifier = Verifier.from_pretrained(self.made.verifier(self.kind), dtype="float32")
        lines = []
        for row, at in enumerate(places):
            if at is not None:
                gap = top2_gap(verifier, [*self.prompts[row], *plain[row][0][:at]])
                lines.append(f"request {row} from token {at} on (two likeliest logits there: {gap:.1e} apart)")
            elif found[row] != plain[row]:
                lines.append(f"request {row}: {found[row][1:]} instead of {plain[row][1:]}")
        return lines


def _end(output: RequestOutput) -> str:
    completion = output.outputs[0]
    if completion.finish_reason != "stop":
        return str(completion.finish_reason)
    reasons = {int: "stop token", str: "stop text"}
    return reasons.get(type(completion.stop_reason), "end of sequence")
