"""Prompts around a text: passages composed from sentence pools, records, drafts to rewrite, code snippets."""

from .grammar import ROOT, Decks, read_lines, read_sections

PASSAGE_SENTENCES = (5, 8)
_PASSAGES = ROOT / "passages"
_TEMPLATES = ROOT / "templates"
_SNIPPETS = ROOT / "snippets"


class Composer:
    """Deals the parts that prompts with a given text are made of, for one side of the split."""

    def __init__(self, decks: Decks) -> None:
        self.decks = decks
        self.topics = read_sections(_PASSAGES / "general.txt")
        decks.add("passage_topic", list(self.topics))
        for name in ("summary_ask", "qa_ask", "extract_ask", "records", "records_ask", "rewrite_ask", "drafts"):
            decks.add(f"_{name}", read_lines(_PASSAGES / f"{name}.txt"))
        for name in ("code_explain", "code_fix", "math_request", "word_problem", "arithmetic"):
            decks.add(f"_{name}", read_lines(_TEMPLATES / f"{name}.txt"))
        decks.add("task", read_lines(_TEMPLATES / "code_task.txt"), reserved=True)
        for name in ("good", "broken"):
            snippets = (_SNIPPETS / f"{name}.txt").read_text(encoding="utf-8").split("\n---\n")
            decks.add(f"_{name}", [snippet.strip("\n") for snippet in snippets])

    def passage(self) -> str:
        """Return five to eight sentences on one topic, in the order of its pool and always with the first."""
        pool = self.topics[self.decks.deal("passage_topic")]
        rng = self.decks.rng
        kept = [0, *sorted(rng.sample(range(1, len(pool)), rng.randint(*PASSAGE_SENTENCES) - 1))]
        return self.decks.expand(" ".join(pool[index] for index in kept))

    def about_text(self, request: str, text: str) -> str:
        """Return a request and a text in one of the usual layouts: before, after, or with a label."""
        layout = self.decks.rng.choice(("{0}\n\n{1}", "{0}\n{1}", "{1}\n\n{0}", "{0}\n\nText: {1}", '{0}\n\n"{1}"'))
        return layout.format(self.decks.expand(request), text)

    def summary(self) -> str:
        """Return a request to summarize a passage."""
        return self.about_text(self.decks.deal("_summary_ask"), self.passage())

    def passage_qa(self) -> str:
        """Return a question over a passage."""
        return self.about_text(self.decks.deal("_qa_ask"), self.passage())

    def extraction(self) -> str:
        """Return a request to extract facts from a passage or a record."""
        if self.decks.rng.random() < 0.35:
            return self.about_text(self.decks.deal("_extract_ask"), self.passage())
        return self.about_text(self.decks.deal("_records_ask"), self.decks.expand(self.decks.deal("_records")))

    def rewrite(self) -> str:
        """Return a request to rewrite a draft or a passage."""
        is_draft = self.decks.rng.random() < 0.7
        text = self.decks.expand(self.decks.deal("_drafts")) if is_draft else self.passage()
        return self.about_text(self.decks.deal("_rewrite_ask"), text)

    def _snippet(self, request: str, snippets: str) -> str:
        code = self.decks.expand(self.decks.deal(snippets), code=True)
        fenced = self.decks.rng.random() < 0.5
        language = "javascript" if ("function " in code or "const " in code) else "python"
        filled = self.decks.expand(self.decks.deal(request).replace("{code}", "<code>"))
        return filled.replace("<code>", f"```{language}\n{code}\n```" if fenced else code)

    def code_explain(self) -> str:
        """Return a request to explain, review or translate a piece of code."""
        return self._snippet("_code_explain", "_good")

    def code_fix(self) -> str:
        """Return a request to find the mistake in a piece of code."""
        return self._snippet("_code_fix", "_broken")

    def word_problem(self) -> str:
        """Return a word problem of several steps."""
        problem = self.decks.expand(self.decks.deal("_word_problem"))
        return self.decks.deal("_math_request").replace("{q}", problem)

    def arithmetic(self) -> str:
        """Return a calculation."""
        return self.decks.expand(self.decks.deal("_arithmetic"))
