"""Settings of the server: typed, bounded, from TOML and the environment.

Unknown keys are errors, and every error names the key. Nothing is read at import.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from experience_buffer.trxp import DEFAULT_LIMITS, Limits
from experience_buffer_server.advantages.plan import custom
from experience_buffer_server.settings.access import AccessSection, TlsSection
from experience_buffer_server.settings.buffer import GIBI, KIBI, MEBI, NO_ARCHIVE, BufferSettings
from experience_buffer_server.settings.consumer import Name, Section
from experience_buffer_server.settings.estimators import Declarations, Estimators

ENV_PREFIX = "EXPERIENCE_BUFFER_"
COMPUTED_TENSORS = 8
"""Of those that a trainer may get with one experience, how many the server may add."""
COMPUTED_HEADER_BYTES = 4096
"""Of the table that describes them, how much the server may add."""
_MOST_KEEPALIVE_SECONDS = 86_400
"""gRPC counts milliseconds, in 32 bits."""
_SHOWN_CHARS = 200
CLIENT_VARIABLES = ("address", "token_file", "ca", "certificate", "key", "server_name")
"""What follows the prefix in variables that say to commands how to reach a server."""
_FILE_ONLY = ("estimators",)
"""Sections that name code to be run: from the operator's file, and from nowhere else."""


class ConfigurationError(ValueError):
    """The configuration can't be used; the message names the key and what it takes."""


class ServerSection(Section):
    """Addresses, limits and manners of the process."""

    host: str = "127.0.0.1"
    """Address, name or `unix:/path` to listen on; beyond loopback only with TLS and known callers."""
    port: int = Field(50051, ge=0, le=65535)
    """0: a free port; the log line "listening" names it."""
    metrics_host: str = "127.0.0.1"
    """Interface of the metrics endpoint; as for `host`."""
    metrics_port: int = Field(9464, ge=-1, le=65535)
    """0: a free port; -1: no metrics endpoint."""
    http_names: tuple[str, ...] = ()
    """Names under which the HTTP server may be asked, beside those that no stranger can have."""
    page: bool = True
    """The page that looks into the buffers, at `/ui/` of the HTTP server."""
    tokenizer: Path | None = None
    """A file of the `tokenizers` format: pages and JSON have texts for token ids."""
    http_push: bool = False
    """Experiences can be pushed as JSON; else HTTP changes nothing."""
    insecure: bool = False
    """Allow plain text and unknown callers beyond the loopback interface."""
    update_buffers: bool = False
    """Stored buffers take the settings given in `[buffers.NAME]` instead of keeping their own."""
    reflection: bool = True
    """Generic gRPC tools can list and call the service."""
    max_message_bytes: int = Field(64 * MEBI, ge=64 * KIBI, le=GIBI)
    """Largest request and response."""
    max_push_items: int = Field(4096, ge=1)
    """Most experiences in one push."""
    max_metadata_bytes: int = Field(
        DEFAULT_LIMITS.max_metadata_bytes, ge=KIBI, le=DEFAULT_LIMITS.max_metadata_bytes
    )
    """Largest metadata of one push."""
    max_metadata_depth: int = Field(DEFAULT_LIMITS.max_depth, ge=4, le=DEFAULT_LIMITS.max_depth)
    """Deepest nesting of an experience's metadata."""
    max_metadata_nodes: int = Field(DEFAULT_LIMITS.max_nodes, ge=KIBI, le=DEFAULT_LIMITS.max_nodes)
    """Most values in the metadata of one push."""
    max_header_bytes: int = Field(
        DEFAULT_LIMITS.max_header_bytes - COMPUTED_HEADER_BYTES,
        ge=KIBI,
        le=DEFAULT_LIMITS.max_header_bytes - COMPUTED_HEADER_BYTES,
    )
    """Largest table of a push's tensors: trainers must be able to read it with what is computed."""
    max_tensors: int = Field(1024, ge=8, le=DEFAULT_LIMITS.max_tensors - COMPUTED_TENSORS)
    """Most tensors of one experience."""
    max_pending_bytes: int = Field(256 * MEBI, ge=MEBI)
    """Most bytes of pushes that wait for their commit, and half as many that wait for room."""
    max_pending_bytes_per_client: int = Field(0, ge=0)
    """Most of them from one client; 0: no more than what is left for all others."""
    max_response_bytes: int = Field(256 * MEBI, ge=MEBI)
    """Most bytes of responses that wait to be sent; beyond, calls are refused and streams wait."""
    max_shared_bytes: int = Field(512 * MEBI, ge=0)
    """Most memory shared with streams of clients on the same machine; those beyond go without."""
    max_waiting_pushes: int = Field(1024, ge=1)
    """Most pushes that wait in line for room, per buffer."""
    max_waiting_samples: int = Field(4096, ge=1)
    """Most sample calls and streams that wait at once, per buffer."""
    max_waiting_samples_per_client: int = Field(2048, ge=0)
    """Most of them from one client, over all buffers; 0: any number."""
    max_streams: int = Field(8192, ge=0)
    """Most open streams; 0: any number."""
    max_streams_per_client: int = Field(4096, ge=0)
    """Most of them from one client; 0: any number."""
    max_calls: int = Field(16384, ge=1, lt=2**31)
    """Most calls under way, streams included."""
    max_buffers: int = Field(1024, ge=1)
    """Most buffers."""
    max_leased_experiences: int = Field(1_000_000, ge=1)
    """Most experiences leased at once, per consumer."""
    keepalive_seconds: float = Field(60.0, ge=0, le=_MOST_KEEPALIVE_SECONDS)
    """A peer that has been silent for so long is asked whether it lives; 0: never."""
    keepalive_timeout_seconds: float = Field(20.0, gt=0, le=_MOST_KEEPALIVE_SECONDS)
    """How long a peer has to answer that, and a new connection to say what it wants."""
    compiled_reader: bool = True
    """Most pushes are read by compiled code: for a third of the CPU time, and 40 MB of memory."""
    shutdown_grace_seconds: float = Field(10.0, ge=0)
    """After SIGTERM, how long calls under way may take."""
    log_format: Literal["auto", "text", "json"] = "auto"
    """auto: text on a terminal, else JSON lines."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """The least severe entries that are written."""

    @field_validator("tokenizer", mode="before")
    @classmethod
    def _empty_is_none(cls, value: Any) -> Any:
        # As an environment variable that is set to nothing.
        return None if value == "" else value

    @property
    def payload_limits(self) -> Limits:
        """What a pushed payload may ask of its reader, never more than a trainer's reader allows."""
        return Limits(
            max_message_bytes=self.max_message_bytes,
            max_metadata_bytes=self.max_metadata_bytes,
            max_header_bytes=self.max_header_bytes,
            max_tensors=self.max_tensors,
            max_nodes=self.max_metadata_nodes,
            max_depth=self.max_metadata_depth,
        )


