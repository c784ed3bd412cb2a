from fairlead.server.observe.component_metrics import UploadMetrics
from fairlead.server.observe.exposition import Registry


def test_who_uploads_too_much_is_counted_and_named(caplog):
    now, registry = [100.0], Registry()
    uploads = UploadMetrics(registry, lambda: now[0])
    assert uploads.note() == ""
    with caplog.at_level("WARNING", "fairlead"):
        for i in range(300):
            uploads.ended("10.0.0.1" if i % 2 else f"10.1.{i % 256}.{i // 256}", 62_000_000, "memory")
        uploads.ended("10.0.0.2", 1, "paused")
        uploads.ended("10.0.0.2", 1, "address")
    note = uploads.note()
    assert (
        "300 to keep its memory, 1 that paused, 1 because others from the same" in note and "10.0.0.1 9300.0," in note
    )
    assert len(note) < 250
    page = registry.render()
    assert b'fairlead_uploads_ended_total{reason="slow"} 0\n' in page
    assert b'fairlead_uploads_ended_total{reason="memory"} 300\n' in page
    assert b'fairlead_uploads_ended_total{reason="paused"} 1\n' in page
    assert [record.fields["memory"] for record in caplog.records] == [1], "one line in ten seconds"
    now[0] += 20.0
    assert uploads.note() == ""
    with caplog.at_level("WARNING", "fairlead"):
        uploads.ended("::1", 1, "slow")
    assert len(caplog.records) == 2 and "memory" not in caplog.records[1].fields
