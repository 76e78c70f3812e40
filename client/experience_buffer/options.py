"""Small immutable values that say how a client behaves and how a buffer is configured.

Those of a buffer's consumers are in `consumer_options.py`. Nothing here talks to a server;
`_messages/config.py` translates the configurations to messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypedDict

from experience_buffer._arguments import (
    NONE,
    Table,
    as_flag,
    check_number,
    check_path,
    check_text,
    check_whole,
    made,
    pairs,
    refused,
    shown,
)
from experience_buffer._show import Shown, plain, sparse
from experience_buffer.consumer_options import ConsumerConfig, Pacing, Selector, SelectorKind
from experience_buffer.errors import InvalidRequestError
from experience_buffer.leaving_options import Archive, Retention

if TYPE_CHECKING:
    from experience_buffer._arguments import Like, Several

__all__ = [
    "AdvantageConfig",
    "BadRewardPolicy",
    "BufferChanges",
    "BufferConfig",
    "ClientOptions",
    "DeadlinePolicy",
    "FullPolicy",
    "FuturePolicy",
    "GroupBy",
    "LatePolicy",
    "MissingFieldPolicy",
    "MissingVersionPolicy",
    "Parameter",
    "RetryOptions",
    "TlsOptions",
    "WriterOptions",
]
__dir__ = __all__.copy

GroupBy: TypeAlias = Literal["none", "task", "run", "step"]
"""Which key makes experiences one group."""
DeadlinePolicy: TypeAlias = Literal["wait", "use_partial", "drop"]
"""What happens to a group that isn't whole at its deadline."""
LatePolicy: TypeAlias = Literal["refuse", "new_group"]
"""What happens to an experience that comes after its group closed."""
BadRewardPolicy: TypeAlias = Literal["refuse", "tombstone"]
"""What happens to an experience whose reward is NaN, or missing though the estimator needs it."""
MissingFieldPolicy: TypeAlias = Literal["refuse", "wait"]
"""What happens to an experience without a field that the estimator needs."""
FullPolicy: TypeAlias = Literal["refuse", "evict", "block"]
"""What happens to a push that finds the buffer full."""
FuturePolicy: TypeAlias = Literal["hold", "refuse", "deliver"]
"""What happens to an experience of a policy version newer than the published one."""
MissingVersionPolicy: TypeAlias = Literal["refuse", "deliver"]
"""What happens to an experience without policy version where staleness is judged by versions."""
Parameter: TypeAlias = bool | int | float | str
"""A parameter of an advantage estimator; integers up to 2**53 are exact."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RetryOptions(Shown):
    """When and for how long failed calls are tried again.

    After failure n to reach the server a call waits `initial_backoff_seconds * multiplier**n`, at
    most `max_backoff_seconds`, less a random part of up to half of it; never less than the delay
    that the server asked for. A server that is full names the delay: the call waits once to twice
    that, however often it is refused. A call gives up at its deadline.

    Attributes:
        initial_backoff_seconds: Wait after the first failure to reach the server, above 0.
        multiplier: By how much the wait grows with each further failure, at least 1.
        max_backoff_seconds: Longest wait between two attempts, above 0.
        max_attempts: Attempts per call, the first included; 0: as many as the deadline allows; 1:
            no retry.
        reconnect_seconds: For how long a broken sample stream or writer tries to reach the server
            again.
    """

    initial_backoff_seconds: float = 0.1
    multiplier: float = 2.0
    max_backoff_seconds: float = 5.0
    max_attempts: int = 0
    reconnect_seconds: float = 300.0

    def __post_init__(self) -> None:
        for name in ("initial_backoff_seconds", "max_backoff_seconds"):
            check_number(name, getattr(self, name), is_open=True)
        check_number("multiplier", self.multiplier, least=1)
        check_whole("max_attempts", self.max_attempts)
        check_number("reconnect_seconds", self.reconnect_seconds)


_RETRY: Any = RetryOptions()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TlsOptions(Shown):
    """A secure channel. Files are read when the channel is made, so a pickled client holds no key.

    Attributes:
        ca_file: PEM certificates that the server's is checked against; None: the system's.
        certificate_file: PEM certificate that the client shows, for servers that ask for one.
        key_file: PEM private key of `certificate_file`.
        server_name: Name expected in the server's certificate; empty: the address's host.
    """

    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    server_name: str = ""

    def __post_init__(self) -> None:
        for name in ("ca_file", "certificate_file", "key_file"):
            check_path(name, getattr(self, name))
        check_text("server_name", self.server_name)
        if (self.certificate_file is None) != (self.key_file is None):
            raise InvalidRequestError(
                "certificate_file and key_file belong together: give both or neither",
                subject="certificate_file",
            )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ClientOptions(Shown):
    """What rarely needs changing.

    Attributes:
        max_message_bytes: Largest message, both ways. The server has a limit of its own.
        max_push_bytes: `push` and `annotate` aim at requests of at most this size; what is larger
            goes alone.
        max_push_items: Most experiences, and most tombstones, in one request of `push`.
        keepalive_seconds: Time between pings on a connection with open calls, to notice a dead
            peer; 0: none.
        keepalive_timeout_seconds: A connection whose ping isn't answered in this time counts as
            dead.
        retry: When and for how long failed calls are tried again.
        shared_memory: True: writers and sample streams share memory with a server on the same machine,
            where it has some and this process runs as the same user in the same namespace of processes.
        allow_insecure_token: True: send the token also over an unencrypted connection elsewhere.
        holder: What it calls itself to those who look at leases, at most 256 characters; empty: "host:pid".
    """

    max_message_bytes: int = 64 * 1024 * 1024
    max_push_bytes: int = 8 * 1024 * 1024
    max_push_items: int = 512
    keepalive_seconds: float = 60.0
    keepalive_timeout_seconds: float = 20.0
    retry: Like[RetryOptions] = field(default=_RETRY)
    shared_memory: bool = True
    allow_insecure_token: bool = False
    holder: str = ""

    def __post_init__(self) -> None:
        check_whole("max_push_items", self.max_push_items, least=1)
        check_whole("max_push_bytes", self.max_push_bytes, least=1)
        check_whole("max_message_bytes", self.max_message_bytes, least=64 * 1024, most=2**31 - 1)
        as_flag("shared_memory", self.shared_memory)
        as_flag("allow_insecure_token", self.allow_insecure_token)
        check_text("holder", self.holder, most=256)
        check_number("keepalive_seconds", self.keepalive_seconds)
        check_number("keepalive_timeout_seconds", self.keepalive_timeout_seconds)
        object.__setattr__(self, "retry", made(RetryOptions, self.retry, "retry"))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WriterOptions(Shown):
    """Bounds of a background writer.

    Attributes:
        max_pending_bytes: Payload bytes that may wait for their outcome; `append` blocks beyond.
        max_batch_items: Most experiences in one request.
        max_batch_bytes: Payload of one request, and no more than a message holds; one larger
            experience goes alone.
        linger_seconds: How long an experience waits for others to share its request.
        raise_on_refused: False: refused experiences are counted and logged only.
    """

    max_pending_bytes: int = 64 * 1024 * 1024
    max_batch_items: int = 128
    max_batch_bytes: int = 4 * 1024 * 1024
    linger_seconds: float = 0.02
    raise_on_refused: bool = True

    def __post_init__(self) -> None:
        for name in ("max_pending_bytes", "max_batch_items", "max_batch_bytes"):
            check_whole(name, getattr(self, name), least=1)
        check_number("linger_seconds", self.linger_seconds)
        as_flag("raise_on_refused", self.raise_on_refused)


@dataclass(frozen=True, slots=True, repr=False)
class AdvantageConfig(Shown):
    """How advantages are computed when a group is whole.

    Attributes:
        estimator: One of those in docs/advantages.md, such as "grpo" or "gae", or one that the
            server's configuration declares; empty: none are computed.
        parameters: The estimator's parameters by name, those left out at their defaults; the server
            refuses names that it doesn't know and values out of bounds.
    """

    estimator: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Describe it as plain data, with the parameters beside the estimator, as in TOML."""
        return {"estimator": self.estimator, **plain(self.parameters)}


