"""`experience-buffer buffers`: the buffers of a server, or one with its settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experience_buffer_server.commands.looking import Looking, looks

if TYPE_CHECKING:
    from rich.console import RenderableType

    from experience_buffer import BufferInfo


@looks
def buffers(
    look: Looking,
    name: Annotated[str, typer.Argument(help="Show only this one, with all its settings.")] = "",
) -> None:
    """List the buffers, or show one with its settings as they hold now."""
    if name:
        one = look.client.get_buffer(name)
        if look.as_json:
            look.json([one])
        else:
            look.say(*_settings(one))
        return
    found = look.client.list_buffers()
    if look.as_json:
        look.json(found)
        return
    if not found:
        look.say("there is no buffer yet: a client makes one with create_buffer")
        return
    from experience_buffer import _show
    from experience_buffer_server.commands.terminal import ago, table

    look.say(
        table(
            "!buffer", ">experiences", ">size", ">policy", "group", "advantage", "consumers", "age",
            rows=[
                (
                    *(each.config.name, each.num_items, _show.size(each.num_bytes)),
                    *(each.policy_version, _grouping(each), _estimator(each)),
                    ", ".join(consumer.name for consumer in each.config.consumers or ()),
                    ago(each.create_time),
                )
                for each in found
            ],
        )
    )  # fmt: skip


def _grouping(info: BufferInfo) -> str:
    """How experiences are grouped: "task of 8"."""
    config = info.config.to_dict()
    by, size = config.get("group_by"), config.get("group_size")
    return f"{by} of {size}" if by and size else str(by or "")


def _estimator(info: BufferInfo) -> str:
    advantage = info.config.to_dict().get("advantage")
    return str(advantage.get("estimator", "")) if isinstance(advantage, dict) else ""


def _settings(info: BufferInfo) -> Iterator[RenderableType]:
    """All settings of a buffer, one a line, by their path."""
    from rich.text import Text

    from experience_buffer import _show
    from experience_buffer_server.commands.terminal import ago, clean, table

    version = "none" if info.policy_version is None else f"{info.policy_version:,}"
    yield Text(clean(info.config.name), style="bold")
    yield (
        f"{_show.counted(info.num_items, 'experience')}, {_show.size(info.num_bytes)}, policy "
        f"version {version}, created {ago(info.create_time)} ago"
    )
    yield ""
    rows = [(path, value) for path, value in _flat(info.config.to_dict()) if path != "name"]
    yield table("!setting", "value", rows=rows)


def _flat(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for each in value:
                yield from _flat(each, f"{path}{key}[{each.get('name', '')}].")
        elif value not in (None, "", [], {}):
            yield f"{path}{key}", str(value)
