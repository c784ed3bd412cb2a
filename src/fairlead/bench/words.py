"""Filler text that costs about one token per word: 256 English words of three letters, so a token is four bytes."""

from random import Random

#: Bytes of text per token, as tokenisers for English average.
BYTES_PER_TOKEN = 4

_WORDS = (
    b"ace act add ado ads age ago aid aim air ale all and ant any ape app arc are ark arm art ash ask ate awe axe aye "
    b"bad bag ban bar bat bay bed bee beg bet bid big bin bit bow box boy bud bug bun bus but buy cab can cap car cat "
    b"cow cry cub cue cup cut dad dam day den dew did die dig dim din dip dog dot dry due dug ear eat ebb egg ego elk "
    b"elm end era eve eye fan far fat fax fed fee few fig fin fir fit fix fly foe fog for fox fun fur gap gas gel gem "
    b"get gin god got gum gun gut guy gym had ham has hat hay hen her hid him hip his hit hop hot how hub hue hug hut "
    b"ice icy ill ink inn ion its ivy jam jar jaw jet job jog joy jug key kid kin kit lab lad lap law lay led leg let "
    b"lid lie lip lit log lot low mad man map mat may men met mid mix mob mom mud mug nap net new nod nor not now nut "
    b"oak oar odd off oil old one orb ore our out owe owl own pad pal pan par pat paw pay pea peg pen pet pie pig pin "
    b"pit ply pod pop pot pro pub put rag ram ran rap rat raw ray red rib rid rim rip rob rod row rub rug run rye sad "
    b"sap sat saw say sea"
).split()[:256]


# Word number -> its first, second and third letter.
_LETTERS = tuple(bytes(word[place] for word in _WORDS) for place in range(3))


def text(tokens: int, chance: Random) -> bytes:
    """`tokens` words, each with a space behind it: `4 * tokens` bytes. Built by columns of letters: 20 ns per token."""
    return spell(chance.randbytes(tokens))


def spell(numbers: bytes) -> bytes:
    """The word of each byte, with a space behind it: four bytes for one."""
    out = bytearray(b" ") * (BYTES_PER_TOKEN * len(numbers))
    for place, letters in enumerate(_LETTERS):
        out[place::BYTES_PER_TOKEN] = numbers.translate(letters)
    return bytes(out)
