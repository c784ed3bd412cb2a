"""A segment that is twice in a journal counts once; one that cannot be read is named."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fairlead.cli.app import build_app
from fairlead.lab.simulator.capture import capture
from fairlead.lab.simulator.journal import JournalError, one_run
from fairlead.lab.simulator.replay import replay
from fairlead.server.journal.blocks import MAGIC, block
from fairlead.server.journal.records import SEGMENT, VERSION, Segment, encode, joined


@pytest.fixture
def journal(recorded: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded.path, tmp_path / "journal"))


def segment_of(journal: Path) -> Path:
    return one_run(journal).segments[0][0]


@pytest.mark.parametrize("share", [1.0, 0.5], ids=["whole", "taken while it grew"])
def test_a_copy_is_left_out_and_noted(journal: Path, share: float) -> None:
    alone, size = replay(one_run(journal)), len(capture(one_run(journal), key=b"k").workload)
    segment = segment_of(journal)
    whole = segment.read_bytes()
    (journal / "a copy.journal").write_bytes(whole[: int(len(whole) * share)])
    run = one_run(journal)
    again = replay(run)
    assert (again.replayed.hash, again.exact) == (alone.replayed.hash, True)
    assert "was left out: it is a copy of" in again.notes[0] and len(again.notes) == 1 + len(alone.notes)
    assert len(capture(run, key=b"k").workload) == size > 0


def test_capture_says_so(journal: Path, tmp_path: Path) -> None:
    shutil.copy(segment_of(journal), journal / "a copy.journal")
    out = str(tmp_path / "out.jsonl")
    said = CliRunner().invoke(build_app(), ["journal", "capture", str(journal), "--out", out])
    assert said.exit_code == 0 and "was left out: it is a copy of" in said.output
    said = CliRunner().invoke(build_app(), ["journal", "capture", str(journal), "--out", out, "--json"])
    assert len(json.loads(said.output)["notes"]) == 1


def test_two_that_differ_are_named(journal: Path) -> None:
    segment = segment_of(journal)
    other = journal / "other.journal"
    other.write_bytes(segment.read_bytes()[:-9] + b"something")
    with pytest.raises(JournalError, match=r"are both segment 0 of run \w+ and differ; remove one") as caught:
        one_run(journal)
    assert str(segment) in str(caught.value) and str(other) in str(caught.value)


def test_a_file_with_two_segments_is_refused(journal: Path) -> None:
    segment = segment_of(journal)
    segment.write_bytes(segment.read_bytes() * 2)
    with pytest.raises(JournalError, match="has a second segment behind the first"):
        replay(one_run(journal))


def test_a_segment_without_its_first_block_is_named(journal: Path) -> None:
    segment = segment_of(journal)
    beheaded = segment.read_bytes()[100:]
    (journal / "beheaded.journal").write_bytes(beheaded)
    left_out = f"{journal}/beheaded.journal was left out: the first block is damaged"
    assert any(note.startswith(left_out) for note in replay(one_run(journal)).notes)
    segment.write_bytes(beheaded)
    with pytest.raises(JournalError, match="the first block is damaged"):
        one_run(journal)
    (journal / "beheaded.journal").unlink()
    segment.write_bytes(b"")
    with pytest.raises(JournalError, match="holds no journal"):
        one_run(journal)


def test_a_segment_of_a_newer_version_is_left_out_and_noted(journal: Path) -> None:
    newer = journal / "newer.journal"
    newer.write_bytes(MAGIC + block(joined([encode((SEGMENT, 0.0, Segment(run="r", version=VERSION + 1)))], 1)))
    why = f"has version {VERSION + 1}; this program knows {VERSION}"
    assert f"{newer} was left out: it {why}" in replay(one_run(journal)).notes
    with pytest.raises(JournalError, match=why):
        one_run(newer)


def test_a_segment_that_is_deleted_while_it_is_read_is_named(journal: Path) -> None:
    run = one_run(journal)
    (journal / "deleted.journal").symlink_to(journal / "nothing")
    assert one_run(journal).segments == run.segments
    segment_of(journal).unlink()
    with pytest.raises(JournalError, match=r"was deleted while the journal was read.* Try again"):
        replay(run)
