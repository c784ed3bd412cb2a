"""What Fairlead makes of configurations of the reference picker (`EndpointPickerConfig`, or values of its chart).

    python bench/configs.py [--json] [FILE or FOLDER ...]
    CONFIGS=folder python bench/configs.py

Without an argument and without CONFIGS: the examples under tests/data. Folders are searched for .yaml, .yml and .json.

`same_meaning`: loaded, and nothing to say. `noted`: loaded, with what is different or has no effect. `refused`: with
every reason. `unlisted`: of those refused, the ones with a reason that names no plugin which docs/plugins.md lists as
missing; a mistake in the file is such a reason. `other`: files that are no such configuration.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _output import tell
from fairlead.compat.catalogue import CATALOGUE
from fairlead.compat.load import examine
from fairlead.compat.locate import OF_THE_CHART, in_values, is_document
from fairlead.config import yaml
from fairlead.config.problems import Report
from fairlead.core.errors import ConfigError

EXAMPLES = Path(__file__).parents[1] / "tests" / "data" / "epp-configs"
MISSING = frozenset(name for name, entry in CATALOGUE.items() if entry.refused)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, metavar="FILE or FOLDER")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    arguments = parser.parse_args()
    paths = arguments.paths or [Path(os.environ.get("CONFIGS") or EXAMPLES)]
    absent = [str(path) for path in paths if not path.exists()]
    if absent:
        parser.error(f"there is no {', '.join(absent)}")
    found: dict[str, Any] = {"same_meaning": [], "noted": {}, "refused": {}, "unlisted": [], "other": []}
    for root in paths:
        for path in _files(root):
            _sort(path, str(path.relative_to(root)) if path != root else path.name, found)
    tell(found, arguments.json, _show)


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    else:
        yield from sorted(file for file in path.rglob("*") if file.suffix in (".yaml", ".yml", ".json"))


def _sort(path: Path, name: str, found: dict[str, Any]) -> None:
    try:
        if not _is_theirs(path):
            found["other"].append(name)
            return
        _, report = examine(path)
    except ConfigError as error:
        found["refused"][name] = [str(error)]
        found["unlisted"].append(name)
        return
    if report.problems:
        found["refused"][name] = reasons = [problem.message for problem in report.problems]
        if not all(any(f"'{missing}'" in reason for missing in MISSING) for reason in reasons):
            found["unlisted"].append(name)
    elif notes := [note.message for note in report.notes if not _of_surroundings(note.message)]:
        found["noted"][name] = notes
    else:
        found["same_meaning"].append(name)


def _of_surroundings(message: str) -> bool:
    """Whether it is about what stands around a configuration, or is meant to."""
    return message == OF_THE_CHART or message.startswith("no endpoints")


def _is_theirs(path: Path) -> bool:
    document = yaml.parse(path.read_bytes())
    root = document.value
    if document.problems and root is None:  # it cannot be read, so nobody knows
        return True
    if not isinstance(root, dict):
        return False
    return is_document(root) or in_values(root, document.tree, Report(document.tree.line)) is not None


def _show(found: dict[str, Any]) -> None:
    print(f"same meaning: {len(found['same_meaning'])}", *(f"    {name}" for name in found["same_meaning"]), sep="\n")
    for kind in ("noted", "refused"):
        print(f"{kind}: {len(found[kind])}")
        for name, why in found[kind].items():
            print(f"    {name}", *(f"        {line}" for line in why), sep="\n")
    print(f"refused for what no list names: {len(found['unlisted'])}; other files: {len(found['other'])}")


if __name__ == "__main__":
    main()
