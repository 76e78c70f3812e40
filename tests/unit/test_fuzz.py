"""What `make fuzz` has found stays found: bombs, corpus and regressions, and a short run by chance."""

from __future__ import annotations

import gc
import sys
import time
import tracemalloc
from collections.abc import Iterator

import pytest

from experience_buffer import trxp
from experience_buffer.errors import ExperienceBufferError
from experience_buffer.v1 import service_pb2
from experience_buffer_server.buffer.intake.admission import admit
from experience_buffer_server.buffer.state.entries import Refusal
from experience_buffer_server.settings.buffer import BufferSettings
from tests.fuzz import corpus, meter
from tests.fuzz.bombs import BOMBS, one
from tests.fuzz.decoders import DECODERS, MUTATIONS, Target, pushed
from tests.fuzz.endure import inputs
from tests.fuzz.meter import MAX_BYTES, Meter, OverLimitError
from tests.fuzz.service import ServiceTarget
from tests.fuzz.verbs import Verbs

RUN_SECONDS = 0.6
SEED = 20_261_121

ANSWERS = {
    "version_laughs": "version a list",
    "version_deep": "version a list",
    "num_items_laughs": "num_items is a list",
    "num_items_text": "num_items is a list",
    "numpy_texts": "NumPy texts longer than the pickle",
    "info_laughs": "more than 1,000,000 values",
    "info_almost_too_large": "",
    "shared_by_many_values": "",
    "model_version_laughs": "info['model_version'] is a list",
    "priority_laughs": "priority is a list",
    "multi_modal_keys": "keys and tensors disagree about 1",
    "long_key_in_error": "isn't plain data",
    "long_path_in_error": "isn't plain data",
    "text_shared_by_items": "share so much",
    "long_uids": "300000 characters exceed 4096",
    "many_globals": "metadata",
    "key_set_again": "is given twice",
    "long_tuple_keys": "a tuple is used as a key",
    # Newer Pythons read JSON that is nested so deep, and it isn't what it should be.
    "nested_json": "isn't JSON" if sys.version_info < (3, 14) else "an entry has dtype, shape and",
}


def answer(data: bytes) -> str:
    """What a server says to a push: the error, or the first refusal; empty: it stores all."""
    try:
        found = pushed(data, BufferSettings())
    except ExperienceBufferError as error:
        return str(error)
    return next((one.message for one in found if isinstance(one, Refusal)), "")


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_answered_within_the_limits(name: str) -> None:
    data = BOMBS[name]()
    found = answer(data)
    assert ANSWERS[name] in found
    assert len(found) < 3000
    assert bool(found) == bool(ANSWERS[name])
    for target in ("push", "rewrite"):
        Meter(DECODERS[target])(data)


def test_an_annotation_whose_names_are_long() -> None:
    annotation = service_pb2.Annotation(uid="1/2/3/5/a")
    annotation.info.update({"x" * 1_000_000: [1.0] * 50_000})
    Meter(DECODERS["annotation"])(annotation.SerializeToString())


def test_versions_take_no_list_of_them() -> None:
    """A byte per token must not become an object per token."""
    table = trxp.TensorView("U8", (8 * 2**20,), memoryview(bytes(8 * 2**20)))
    data = trxp.with_tensors(trxp.split(one())[0], {"versions": table})
    (item,) = trxp.read(data)
    assert isinstance(item, trxp.Item)
    tracemalloc.start()
    try:
        admit(item, BufferSettings())
        assert tracemalloc.get_traced_memory()[1] < 4 * len(data)
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceTarget]:
    target = ServiceTarget()
    yield target
    target.close()


@pytest.fixture(scope="module")
def verbs() -> Iterator[Verbs]:
    target = Verbs()
    yield target
    target.close()


@pytest.fixture(autouse=True)
def small_heap() -> Iterator[None]:
    """Times are those of the target: a collection doesn't walk what earlier tests have left."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=MUTATIONS)
def target(request: pytest.FixtureRequest) -> tuple[str, Target]:
    name: str = request.param
    if name == "requests":
        return name, request.getfixturevalue("service")
    if name == "verbs":
        return name, request.getfixturevalue("verbs")
    return name, DECODERS[name]


def test_the_corpus_and_what_was_found(target: tuple[str, Target]) -> None:
    name, run = target
    meter = Meter(run)
    for data in corpus.kept(name) + corpus.regressions(name):
        meter(data)


def test_a_short_run(target: tuple[str, Target]) -> None:
    name, run = target
    made, meter = inputs(name, corpus.seeds(name) + corpus.kept(name), SEED), Meter(run)
    end = time.monotonic() + RUN_SECONDS
    while time.monotonic() < end:
        meter(next(made))


def test_the_limits_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(data: bytes) -> None:
        end = time.thread_time() + 0.11
        while time.thread_time() < end:
            pass

    with pytest.raises(OverLimitError, match="ms for 1 bytes"):
        Meter(slow)(b"x")

    def large(data: bytes) -> None:
        bytearray(MAX_BYTES + 2**22).count(1)

    # New memory alone may take a machine longer than its time.
    monkeypatch.setattr(meter, "MAX_SECONDS", 10.0)
    with pytest.raises(OverLimitError, match="MiB for 1 bytes"):
        Meter(large)(b"x")