@dataclass(frozen=True, slots=True, repr=False)
class BufferConfig(Shown):
    """Everything that can be set for a buffer; None takes the server's default.

    What is a value of its own may be given as in TOML, as a dict of its fields:
    `BufferConfig("math", group_size=8, advantage="grpo", consumers=["trainer"])`.

    Attributes:
        name: 1 to 64 characters of letters, digits, ".", "_" and "-".
        group_by: Which key makes experiences one group: "task", "run" or "step"; "none": there are
            no groups.
        group_size: Members that make a group whole; 0: only a push or `seal_group` states it.
        group_deadline_seconds: From a group's first member until its deadline; 0: none.
        on_group_deadline: What happens to a group that isn't whole at its deadline: "use_partial",
            "drop", or "wait" longer.
        min_group_size: Fewest members with which a partial group is used.
        late_members: What happens to members that come after their group closed: "refuse", or
            "new_group" begins another.
        on_bad_reward: What happens to a reward that is NaN, or missing though the estimator needs
            it: "refuse", or "tombstone" counts the experience as a failed rollout.
        on_missing_field: What happens to experiences without a field that the estimator needs:
            "refuse" names the field; "wait" stores them, and their groups wait for `annotate` until
            their deadlines.
        consumers: The readers, each a `ConsumerConfig` or a name alone, which takes items; None:
            one named "trainer".
        advantage: How advantages are computed when a group is whole: an `AdvantageConfig`, the
            estimator's name alone, or a dict with it and its parameters.
        lease_seconds: Until an unacknowledged delivery is offered again.
        max_items: Most experiences in the buffer; 0: bounded by bytes only.
        max_bytes: Most payload bytes in the buffer.
        duplicate_horizon_seconds: For how long a consumed uid is remembered to recognise a repeated
            push.
        on_full: A push that finds the buffer full is refused with a delay after which to try again
            ("refuse"), or units that `remover` chooses make room ("evict"), or it waits in line
            ("block"); leased and retained ones stay.
        full_timeout_seconds: Under "block": the longest wait of a push for room.
        remover: What makes room under "evict", whole groups where there are groups: a `Selector`,
            or its kind alone.
        max_pending_bytes: Most bytes of pushes that wait for their commit, and as many in line for
            room; 0: the server's bounds alone.
        retention: What leaves by its age or its policy version; None: nothing does.
        on_future_version: What happens to experiences of a policy version that isn't published yet,
            as after a rollback: "hold" keeps them until it is, "refuse" when pushed, "deliver" like
            any other.
        on_missing_version: What happens to experiences that don't say which policy version made
            them, where a consumer's staleness is judged by it (`max_lag`, `max_version_span`):
            "refuse" when pushed, and those that were stored before are held for `annotate`;
            "deliver" as if they were fresh.
        pacing: Admission of new tasks; None: all are admitted.
        archive: What stays readable after it has left; None: nothing does.
    """

    name: str
    group_by: GroupBy | None = field(default=None, kw_only=True)
    group_size: int | None = field(default=None, kw_only=True)
    group_deadline_seconds: float | None = field(default=None, kw_only=True)
    on_group_deadline: DeadlinePolicy | None = field(default=None, kw_only=True)
    min_group_size: int | None = field(default=None, kw_only=True)
    late_members: LatePolicy | None = field(default=None, kw_only=True)
    on_bad_reward: BadRewardPolicy | None = field(default=None, kw_only=True)
    on_missing_field: MissingFieldPolicy | None = field(default=None, kw_only=True)
    consumers: Several[ConsumerConfig] = field(default=NONE, kw_only=True)
    advantage: Like[AdvantageConfig | None] = field(default=NONE, kw_only=True)
    lease_seconds: float | None = field(default=None, kw_only=True)
    max_items: int | None = field(default=None, kw_only=True)
    max_bytes: int | None = field(default=None, kw_only=True)
    duplicate_horizon_seconds: float | None = field(default=None, kw_only=True)
    on_full: FullPolicy | None = field(default=None, kw_only=True)
    full_timeout_seconds: float | None = field(default=None, kw_only=True)
    remover: Like[Selector | None] = field(default=NONE, kw_only=True)
    max_pending_bytes: int | None = field(default=None, kw_only=True)
    retention: Like[Retention | None] = field(default=NONE, kw_only=True)
    on_future_version: FuturePolicy | None = field(default=None, kw_only=True)
    on_missing_version: MissingVersionPolicy | None = field(default=None, kw_only=True)
    pacing: Like[Pacing | None] = field(default=NONE, kw_only=True)
    archive: Like[Archive | None] = field(default=NONE, kw_only=True)

    def __post_init__(self) -> None:
        keep = partial(object.__setattr__, self)  # It is frozen once it is made.
        if self.consumers is not None:
            keep("consumers", _consumers(self.consumers))
        if self.advantage is not None:
            keep("advantage", _advantage(self.advantage))
        if self.remover is not None:
            keep("remover", made(Selector, self.remover, "remover", alone="kind"))
        if self.retention is not None:
            keep("retention", made(Retention, self.retention, "retention"))
        if self.pacing is not None:
            keep("pacing", made(Pacing, self.pacing, "pacing"))
        if self.archive is not None:
            keep("archive", made(Archive, self.archive, "archive"))

    def __repr__(self) -> str:
        return sparse(self, _SERVER_DEFAULTS)


