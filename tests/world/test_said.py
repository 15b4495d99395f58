from datetime import timedelta

import torch.distributed as dist

from hasten.world import process
from hasten.world.said import Said
from tests.ranks import run_ranks


def talk(rounds: int) -> list[dict[int, str]]:
    world = process.start()
    heard = []
    for number in range(rounds):
        said = Said(world, "numbers")
        said.say(f"{world.rank}/{number}")
        heard.append(said.all())
    return heard


def test_everyone_hears_what_everyone_says():
    for world_size in (2, 4):
        expected = [{rank: f"{rank}/{number}" for rank in range(world_size)} for number in range(4)]
        assert run_ranks(talk, world_size, 4) == [expected] * world_size


def keep_silent() -> tuple[str, dict[int, str]]:
    world = process.start(timeout=timedelta(seconds=1))
    dist.barrier()
    said = Said(world, "numbers")
    text = ""
    if world.rank != 1:
        said.say("here")
        try:
            said.all()
        except TimeoutError as error:
            text = str(error)
    return text, said.heard() if world.rank == 0 else {}


def test_the_wait_has_a_limit_and_names_who_said_nothing():
    text = "Rank 0 waited for ranks [1] for 1 s, its process group's timeout."
    assert run_ranks(keep_silent, 2) == [(text, {0: "here"}), ("", {})]


def topics() -> dict[int, str]:
    world = process.start()
    for topic in ("one", "two") if world.rank else ("two", "one"):
        Said(world, topic).say(f"{topic} by {world.rank}")
    Said(world, "one")
    said = Said(world, "two")
    said.say("again")
    return said.all()


def test_topics_do_not_mix():
    assert run_ranks(topics, 2) == [{0: "again", 1: "again"}] * 2
