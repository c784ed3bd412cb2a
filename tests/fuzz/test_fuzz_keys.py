"""Any file of API keys is read or refused with its line, and what is read survives the way to Envoy."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead.core.errors import ConfigError
from fairlead.gateway.envoy.authentication import Key, parse_keys, script

pytestmark = pytest.mark.fuzzer("files of API keys")

digests = st.text("0123456789abcdefABCDEF", min_size=64, max_size=64)
tenants = st.text("abZ09._:@/+-", min_size=1, max_size=10)
times = st.datetimes(timezones=st.timezones()).map(lambda moment: f"expires={moment.isoformat()}")
scraps = st.sampled_from(
    ["#", "]]", "\\", "\x00", "\x85", "\u2028", "expires=", "expires=9999-12-31T23:59:59-23:59", "ü"]
)
words = digests | tenants | times | scraps | st.text(max_size=20)
lines = st.lists(words, max_size=4).map(" ".join) | st.tuples(digests, tenants, times | scraps).map(" ".join)
files = st.tuples(st.lists(lines, max_size=6), st.sampled_from(["\n", "\r\n"])).map(lambda file: file[1].join(file[0]))


@given(files)
@settings(max_examples=200, deadline=None)
def test_any_text(text: str) -> None:
    problem = ""
    keys: tuple[Key, ...] = ()
    try:
        keys = parse_keys(text)
    except ConfigError as error:
        problem = error.message
    assert len(problem) < 300 and re.match(r"line \d+: |$", problem)
    assert parse_keys("\n".join(key.line for key in keys)) == keys
    listed = script(keys, False).partition("[[\n")[2].partition("\n]]")[0]
    assert re.findall(r"(\S+) (\S+) (\d+)", listed) == [(key.digest, key.tenant, str(key.expires)) for key in keys]
