"""The clients' own verbs, given what no argument expects, over a channel that only counts.

Whatever is given, what comes out is one of the package's errors that names the argument, raised before
anything is sent, and the next call works. `choose` says which verb, which arguments and which values.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from experience_buffer import (
    EID,
    AdvantageConfig,
    AsyncClient,
    BufferConfig,
    Client,
    ClientOptions,
    ConsumerConfig,
    Experience,
    ExperienceBufferError,
    Limiter,
    Pacing,
    PushRefusedError,
    Retention,
    RetryOptions,
    Selector,
    Staleness,
    TlsOptions,
    Tombstone,
    WriterOptions,
)
from experience_buffer._messages import sample_bytes
from experience_buffer.dataset import ExperienceDataset, LeaseTicket
from experience_buffer.options import BufferChanges
from experience_buffer.v1 import looking_pb2
from experience_buffer.v1 import service_pb2 as pb
from tests.fuzz import hostile

Choose = Callable[[int], int]
"""A number below the one given."""
UID: Final = "a/b/0/0/s"


def rollout(**fields: Any) -> Experience:
    """A good experience."""
    eid = EID("a", "b", 0, 0, "s")
    return Experience(eid=eid, tokens=[1, 2], prompt_length=1, reward=1.0, **fields)


class Counting:
    """Stands for a stub: answers every call with an empty message, and counts them."""

    def __init__(self, *, is_async: bool) -> None:
        self.num_sent = 0
        self._is_async = is_async

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda request, **options: self._answer(method, request)

    def _answer(self, method: str, request: Any) -> Any:
        self.num_sent += 1
        if not isinstance(request, bytes):
            request.SerializeToString()
        name = f"{method}Response"
        answer: Any = (getattr(pb, name, None) or getattr(looking_pb2, name))()
        if method == "Sample":
            answer.lease.id = 3
            answer = sample_bytes.Received(answer, (), b"")

        async def later() -> Any:
            return answer

        return later() if self._is_async else answer


class _SyncClient(Client):
    def _prepare(self) -> None:
        super()._prepare()
        self.counting = Counting(is_async=False)

    def _get_stub(self) -> Any:
        return self.counting


class _AsyncClient(AsyncClient):
    def _prepare(self) -> None:
        super()._prepare()
        self.counting = Counting(is_async=True)

    def _get_stub(self) -> Any:
        return self.counting


GOOD: Final[Mapping[str, Callable[[], Any]]] = {
    "address": lambda: "localhost:1",
    "annotations": lambda: {UID: {"reward": 1.0}},
    "batch_size": lambda: 4,
    "buffer": lambda: "math",
    "client": lambda: _SyncClient("localhost:1"),
    "config": lambda: BufferConfig("math"),
    "consumer": lambda: "trainer",
    "experiences": lambda: [rollout(), rollout()],
    "group": lambda: "a/b",
    "groups": lambda: ["a/b"],
    "label": lambda: "x",
    "lease_id": lambda: 17,
    "max_items": lambda: 5,
    "max_staleness": lambda: 3,
    "name": lambda: "math",
    "priorities": lambda: {UID: 1.0},
    "reason": lambda: "why",
    "state": lambda: {"version": 1, "buffer": "math", "consumer": "trainer", "step": 3},
    "step": lambda: 3,
    "ticket": lambda: LeaseTicket("math", "trainer", 3, None, 0, 1),
    "tid": lambda: "a/b",
    "tombstones": lambda: [Tombstone(EID("a", "b", 1, 0, "s"), "gone")],
    "uid": lambda: UID,
    "uids": lambda: [UID],
    "version": lambda: 3,
    "estimator": lambda: "grpo",
    "eid": lambda: EID("a", "b", 1, 0, "s"),
}
_NOT_VERBS: Final = {"close", "address", "timeout", "options", "counting"}
_ALSO: Final = {
    "client": "address",
    "config": "name",
    "uids": "uid",
    "state": "step",
    "tls": "_file",
    "parameters": "advantage",
}
"""What an error may name instead, of which the argument is made."""
_OPTIONS: Final = (ClientOptions, RetryOptions, TlsOptions, WriterOptions)
_CONFIGS: Final[tuple[tuple[type[Any], str], ...]] = (
    (BufferConfig, ""),
    (ConsumerConfig, "consumers"),
    (AdvantageConfig, "advantage"),
    (Retention, "retention"),
    (Pacing, "pacing"),
    (Selector, "remover"),
    (Limiter, "limiter"),
    (Staleness, "staleness"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call: of what, and with which parameters."""

    name: str
    parameters: tuple[str, ...]
    required: frozenset[str]
    """Those that a good call has."""
    call: Callable[[dict[str, Any]], Any]
    """Takes arguments by parameter."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """What the parameters are annotated as."""


def _parameters(made: Any) -> tuple[tuple[str, ...], frozenset[str]]:
    given = [each for each in inspect.signature(made).parameters.values() if each.name != "self"]
    plain = [each for each in given if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    required = frozenset(each.name for each in plain if each.default is each.empty)
    return tuple(each.name for each in plain), required


def _kinds(made: Any) -> dict[str, str]:
    return {name: str(each.annotation) for name, each in inspect.signature(made).parameters.items()}


def _kinds_of_changes(verb: str) -> dict[str, str]:
    given = BufferChanges.__annotations__ if verb == "update_buffer" else {}
    return {name: kind.__forward_arg__ for name, kind in given.items()}


class Verbs:
    """All that is tried. Not thread-safe."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self.clients: tuple[Any, Any] = (_SyncClient("localhost:1"), _AsyncClient("localhost:1"))
        self.cases: list[Case] = []
        for client in self.clients:
            self.cases += self._cases_of_client(client)
        for kind in (*_OPTIONS, _SyncClient, _AsyncClient):
            names, required = _parameters(kind)
            self.cases.append(
                Case(name=kind.__name__, parameters=names, required=required, call=_maker(kind))
            )
        for kind, place in _CONFIGS:
            names, required = _parameters(kind)
            call = self._config_call(kind, place)
            name = f"create_buffer({kind.__name__})"
            self.cases.append(Case(name=name, parameters=names, required=required, call=call))
        names, required = _parameters(Tombstone)
        self.cases.append(
            Case(name="Tombstone", parameters=names, required=required, call=self._tombstone)
        )
        names, _ = _parameters(EID)
        self.cases.append(
            Case(name="EID", parameters=names, required=frozenset(), call=self._identity)
        )
        self._add_dataset()

    def close(self) -> None:
        """End the loop."""
        self._loop.close()

    def _cases_of_client(self, client: Any) -> Iterator[Case]:
        kind = type(client).__mro__[1].__name__
        for verb in sorted(set(dir(client)) - _NOT_VERBS):
            if verb.startswith("_"):
                continue
            method = getattr(client, verb)
            names, required = _parameters(method)
            if verb == "delete":
                required |= {"uids"}
            if verb == "update_buffer":
                required |= {"max_items"}
                names += tuple(BufferChanges.__annotations__)
            yield Case(
                name=f"{kind}.{verb}",
                parameters=names,
                required=required,
                call=self._caller(client, method),
                kinds=_kinds(method) | _kinds_of_changes(verb),
            )
        yield Case(
            name=f"{kind}.writer.append",
            parameters=("experiences", "timeout"),
            required=frozenset({"experiences"}),
            call=lambda given: self._append(client, **given),
        )
        for verb, names in (
            ("ack", ("step",)),
            ("begin_ack", ("step",)),
            ("nack", ("reason",)),
            ("extend", ("lease_seconds",)),
        ):
            yield Case(
                name=f"{kind}.sample.{verb}",
                parameters=names,
                required=frozenset(),
                call=self._batch_caller(client, verb),
            )

    def _caller(self, client: Any, method: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
        return lambda given: self._settled(method(**given))

    def _settled(self, found: Any) -> Any:
        """What a verb returns in the end, all of it."""
        if inspect.isawaitable(found):
            return self._loop.run_until_complete(_awaited(found))
        if inspect.isasyncgen(found):
            return self._loop.run_until_complete(_all(found))
        return list(found) if inspect.isgenerator(found) else found

    def _append(self, client: Any, **given: Any) -> None:
        writer = client.writer()
        writer._start = lambda: None
        self._settled(writer.append(**given))

    def _batch_caller(self, client: Any, verb: str) -> Callable[[dict[str, Any]], Any]:
        batch = self._settled(client.sample(4))

        def call(given: dict[str, Any]) -> Any:
            found = getattr(batch, verb)(**given)
            return self._settled(found.result() if verb == "begin_ack" else found)

        return call

    def _config_call(self, kind: type[Any], place: str) -> Callable[[dict[str, Any]], Any]:
        def call(given: dict[str, Any]) -> Any:
            made = kind(**given)
            if place in ("limiter", "staleness"):
                made = ConsumerConfig("trainer", **{place: made})
            if isinstance(made, ConsumerConfig):
                made = BufferConfig("math", consumers=(made,))
            elif place:
                fields: dict[str, Any] = {place: made}
                made = BufferConfig("math", **fields)
            return self.clients[0].create_buffer(made)

        return call

    def _tombstone(self, given: dict[str, Any]) -> Any:
        return self.clients[0].push([], tombstones=[Tombstone(**given)])

    def _identity(self, given: dict[str, Any]) -> Any:
        return self.clients[0].push([], tombstones=[Tombstone(EID(**given))])

    def _add_dataset(self) -> None:
        client = self.clients[0]
        names, required = _parameters(ExperienceDataset)
        make = _maker(ExperienceDataset)
        self.cases.append(
            Case(name="ExperienceDataset", parameters=names, required=required, call=make)
        )
        dataset = ExperienceDataset(client, batch_size=4, buffer="math", ack="manual")
        for verb in ("ack", "nack", "state_dict", "load_state_dict", "declare_safe"):
            method = getattr(dataset, verb)
            names, required = _parameters(method)
            self.cases.append(
                Case(
                    name=f"ExperienceDataset.{verb}",
                    parameters=names,
                    required=required,
                    call=self._caller(client, method),
                )
            )

    @property
    def num_sent(self) -> int:
        """Calls of both clients so far."""
        return sum(client.counting.num_sent for client in self.clients)

    def check(self, case: Case, wrong: Mapping[str, Any]) -> ExperienceBufferError | None:
        """Make one call; the error that it ends in.

        Args:
            case: What is called.
            wrong: The arguments that aren't good, by parameter; the others are.
        """
        given = {name: GOOD[name]() for name in case.required if name in GOOD} | dict(wrong)
        before = self.num_sent
        found: ExperienceBufferError | None = None
        try:
            case.call(given)
        except ExperienceBufferError as error:
            found = error
        num_sent = self.num_sent - before
        if found is not None:
            text, names = str(found), {*wrong, *(_ALSO[name] for name in wrong if name in _ALSO)}
            text.encode()
            assert len(text) < 2000
            if not isinstance(found, PushRefusedError):
                what = f"{case.name} with {list(wrong)}: {text}"
                assert any(name in f"{found.subject} {text}" for name in names), what
                assert num_sent == 0, f"{what}: it was raised after something was sent"
        self._check_good()
        return found

    def _check_good(self) -> None:
        for client in self.clients:
            assert self._settled(client.get_stats()).buffers == ()

    def run(self, choose: Choose) -> None:
        """Make one call with wrong arguments."""
        case = self.cases[choose(len(self.cases))]
        if not case.parameters:
            return
        wrong = {}
        for _ in range(1 + choose(2)):
            wrong[case.parameters[choose(len(case.parameters))]] = value(choose)
        self.check(case, wrong)

    def __call__(self, data: bytes) -> None:
        """Be a target of `make fuzz`: two bytes for each choice."""
        left = iter(data)

        def choose(count: int) -> int:
            return (next(left, 0) * 256 + next(left, 0)) % count

        self.run(choose)


def value(choose: Choose) -> Any:
    """A value that no argument expects."""
    kind = choose(4)
    if kind == 0:
        return hostile.WHOLES[choose(len(hostile.WHOLES))]()
    found = hostile.SCALARS[choose(len(hostile.SCALARS))]()
    return hostile.CONTAINERS[choose(len(hostile.CONTAINERS))](found) if kind == 1 else found


def _maker(kind: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda given: kind(**given)


async def _awaited(found: Any) -> Any:
    return await found


async def _all(found: Any) -> list[Any]:
    return [each async for each in found]
