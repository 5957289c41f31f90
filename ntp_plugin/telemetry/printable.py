"""Strips terminal sequences from text of a record, a file or another process before it is printed.

A terminal obeys sequences in what is printed: they change its title, put text on the clipboard, hide or overwrite
lines. So text that this program did not write itself is stripped of them.
"""

import re
import unicodedata

_SEQUENCE = re.compile(
    "(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, the cursor
    "|(?:\x1b[\\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\\\|\x9c)?"  # OSC, ...: title, clipboard
    "|\x1b[ -/]*[0-~]"  # all others
)
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Categories of characters that move, hide or reverse what is shown."""


def printable(text: object) -> str:
    """Return the text without terminal sequences; other control characters become spaces.

    >>> printable("lost\\x1b]0;title\\x07 r0.s0.t1\\x1b[2J")
    'lost r0.s0.t1'
    """
    plain = _SEQUENCE.sub("", str(text))
    return "".join(" " if unicodedata.category(one) in _UNSEEN else one for one in plain)
