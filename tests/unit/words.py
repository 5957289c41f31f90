"""Words that this project does not use, each with the word to use: one meaning for a name, one name for a meaning.

python -m tests.unit.words ntp_plugin/copies docs/copies.md     what is to be changed there
"""

import ast
import dataclasses
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

NAMES = {
    "anatomy": "model_rebuild",
    "bell": "wakeup",
    "crossing": "core_exchange",
    "door": "admission, endpoint",
    "gone": "lost, evicted",
    "heart": "heartbeat",
    "hurt": "degraded",
    "keeper": "parity_host",
    "newcomer": "joiner",
    "nursery": "fork_server",
    "occupant": "incarnation",
    "piece": "tensor_slice, part, split",
    "rehearsal": "cpu_emulation",
    "said": "reported, output, message, log",
    "seat": "member_id, slot",
    "speaks": "is_replica_leader",
    "stood": "resumed",
    "strike": "fault, inject",
    "struck": "injected",
    "stuck": "hung",
    "tell": "report, record, write",
    "telling": "recording",
    "tells": "reports",
    "tenant": "incarnation",
    "told": "reported, recorded, events",
    "twin": "reference",
    "walk": "recovery",
    "ward": "worker",
    "wholes": "replica_digests",
}
"""Part of an identifier (singular; the plural is meant as well) -> the word to use."""

PHRASES = {
    r"walks?": "recovery",
    r"hearts?": "heartbeat",
    r"bells?": "wake-up event",
    r"newcomers?": "joining rank",
    r"doors?": "admission",
    r"hurt": "degraded",
    r"stuck": "hung",
    r"(stand|stands|stood|standing) on": "resume from",
    r"(stand|stands|stood|standing) still": "hang",
    r"(break|breaks|broke|broken|breaking)[ -]out": "interrupt",
    r"(is|are|was|were|be|been) put out": "evicted",
    r"let in": "admitted",
    r"seats?": "slot",
    r"occupants?": "incarnation",
    r"tenants?": "incarnation",
    r"anatomy": "model rebuild",
    r"nursery": "fork server",
    r"twins?": "reference run",
    r"wholes": "replica digests",
    r"keepers?": "parity host",
    r"wards?": "process",
    r"strikes?": "fault, inject",
    r"struck": "injected",
    r"rehears\w+": "CPU emulation",
    r"whole replicas?": "full-width replica",
    r"whole layout": "nominal layout",
    r"newly come": "joining",
    r"broken on purpose": "with faults",
    r"left alone": "reference",
}
"""What a sentence does not say (a regular expression) -> what it says."""

OPENINGS = ("Of ", "Whether somebody", "What there is", "Those ", "That ", "And ")
"""How no docstring begins: who does what, in that order."""

_TEXT = re.compile(r"(?<![\w`./-])(" + "|".join(f"(?:{phrase})" for phrase in PHRASES) + r")(?![\w`/-])", re.IGNORECASE)
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Finding:
    """A word at a place, and the one to use."""

    path: str
    line: int
    found: str
    use: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.found!r}: use {self.use}"


def of_names(path: str, source: str) -> Iterator[Finding]:
    """Words in the identifiers of Python source."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.NAME or _is_of_python(token.string):
            continue
        for part in _PARTS.findall(token.string):
            word = part.lower()
            banned = word if word in NAMES else word.removesuffix("s")
            if banned in NAMES:
                yield Finding(path=path, line=token.start[0], found=token.string, use=NAMES[banned])


def _is_of_python(name: str) -> bool:
    return name in {"walk", "tell"}  # ast.walk, os.walk, file.tell


def of_text(path: str, source: str) -> Iterator[Finding]:
    """Phrases in comments, docstrings and messages, or on a page."""
    for number, line in _text(path, source):
        for match in _TEXT.finditer(line):
            use = next(use for phrase, use in PHRASES.items() if re.fullmatch(phrase, match[0], re.IGNORECASE))
            yield Finding(path=path, line=number, found=match[0], use=use)


def of_openings(path: str, source: str) -> Iterator[Finding]:
    """Docstrings that begin in the middle of a sentence."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if text.startswith(OPENINGS):
                line = node.body[0].lineno
                yield Finding(path=path, line=line, found=text[:40], use="who does what, in that order")


def _text(path: str, source: str) -> Iterator[tuple[int, str]]:
    if not path.endswith(".py"):
        yield from enumerate(source.splitlines(), start=1)
        return
    wanted = {tokenize.STRING, tokenize.COMMENT, tokenize.FSTRING_MIDDLE}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in wanted:
            yield from enumerate(token.string.splitlines(), start=token.start[0])


def findings(path: Path) -> list[Finding]:
    """All that is to be changed in a file."""
    source, name = path.read_text(), str(path)
    found = list(of_text(name, source))
    if path.suffix == ".py":
        found += [*of_names(name, source), *of_openings(name, source)]
    return sorted(found)


def main(paths: list[str]) -> None:
    """Print what is to be changed in these files and folders."""
    for root in map(Path, paths):
        files = (
            [root]
            if root.is_file()
            else sorted(file for end in ("py", "md", "toml") for file in root.rglob(f"*.{end}"))
        )
        for file in files:
            for finding in findings(file):
                sys.stdout.write(f"{finding}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