_REFUSING: Final = ("late_members", "on_bad_reward", "on_missing_field", "on_full")
_SERVER_DEFAULTS: Final = {
    **dict.fromkeys((*_REFUSING, "on_missing_version"), "refuse"),
    **dict.fromkeys(("group_size", "group_deadline_seconds", "max_items", "max_pending_bytes"), 0),
    **{"group_by": "task", "on_group_deadline": "wait", "min_group_size": 1},
    **{"consumers": (ConsumerConfig("trainer"),), "advantage": AdvantageConfig()},
    **{"lease_seconds": 600, "duplicate_horizon_seconds": 86400, "full_timeout_seconds": 10},
    **{"max_bytes": 64 * 1024**3, "remover": Selector(), "on_future_version": "hold"},
}
"""What the server takes where nothing is given: a repr needn't say it."""


def _consumers(given: object) -> tuple[ConsumerConfig, ...]:
    """The readers of a list, each as it is, as a table, or as its name."""
    if isinstance(given, (str, Mapping, ConsumerConfig)) or not isinstance(given, Sequence):
        raise refused(
            "consumers", given, 'a list of names, dicts or ConsumerConfig, such as ["trainer"]'
        )
    if not given:
        raise refused("consumers", given, "at least one, or leave it out: nobody would read")
    return tuple(
        made(ConsumerConfig, each, f"consumers[{index}]", alone="name")
        for index, each in enumerate(given)
    )


