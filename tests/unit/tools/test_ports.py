"""The ports that tests take."""

from itertools import pairwise

from ports import free_port, free_port_block, free_ports, part


def test_processes_beside_each_other_have_parts_of_their_own():
    parts = [part(f"gw{number}", 4) for number in range(4)]
    assert all(first < last for first, last in parts)
    assert all(last < first for (_, last), (first, _) in pairwise(parts))
    assert 20_000 <= parts[0][0] < parts[-1][1] < 32_768
    assert part("gw5", 4) == parts[1], "it has taken the place of one that died"
    assert part("gw0", 1)[1] - part("gw0", 1)[0] > 10_000


def test_a_port_is_not_among_the_next_500():
    given = [port for _ in range(30) for port in (*free_ports(3), free_port(), free_port_block())]
    assert len({*given}) == len(given)
