"""Explores one target under atheris: inputs that reach new code are kept for `endure`.

`python -m tests.fuzz.explore TARGET --runs N --seed S --folder F`: F/corpus has the first inputs and
gets what reaches something new; F/explore.json is the report. Errors are findings here as there;
limits are judged there alone, since instrumented code is ten times as slow.
"""

from __future__ import annotations

import random
import sys
from typing import Any, Final

import atheris

with atheris.instrument_imports(
    include=["experience_buffer", "experience_buffer_server"],
    exclude=["experience_buffer.v1", "experience_buffer_server.advantages"],
):
    from tests.fuzz.decoders import MUTATIONS
    from tests.fuzz.findings import Watch, arguments
    from tests.fuzz.meter import confine
    from tests.fuzz.mutations import Mutation

MAX_INPUT_BYTES: Final = 4096
_HANG_SECONDS: Final = 20
"""Beyond this an input never ends, and the process does: what it was is in the folder."""


def _mutator(structured: Mutation) -> Any:
    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.2:
            return bytes(atheris.Mutate(data, max_size))
        return structured(data, rng)[:max_size]

    return mutate


def main() -> None:
    asked = arguments()
    watch = Watch(asked.target, asked.folder / "explore.json", judge_limits=False)

    def run(data: bytes) -> None:
        watch.run(data)
        # libFuzzer ends the process without a word to Python.
        if watch.num_inputs % 1000 == 0 or watch.num_inputs >= asked.runs:
            watch.write()

    options = [
        sys.argv[0],
        f"-runs={asked.runs}",
        f"-seed={asked.seed}",
        f"-max_len={MAX_INPUT_BYTES}",
        f"-timeout={_HANG_SECONDS}",
        "-rss_limit_mb=0",
        f"-artifact_prefix={asked.folder}/hang-",
        str(asked.folder / "corpus"),
    ]
    atheris.Setup(options, run, custom_mutator=_mutator(MUTATIONS[asked.target]))
    confine()
    atheris.Fuzz()


if __name__ == "__main__":
    main()
