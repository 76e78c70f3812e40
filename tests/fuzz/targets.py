"""All targets by name, and which mutation each is given."""

from __future__ import annotations

from typing import Final

from tests.fuzz import messages, pickles, tables
from tests.fuzz.decoders import DECODERS, Target
from tests.fuzz.mutations import Mutation, mostly, of_frame

MUTATIONS: Final[dict[str, Mutation]] = {
    "frame": mostly(of_frame),
    "metadata": mostly(pickles.mutate),
    "tensors": mostly(tables.mutate),
    "push": mostly(of_frame),
    "compiled": mostly(of_frame),
    "rewrite": mostly(of_frame),
    "packed": mostly(tables.mutate),
    "annotation": messages.mutate_annotation,
    "requests": messages.mutate,
}
"""In the order in which `make fuzz` runs them."""


def make_target(name: str) -> Target:
    if name == "requests":
        # Imports all of the server, which no decoder needs.
        from tests.fuzz.service import ServiceTarget

        return ServiceTarget()
    return DECODERS[name]
