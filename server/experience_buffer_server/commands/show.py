"""`experience-buffer show UID`: one experience with its texts, tokens, computation and history."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from experience_buffer_server.commands import at_rest
from experience_buffer_server.commands.looking import BufferName, Looking, looks

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from experience_buffer import Client, Experience, StoredExperience
    from experience_buffer_server.commands.token_columns import Columns, Texts

_MOST_CHARS: Final = 20_000
_MOST_MESSAGES: Final = 50
_MOST_CANDIDATES: Final = 20


class ColorBy(StrEnum):
    """By what the tokens of a response are coloured."""

    ADVANTAGE = "advantage"
    LOGPROB = "logprob"
    MASK = "mask"


@looks
def show(
    look: Looking,
    uid: Annotated[str, typer.Argument(help="Its uid, or the beginning of it.")],
    buffer: BufferName = "",
    color_by: Annotated[
        ColorBy, typer.Option("--color-by", help="What the tokens' background tells.")
    ] = ColorBy.ADVANTAGE,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A tokenizer.json: texts in place of token ids.", exists=True),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=0, help="How many tokens of the response are shown at most.")
    ] = 400,
    data: at_rest.Data = None,
) -> None:
    """Show one experience: texts, each response token with its advantage as colour, and its past.

    What has left is found in the archive, where the buffer has one.

    Exit status 1: there is no such experience.
    """
    from experience_buffer_server.commands.token_columns import tokenizer_of

    texts = tokenizer_of(tokenizer)
    if data is None:
        name = look.buffer(buffer)
        found = _found(look.client, uid, name)
    else:
        name, found = buffer, _at_rest(look, data, uid, buffer)
    if look.as_json:
        look.json([found])
        return
    from experience_buffer_server.commands import history

    look.say(*_heading(found, name), *history.left(found), "")
    experience = found.experience
    if experience is None:
        look.say("a failed rollout: it has no tokens and no vote in its group's statistics", "")
    else:
        look.say(*_body(found, experience, color_by, texts, tokens))
    look.say(*history.told(look.console, found))


def _at_rest(look: Looking, data: Path, uid: str, buffer: str) -> StoredExperience:
    """The experience of a store without a server, which goes through all of it."""
    from experience_buffer import StoredExperience
    from experience_buffer.errors import DataLossError, ExperienceNotFoundError

    with at_rest.stored(look, data, buffer, {"uid_prefix": uid}, with_payloads=True) as scan:
        begins = {each.summary.uid: each for each in islice(scan, _MOST_CANDIDATES)}
    parts = [each for each in begins if each == uid or each.startswith(f"{uid.rstrip('/')}/")]
    candidates = [uid] if uid in begins else parts or [*begins]
    if not candidates:
        raise ExperienceNotFoundError(f"{data} holds no experience {uid!r}", subject=uid)
    found = begins[_only(candidates)]
    if found.problem:
        raise DataLossError(f"experience {found.summary.uid!r}: {found.problem}", subject=uid)
    return StoredExperience(
        summary=found.summary, payload=found.delivered, computation=found.computation
    )


def _found(client: Client, uid: str, buffer: str) -> StoredExperience:
    """The experience with this uid, or the only one whose uid begins so.

    Raises:
        ExperienceNotFoundError: There is none.
        typer.BadParameter: There are several.
    """
    from experience_buffer.errors import ExperienceNotFoundError

    try:
        return client.get(uid, buffer=buffer)
    except ExperienceNotFoundError:
        candidates = _beginning(client, uid, buffer)
        if not candidates:
            raise
    return client.get(_only(candidates), buffer=buffer)


def _only(candidates: Sequence[str]) -> str:
    """The only uid of these.

    Raises:
        typer.BadParameter: There are several.
    """
    from experience_buffer_server.commands.terminal import clean

    if len(candidates) == 1:
        return candidates[0]
    shown = ", ".join(map(clean, candidates))
    more = ", ..." if len(candidates) == _MOST_CANDIDATES else ""
    raise typer.BadParameter(f"several begin so: {shown}{more}", param_hint="UID")


def _beginning(client: Client, uid: str, buffer: str) -> list[str]:
    # Parts of it first: "0/7/1" is no beginning of "0/7/12/..." to whoever types it.
    for prefix in dict.fromkeys((f"{uid.rstrip('/')}/", uid)):
        for archived in (False, True):
            found = client.list(
                buffer=buffer, uid_prefix=prefix, archived=archived, page_size=_MOST_CANDIDATES
            )
            if uids := [each.uid for each in islice(found, _MOST_CANDIDATES)]:
                return uids
    return []


def _heading(found: StoredExperience, buffer: str) -> Iterator[RenderableType]:
    from rich.text import Text

    from experience_buffer import _show
    from experience_buffer_server.commands.terminal import ago, clean, local

    summary = found.summary
    said = [clean(buffer), summary.state.replace("_", " ")]
    if summary.reward is not None:
        said.append(f"reward {summary.reward:g}")
    said.append(_show.counted(summary.response_tokens, "response token"))
    if (low := summary.min_policy_version) is not None:
        high = summary.max_policy_version
        said.append(f"policy version {low}" if low == high else f"policy versions {low} to {high}")
    yield Text(clean(summary.uid, most_chars=1000), style="bold")
    yield Text(" · ".join(said))
    yield Text(
        f"task {clean(summary.tid)} · run {clean(summary.rid)} · pushed {ago(summary.push_time)} "
        f"ago, at {local(summary.push_time)} · {_show.size(summary.payload_bytes)}"
    )
    if summary.message:
        yield Text(clean(summary.message, most_chars=2000), style="yellow")


def _body(
    found: StoredExperience,
    experience: Experience,
    color_by: ColorBy,
    texts: Texts | None,
    most_tokens: int,
) -> Iterator[RenderableType]:
    from rich.text import Text

    from experience_buffer_server.commands.computation import computed
    from experience_buffer_server.commands.token_columns import columns_of, prompt_ids

    columns = columns_of(experience)
    if found.computation is not None:
        reward, advantage = found.summary.reward, columns.trained()
        yield Text(computed(found.computation, reward=reward, advantage=advantage))
        yield ""
    yield from _conversation(experience)
    if experience.messages is None and experience.prompt_text is None:
        yield from _section("prompt", _plain_tokens(prompt_ids(experience), texts, most_tokens))
    if texts is None and not _is_told(experience) and experience.response_text is not None:
        yield from _section("response", _quoted(experience.response_text))
    what = f"response tokens by {color_by}"
    yield from _section(what, coloured(columns, color_by, texts, most_tokens))
    if columns.mask is not None and not all(columns.mask):
        num_masked = columns.mask.count(False)
        yield f"{num_masked:,} of {len(columns.mask):,} are masked: struck, and not trained on"
        yield ""


def _is_told(experience: Experience) -> bool:
    """Whether the conversation ends with the response."""
    messages = experience.messages or []
    return bool(messages) and messages[-1].get("content") == experience.response_text


def _conversation(experience: Experience) -> Iterator[RenderableType]:
    from experience_buffer_server.commands.terminal import clean

    messages = experience.messages
    if not messages:
        if experience.prompt_text is not None:
            yield from _section("prompt", _quoted(experience.prompt_text))
        return
    for message in messages[:_MOST_MESSAGES]:
        role = clean(str(message.get("role", "")), most_chars=40) or "message"
        content = message.get("content")
        shown = content if isinstance(content, str) else str(content or "")
        yield from _section(role, _quoted(shown))
        if calls := message.get("tool_calls"):
            yield from _section("calls", _quoted(str(calls)))
    if len(messages) > _MOST_MESSAGES:
        yield f"... {len(messages) - _MOST_MESSAGES:,} more messages"


def _section(title: str, text: Text) -> Iterator[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    yield Text(title, style="bold")
    yield Padding(text, (0, 0, 0, 2), expand=False)
    yield ""


def _quoted(text: str) -> Text:
    from rich.text import Text

    from experience_buffer_server.commands.terminal import clean

    return Text(clean(text, most_chars=_MOST_CHARS, lines=True))


def _plain_tokens(ids: Sequence[int], texts: Texts | None, most: int) -> Text:
    from rich.text import Text

    shown = Text()
    for each in _written(ids[:most], texts):
        shown.append(each)
    if len(ids) > most:
        shown.append(f" … {len(ids) - most:,} more")
    return shown


def coloured(columns: Columns, color_by: ColorBy, texts: Texts | None, most: int) -> Text:
    """The tokens of a response, the background of each telling its value."""
    from rich.text import Text

    from experience_buffer_server.commands import colours

    shown = Text()
    for number, text in enumerate(_written(columns.ids[:most], texts)):
        trains = columns.mask is None or _at(columns.mask, number) is not False
        if not trains:
            style = colours.MASKED
        elif color_by == ColorBy.ADVANTAGE:
            style = colours.diverging(_at(columns.advantages, number))
        elif color_by == ColorBy.LOGPROB:
            style = colours.improbable(_at(columns.logprobs, number))
        else:
            style = colours.diverging(1.0)
        shown.append(text, style=style)
    if len(columns.ids) > most:
        shown.append(f" … {len(columns.ids) - most:,} more; see --tokens")
    if color_by == ColorBy.ADVANTAGE and columns.advantages is None:
        shown.append("\nno advantages were computed", style="dim")
    elif color_by != ColorBy.MASK:
        shown.append("\n")
        shown.append_text(_legend(color_by))
    return shown


def _legend(color_by: ColorBy) -> Text:
    from rich.text import Text

    from experience_buffer_server.commands import colours

    shown = Text()
    by_advantage = color_by == ColorBy.ADVANTAGE
    marks = (-3, -1, -0.3, 0, 0.3, 1, 3) if by_advantage else (-10, -3, -1, -0.1, 0)
    for mark in marks:
        style = colours.diverging(mark) if by_advantage else colours.improbable(mark)
        shown.append(f" {mark:g} ", style=style)
    return shown


def _written(ids: Sequence[int], texts: Texts | None) -> Iterator[str]:
    from experience_buffer_server.commands.terminal import clean

    if texts is None:
        for each in ids:
            yield f"{each} "
        return
    for text in texts(ids):
        # Its spaces are part of a token: they stay.
        lines = (clean_token(line) for line in text.split("\n"))
        yield "↵\n".join(lines) or clean(text)


def clean_token(text: str) -> str:
    """A token's text, harmless, with its spaces."""
    from experience_buffer import _show

    return _show.printable(text.replace("\t", "→   "))


def _at(values: Sequence[float] | Sequence[bool] | None, number: int) -> float | bool | None:
    return values[number] if values is not None and number < len(values) else None
