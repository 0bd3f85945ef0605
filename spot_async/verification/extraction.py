r"""Cuts a response down to the text of its last box.

The answer of a response is its last balanced `\boxed{...}` or `\fbox{...}`. When boxes nest it is
the one that opens last. What the answer means is not decided here.
"""

from __future__ import annotations

import re

MAX_ANSWER_CHARS = 500
MAX_NESTING = 40

# One alternative for each thing that matters to brace matching. An escaped brace is not a brace. `\\boxed` is a box,
# since some responses escape their backslashes. Every repetition ends at a character that it cannot match, which makes
# a scan linear in the text.
_TOKEN = re.compile(
    r"""
    \\\\? (?:boxed|fbox) (?![A-Za-z])
      (?: \s* (?P<open> \{ )
        | [ \t]* (?P<bare>
            # A number, unless it is only the beginning of something: `1/2`, `2\sqrt3`, `4 \times 10^5`.
            -?[0-9]+ (?:,[0-9]{3})*+ (?:\.[0-9]+)?+
              (?! [0-9A-Za-z(/*+_] | \^(?!\{?\\circ) | [ \t]*\\(?:[dt]?frac|sqrt|pi|cdot|times)(?![A-Za-z]) )
            # A command or a letter that stands alone: else it wants arguments, or is a word of a sentence.
          | (?: \\[A-Za-z]++ | [A-Za-z] ) (?= [ \t]* (?: [.,;:!?$)\]}\n] | \\[)\]] | \Z ) )
        )
      )
  | \\. | \{ | \}
    """,
    re.VERBOSE | re.DOTALL,
)


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last balanced box in `text`, stripped; None when there is none.

    Spaces may stand before the brace. Without braces a box may hold one number, command or letter (`\boxed 5`). It may
    not hold a word of prose (`\boxed a form`) or a command with arguments (`\boxed \frac12`), because TeX would not
    box those as they are meant. A box that never closes is not a box, and an earlier one that closes counts instead.
    Surrounding white space and one trailing full stop are dropped. An empty box gives the empty string. Linear in the
    length of `text`.
    """
    open_braces: list[int | None] = []  # where the command of a box starts; None for any other brace
    contents: list[int] = []  # where the content of that brace starts
    last = -1
    content: str | None = None
    first_box = min((at for at in (text.find(r"\boxed"), text.find(r"\fbox")) if at >= 0), default=len(text))
    for token in _TOKEN.finditer(text, first_box):
        if token["bare"] is not None:
            last, content = token.start(), token["bare"]
        elif token["open"] is not None or token[0] == "{":
            open_braces.append(None if token["open"] is None else token.start())
            contents.append(token.end())
        elif token[0] == "}" and open_braces:
            box, start = open_braces.pop(), contents.pop()
            if box is not None and box > last:
                last, content = box, text[start : token.start()]
    return None if content is None else strip_answer(content)


def strip_answer(answer: str) -> str:
    """Return `answer` without surrounding white space and one trailing full stop. An ellipsis stays."""
    answer = answer.strip()
    if answer.endswith(".") and not answer.endswith(".."):
        answer = answer[:-1].rstrip()
    return answer


def is_oversized(answer: str) -> bool:
    """Return whether an answer is too long or too deep to be right. Such an answer must not reach a parser."""
    if len(answer) > MAX_ANSWER_CHARS:
        return True
    depth = deepest = 0
    for character in answer:
        depth += (character in "{[(") - (character in "}])")
        deepest = max(deepest, depth)
    return deepest > MAX_NESTING
