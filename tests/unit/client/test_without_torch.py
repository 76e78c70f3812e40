"""What the client does where torch isn't installed: all but what is made of tensors."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

MAKE = """
import json, sys
sys.modules["torch"] = None
from experience_buffer import EID, CustomField, Experience, trxp
from experience_buffer.packed import PackedBatch, PackedRow, pack

def said(read):
    try:
        found = read()
        return found.tolist() if hasattr(found, "tolist") else found
    except Exception as error:
        return f"{type(error).__name__}: {error}"

one = Experience(
    eid=EID(0, 0, suffix="a"), prompt=(1, 2), response=[3, 4], logprobs=[-0.5, -1], reward=0.5,
    versions=[7, 7], extra={"x": [[1.5], [2.5]]}, multi_modal_inputs={"p": [1]}, info={"n": 1},
    custom_fields=[CustomField("n", "m", "torch.int64")],
)
payload = one.serialize()
(back,) = trxp.decode(payload)
row = PackedRow(uid="a", group="g", payload=payload, tensors={})
batch = PackedBatch.parse(b"".join(pack([row, row])))
half = trxp.with_tensors(payload, {"values": trxp.TensorView("BF16", (2,), memoryview(bytes(4)))})
(wide,) = trxp.decode(half)
"""
READ = """
found = {
    "tokens": said(lambda: back.tokens),
    "mask": said(lambda: back.action_mask),
    "extra": said(lambda: back.extra["x"]),
    "versions": said(lambda: back.versions),
    "images": said(lambda: back.multi_modal_inputs["p"]),
    "same": said(lambda: back.tokens is back.tokens),
    "dtype": said(lambda: str(back.custom_fields[0].data_type)),
    "bytes": said(lambda: back.serialize() == payload),
    "column": said(lambda: batch.column("reward")),
    "tensor": said(lambda: batch.tensor("tokens")),
    "offsets": said(lambda: batch.offsets("tokens")),
    "member": said(lambda: batch[0].logprobs),
    "bfloat16": said(lambda: wide.values),
    "kept": said(lambda: wide.serialize() == half),
    "padded": said(batch.padded),
    "varlen": said(batch.varlen),
    "collation": said(lambda: __import__("experience_buffer.collation")),
    "dataset": said(lambda: __import__("experience_buffer").ExperienceDataset),
}
print(json.dumps(found))
"""
CHANGE = """
back.tokens[0] = 9
back.logprobs = [1.0, 2.0]
back.extra["x"][:] = 0
(again,) = trxp.decode(back.serialize())
print(json.dumps([again.tokens.tolist(), again.logprobs.tolist(), again.extra["x"].tolist()]))
"""
INSTALL = "pip install 'experience-buffer[torch]'"


def run(code: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    return json.loads(done.stdout)


def test_experiences_are_made_sent_and_read_as_arrays() -> None:
    found = run(MAKE + READ)
    needs = {name: found.pop(name) for name in ("padded", "varlen", "collation", "dataset")}
    no_dtype = found.pop("bfloat16")
    assert found == {
        "tokens": [1, 2, 3, 4],
        "mask": [True, True],
        "extra": [[1.5], [2.5]],
        "versions": [7, 7],
        "images": [1],
        "same": True,
        "dtype": "torch.int64",
        "bytes": True,
        "column": [0.5, 0.5],
        "tensor": [1, 2, 3, 4, 1, 2, 3, 4],
        "offsets": [0, 4, 8],
        "member": [-0.5, -1.0],
        "kept": True,
    }
    assert no_dtype == f"TypeError: NumPy has no bfloat16; read it with torch: {INSTALL}"
    for name, error in needs.items():
        assert error.startswith("ModuleNotFoundError: "), name
        assert error.endswith(f" needs torch: {INSTALL}"), name


def test_what_is_changed_in_an_array_is_sent() -> None:
    assert run(MAKE + CHANGE) == [[9, 2, 3, 4], [1.0, 2.0], [[0.0], [0.0]]]


@pytest.mark.parametrize("read", ["tokens", "logprobs", "versions"])
def test_without_numpy_either_reading_says_what_to_install(read: str) -> None:
    found = run(
        f"{MAKE.replace('import json, sys', 'import json, sys; sys.modules[' + repr('numpy') + '] = None')}\n"
        f"print(json.dumps([said(lambda: back.{read}), said(lambda: back.serialize() == payload)]))"
    )
    error = f"ModuleNotFoundError: tensors are read with torch, or with NumPy: {INSTALL}, or pip"
    assert found[0].startswith(error)
    assert found[1] is True
