"""What was learned as bytes: any table comes back without a hole, any bytes are refused or kept within bounds."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from prefix_matches import matches

from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.fleet import Fleet
from fairlead.core.learned import Common, EndpointLearned, Number, Part, PrefixesLearned
from fairlead.core.prefix import ChainHasher, PrefixIndex
from fairlead.core.request import PrefixChain, Request
from fairlead.core.state import Head, decode, encode, taken
from fairlead.core.tokens import TokenEstimator

HASHER = ChainHasher(finest=4, growth=4)
PAGE = Sample(waiting=0.0, running=0.0, kv_usage=0.0, block_size=16, num_blocks=1000, prefix_queries=5.0)

prompts = st.lists(st.sampled_from([b"aaaa", b"bbbb", b"abab"]), max_size=16).map(b"".join)
#: A prompt, or the bytes of an answer.
uses = st.lists(prompts | st.integers(1, 40), max_size=12)


def chain(prompt: bytes) -> PrefixChain:
    return HASHER.chain(b"root", prompt)


def use(index: PrefixIndex, what: bytes | int) -> None:
    if isinstance(what, bytes):
        index.insert(0, chain(what))
    else:
        index.occupy(0, what)


def index_of(capacity: int, used: list[bytes | int]) -> PrefixIndex:
    index = PrefixIndex()
    index.add_slot(0, capacity)
    for what in used:
        use(index, what)
    return index


@given(before=uses, after=uses, capacity=st.integers(1, 200), size=st.integers(1, 8), asked=prompts)
def test_a_table_is_given_back_as_it_was_whatever_is_used_meanwhile(
    before: list[bytes | int], after: list[bytes | int], capacity: int, size: int, asked: bytes
) -> None:
    known = index_of(capacity, before)
    blocks = known.newest(0, 1000)
    sizes = known.sizes(0, blocks)
    fresh, oldest, meanwhile = index_of(capacity, []), None, list(after)
    for begin in range(0, len(blocks), size):
        piece = slice(begin, begin + size)
        oldest = fresh.extend(0, blocks[piece], sizes[piece], oldest)
        fresh.validate()
        if oldest is None:
            break
        if meanwhile:
            use(fresh, meanwhile.pop(0))
            fresh.validate()
    if not after:
        assert [block for block in fresh.newest(0, 1000) if block > 0] == [block for block in blocks if block > 0]
        assert matches(fresh, chain(asked)) == matches(known, chain(asked))
    held = {block for block in fresh.newest(0, 1000) if block > 0}
    for prompt in (*before, *after, asked):
        if isinstance(prompt, bytes):
            there = [block in held for block in chain(prompt).hashes]
            assert there == sorted(there, reverse=True), "a hole"


def learned_fleet() -> tuple[Fleet, TokenEstimator]:
    fleet, tokens = fleet_of(None), TokenEstimator()
    fleet.sampled("e0", 0.0, 0.0, PAGE)
    for number in range(5):
        prompt = bytes([number]) * 4000
        request = Request(number, 0.0, prompt_tokens=1000, prompt_bytes=4000, prefix=chain(prompt), stream=True)
        lease = fleet.charge(request, 0, float(number), 0, 10.0)
        fleet.first_token(lease, number + 0.3)
        fleet.ledger.release(lease)
        fleet.completed(lease, number + 0.5, 10)
        tokens.learn("m", 4000, 1000)
    return fleet, tokens


def fleet_of(page: Sample | None) -> Fleet:
    fleet = Fleet()
    fleet.up(Endpoint("e0", "10.0.0.1:8000"))
    if page is not None:
        fleet.sampled("e0", 0.0, 0.0, page)
    return fleet


PARTS = [encode(part) for part in taken(*learned_fleet(), 5.0, 1000)]


@given(st.binary(max_size=200))
def test_bytes_are_a_part_or_refused(data: bytes) -> None:
    try:
        decode(data)
    except ValueError:
        return


def given_to_fleets(parts: list[Part], age_s: float) -> None:
    """Before the first scrape and after it: neither may fail, and all stays within its bounds."""
    for page in (None, PAGE):
        fleet, tokens = fleet_of(page), TokenEstimator()
        for part in parts:
            if isinstance(part, Common):
                tokens.restore(part.models)
            fleet.restore(part, age_s, 1.0)
            fleet.validate()
        fleet.sampled("e0", 1.0, 1.0, PAGE)
        request = Request(1, 1.0, prompt_tokens=1000, prompt_bytes=4000, prefix=chain(b"a" * 4000), stream=True)
        lease = fleet.charge(request, 0, 1.0, 0, float(tokens.estimate_output("m")))
        fleet.first_token(lease, 1.4)
        fleet.ledger.release(lease)
        fleet.completed(lease, 2.0, 10)
        fleet.measured(tokens.bytes_per_token("m"))
        fleet.validate()


@given(which=st.integers(0, len(PARTS) - 1), offset=st.integers(0, 2000), byte=st.integers(0, 255))
def test_a_byte_that_is_another_is_refused_or_harmless(which: int, offset: int, byte: int) -> None:
    parts: list[Part] = []
    for number, data in enumerate(PARTS):
        changed = bytearray(data)
        if number == which:
            changed[offset % len(changed)] = byte
        try:
            part = decode(bytes(changed))
        except ValueError:
            continue
        if not isinstance(part, Head):
            parts.append(part)
    given_to_fleets(parts, 1.0)


amounts = st.floats(0.0, 1e15)
numbers = st.floats(-1e15, 1e15)


def drawn(kind: object) -> st.SearchStrategy[object]:
    """Values of the types of `fairlead.core.learned`."""
    info = msgspec.inspect.type_info(kind)
    return _of(info)


def _of(info: msgspec.inspect.Type) -> st.SearchStrategy[object]:
    match info:
        case msgspec.inspect.FloatType(ge=least):
            return amounts if least == 0.0 else numbers
        case msgspec.inspect.IntType(ge=least):
            return st.integers(0, 1 << 40) if least == 0 else st.integers(-5, (1 << 64) - 1)
        case msgspec.inspect.TupleType(item_types=items):
            return st.tuples(*map(_of, items))
        case msgspec.inspect.VarTupleType(item_type=item):
            return st.lists(_of(item), max_size=20).map(tuple)
        case msgspec.inspect.StructType(cls=cls, fields=fields):
            named = {field.name: _of(field.type) for field in fields}
            return st.fixed_dictionaries(named).map(lambda values: cls(**values))
        case msgspec.inspect.UnionType(types=types) if not info.includes_none:
            return st.one_of(*map(_of, types))
        case msgspec.inspect.UnionType():
            return st.sampled_from([None, PAGE])
        case _:
            return st.sampled_from(["e0", "10.0.0.1:8000", "m"])


def test_the_strategies_know_the_types() -> None:
    assert msgspec.inspect.type_info(Number).ge == -1e15  # type: ignore[attr-defined]


@given(
    common=drawn(Common), endpoint=drawn(EndpointLearned), prefixes=drawn(PrefixesLearned), age_s=st.floats(0.0, 1e9)
)
def test_whatever_a_file_says_bounds_are_kept(
    common: Common, endpoint: EndpointLearned, prefixes: PrefixesLearned, age_s: float
) -> None:
    endpoint = msgspec.structs.replace(endpoint, endpoint_id="e0", address="10.0.0.1:8000")
    prefixes = msgspec.structs.replace(prefixes, endpoint_id="e0", number=0)
    parts = [decode(encode(part)) for part in (common, endpoint, prefixes)]
    given_to_fleets([part for part in parts if not isinstance(part, Head)], age_s)