class StoreSection(Section):
    """The durable store."""

    path: Path = Path("data")
    """The folder of the store; made if missing. On a local disk, and one server's alone."""
    memory: bool = False
    """Keep nothing on a disk: nothing survives the process. For trying out, and for tests."""
    durability: Literal["commit", "interval"] = "commit"
    """commit: an ack follows the fsync; interval: the disk follows within `sync_interval_seconds`."""
    sync_interval_seconds: float = Field(1.0, gt=0)
    """Under `durability = "interval"`: from one fsync to the next."""
    max_map_bytes: int = Field(1024 * GIBI, ge=16 * MEBI)
    """What is stored never takes more, nor does either file; they grow as they are filled."""


class SnapshotsSection(Section):
    """Snapshots of the store."""

    path: Path | None = None
    """The folder that they are written to; None: snapshots are off."""
    keep: int = Field(0, ge=0)
    """How many stay; 0: all."""
    interval_seconds: float = Field(0.0, ge=0)
    """From one to the next; 0: only on request."""
    nice: int = Field(10, ge=0, le=19)
    """Of the process that takes them: 0 has the server's priority, 19 the least."""

    @field_validator("path", mode="before")
    @classmethod
    def _empty_is_none(cls, value: Any) -> Any:
        # As an environment variable that is set to nothing: not the folder that the server runs in.
        return None if value == "" else value


class ComputeSection(Section):
    """The process that computes advantages."""

    device: str = "auto"
    """auto: cuda where there is one, else cpu; or a torch device name."""
    threads: int = Field(1, ge=1)
    """For the loops over tokens on the CPU."""
    start_early: bool = True
    """The process starts with the server, and not with the first buffer that has an estimator."""
    max_batch_groups: int = Field(1024, ge=1)
    """Most groups in one launch."""
    max_batch_tokens: int = Field(32_768, ge=1)
    """Response tokens beyond which a launch takes no more groups."""
    max_latency_seconds: float = Field(0.002, ge=0)
    """How long a whole group waits for others to share its launch."""
    max_launch_seconds: float = Field(120.0, ge=1)
    """The process is killed when it takes longer: what it was computing is tried again alone, then
    quarantined."""

    @property
    def names_a_device(self) -> bool:
        """Whether it asks for a device that may not be there."""
        return self.device not in ("auto", "cpu")


