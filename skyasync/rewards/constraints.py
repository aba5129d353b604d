"""Instructions that a program can verify, by the names and arguments of IFEval (Zhou et al. 2023, arXiv:2311.07911).

Invariant: a constraint looks at the text alone, in time that grows with its length, and says whether it is followed.
Its arguments are its parameters behind the text, all of which it needs.

Sentences are counted by their marks and a list of abbreviations, where IFEval uses a trained splitter, and whether text
in capitals or small letters is English is not asked.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import TypeVar

from skyasync.errors import UserError, unknown

F = TypeVar("F", bound=Callable[..., bool])

CONSTRAINTS: dict[str, Callable[..., bool]] = {}
RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "at least": lambda found, asked: found >= asked,
    "less than": lambda found, asked: found < asked,
    "at most": lambda found, asked: found <= asked,
    "more than": lambda found, asked: found > asked,
    "exactly": lambda found, asked: found == asked,
}
_SHORTENED = re.compile(r"(?:\b(?i:mr|mrs|ms|dr|prof|vs|jr|sr|e\.g|i\.e|cf|approx)|\b[A-Z])\.$")
_SENTENCE_ENDS = re.compile(r"[.!?]+[\"')\]]*(?=\s|$)")
_BULLET = re.compile(r"^[ \t]*(?:\*[^*\n]|-).*$", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*\*([^*\n]+)\*\*|\*([^*\n]+)\*")
_OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_FENCE = re.compile(r"\A\s*```(?:json)?\s*\n?(.*?)\n?\s*```\s*\Z", re.DOTALL | re.IGNORECASE)


def constraint(name: str) -> Callable[[F], F]:
    """Add the decorated function: its first parameter is the response."""

    def add(function: F) -> F:
        CONSTRAINTS[name] = function
        return function

    return add


def parameters(name: str) -> list[str]:
    """The arguments that a constraint takes, all of which it needs."""
    return list(inspect.signature(CONSTRAINTS[name]).parameters)[1:]


def check(name: str, arguments: dict[str, object]) -> None:
    """Raises ``UserError`` for a constraint that there is not, or one whose arguments are missing or cannot be."""
    if name not in CONSTRAINTS:
        raise UserError(unknown("instruction", name, CONSTRAINTS))
    for needed in parameters(name):
        value = arguments.get(needed)
        if value is None:
            given = ", ".join(key for key, value in arguments.items() if value is not None) or "none"
            raise UserError(f"instruction {name} needs {needed!r} in its kwargs; they have: {given}")
        if needed.endswith("relation") and value not in RELATIONS:
            raise UserError(f"instruction {name}: {unknown(needed, str(value), RELATIONS)}")
        if needed.startswith(("num_", "nth_")) or needed.endswith("frequency"):
            if not isinstance(value, int | float) or isinstance(value, bool) or value != int(value) or value < 0:
                raise UserError(f"instruction {name}: {needed} must be a whole number, found {value!r}")
        elif needed in ("keywords", "forbidden_words") and isinstance(value, str):
            raise UserError(f"instruction {name}: {needed} must be a list of words, found {value!r}")
    if name == "language:response_language" and find_spec("py3langid") is None:
        what = "py3langid, which is not installed; add it with: uv pip install py3langid"
        raise UserError(f"instruction {name} needs {what}")


def follows(response: str, name: str, arguments: dict[str, object]) -> bool:
    """Whether a response follows one instruction; one that says nothing follows none."""
    if not response.strip():
        return False
    return CONSTRAINTS[name](response, **{needed: arguments[needed] for needed in parameters(name)})


# ---------------------------------------------------------------- words


@constraint("keywords:existence")
def _existence(text: str, keywords: Iterable[str]) -> bool:
    return all(str(word).lower() in text.lower() for word in keywords)


@constraint("keywords:forbidden_words")
def _forbidden(text: str, forbidden_words: Iterable[str]) -> bool:
    return not any(_whole_word(str(word)).search(text) for word in forbidden_words)


@constraint("keywords:frequency")
def _frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return RELATIONS[relation](text.lower().count(keyword.lower()), int(frequency))


@constraint("keywords:letter_frequency")
def _letters(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return RELATIONS[let_relation](text.lower().count(letter.lower()), int(let_frequency))


@constraint("language:response_language")
def _language(text: str, language: str) -> bool:
    import py3langid

    return str(py3langid.classify(text)[0]) == language.split("-")[0].lower()


# ---------------------------------------------------------------- length


@constraint("length_constraints:number_words")
def _words(text: str, num_words: int, relation: str) -> bool:
    return RELATIONS[relation](len(re.findall(r"\w+", text)), int(num_words))


@constraint("length_constraints:number_sentences")
def _sentences(text: str, num_sentences: int, relation: str) -> bool:
    return RELATIONS[relation](count_sentences(text), int(num_sentences))


def _between(text: str, divider: str) -> list[str]:
    """Its parts; an empty one at the beginning or the end does not count."""
    parts = [part.strip() for part in text.split(divider)]
    return parts[not parts[0] : len(parts) - (len(parts) > 1 and not parts[-1])]


@constraint("length_constraints:number_paragraphs")
def _paragraphs(text: str, num_paragraphs: int) -> bool:
    """They are divided by ``***``; none in the middle is empty."""
    parts = _between(text, "***")
    return all(parts) and len(parts) == int(num_paragraphs)


@constraint("length_constraints:nth_paragraph_first_word")
def _first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """They are divided by empty lines."""
    paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()]
    if len(paragraphs) != int(num_paragraphs) or not 1 <= int(nth_paragraph) <= len(paragraphs):
        return False
    word = paragraphs[int(nth_paragraph) - 1].split()[0].lstrip("\"'(*_")
    found = re.match(r"[^\s.,?!'\"):;*]*", word)
    return found is not None and found[0].lower() == first_word.lower()


# ---------------------------------------------------------------- contents and form


@constraint("detectable_content:number_placeholders")
def _placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]\n]+\]", text)) >= int(num_placeholders)


@constraint("detectable_content:postscript")
def _postscript(text: str, postscript_marker: str) -> bool:
    letters = [re.escape(part) for part in postscript_marker.lower().replace(" ", "").rstrip(".").split(".")]
    return re.search(r"^[ \t]*" + r"\.\s?".join(letters), text.lower(), re.MULTILINE) is not None


@constraint("detectable_format:number_bullet_lists")
def _bullets(text: str, num_bullets: int) -> bool:
    return len(_BULLET.findall(text)) == int(num_bullets)


@constraint("detectable_format:constrained_response")
def _one_of_three(text: str) -> bool:
    return any(option in text for option in _OPTIONS)


@constraint("detectable_format:number_highlighted_sections")
def _highlights(text: str, num_highlights: int) -> bool:
    return sum(bool((bold or plain).strip()) for bold, plain in _HIGHLIGHT.findall(text)) >= int(num_highlights)


@constraint("detectable_format:multiple_sections")
def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(re.escape(section_spliter.strip()) + r"\s?\d+", text)) >= int(num_sections)


@constraint("detectable_format:json_format")
def _json(text: str) -> bool:
    """All of it, with or without a fence around it."""
    fenced = _FENCE.match(text)
    try:
        json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        return False
    return True


@constraint("detectable_format:title")
def _title(text: str) -> bool:
    return any(title.strip() for title in re.findall(r"<<([^<>\n]+)>>", text))


@constraint("combination:two_responses")
def _two_responses(text: str) -> bool:
    """They are divided by ``******``, and differ."""
    parts = _between(text, "******")
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


@constraint("combination:repeat_prompt")
def _repeats(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


# ---------------------------------------------------------------- beginning, end, case, marks


@constraint("startend:end_checker")
def _ends(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@constraint("startend:start_checker")
def _starts(text: str, start_phrase: str) -> bool:
    """Not among IFEval's."""
    return text.strip().strip('"').lower().startswith(start_phrase.strip().lower())


@constraint("startend:quotation")
def _quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


@constraint("change_case:capital_word_frequency")
def _capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    words = re.findall(r"\w+(?:[-'’]\w+)*", text)
    return RELATIONS[capital_relation](sum(word.isupper() for word in words), int(capital_frequency))


@constraint("change_case:english_capital")
def _all_capital(text: str) -> bool:
    return text.isupper()


@constraint("change_case:english_lowercase")
def _all_lower(text: str) -> bool:
    return text.islower()


@constraint("punctuation:no_comma")
def _no_comma(text: str) -> bool:
    return "," not in text


def count_sentences(text: str) -> int:
    """By marks before a space or the end, abbreviations and initials aside; a line that ends without one counts too."""
    count = 0
    for line in filter(None, map(str.strip, text.splitlines())):
        ends = [found for found in _SENTENCE_ENDS.finditer(line) if not _SHORTENED.search(line[: found.end()][-12:])]
        count += len(ends) + (not ends or ends[-1].end() < len(line))
    return count


def _whole_word(word: str) -> re.Pattern[str]:
    return re.compile(r"(?<!\w)" + re.escape(word) + r"(?!\w)", re.IGNORECASE)
