"""The writer: never larger than allowed, never waits, loses nothing silently, survives being killed."""

import contextlib
import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fairlead.compat.load import load
from fairlead.compat.recorded import record
from fairlead.core.endpoint import NOT_READ, BaseModels, Endpoint
from fairlead.core.events import AdaptersListed, EndpointDown, EndpointUp, Reconfigured, RequestArrived, StreamLost
from fairlead.core.instructions import AdoptConfiguration
from fairlead.core.records import DecisionRecord
from fairlead.core.request import PrefixChain, Request
from fairlead.lab.simulator.journal import Faults, one_run
from fairlead.server.journal import writer as writer_module
from fairlead.server.journal.recorder import Recorder
from fairlead.server.journal.records import LOST, Segment
from fairlead.server.journal.writer import Directory, Writer, former_workers, label, segments
from fairlead.server.live.wiring import LiveJournal
from fairlead.server.observe.exposition import Registry
from fairlead.testing import SimClock


def made(path: Path, recorder: Recorder, *, keep: bool = False, size: int = 200_000, segment: int = 20_000) -> Writer:
    directory = Directory(path, size, segment, keep, "t")
    troubles: list[str] = []
    writer = Writer(recorder, directory, Segment(run="r"), flush_s=0.0, on_trouble=troubles.append)
    writer.troubles = troubles  # type: ignore[attr-defined]
    writer.begin()
    return writer


def arrived(number: int) -> RequestArrived:
    hashes = tuple(hash((number, i)) % 2**64 for i in range(70))
    return RequestArrived(Request(id=number, arrived=0.0, prefix=PrefixChain(hashes, tuple(range(1, 71)))))


