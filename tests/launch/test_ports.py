import socket
import sys

import pytest

from hasten.launch.ports import HeldPort, is_busy, take_port

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can hold a port that another may listen on")


def listen(number: int, family=socket.AF_INET, address: str = "127.0.0.1") -> socket.socket:
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, number))
    listener.listen()
    return listener


@linux
@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, ""), (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::")]
)
def test_a_held_port_may_be_listened_on(family, address):
    with HeldPort() as held:
        listen(held.number, family, address).close()


@linux
def test_a_held_port_is_given_to_nobody_else():
    with HeldPort() as held:
        given = []
        for _ in range(10):  # of 28,000 ports
            others = [socket.socket() for _ in range(500)]
            for other in others:
                other.bind(("127.0.0.1", 0))
                given.append(other.getsockname()[1])
            for other in others:
                other.close()
        assert held.number not in given


def test_two_launches_never_hold_the_same_port():
    held = [HeldPort() for _ in range(50)]
    assert len({port.number for port in held}) == 50
    with pytest.raises(OSError, match="in use"):
        HeldPort(held[0].number)
    for port in held:
        port.release()
    HeldPort(held[0].number).release()


def test_a_listener_makes_a_port_busy():
    with listen(0) as listener:
        number = listener.getsockname()[1]
        assert is_busy(number)
        held, note = take_port(number)
        with held:
            assert held.number != number
            assert note == f"port {number} is in use; the processes meet on the free port {held.number} instead"
    assert not is_busy(number)


@pytest.mark.parametrize("wanted", [None, 0])
def test_no_wish_is_any_free_port(wanted):
    held, note = take_port(wanted)
    with held:
        assert held.number > 0
        assert note == ""


def test_a_free_wish_is_granted():
    with HeldPort() as held:
        number = held.number
    again, note = take_port(number)
    with again:
        assert (again.number, note) == (number, "")