def _advantage(given: object) -> AdvantageConfig:
    """An estimator as it is, as its name, or as a table where its parameters stand beside it."""
    if isinstance(given, Mapping):
        table = dict(pairs("advantage", given, "a dict"))
        estimator = table.pop("estimator", "")
        if isinstance(parameters := table.get("parameters"), Mapping):
            beside = {"estimator": estimator, **parameters}
            raise InvalidRequestError(
                f"advantage.parameters is {shown(parameters)}; in a dict they stand beside the "
                f"estimator: {shown(beside)}",
                subject="advantage",
            )
        return AdvantageConfig(estimator, table)
    return made(AdvantageConfig, given, "advantage", alone="estimator")


class BufferChanges(TypedDict, total=False):
    """What `update_buffer` can change: the fields of `BufferConfig`, each only if given.

    `pacing=None` ends the admission of tasks, `retention=None` keeps what is old,
    `archive=None` ends the archive: its files stay until the buffer is deleted.
    """

    group_by: GroupBy
    group_size: int
    group_deadline_seconds: float
    on_group_deadline: DeadlinePolicy
    min_group_size: int
    late_members: LatePolicy
    on_bad_reward: BadRewardPolicy
    on_missing_field: MissingFieldPolicy
    consumers: Sequence[ConsumerConfig | str | Table]
    advantage: AdvantageConfig | str | Table
    lease_seconds: float
    max_items: int
    max_bytes: int
    duplicate_horizon_seconds: float
    on_full: FullPolicy
    full_timeout_seconds: float
    remover: Selector | SelectorKind | Table
    max_pending_bytes: int
    retention: Retention | Table | None
    on_future_version: FuturePolicy
    on_missing_version: MissingVersionPolicy
    pacing: Pacing | Table | None
    archive: Archive | Table | None
