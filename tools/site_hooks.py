"""MkDocs hooks: the pages are written for reading in the repository, and become a site that needs nothing else.

* A link to a file beside `docs/` leads to a copy of that file, as plain text under `files/`: the site is complete
  without a server for the code. A link to a directory becomes its name.
* Between `<!-- tabs -->` and `<!-- /tabs -->` each `**Title**` on a line of its own begins a tab.
* The words behind a fence's language are for the tests (`sh run`, `yaml fragment`, `python file=mine.py`); only the
  name of a file is shown.
* The theme's search dialog gets a name, which screen readers say.
"""

import re
from pathlib import Path
from textwrap import indent
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(!?)\[((?:[^\]\\]|\\.)*)\]\((\.\./[^)\s#]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^(?P<indent> *)```(?P<lang>[a-z]+)(?P<words> [^\n{]+)$", re.MULTILINE)
#: A list right behind a line of text: GitHub begins a list there, Python-Markdown wants an empty line.
_LIST = re.compile(r"^(?![ \t]*(?:[-*]|\d+\.) |[ \t]*$|\||    )(?P<text>.+)\n(?=(?:[-*]|1\.) )", re.MULTILINE)
_TABS = re.compile(r"^<!-- tabs -->\n(.*?)^<!-- /tabs -->$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"\bfile=(\S+)")


def _outside(source: str, link: str) -> Path | None:
    """The repository's file or directory that a page's link means; `None` where it is within `docs/`."""
    target = (ROOT / "docs" / source).parent.joinpath(link).resolve()
    inside = target.is_relative_to(ROOT / "docs") or not target.is_relative_to(ROOT)
    return None if inside or not target.exists() else target


def _place(target: Path) -> str:
    return f"files/{target.relative_to(ROOT)}.txt"


def on_files(files: Any, config: Any) -> Any:
    """Adds the files that pages link to."""
    wanted: set[Path] = set()
    for page in files.documentation_pages():
        for found in _LINK.finditer(page.content_string):
            target = _outside(page.src_uri, found[3])
            if target is not None and target.is_file():
                wanted.add(target)
    for target in sorted(wanted):
        files.append(File.generated(config, _place(target), content=target.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links and fences, as said above."""

    def link(found: re.Match[str]) -> str:
        target = _outside(page.file.src_uri, found[3])
        if target is None:
            return found[0]
        if target.is_dir():
            return found[2]
        up = "../" * page.file.src_uri.count("/")
        return f"[{found[2]}]({up}{_place(target)})"

    def fence(found: re.Match[str]) -> str:
        name = _NAME.search(found["words"])
        title = f' title="{name[1]}"' if name else ""
        return f"{found['indent']}```{found['lang']}{title}"

    def tabs(found: re.Match[str]) -> str:
        return re.sub(r"^    \*\*(.+)\*\*$", r'=== "\1"', indent(found[1], "    "), flags=re.MULTILINE)

    parts = _CODE.split(_LINK.sub(link, markdown))
    parts[::2] = [_LIST.sub(r"\g<text>\n\n", part) for part in parts[::2]]
    return _TABS.sub(tabs, _FENCE.sub(fence, "".join(parts)))


def on_post_page(output: str, page: Any, config: Any) -> str:
    """The search dialog, as said above."""
    dialog = 'data-md-component="search" role="dialog"'
    return output.replace(dialog, f'{dialog} aria-label="Search"', 1)