class Settings(BaseSettings):
    """Everything that can be configured. The environment wins over the file."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True
    )

    server: ServerSection = ServerSection()
    store: StoreSection = StoreSection()
    compute: ComputeSection = ComputeSection()
    snapshots: SnapshotsSection = SnapshotsSection()
    tls: TlsSection = TlsSection()
    access: AccessSection = AccessSection()
    buffers: dict[Name, BufferSettings] = Field(
        default_factory=lambda: {"default": BufferSettings()}
    )
    """Created at the start where they don't exist; an existing buffer keeps its stored settings."""
    estimators: Estimators = {}
    """The operator's own estimators, by name."""

    @field_validator("buffers")
    @classmethod
    def _possible(cls, buffers: dict[Name, BufferSettings]) -> dict[Name, BufferSettings]:
        for name, buffer in buffers.items():
            if problem := buffer.impossible():
                raise ValueError(f"{name}: {problem}")
        return buffers

    @model_validator(mode="after")
    def _archives_have_a_place(self) -> Settings:
        for name, buffer in self.buffers.items():
            if self.store.memory and buffer.archive is not None:
                raise ValueError(f"buffers.{name}.archive: {NO_ARCHIVE}")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order: environment, then what `load_settings` passes (the file)."""
        return env_settings, init_settings


def load_settings(path: Path | None = None, **overrides: dict[str, Any]) -> Settings:
    """Read the file and the environment.

    The operator's estimators are declared to this process (`custom.declare`) before the
    settings of buffers are checked, here or when they are restored or come over the network.

    Args:
        path: A TOML file; None: defaults and environment only.
        overrides: Per section, values from the command line; they win over everything.

    Raises:
        ConfigurationError: The file can't be read, or a key is unknown or out of bounds.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigurationError(f"configuration file {path}: {error}") from error
    _refuse_unknown_environment()
    try:
        custom.declare(Declarations.model_validate(values).specs())
        settings = Settings(**values)
        for section, changes in overrides.items():
            given = {key: value for key, value in changes.items() if value is not None}
            current = getattr(settings, section)
            changed = type(current).model_validate(current.model_dump() | given)
            settings = settings.model_copy(update={section: changed})
    except ValidationError as error:
        raise ConfigurationError(explain(error, of=Settings)) from error
    except SettingsError as error:
        raise ConfigurationError(
            f"environment: {error}; give JSON, or one variable per key"
        ) from error
    return settings


def explain(error: ValidationError, *, of: type[BaseModel] | None = None) -> str:
    """What is wrong with each key, in one line; see `problems`."""
    return "; ".join(f"{key}: {message}" for key, message in problems(error, of=of))


def problems(
    error: ValidationError, *, of: type[BaseModel] | None = None
) -> Iterator[tuple[str, str]]:
    """Each wrong key by its path, with what is wrong, what would do, and the value that it has.

    Args:
        error: What was raised.
        of: The table that was read: of an unknown key the nearest one that it knows is named, too.
    """
    for detail in error.errors():
        key = ".".join(str(part) for part in detail["loc"]) or "configuration"
        message = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "extra_forbidden":
            known = [] if of is None else _keys_beside(of, detail["loc"])
            near = difflib.get_close_matches(str(detail["loc"][-1]), known, n=1)
            message = f"unknown key; did you mean {near[0]}?" if near else "unknown key"
        elif not isinstance(detail["input"], dict | BaseModel):
            message += f" (got {_shown(detail['input'])})"
        yield key, message


def _keys_beside(table: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """The keys that a table has where a path into it ends; a name or number leads to what it is of."""
    for part in path[:-1]:
        field = table.model_fields.get(str(part))
        if field is not None:
            table = next(_tables(field.annotation), table)
    return list(table.model_fields)


def _tables(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _tables(part)


def _shown(value: object) -> str:
    """The value in short: a sender may have given it millions of characters."""
    if isinstance(value, str | bytes) and len(value) > _SHOWN_CHARS:
        return f"{value[:_SHOWN_CHARS]!r}... of {len(value)} characters"
    return f"{value!r:.{4 * _SHOWN_CHARS}}"


def _refuse_unknown_environment() -> None:
    """A misspelt variable must not be ignored silently."""
    for variable in os.environ:
        if not variable.upper().startswith(ENV_PREFIX):
            continue
        section = variable[len(ENV_PREFIX) :].split("__")[0].lower()
        if section in CLIENT_VARIABLES:
            continue
        if section in _FILE_ONLY:
            raise ConfigurationError(
                f"environment variable {variable}: declare {section} in the configuration file"
            )
        if section not in Settings.model_fields:
            sections = (name for name in Settings.model_fields if name not in _FILE_ONLY)
            known = ", ".join(f"{ENV_PREFIX}{name.upper()}__..." for name in sections)
            raise ConfigurationError(
                f"environment variable {variable}: unknown; there are: {known}"
            )
