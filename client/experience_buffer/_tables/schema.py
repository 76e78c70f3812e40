"""The columns of a table of experiences: names, types, and what each says. Arrow is imported when asked for.

The schema never depends on the rows: files of any buffers, of any day, can be read as one table.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, NamedTuple

from experience_buffer.errors import UnsupportedError

FORMAT_VERSION: Final = 1
METADATA_KEY: Final = b"experience_buffer"
"""Under which a file says, as JSON, what it was made of: buffer, configuration, cursor."""
CURE: Final = "pip install 'experience-buffer[arrow]'"
END_KEY: Final = b"experience_buffer.end"
"""The same of what is known when it is closed."""

TEXT: Final = "string"
JSON: Final = "json"
"""A text in the table; in JSONL the value itself."""
INT: Final = "int64"
SHORT: Final = "int32"
FLOAT: Final = "float64"
FLAG: Final = "bool"
TEXTS: Final = "list<string>"
IDS: Final = "list<int32>"
NUMBERS: Final = "list<float32>"
MASK: Final = "list<bool>"
BYTES: Final = "binary"


class Column(NamedTuple):
    """One column."""

    name: str
    kind: str
    """One of the kinds above."""
    about: str


COLUMNS: Final = (
    Column("uid", TEXT, "Name of the experience."),
    Column("group", TEXT, "Key of its group; empty in a buffer without groups."),
    Column("batch", TEXT, "Batch of its identity, as text."),
    Column("task", TEXT, "Task of its identity, as text."),
    Column("run", INT, "Run of its identity."),
    Column("step", INT, "Step within the run, of its identity."),
    Column("suffix", TEXT, "Suffix of its identity."),
    Column("tid", TEXT, "Task key: what all runs of a task share."),
    Column("rid", TEXT, "Run key: what all steps of a run share."),
    Column("prompt", TEXT, "The prompt as text."),
    Column("completion", TEXT, "The response as text."),
    Column("messages", JSON, "The conversation."),
    Column("tools", JSON, "Schemas of the tools that the model could call."),
    Column("chosen_messages", JSON, "For dpo: the conversation with the preferred response."),
    Column("rejected_messages", JSON, "For dpo: the conversation with the other response."),
    Column("reward", FLOAT, "Scalar reward."),
    Column("advantage", FLOAT, "Mean of `advantages` over the tokens of `completion_mask`."),
    Column("truncated", TEXT, '"prompt_truncated" or "response_truncated"; null: neither.'),
    Column("prompt_length", SHORT, "Tokens of the prompt."),
    Column("response_length", SHORT, "Tokens of the response."),
    Column("model_version", INT, "Lowest policy version that produced a token; null: unknown."),
    Column("max_model_version", INT, "Highest policy version that produced a token."),
    Column("staleness", INT, "Published policy version minus `model_version`, when it was read."),
    Column("times_sampled", INT, "Deliveries that were acknowledged, over all consumers."),
    Column("flags", TEXTS, "What its advantages are like, such as zero_variance."),
    Column("state", TEXT, "Where it was on its way when it was read."),
    Column("tombstone", FLAG, "True of a failed rollout: it has no tokens and no payload."),
    Column("reason", TEXT, "Of a tombstone why it failed; of what was set aside, why."),
    Column("priority", FLOAT, "As pushed or set since."),
    Column("push_time", FLOAT, "When the server accepted it, seconds since the Unix epoch."),
    Column("metrics", JSON, "Numbers for a monitor."),
    Column("info", JSON, "Anything else that was pushed with it."),
    Column("computation", JSON, "How its advantages were computed; null: they weren't."),
    Column("prompt_ids", IDS, "Token ids of the prompt."),
    Column("completion_ids", IDS, "Token ids of the response."),
    Column("completion_mask", MASK, "True where the model chose the token, as it is delivered."),
    Column("logprobs", NUMBERS, "Log-probabilities under the policy that sampled."),
    Column("advantages", NUMBERS, "Per response token, as computed; where none were, as pushed."),
    Column("returns", NUMBERS, "Per response token, as computed; where none were, as pushed."),
    Column("chosen_ids", IDS, "For dpo: token ids of the preferred response."),
    Column("rejected_ids", IDS, "For dpo: token ids of the other response."),
    Column("payload", BYTES, "The TRXP payload, byte for byte as it was pushed."),
)
"""In their order. Later ones come last, before the payload, and readers do without those they don't find."""

NAMES: Final = tuple(column.name for column in COLUMNS)
KINDS: Final = {column.name: column.kind for column in COLUMNS}
LISTS: Final = tuple(each.name for each in COLUMNS if each.kind in (IDS, NUMBERS, MASK))


@cache
def arrow() -> Any:
    """The module `pyarrow`.

    Raises:
        UnsupportedError: It isn't installed.
    """
    try:
        import pyarrow
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        raise UnsupportedError(f"tables need pyarrow: {CURE}", subject="pyarrow") from error
    return pyarrow


@cache
def arrow_schema() -> Any:
    """The columns as a `pyarrow.Schema`, without metadata."""
    pa = arrow()
    return pa.schema([(column.name, arrow_type(column.kind)) for column in COLUMNS])


@cache
def arrow_type(kind: str) -> Any:
    """The Arrow type of a kind."""
    pa = arrow()
    return {
        TEXT: pa.string(),
        JSON: pa.string(),
        INT: pa.int64(),
        SHORT: pa.int32(),
        FLOAT: pa.float64(),
        FLAG: pa.bool_(),
        TEXTS: pa.list_(pa.string()),
        IDS: pa.list_(pa.int32()),
        NUMBERS: pa.list_(pa.float32()),
        MASK: pa.list_(pa.bool_()),
        BYTES: pa.binary(),
    }[kind]
