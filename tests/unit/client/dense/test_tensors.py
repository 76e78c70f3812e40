"""Tensors whose elements aren't where their address says: made plain, or refused by name.

Reading one by its address would end the process, so each runs in one of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from experience_buffer import EID, Experience, InvalidRequestError, TrxpError
from experience_buffer._dense.tensors import tensor_view

HEAD = """
import torch
from experience_buffer import EID, Experience, TrxpError
def one(tensor):
    given = Experience(eid=EID(0, 0, 0), tokens=[1, 2, 3, 4, 5], prompt_length=1, reward=1.0)
    for name in ("logprobs", "extra"):
        setattr(given, name, {"x": tensor} if name == "extra" else tensor)
        try:
            back = Experience.deserialize(given.serialize())
            print((back.extra["x"] if name == "extra" else back.logprobs).tolist())
        except TrxpError as error:
            print(error)
        setattr(given, name, None)
"""
GLOO = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
DTENSOR = f"""{GLOO}
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, DTensor, distribute_tensor
mesh = init_device_mesh("cpu", (1,))
"""
SENT = "[0.0, 1.0, 2.0, 3.0]"
CASES: dict[str, tuple[str, str]] = {
    "AsyncCollectiveTensor": (
        f"""{GLOO}
import torch.distributed._functional_collectives as funcol
one(funcol.all_gather_tensor(torch.arange(4.0), 0, dist.group.WORLD))""",
        SENT,
    ),
    "replicated DTensor": (
        f"{DTENSOR}\none(distribute_tensor(torch.arange(4.0), mesh, [Replicate()]))",
        SENT,
    ),
    "sharded DTensor": (
        f"{DTENSOR}\none(distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))",
        "a DTensor, whose elements lie on several ranks; call full_tensor() on every rank",
    ),
    "DTensor of partial sums": (
        f"{DTENSOR}\none(DTensor.from_local(torch.arange(4.0), mesh, [Partial()]))",
        "a DTensor, whose elements lie on several ranks",
    ),
    "freed storage": (
        "t = torch.ones(4); t.untyped_storage().resize_(0); one(t)",
        "a tensor of 16 bytes, of which its storage has 0",
    ),
    "freed storage of a view": (
        "t = torch.ones(4, 2); u = t.t()[0]; t.untyped_storage().resize_(0); one(u)",
        "of which its storage has 0",
    ),
    "shortened storage": (
        "t = torch.ones(4); t.untyped_storage().resize_(8); one(t)",
        "a tensor of 16 bytes, of which its storage has 8",
    ),
    "shortened storage of a strided view": (
        "t = torch.ones(4, 2); u = t[:, 1]; t.untyped_storage().resize_(16); one(u)",
        "a tensor of 32 bytes, of which its storage has 16",
    ),
    "FakeTensor": (
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "with FakeTensorMode(): t = torch.ones(4)\none(t)",
        "a FakeTensor, whose elements only its class can read",
    ),
    "masked": (
        "one(torch.masked.masked_tensor(torch.ones(4), torch.tensor([True, False, True, True])))",
        "a MaskedTensor",
    ),
    "meta": (
        "one(torch.ones(4, device='meta'))",
        "a tensor on the device meta, which has no elements",
    ),
    "nested": (
        "one(torch.nested.nested_tensor([torch.ones(2), torch.ones(2)]))",
        "a tensor of layout nested",
    ),
    "jagged": (
        "one(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))",
        "a NestedTensor",
    ),
    "sparse": ("one(torch.ones(4).to_sparse())", "a tensor of layout torch.sparse_coo"),
    "mkldnn": ("one(torch.ones(4).to_mkldnn())", "a tensor of layout torch._mkldnn"),
    "quantized": (
        "one(torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8))",
        "a tensor of torch.quint8",
    ),
    "zeros without memory": ("one(torch._efficientzerotensor(4))", "of which its storage has 0"),
    "lazy parameter": ("one(torch.nn.UninitializedParameter())", "which has no elements yet"),
    "inside vmap": (
        "torch.func.vmap(lambda t: (one(t), t)[1])(torch.ones(2, 4))",
        "elements can't be read here (Cannot access storage of BatchedTensorImpl",
    ),
    "inside grad": (
        "torch.func.grad(lambda t: (one(t), t.sum())[1])(torch.ones(4))",
        "elements can't be read here (Cannot access storage of TensorWrapper",
    ),
    "inside functionalize": (
        "torch.func.functionalize(lambda t: (one(t), t)[1])(torch.ones(4))",
        "a tensor",
    ),
    "a class that has its elements elsewhere": (
        """
