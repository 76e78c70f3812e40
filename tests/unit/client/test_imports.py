"""What is used without torch, or before anything else, loads nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("datasets", "grpc", "numpy", "safetensors", "torch")
BATCH = Path(__file__).parents[2] / "data" / "trxp" / "batch_64.bin"
USES = {
    "the package, at once": (
        "import time; start = time.perf_counter(); import experience_buffer\n"
        "assert time.perf_counter() - start < 0.2",
        [],
    ),
    "clients": ("import experience_buffer as e; e.Client('h'), e.AsyncClient", ["grpc"]),
    "annotations of lists": (
        "import experience_buffer.client, experience_buffer._messages.annotate as a\n"
        "from experience_buffer import ClientOptions\n"
        "a.requests({'u': {'values': [1.0], 'reward': 2}}, buffer='', options=ClientOptions())",
        ["grpc"],
    ),
    "payloads": (
        "import experience_buffer.trxp as trxp, experience_buffer.eid, experience_buffer.experience\n"
        f"trxp.merge(trxp.split(open({str(BATCH)!r}, 'rb').read()))",
        [],
    ),
    "experiences of lists": (
        "import time; start = time.process_time()\n"
        "from experience_buffer import EID, Experience, trxp\n"
        "one = Experience(eid=EID(0, 0), prompt=[1], response=[2, 3], logprobs=(-0.5, -1),\n"
        "    reward=1.0, versions=[3, 3], extra={'x': [[1.5], [2]]})\n"
        "assert time.process_time() - start < 0.2\n"  # 0.03 where nothing else runs.
        "assert trxp.encode(trxp.decode(one.serialize())) == one.serialize()",
        [],
    ),
    "packed batches": (
        "import experience_buffer.trxp as trxp, experience_buffer.packed as packed\n"
        f"[first, *_] = trxp.split(open({str(BATCH)!r}, 'rb').read())\n"
        "row = packed.PackedRow(uid='a', payload=first, tensors={})\n"
        "batch = packed.PackedBatch.parse(b''.join(packed.pack([row])))\n"
        "assert batch.uids == ['a'] and batch.meta(0) and batch.payload(0) == first",
        [],
    ),
    "a dataset's feed": (
        "import experience_buffer._data.token_budget, experience_buffer._packed.select\n"
        "import experience_buffer._data.dataset_feed",
        [],
    ),
    "helpers of trainers": (
        "import experience_buffer.offpolicy, experience_buffer.pacing, experience_buffer.kl",
        [],
    ),
}


@pytest.mark.parametrize("use", USES)
def test_nothing_heavy_is_loaded(use: str) -> None:
    code, expected = USES[use]
    code += f"\nimport sys; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"{expected}\n"
