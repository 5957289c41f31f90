"""Text from a record, a file or another process, as it may be written to a terminal.

A terminal obeys what is printed: it can be told to change its title, to put text on the clipboard, to hide or overwrite
lines. So whatever this program did not write itself is stripped of such sequences before it is shown.
"""

import re
import unicodedata

_SEQUENCE = re.compile(
    "(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, the cursor
    "|(?:\x1b[\\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\\\|\x9c)?"  # OSC, ...: title, clipboard
    "|\x1b[ -/]*[0-~]"  # all others
)
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Kinds of characters that move, hide or turn around what is shown."""


def printable(text: object) -> str:
    """Return the text without terminal sequences; other characters that are no text become spaces.

    >>> printable("lost\\x1b]0;title\\x07 r0.s0.t1\\x1b[2J")
    'lost r0.s0.t1'
    """
    plain = _SEQUENCE.sub("", str(text))
    return "".join(" " if unicodedata.category(one) in _UNSEEN else one for one in plain)
