"""For mkdocs: what a page links to outside of docs/ is in the site too, as a text that a browser shows.

Pages say `../recipes/plain/train.py`, which is right where they are read in the repository. A link to nothing is left
as it is, so that mkdocs finds it and `make docs` fails.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_LINK = re.compile(r"\]\((?P<path>\.\./[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """The page with such links turned, and what they name among the files of the site."""
    docs, here = Path(config["docs_dir"]), posixpath.dirname(page.file.src_uri)

    def turned(link: re.Match[str]) -> str:
        target = (docs / here / link["path"]).resolve()
        if target.is_relative_to(docs) or not (target.is_relative_to(docs.parent) and target.exists()):
            return link[0]
        shown = f"source/{target.relative_to(docs.parent).as_posix()}.txt"
        if files.get_file_from_path(shown) is None:
            files.append(File.generated(config, shown, content=_text_of(target)))
        return f"]({posixpath.relpath(shown, here or '.')})"

    return _LINK.sub(turned, markdown)


def _text_of(target: Path) -> str:
    """A file as it is; of a folder, what is in it."""
    if target.is_dir():
        return "".join(f"{path.name}\n" for path in sorted(target.iterdir()))
    return target.read_text(encoding="utf-8")