class Wrapped(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(func)
    __repr__ = object.__repr__
one(Wrapped(torch.ones(4)))""",
        "a Wrapped, whose elements only its class can read",
    ),
}


EACH = """
import contextlib, io, json, os, sys, traceback, warnings
warnings.simplefilter("ignore")
ends = {}
for case, code in json.load(sys.stdin).items():
    readable, writable = os.pipe()
    child = os.fork()
    if not child:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            try:
                exec(code)
            except BaseException:
                traceback.print_exc(file=said)
        os.write(writable, said.getvalue().encode())
        os._exit(0)
    os.close(writable)
    with open(readable) as said:
        ends[case] = [said.read(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]
print(json.dumps(ends))
"""


@pytest.fixture(scope="module")
def ends() -> dict[str, tuple[str, int]]:
    """What each case said, and how its process ended."""
    return run(HEAD, {case: code for case, (code, _) in CASES.items()})


def run(head: str, cases: dict[str, str]) -> dict[str, tuple[str, int]]:
    """Run each case in a process of its own, forked from one that has run the head."""
    done = subprocess.run(
        [sys.executable, "-c", head + EACH],
        input=json.dumps(cases),
        capture_output=True,
        check=True,
        text=True,
        timeout=100,
    )
    found: dict[str, tuple[str, int]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_tensor_without_memory_of_its_own_ends_no_process(
    ends: dict[str, tuple[str, int]], case: str
) -> None:
    said, code = ends[case]
    assert code == 0
    lines, names = said.splitlines(), ("items[0].logprobs: ", "items[0].x: ")
    assert len(lines) == len(names), said
    for line, name in zip(lines, names, strict=True):
        if CASES[case][1] == SENT:
            assert line == SENT
        else:
            assert line.startswith(name)
            assert CASES[case][1] in line


WAYS = {
    "reward": "Experience(tokens=[1, 2], prompt_length=1, reward=make(()))",
    "prompt_length": "Experience(tokens=[1, 2], prompt_length=make((), torch.int64))",
    "prompt": "Experience(prompt=make(2, torch.int64), response=[1])",
    "tokens": "Experience(tokens=make(2), prompt_length=1)",
    "logprobs[0]": "Experience(tokens=[1, 2], prompt_length=1, logprobs=[make(())])",
    "extra['x'][0]": "Experience(tokens=[1, 2], prompt_length=1, extra={'x': [make(2)]})",
    "baseline_reward": "Experience(tokens=[1, 2], prompt_length=1, baseline_reward=make(()))",
    "annotations['u']['reward']": "annotate({'u': {'reward': make(())}})",
    "annotations['u']['x']": "annotate({'u': {'x': make(())}})",
    "annotations['u']['values']": "annotate({'u': {'values': make(2)}})",
    "logprobs is": "gather_response_attrs([with_logprobs(make(2))], 'logprobs', 2)",
    "tokens is": "gather_token_ids([with_tokens(make(2, torch.int64))], 1, 1, 0)",
}
"""What reads elements, by what the error names."""
UNREADABLE = {
    "freed": "made.untyped_storage().resize_(0)",
    "freed in part": "made.untyped_storage().resize_(1)",
    "meta": "made = made.to('meta')",
    "masked": "made = torch.masked.masked_tensor(made, torch.ones_like(made, dtype=torch.bool))",
    "fake": "made = FakeTensorMode().from_tensor(made)",
}
READING = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from experience_buffer import EID, ClientOptions, Experience
from experience_buffer._messages import annotate as annotations
from experience_buffer.collation import gather_response_attrs, gather_token_ids
def annotate(given):
    annotations.requests(given, buffer="b", options=ClientOptions())
def with_logprobs(tensor):
    return Experience(tokens=[1, 2, 3], prompt_length=1, logprobs=tensor)
def with_tokens(tensor):
    return Experience(tokens=tensor, prompt_length=1)
"""


def test_no_element_is_read_that_is_not_there() -> None:
    cases = {
        f"{kind}: {way}": f"""
def make(shape, dtype=torch.float32):
    made = torch.ones(shape, dtype=dtype)
    {break_it}
    return made
try:
    {code}
except ValueError as error:
    print(error)
"""
        for kind, break_it in UNREADABLE.items()
        for way, code in WAYS.items()
    }
    ends = run(READING, cases)
    for case, (said, code) in ends.items():
        way = case.partition(": ")[2]
        assert code == 0, case
        assert way in said, (case, said)
        assert " is a" in said or " is of" in said, (case, said)
        assert "Traceback" not in said, (case, said)


def test_a_masked_element_of_numpys_is_no_number() -> None:
    masked: dict[str, Any] = {"reward": np.ma.masked}
    with pytest.raises(InvalidRequestError, match="reward is masked"):
        Experience(tokens=[1, 2], prompt_length=1, **masked)


class Named(Tensor):
    """A tensor with another name, as users derive them."""


@pytest.mark.parametrize(
    "given",
    [
        torch.arange(4.0).as_subclass(Named),
        torch.arange(8.0)[::2].as_subclass(Named) / 2,
        torch.nn.Parameter(torch.arange(4.0)),
        torch.nn.Buffer(torch.arange(4.0)),
        torch.arange(4.0).requires_grad_() * 1,
        torch.arange(8.0)[4:] - 4,
        torch.arange(4.0).expand(2, 4)[1],
        torch._neg_view(torch.arange(4.0)).neg(),
        torch.complex(torch.arange(4.0), torch.zeros(4)).conj().real,
        torch.complex(torch.zeros(4), -torch.arange(4.0)).conj().imag,
    ],
)
def test_whatever_is_dense_memory_is_sent(given: Tensor) -> None:
    view = tensor_view(given)
    assert view.dtype == "F32"
    assert bytes(view.data) == torch.arange(4.0).numpy().tobytes()


def test_inference_tensors_are_sent() -> None:
    with torch.inference_mode():
        given = torch.arange(4.0)
    assert bytes(tensor_view(given).data) == torch.arange(4.0).numpy().tobytes()


@pytest.mark.parametrize("given", [torch.zeros(0), torch.zeros(3, 0), torch.zeros(0).t()])
def test_nothing_needs_no_memory(given: Tensor) -> None:
    assert tensor_view(given).shape == tuple(given.shape)


@pytest.mark.parametrize("name", ["tokens", "action_mask", "values", "routed_experts"])
def test_the_error_names_the_field_of_the_experience(name: str) -> None:
    freed = torch.ones(4, dtype=torch.float32 if name == "values" else torch.int64)
    freed.untyped_storage().resize_(0)
    good = Experience(eid=EID(0, 0, 0), tokens=[1, 2], prompt_length=1)
    fields: dict[str, Any] = {"tokens": [1, 2], "prompt_length": 1} | {name: freed}
    with pytest.raises(TrxpError, match=rf"items\[1\].{name}: a tensor of") as refused:
        Experience.serialize_many([good, Experience(**fields)])
    assert refused.value.item == 1