def total(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def test_it_never_exceeds_its_bound_and_keeps_the_newest(tmp_path: Path) -> None:
    (tmp_path / "19990101-old-000000.journal").write_bytes(b"x" * 50_000)
    recorder = Recorder()
    writer = made(tmp_path, recorder, size=100_000)
    for number in range(600):
        recorder.take(float(number), arrived(number))
        if number % 9 == 0:
            writer.turn(False)
            assert total(tmp_path) <= 100_000
    writer.turn(True)
    assert 60_000 < total(tmp_path) <= 100_000
    assert recorder.counts.size == total(tmp_path)
    assert not (tmp_path / "19990101-old-000000.journal").exists()
    run = one_run(tmp_path)
    numbers = [body.request.id for _, _, body in run.items()]
    assert numbers == list(range(600 - len(numbers), 600))
    assert run.head.number > 0


def test_a_run_is_newer_than_those_before_it_whatever_the_clock_said(tmp_path: Path) -> None:
    (tmp_path / "other-name.journal").touch()
    assert label(tmp_path, "a", 1e9) == "20010909T014640-a"
    (tmp_path / f"{label(tmp_path, 'z', 1e9 + 2 * 86400)}-000003.journal").write_bytes(b"x" * 900)
    second = Directory(tmp_path, 2000, 500, False, label(tmp_path, "a", 1e9))
    second.begin(b"x" * 300)
    second.release()
    third = Directory(tmp_path, 2000, 500, False, label(tmp_path, "a", 1e9))
    third.begin(b"x" * 900)
    third.release()
    assert [path.name for path in segments(str(tmp_path)) or ()] == [
        "20010911T014641-a-000000.journal",
        "20010911T014642-a-000000.journal",
        "other-name.journal",
    ]


def test_segments_of_workers_that_no_longer_exist_count_and_go_like_old_ones(tmp_path: Path) -> None:
    for number, day in ((1, 3), (2, 1), (3, 2)):
        (tmp_path / f"worker-{number}").mkdir()
        (tmp_path / f"worker-{number}" / f"2026010{day}T000000-old-000000.journal").write_bytes(b"x" * 900)
    (tmp_path / "worker-x").mkdir()
    former = former_workers(tmp_path, 2)
    assert {path.name for path in former} == {"worker-2", "worker-3"}
    directory = Directory(tmp_path, 2000, 500, False, label(tmp_path, "a", 2e9), former)
    assert directory.size == 1800
    directory.begin(b"x" * 400)
    assert directory.size < 2000
    kept = {path.parent.name for path in tmp_path.glob("*/*.journal")}
    assert kept == {"worker-1", "worker-3"}, "that of worker 1 is not ours, and that of worker 2 was older"


def test_segments_of_a_worker_that_another_scheduler_still_has_are_not_ours(tmp_path: Path) -> None:
    path = tmp_path / "worker-1"
    other = Directory(path, 2000, 500, False, "b")
    other.begin(b"x" * 300)
    directory = Directory(tmp_path, 400, 400, False, "a", former_workers(tmp_path, 1))
    directory.begin(b"x" * 300)
    assert segments(str(path))
    other.release()
    directory.release()
    directory.begin(b"x" * 300)
    assert not segments(str(path)), "it is no longer written"
    other = Directory(path, 2000, 500, False, "b")
    with pytest.raises(OSError, match="another scheduler"):
        other.begin(b"x" * 300)
    directory.release()
    other.begin(b"x" * 300)
    other.release()


def test_stopping_when_full_keeps_the_beginning(tmp_path: Path) -> None:
    recorder = Recorder()
    writer = made(tmp_path, recorder, keep=True, size=60_000)
    for number in range(300):
        recorder.take(float(number), arrived(number))
        if number % 9 == 0:
            writer.turn(False)
            assert total(tmp_path) <= 60_000
    run = one_run(tmp_path)
    assert run.complete
    numbers = [body.request.id for _, _, body in run.items()]
    assert numbers == list(range(len(numbers)))
    assert recorder.counts.unwritten > 100
    assert writer.troubles == ["it has reached its size limit, and nothing more is written"]  # type: ignore[attr-defined]


def test_two_schedulers_do_not_share_a_directory(tmp_path: Path) -> None:
    first = Directory(tmp_path, 1 << 20, 1 << 18, False, "a")
    second = Directory(tmp_path, 1 << 20, 1 << 18, False, "b")
    with pytest.raises(OSError, match="another scheduler"):
        second.begin(b"x")
    first.release()
    second.begin(b"x")
    second.release()


def test_the_next_scheduler_writes_when_the_one_before_has_ended(tmp_path: Path) -> None:
    """As in a rolling update whose pods share a volume."""
    before, recorder, reported = Directory(tmp_path, 1 << 20, 1 << 18, False, "a"), Recorder(), list[str]()
    before.begin(b"x")
    directory = Directory(tmp_path, 1 << 20, 1 << 18, False, "b")
    writer = Writer(recorder, directory, Segment(run="r"), flush_s=0.0, on_trouble=reported.append)
    writer.start()
    recorder.take(0.0, StreamLost(1))
    for _ in range(500):
        if recorder.counts.unwritten:
            break
        time.sleep(0.01)
    before.release()
    recorder.take(1.0, StreamLost(2))
    writer.close()
    assert reported == ["another scheduler writes its journal there; each needs its own directory"]
    assert [path.name for path in segments(str(tmp_path)) or ()] == ["a-000000.journal", "b-000000.journal"]
    assert (recorder.counts.unwritten, recorder.counts.records) == (1, 2), "the second says what is missing"


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    made(path, Recorder())
    (file,) = path.glob("*.journal")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_later_segment_knows_who_was_there(tmp_path: Path) -> None:
    recorder = Recorder()
    writer = made(tmp_path, recorder)
    for name in ("a", "b", "c"):
        recorder.take(0.0, EndpointUp(Endpoint(name, f"10.0.0.{ord(name)}:80")))
    recorder.take(0.0, EndpointDown("b"))
    recorder.take(0.0, EndpointUp(Endpoint("d", "10.0.0.9:80"), listing=True))
    listed = AdaptersListed("c", frozenset(), BaseModels(frozenset({"m"})))
    recorder.take(0.0, EndpointUp(Endpoint("c", "10.0.0.9:81"), listing=True))
    recorder.take(0.0, listed)
    recorder.take(0.0, EndpointUp(Endpoint("c", "10.0.0.9:81", {"a": "b"}), listing=True))
    today = load("policy: round-robin", need_endpoints=False)
    recorder.take(0.0, Reconfigured(load("policy: least-requests", need_endpoints=False)))  # and refused
    recorder.take(0.0, Reconfigured(today))
    recorder.take(0.0, AdoptConfiguration(today, None))
    for number in range(200):
        recorder.take(1.0, arrived(number))
        writer.turn(False)
    heads = [head for _, head in one_run(tmp_path).segments]
    assert len(heads) > 3
    assert [endpoint.id for endpoint in heads[-1].endpoints] == ["a", "c", "d"]
    assert [*heads[-1].listed] == [AdaptersListed("d", None, NOT_READ), listed]
    assert heads[-1].scheduling == record(today)


def test_who_does_not_keep_up_loses_a_stretch_and_says_so(tmp_path: Path) -> None:
    recorder = Recorder(max_waiting=100)
    writer = made(tmp_path, recorder)
    for number in range(150):
        recorder.take(float(number), StreamLost(number))
    assert recorder.counts.dropped == 50
    assert len(recorder.waiting) == 100
    writer.turn(True)
    for number in range(150, 160):
        recorder.take(float(number), StreamLost(number))
    writer.turn(True)
    items = list(one_run(tmp_path).items())
    assert [body.request_id for kind, _, body in items if kind != LOST] == [*range(100), *range(150, 160)]
    assert [(index, body.records) for index, (kind, _, body) in enumerate(items) if kind == LOST] == [(100, 50)]


def test_a_disk_that_hangs_is_said_while_few_records_wait(tmp_path: Path) -> None:
    clock = SimClock(100.0)
    config = load(f"gateway: none\nendpoints: ['10.0.0.1:8000']\njournal: {{path: {tmp_path}}}\n")
    journal = LiveJournal(config, clock, "run", Random(1), Registry())
    for _ in range(2):
        journal.recorder.take(clock.time(), StreamLost(1))
        assert journal.hung() == ""
        clock.advance(20.0)
    assert journal.hung() == "records have waited 40 s for the journal's disk, which hangs or is far too slow"
    journal.recorder.waiting.clear()
    assert journal.hung() == ""


def test_a_full_disk_costs_records_and_is_said_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    writer = made(tmp_path, recorder)
    recorder.take(1.0, StreamLost(1))
    writer.turn(True)
    real = os.write
    monkeypatch.setattr(writer_module.os, "write", lambda number, data: (_ for _ in ()).throw(OSError(28, "full")))
    for number in (2, 3):
        recorder.take(2.0, StreamLost(number))
        writer.turn(True)
    monkeypatch.setattr(writer_module.os, "write", real)
    recorder.take(3.0, StreamLost(4))
    writer.turn(True)
    items = list(one_run(tmp_path).items())
    assert [body.request_id for kind, _, body in items if kind != LOST] == [1, 4]
    assert sum(body.records for kind, _, body in items if kind == LOST) == 2
    assert recorder.counts.errors == 2
    assert recorder.counts.unwritten >= 2
    assert len(writer.troubles) == 1  # type: ignore[attr-defined]


def _remove(path: Path) -> None:
    for segment in segments(str(path)) or ():
        segment.unlink()


def _move(path: Path) -> None:
    for segment in segments(str(path)) or ():
        segment.rename(path.with_name(segment.name))


def _cut(path: Path) -> None:
    for segment in segments(str(path)) or ():
        os.truncate(segment, 0)  # as `copytruncate` of logrotate does


def _cut_in_part(path: Path) -> None:
    for segment in segments(str(path)) or ():
        os.truncate(segment, 20)


@pytest.mark.parametrize(
    "take_away", [_remove, shutil.rmtree, _move, lambda path: path.rename(path.with_name("old")), _cut, _cut_in_part]
)
def test_segments_may_be_taken_away_or_cut_while_it_runs(tmp_path: Path, take_away: Callable[[Path], object]) -> None:
    path, recorder = tmp_path / "j", Recorder()
    writer = made(path, recorder)
    for number in (1, 2):
        recorder.take(1.0, StreamLost(number))
        writer.turn(True)
    take_away(path)
    for number in (3, 4):
        recorder.take(2.0, StreamLost(number))
        writer.turn(True)
    items = list(one_run(path).items())
    assert [body.request_id for kind, _, body in items if kind != LOST] == [3, 4]
    assert sum(body.records for kind, _, body in items if kind == LOST) == recorder.counts.unwritten == 1
    assert recorder.counts.size == sum(file.stat().st_size for file in path.glob("*.journal"))
    assert writer.troubles == ["its segment was removed, moved or cut; a new one begins"]  # type: ignore[attr-defined]
    recorder.close()


def test_a_disk_that_is_full_as_a_segment_begins_leaves_none_without_a_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    writer = made(tmp_path, recorder)
    real, room = os.write, [40]

    def full(number: int, data: Any) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        written = real(number, data[: room[0]])
        room[0] -= written
        return written

    while recorder.counts.size < 18_900:  # the next block begins a segment
        recorder.take(1.0, arrived(1))
        writer.turn(True)
    with monkeypatch.context() as patch:
        patch.setattr(writer_module.os, "write", full)
        for _ in range(30):
            recorder.take(2.0, arrived(2))
        writer.turn(True)
    assert len(list(tmp_path.glob("*.journal"))) == 1
    recorder.take(3.0, StreamLost(3))
    writer.turn(True)
    faults = Faults()
    items = list(one_run(tmp_path).items(faults))
    assert items[-1][0] == "StreamLost" and faults == Faults()
    assert sum(body.records for kind, _, body in items if kind == LOST) == 30
    assert len(list(tmp_path.glob("*.journal"))) == 2


@pytest.mark.parametrize("fails", ["open", "write"])
def test_a_disk_that_is_full_at_the_start_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Neither its lock nor its first segment can be made."""
    recorder, reported = Recorder(), list[str]()
    with monkeypatch.context() as patch:

        def full(*_: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(writer_module.os, fails, full)
        directory = Directory(tmp_path, 1 << 20, 1 << 18, False, "t")
        head = Segment(run="r", chance=Random(1).getstate())
        writer = Writer(recorder, directory, head, flush_s=0.0, on_trouble=reported.append)
        writer.start()
        recorder.take(0.0, EndpointUp(Endpoint("a", "10.0.0.1:80")))
        for _ in range(500):
            if recorder.counts.unwritten:
                break
            time.sleep(0.01)
    recorder.take(1.0, StreamLost(1))
    writer.close()
    assert reported == ["[Errno 28] No space left on device"]
    run = one_run(tmp_path)
    assert [endpoint.id for endpoint in run.head.endpoints] == ["a"]
    assert run.head.chance is None, "decisions may be missing"
    assert [kind for kind, _, _ in run.items()] == [LOST, "StreamLost"]
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        Directory(tmp_path / "file", 1 << 20, 1 << 18, False, "t")


def test_a_journal_that_is_full_at_the_start_is_kept(tmp_path: Path) -> None:
    (tmp_path / "19990101-old-000000.journal").write_bytes(b"x" * 50_000)
    reported: list[str] = []
    writer = Writer(
        Recorder(), Directory(tmp_path, 50_000, 20_000, True, "t"), Segment(run="r"), on_trouble=reported.append
    )
    writer.start()
    writer.close()
    assert reported == ["it has reached its size limit, and nothing more is written"]
    assert total(tmp_path) == 50_000


def test_a_segment_without_a_head_that_cannot_be_removed_is_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails, and is mounted read-only then."""
    directory = Directory(tmp_path, 100_000, 20_000, False, "t")

    def fails(*_: Any, **__: Any) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(writer_module.os, "write", fails)
        patch.setattr(Path, "unlink", fails)
        with pytest.raises(OSError, match="Input/output"):
            directory.begin(b"head")
    directory.begin(b"head")
    assert len(list(tmp_path.glob("*.journal"))) == 1 and directory.number == 1
    directory.release()


def test_old_segments_count_though_they_could_not_be_listed_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "a-000000.journal"
    old.write_bytes(b"x" * 50_000)
    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "segments", lambda path: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        directory = Directory(tmp_path, 60_000, 20_000, False, "t")
    directory.begin(b"head" * 5_000)
    assert not old.exists() and directory.size < 60_000
    directory.release()


def test_a_part_of_a_block_is_skipped_by_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    writer = made(tmp_path, recorder)
    real, calls = os.write, [0]

    def short(number: int, data: Any) -> int:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError(28, "full")
        return real(number, bytes(data)[:20])

    recorder.take(1.0, arrived(1))
    monkeypatch.setattr(writer_module.os, "write", short)
    writer.turn(True)
    monkeypatch.setattr(writer_module.os, "write", real)
    recorder.take(2.0, StreamLost(2))
    writer.turn(True)
    faults = Faults()
    kinds = [kind for kind, _, _ in one_run(tmp_path).items(faults)]
    assert kinds == [LOST, "StreamLost"]
    assert faults.damaged == 20


def test_each_segment_has_the_time_of_day_of_its_beginning(tmp_path: Path) -> None:
    recorder, epochs = Recorder(), iter((1e9, 2e9, 3e9))
    directory = Directory(tmp_path, 200_000, 20_000, False, "t")
    writer = Writer(recorder, directory, Segment(run="r"), epoch=lambda: next(epochs), flush_s=0.0)
    writer.begin()
    writer.begin()
    assert [head.epoch for _, head in one_run(tmp_path).segments] == [1e9, 2e9]


def test_a_record_that_cannot_be_written_costs_only_itself(tmp_path: Path) -> None:
    recorder = Recorder()
    writer = made(tmp_path, recorder)
    recorder.take(1.0, StreamLost(2**70))
    recorder.take(2.0, StreamLost(3))
    writer.turn(True)
    items = list(one_run(tmp_path).items())
    assert [kind for kind, _, _ in items] == [LOST, "StreamLost"]
    assert (recorder.counts.unencoded, recorder.counts.unwritten) == (1, 0)


def test_the_thread_writes_soon_and_all_at_the_end(tmp_path: Path) -> None:
    recorder = Recorder()
    directory = Directory(tmp_path, 1 << 20, 1 << 18, False, "t")
    writer = Writer(recorder, directory, Segment(run="r"), flush_s=0.01)
    writer.start()
    record = DecisionRecord(request=Request(id=1, arrived=0.0), at=1.0, policy="p", endpoint="e")
    recorder.take(1.0, record)
    for _ in range(500):
        if recorder.counts.records:
            break
        time.sleep(0.01)
    assert [kind for kind, _, _ in one_run(tmp_path).items()] == ["decided"]
    for number in range(1000):
        recorder.take(2.0, StreamLost(number))
    writer.close()
    recorder.take(3.0, StreamLost(-1))
    assert len(list(one_run(tmp_path).items())) == 1001
    assert recorder.counts.dropped == 0


KILLED = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from fairlead.server.journal.writer import Directory
    from fairlead.server.journal.recorder import Recorder
    from fairlead.server.journal.writer import Writer
    from fairlead.core.events import StreamLost
    from fairlead.server.journal.records import Segment
    recorder = Recorder(max_waiting=200)
    directory = Directory(Path(sys.argv[1]), 300_000, 60_000, False, sys.argv[2])
    writer = Writer(recorder, directory, Segment(run=sys.argv[2]))
    writer._flush_s = 0.0
    writer.begin()
    print("ready", flush=True)
    number = 0
    while True:
        for _ in range(50):
            number += 1
            recorder.take(float(number), StreamLost(number))
        writer.turn(True)
    """
)


def test_killed_at_any_moment_it_can_be_read(tmp_path: Path) -> None:
    for trial in range(3):
        run = f"run{trial}"
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path), run], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05 + 0.037 * trial)
            process.send_signal(signal.SIGKILL)
        assert total(tmp_path) <= 300_000
        faults = Faults()
        numbers = [body.request_id for _, _, body in one_run(tmp_path, run).items(faults)]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert faults.damaged == 0
        assert faults.unreadable == 0
