"""Two processes that each do their share of a step at the same time."""

import os
import socket
from typing import Any

from ..contender import Contender, Worker
from .names import TRAINER
from .trainer import training_step


class Pair:
    """This process and a second one. Together they are one run of two processes (DDP), or two runs on their own."""

    def __init__(self, together: bool, **arguments: Any) -> None:
        places = [{}, {}]
        if together:
            arguments["batch"] *= 2
            places = _places()
        self.other = Worker(Contender("the second process", TRAINER, arguments, places[1]), threads=1)
        os.environ.update(places[0])  # what torchrun would have set
        self.step = training_step(**arguments)
        self.other.wait_until_built()

    def __call__(self) -> None:
        self.other.begin(1)
        self.step()
        self.other.end()


def _places() -> list[dict[str, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]
