"""Rewards for following instructions that a program can verify.

The instructions have the names and arguments of IFEval (Zhou et al. 2023, arXiv:2311.07911). A row
has them in its columns ``instruction_id_list`` and ``kwargs``, or both in its label; a row whose
instructions cannot be verified is rejected before the run.

A strict reading takes the response as it is. A loose reading also tries it, as IFEval does, without
its first line, its last line and both, each with and without asterisks; it is enough if one of the
eight follows the instruction. Thinking is left out in both.

A constraint takes the text and its arguments, all of which it needs; its time grows with the length
of the text. Sentences are counted by their marks and a list of abbreviations, where IFEval uses a
trained splitter. Whether text in capitals or small letters is English is not checked.
"""

from __future__ import annotations

import ast
import inspect
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from skyasync.errors import UserError, unknown
from skyasync.rewards import REWARDS, Capabilities
from skyasync.rewards.judge_prompts import without_thinking
from skyasync.rewards.signature import Inputs

Instructions = list[tuple[str, dict[str, object]]]
Rewards = dict[str, float]  # ``reward`` and metrics
RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "at least": operator.ge,
    "less than": operator.lt,
    "at most": operator.le,
    "more than": operator.gt,
    "exactly": operator.eq,
}
_ABBREVIATION = re.compile(r"(?:\b(?i:mr|mrs|ms|dr|prof|vs|jr|sr|e\.g|i\.e|cf|approx)|\b[A-Z])\.$")
_LONGEST_ABBREVIATION = 12  # characters that are searched for one, with what closes a quotation
# Possessive quantifiers (++): without backtracking the time is linear in the length of the text.
_SENTENCE_STOPS = re.compile(r"(?<![.!?])[.!?]++[\"')\]]*+(?=\s|$)")
_BULLET = re.compile(r"^[ \t]*(?:\*[^*\n]|-).*$", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*\*([^*\n]+)\*\*|\*([^*\n]+)\*")
_OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")  # IFEval's


def _check_row(inputs: Inputs) -> None:
    instructions_of(inputs.get("instruction_id_list"), inputs.get("kwargs"), inputs.get("label"))


@REWARDS.register("instruction_following")
@Capabilities(check=_check_row)
def instruction_following(
    response: str, label: object = None, instruction_id_list: object = None, kwargs: object = None
) -> Rewards:
    """1 if the response follows all instructions, strictly.

    Metrics: ``loose``, the same read loosely; ``share`` and ``loose_share``, the part of the
    instructions followed.
    """
    return _rewards(response, label, instruction_id_list, kwargs, "strict")


@REWARDS.register("instruction_following_loose")
@Capabilities(check=_check_row)
def instruction_following_loose(
    response: str, label: object = None, instruction_id_list: object = None, kwargs: object = None
) -> Rewards:
    """1 if the response follows all instructions, read loosely."""
    return _rewards(response, label, instruction_id_list, kwargs, "loose")


@REWARDS.register("instruction_following_share")
@Capabilities(check=_check_row)
def instruction_following_share(
    response: str, label: object = None, instruction_id_list: object = None, kwargs: object = None
) -> Rewards:
    """The part of the instructions that the response follows, strictly."""
    return _rewards(response, label, instruction_id_list, kwargs, "share")


def instructions_of(names: object, arguments: object, label: object) -> Instructions:
    """The instructions of a row, checked: names with their arguments.

    Raises:
        UserError: for a row without instructions, or with one that cannot be verified.
    """
    if names is None:
        values = _parsed(label)
        if isinstance(values, Sequence) and not isinstance(values, str) and len(values) == 1:
            values = values[0]  # a list of one mapping, as RLVR data sets have it
        if isinstance(values, Mapping):
            names = values.get("instruction_id_list", values.get("instruction_id"))
            arguments = values.get("kwargs")
        if names is None:
            raise _missing(label)
    names = _parsed(names)
    arguments = _parsed(arguments)
    names = [names] if isinstance(names, str) else names
    if arguments is None and isinstance(names, Sequence):
        arguments = [None] * len(names)
    if isinstance(arguments, Mapping):
        arguments = [arguments]
    if not isinstance(names, Sequence) or not names or not isinstance(arguments, Sequence):
        raise _missing(names)
    if len(names) != len(arguments):
        raise UserError(
            f"instruction_id_list has {len(names)} entries and kwargs {len(arguments)}: one for each"
        )
    instructions: Instructions = []
    for name, keywords in zip(names, arguments, strict=True):
        instructions.append((str(name), dict(keywords or {})))
    for name, keywords in instructions:
        check_instruction(name, keywords)
    return instructions


def variants(response: str) -> list[str]:
    """The response unchanged, and the other forms of a loose reading, each once."""
    lines = response.split("\n")
    texts = [response]
    for cut in (lines, lines[1:], lines[:-1], lines[1:-1]):
        texts.append("\n".join(cut).strip())
    texts += [text.replace("*", "") for text in texts]
    return list(dict.fromkeys(texts))


def _rewards(
    response: str, label: object, names: object, arguments: object, reward: str
) -> Rewards:
    """The reading named by ``reward`` as the reward, the others as metrics."""
    instructions = instructions_of(names, arguments, label)
    response = without_thinking(response).strip()
    texts = variants(response)
    strict: list[bool] = []
    loose: list[bool] = []
    for name, keywords in instructions:
        followed = follows(response, name, keywords)
        strict.append(followed)
        loose.append(followed or any(follows(text, name, keywords) for text in texts))
    rewards = {
        "strict": float(all(strict)),
        "loose": float(all(loose)),
        "share": sum(strict) / len(strict),
        "loose_share": sum(loose) / len(loose),
    }
    return {"reward": rewards.pop(reward), **rewards}


def _parsed(value: object) -> Any:  # noqa: ANN401
    """The value of text that is JSON or a Python literal; any other value unchanged."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            return read(value)
        except (ValueError, SyntaxError, RecursionError):
            continue
    return value


def _missing(value: object) -> UserError:
    shown = repr(value)
    if len(shown) > 80:
        shown = f"{shown[:77]}..."
    return UserError(
        f"reward function instruction_following needs the row's instructions: columns instruction_id_list and kwargs, "
        f"or a label {{instruction_id: [...], kwargs: [...]}}; found {shown}"
    )


# ---------------------------------------------------------------- constraints


def parameters(name: str) -> list[str]:
    """The arguments that a constraint takes, all of which it needs."""
    return list(inspect.signature(CONSTRAINTS[name]).parameters)[1:]


def check_instruction(name: str, arguments: dict[str, object]) -> None:
    """Raise ``UserError`` for an unknown constraint, or arguments that are missing or invalid."""
    if name not in CONSTRAINTS:
        raise UserError(unknown("instruction", name, CONSTRAINTS))
    for parameter in parameters(name):
        value = arguments.get(parameter)
        if value is None:
            present = [key for key, argument in arguments.items() if argument is not None]
            raise UserError(
                f"instruction {name} needs {parameter!r} in its kwargs; they have: "
                f"{', '.join(present) or 'none'}"
            )
        if parameter.endswith("relation") and value not in RELATIONS:
            raise UserError(f"instruction {name}: {unknown(parameter, str(value), RELATIONS)}")
        if parameter.startswith(("num_", "nth_")) or parameter.endswith("frequency"):
            if not _is_count(value):
                raise UserError(
                    f"instruction {name}: {parameter} must be a whole number, found {value!r}"
                )
        elif parameter in ("keywords", "forbidden_words") and isinstance(value, str):
            # The letters of a text would be the words.
            raise UserError(
                f"instruction {name}: {parameter} must be a list of words, found {value!r}"
            )
    if name == "language:response_language" and find_spec("py3langid") is None:
        raise UserError(
            f"instruction {name} needs py3langid, which is not installed; add it with: "
            "uv pip install py3langid"
        )


def _is_count(value: object) -> bool:
    """Whether it is a whole number from 0 on; Parquet files may have 3.0 for 3."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return value == int(value) and value >= 0


def follows(response: str, name: str, arguments: dict[str, object]) -> bool:
    """Whether a response follows one instruction; one that says nothing follows none."""
    if not response.strip():
        return False
    # Datasets give every instruction the arguments of all, null where it has none.
    taken = {parameter: arguments[parameter] for parameter in parameters(name)}
    return CONSTRAINTS[name](response, **taken)


def _matches(relation: str, count: int, target: int) -> bool:
    return RELATIONS[relation](count, int(target))


def count_sentences(text: str) -> int:
    """Count marks before a space or the end, not after abbreviations or initials.

    The end of a line ends a sentence too.
    """
    count = 0
    for line in map(str.strip, text.splitlines()):
        end_of_sentence = 0  # the position after the last sentence of the line
        for stop in _SENTENCE_STOPS.finditer(line):
            sentence = line[: stop.end()]
            if not _ABBREVIATION.search(sentence[-_LONGEST_ABBREVIATION:]):
                count += 1
                end_of_sentence = stop.end()
        if end_of_sentence < len(line):
            count += 1
    return count


def _between(text: str, divider: str) -> list[str]:
    """The sections of a text; an empty one at the beginning or the end does not count."""
    sections = [section.strip() for section in text.split(divider)]
    if len(sections) > 1 and not sections[-1]:
        del sections[-1]
    if not sections[0]:
        del sections[0]
    return sections


def _paragraphs(text: str, num_paragraphs: int) -> bool:
    """Whether ``***`` divides the text into so many paragraphs, none in the middle empty."""
    sections = _between(text, "***")
    return all(sections) and len(sections) == int(num_paragraphs)


def _first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Whether a paragraph begins with a word; empty lines divide paragraphs."""
    paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()]
    if len(paragraphs) != int(num_paragraphs) or not 1 <= int(nth_paragraph) <= len(paragraphs):
        return False
    word = paragraphs[int(nth_paragraph) - 1].split()[0].lstrip("\"'(*_")
    start = re.match(r"[^\s.,?!'\"):;*]*", word)
    return start is not None and start[0].lower() == first_word.lower()


def _postscript(text: str, postscript_marker: str) -> bool:
    """Whether a line begins with the marker; "P.S." is also "p. s."."""
    letters = postscript_marker.lower().replace(" ", "").rstrip(".").split(".")
    pattern = r"^[ \t]*" + r"\.\s?".join(map(re.escape, letters))
    return re.search(pattern, text.lower(), re.MULTILINE) is not None


def _json(text: str) -> bool:
    """Whether the text is JSON, with or without a fence around it."""
    text = text.strip()
    if text.startswith("```") and text.endswith("```"):
        text = text[3:-3]
        text = text[4:] if text[:4].lower() == "json" else text
    try:
        json.loads(text.strip())
    except (ValueError, RecursionError):
        return False
    return True


def _two_responses(text: str) -> bool:
    """Whether ``******`` divides the text into two that differ."""
    responses = _between(text, "******")
    return len(responses) == 2 and all(responses) and responses[0] != responses[1]


def _existence(text: str, keywords: Sequence[str]) -> bool:
    """Whether all keywords occur, also as parts of words."""
    text = text.lower()
    return all(str(word).lower() in text for word in keywords)


def _forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    """Whether none of these words occurs as a word."""
    patterns = [r"(?<!\w)" + re.escape(str(word)) + r"(?!\w)" for word in forbidden_words]
    return not any(re.search(pattern, text, re.IGNORECASE) for pattern in patterns)


def _frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return _matches(relation, text.lower().count(keyword.lower()), frequency)


def _letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _matches(let_relation, text.lower().count(letter.lower()), let_frequency)


def _language(text: str, language: str) -> bool:
    detected = import_module("py3langid").classify(text)[0]
    return str(detected) == language.split("-")[0].lower()  # "pt-br" is "pt"


def _number_words(text: str, num_words: int, relation: str) -> bool:
    return _matches(relation, len(re.findall(r"\w+", text)), num_words)


def _number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    return _matches(relation, count_sentences(text), num_sentences)


def _placeholders(text: str, num_placeholders: int) -> bool:
    """Whether there are at least so many placeholders in square brackets."""
    return len(re.findall(r"\[[^\[\]\n]+\]", text)) >= int(num_placeholders)


def _bullet_lists(text: str, num_bullets: int) -> bool:
    return len(_BULLET.findall(text)) == int(num_bullets)


def _constrained_response(text: str) -> bool:
    return any(option in text for option in _OPTIONS)


def _highlights(text: str, num_highlights: int) -> bool:
    """Whether at least so many texts that are not blank are between asterisks."""
    count = 0
    for bold, italic in _HIGHLIGHT.findall(text):
        if (bold or italic).strip():
            count += 1
    return count >= int(num_highlights)


def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """Whether at least so many sections begin with the word and a number."""
    headings = re.findall(re.escape(section_spliter.strip()) + r"\s?\d+", text)
    return len(headings) >= int(num_sections)


def _title(text: str) -> bool:
    return any(title.strip() for title in re.findall(r"<<([^<>\n]+)>>", text))


def _repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _end_phrase(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _start_phrase(text: str, start_phrase: str) -> bool:
    return text.strip().strip('"').lower().startswith(start_phrase.strip().lower())


def _quotation(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text.startswith('"') and text.endswith('"')


def _capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    """Compare the number of words in capitals; a hyphen or an apostrophe does not end a word."""
    words = re.findall(r"\w+(?:[-'’]\w+)*", text)
    return _matches(capital_relation, sum(word.isupper() for word in words), capital_frequency)


def _no_comma(text: str) -> bool:
    return "," not in text


#: Constraints by the names of IFEval, which does not have ``startend:start_checker``. The parameters
#: after the text have the names of a row's ``kwargs``.
CONSTRAINTS: dict[str, Callable[..., bool]] = {
    "keywords:existence": _existence,
    "keywords:forbidden_words": _forbidden_words,
    "keywords:frequency": _frequency,
    "keywords:letter_frequency": _letter_frequency,
    "language:response_language": _language,
    "length_constraints:number_words": _number_words,
    "length_constraints:number_sentences": _number_sentences,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullet_lists,
    "detectable_format:constrained_response": _constrained_response,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeat_prompt,
    "startend:end_checker": _end_phrase,
    "startend:start_checker": _start_phrase,
    "startend:quotation": _quotation,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": str.isupper,
    "change_case:english_lowercase": str.islower,
    "punctuation:no_comma": _no_comma,
}
