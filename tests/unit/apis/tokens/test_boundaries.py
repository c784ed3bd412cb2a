from fairlead.apis.tokens.tokeniser import AddedToken, Boundaries


def raw(content: str, **more: bool) -> AddedToken:
    return AddedToken(content, normalized=False, special=True, **more)


def test_a_text_is_cut_in_front_of_every_token() -> None:
    cut = Boundaries([raw("<a>"), raw("<b>")]).pieces
    assert cut("x<a>y<b><a>z") == ["x", "<a>y", "<b>", "<a>z"]
    assert cut("<a>") == ["<a>"]
    assert cut("plain") == ["plain"]
    assert cut("") == []


def test_the_longest_token_counts_also_where_it_is_no_place() -> None:
    cut = Boundaries([raw("<a>"), raw("<a>b", single_word=True), raw("<a><a>")]).pieces
    assert cut("x<a>bc") == ["x<a>bc"]
    assert cut("x<a><a>y") == ["x", "<a><a>y"]
    assert cut("x<a>yy") == ["x", "<a>yy"]


def test_tokens_that_look_at_their_neighbours_are_no_places() -> None:
    added = [raw("<l>", lstrip=True), raw("<w>", single_word=True), raw("word"), raw("_x"), AddedToken("<n>")]
    boundaries = Boundaries([*added, raw("<r>", rstrip=True)])
    assert boundaries.pieces("a <l> <w> word _x <n> <r> b") == ["a <l> <w> word _x <n> ", "<r> b"]
    assert len(boundaries) == 1


def test_no_tokens() -> None:
    assert Boundaries([]).pieces("abc") == ["abc"]
    assert Boundaries([raw("")]).pieces("abc") == ["abc"]


def test_a_vocabulary_of_placeholders_and_a_long_token() -> None:
    names = [f"<|reserved_{number}|>" for number in range(5000)]
    boundaries = Boundaries([*map(raw, names), raw("<" + "x" * 5000 + ">")])
    assert boundaries.pieces("a".join(names[:1000])) == [
        f"{name}a" if name != names[999] else name for name in names[:1000]
    ]
    assert boundaries.pieces("<" * 100_000) == ["<" * 100_000]


def test_a_vocabulary_that_is_too_deep_for_a_pattern() -> None:
    boundaries = Boundaries([raw("<" * length) for length in range(1, 3000)])
    assert len(boundaries) == 0
    assert boundaries.pieces("a<<<b") == ["a<<<b"]
