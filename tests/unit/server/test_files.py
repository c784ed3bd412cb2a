"""Files that are written whole."""

from pathlib import Path

import pytest

from fairlead.server.files import unfinished, write_output


def test_what_is_written_replaces_what_was_there(tmp_path: Path) -> None:
    path, link = tmp_path / "out.csv", tmp_path / "link.csv"
    write_output(path, "one")
    link.symlink_to(path)
    write_output(link, b"two")
    assert (path.read_text(), link.is_symlink()) == ("two", True)
    assert sorted(tmp_path.iterdir()) == [link, path]


def test_what_cannot_be_written_leaves_what_was_there_and_names_it(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    write_output(path, "one")
    unfinished(path).mkdir()
    with pytest.raises(OSError) as failed:
        write_output(path, "two")
    assert (path.read_text(), failed.value.filename) == ("one", str(path))
