"""Files that are written whole."""

import os
from pathlib import Path

import pytest

from fairlead.server.files import write_output, write_whole


def test_what_is_written_replaces_what_was_there(tmp_path: Path) -> None:
    path, link = tmp_path / "out.csv", tmp_path / "link.csv"
    write_output(path, "one")
    path.chmod(0o640)
    link.symlink_to(path)
    write_output(link, b"two")
    assert (path.read_text(), link.is_symlink(), path.stat().st_mode & 0o777) == ("two", True, 0o640)
    assert sorted(tmp_path.iterdir()) == [link, path]


def test_what_cannot_be_written_leaves_what_was_there_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.csv"
    write_output(path, "one")
    monkeypatch.setattr(Path, "replace", lambda *_: os.stat(tmp_path / "gone"))
    with pytest.raises(OSError) as failed:
        write_output(path, "two")
    assert (path.read_text(), failed.value.filename) == ("one", str(path))
    assert [*tmp_path.iterdir()] == [path]


def test_where_files_cannot_be_replaced_they_are_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: object) -> None:
        raise OSError(16, "Device or resource busy")

    path = tmp_path / "out.csv"
    monkeypatch.setattr(Path, "replace", busy)
    write_output(path, "one")
    assert (path.read_text(), [*tmp_path.iterdir()]) == ("one", [path])


def test_a_new_file_takes_no_others_place(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    write_output(path, "one", new=True)
    with pytest.raises(FileExistsError):
        write_output(path, "two", new=True)
    assert path.read_text() == "one"


def test_a_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    path = tmp_path / "out.state"
    os.mkfifo(path)
    with pytest.raises(OSError, match="it is not a regular file"):
        write_whole(path, [b"one"])
    assert path.is_fifo() and [*tmp_path.iterdir()] == [path]
