import pytest

from fairlead.plugins.params import duration, size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0), ("4096", 4096), ("1k", 1000), ("1K", 1000), ("1Ki", 1024), ("1KiB", 1024), ("1kB", 1000),
        ("64MiB", 64 << 20), ("64 MiB", 64 << 20), ("1G", 10**9), ("1.5Gi", 3 << 29), ("2T", 2 * 10**12), ("7B", 7),
    ],
)  # fmt: skip
def test_sizes(text: str, expected: int) -> None:
    assert size(text) == expected


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "1e3", "1 MB each", "1m", "0x10", "1.M", "9" * 400, "99999999T", "٣"]
)
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        size(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("250ms", 0.25),
        ("5s", 5),
        ("1m30s", 90),
        ("2h", 7200),
        ("0", 0),
        ("1.5s", 1.5),
        ("15min", 900),
        ("1 sec", 1),
        ("2 hours 30 minutes", 9000),
        ("3 m 1 s", 181),
    ],
)
def test_durations(text: str, expected: float) -> None:
    assert duration(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "5", "s", "-5s", "5  s", "5 seks", "5d", "1e3s", "9" * 400 + "h", "99999999999s"])
def test_no_durations(text: str) -> None:
    with pytest.raises(ValueError, match="expected a duration"):
        duration(text)
