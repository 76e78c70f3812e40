"""An experience: one rollout, or one turn of one, with its tensors and texts.

Neither torch nor NumPy is needed to make one: torch is imported when a tensor is read (without it
they are read as NumPy's arrays). How one becomes bytes is `trxp`'s business; how several become a
batch is `collation`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from experience_buffer import _show
from experience_buffer._codec.limits import DEFAULT_LIMITS
from experience_buffer._codec.safetensors import TensorView
from experience_buffer._fields import (
    CountField,
    CustomField,
    EidField,
    ExtraField,
    ExtraTensor,
    ImagesField,
    InfoValue,
    RewardField,
    TensorField,
    Tensors,
    TokensField,
    kept,
    num_rows,
)
from experience_buffer._prompt import tokens_and_prompt
from experience_buffer.eid import EID
from experience_buffer.errors import InvalidRequestError, TrxpError

if TYPE_CHECKING:
    from experience_buffer._fields import TensorLike

__all__ = ["EID", "CustomField", "Experience"]
__dir__ = __all__.copy

_SUFFIX_DIGITS = 12


class Experience:
    """One rollout, or one turn of one, named as in Trinity-RFT.

    Mutable and compared by identity; not to be changed while another thread uses it. S is the
    number of tokens, P of prompt tokens, T = S - P of response tokens.

    Attributes:
        eid: Identity.
        tokens: Token ids of prompt and response, shape [S]; int32 if made of a list. For dpo the
            prompt.
        prompt_length: P: how many of the tokens are the prompt's.
        logprobs: Log-probabilities under the policy that sampled, shape [T]; float32 if made of a
            list.
        reward: Scalar reward of the whole response.
        token_level_reward: Reward of each response token, shape [T]; float32 if made of a list.
        advantages: Advantage of each response token, shape [T]; float32 if made of a list.
        returns: Return of each response token, shape [T]; float32 if made of a list.
        truncate_status: None, `"prompt_truncated"` or `"response_truncated"`.
        info: Anything else, plain data: `model_version`, the task's index, sources of custom
            fields.
        metrics: Numbers for a monitor.
        response_text: The response as text.
        prompt_text: The prompt as text.
        action_mask: True where the model chose the token, shape [T]; bool if made of a list.
        messages: The conversation.
        tools: Schemas of the tools the model could call.
        chosen: Token ids of the preferred response, for dpo; int32 if made of a list.
        rejected: Token ids of the other response, for dpo; int32 if made of a list.
        chosen_messages: The conversation that ends with the preferred response.
        rejected_messages: The conversation that ends with the other response.
        multi_modal_inputs: Tensors of images and the like, by the model's name for them.
        teacher_logprobs: Log-probabilities under a teacher, shape [T]; float32 if made of a list.
        routed_experts: Experts that routed each token, shape [S - 1, layers, top_k]; uint8 if made
            of a list.
        custom_fields: Values of `info` that a trainer wants as tensors.
        extra: Tensors of any other name, kept bit for bit; the next three are attributes as well.
        values: Values by a critic, shape [T], or [T + 1] with the bootstrap value; float32 if of a
            list.
        ref_logprobs: Log-probabilities under the reference policy, shape [T]; float32 if made of a
            list.
        versions: Version of the policy that produced each token, below 0 where none did, shape [T];
            int64 if made of a list.
        baseline_reward: Reward of the greedy response to the same prompt; an entry of `info`, as
            the next two.
        env_state_hash: Names the environment's state before this step: equal states have equal
            texts.
        num_turns: Turns of the response; None: as many as `action_mask` has stretches of ones.
        experience_type: Derived: "multi_turn" if an action_mask is given, else "dpo" if chosen and
            rejected are, else "single_turn".

    Args:
        prompt: Token ids of the prompt, shape [P]; with `response` in place of `tokens`.
        response: Token ids of the response, shape [T].
    """

    eid = EidField()
    tokens = TokensField()
    prompt_length = CountField()
    logprobs = TensorField()
    reward = RewardField()
    token_level_reward = TensorField()
    advantages = TensorField()
    returns = TensorField()
    truncate_status: str | None
    info: dict[str, Any]
    metrics: dict[str, float]
    response_text: str | None
    prompt_text: str | None
    action_mask = TensorField()
    messages: list[dict[str, Any]] | None
    tools: list[dict[str, Any]] | None
    chosen = TensorField()
    rejected = TensorField()
    chosen_messages: list[dict[str, Any]] | None
    rejected_messages: list[dict[str, Any]] | None
    multi_modal_inputs = ImagesField()
    teacher_logprobs = TensorField()
    routed_experts = TensorField()
    custom_fields: list[CustomField]
    extra = ExtraField()
    values = ExtraTensor()
    ref_logprobs = ExtraTensor()
    versions = ExtraTensor()
    baseline_reward = InfoValue(float)
    env_state_hash = InfoValue(str)
    num_turns = InfoValue(int)
    experience_type: Literal["single_turn", "multi_turn", "dpo"]

    def __init__(
        self,
        *,
        eid: EID | Mapping[str, Any] | None = None,
        tokens: TensorLike | None = None,
        logprobs: TensorLike | None = None,
        reward: float | None = None,
        token_level_reward: TensorLike | None = None,
        advantages: TensorLike | None = None,
        returns: TensorLike | None = None,
        truncate_status: str | None = None,
        info: dict[str, Any] | None = None,
        metrics: dict[str, float] | None = None,
        prompt_length: int | None = None,
        response_text: str | None = None,
        prompt_text: str | None = None,
        action_mask: TensorLike | None = None,
        messages: list[dict[str, Any]] | None = None,
        tools: list[dict[str, Any]] | None = None,
        chosen: TensorLike | None = None,
        rejected: TensorLike | None = None,
        chosen_messages: list[dict[str, Any]] | None = None,
        rejected_messages: list[dict[str, Any]] | None = None,
        multi_modal_inputs: Mapping[str, TensorLike] | None = None,
        teacher_logprobs: TensorLike | None = None,
        routed_experts: TensorLike | None = None,
        values: TensorLike | None = None,
        ref_logprobs: TensorLike | None = None,
        versions: TensorLike | None = None,
        baseline_reward: float | None = None,
        env_state_hash: str | None = None,
        num_turns: int | None = None,
        custom_fields: list[CustomField] | None = None,
        extra: Mapping[str, TensorLike] | None = None,
        prompt: TensorLike | None = None,
        response: TensorLike | None = None,
    ) -> None:
        """Make an experience; lists become tensors of the dtypes named above.

        Where the prompt ends has to be said: by `prompt_length`, by `prompt` and `response` in place
        of `tokens` (token ids, which are joined as one list), or by an `action_mask` or `logprobs`
        with a value for each token of the response.

        A single-turn experience gets an `action_mask` of ones, shape [T]; of zeros, shape
        [len(logprobs)], if its prompt was truncated. A dpo one gets `prompt_length = len(tokens)`.

        Raises:
            InvalidRequestError: A value can't be kept as it is: a list, array or tensor in which its
                field would lose something, such as a mask of 0.5, or what is no number where one
                belongs; the text names field and value. Or nothing says where the prompt ends; a
                single-turn experience has no response, or a prompt length below 1; or an input is
                given both as an argument and in `extra` or `info`.
        """
        self.eid = eid
        self.logprobs = logprobs
        self.action_mask = action_mask
        self.chosen = chosen
        self.rejected = rejected
        is_dpo = action_mask is None and chosen is not None and rejected is not None
        self.tokens, self.prompt_length = tokens_and_prompt(
            tokens=tokens,
            prompt=prompt,
            response=response,
            prompt_length=prompt_length,
            action_mask=kept(self, "action_mask"),
            logprobs=kept(self, "logprobs"),
            is_dpo=is_dpo,
        )
        if action_mask is not None:
            self.experience_type = "multi_turn"
        elif is_dpo:
            self.experience_type = "dpo"
        else:
            self.experience_type = "single_turn"
            self.action_mask = _single_turn_mask(self, truncate_status)
        self.reward = reward
        self.token_level_reward = token_level_reward
        self.advantages = advantages
        self.returns = returns
        self.truncate_status = truncate_status
        self.info = info or {}
        self.metrics = metrics or {}
        self.response_text = response_text
        self.prompt_text = prompt_text
        self.messages = messages
        self.tools = tools
        self.chosen_messages = chosen_messages
        self.rejected_messages = rejected_messages
        self.multi_modal_inputs = multi_modal_inputs
        self.teacher_logprobs = teacher_logprobs
        self.routed_experts = routed_experts
        self.custom_fields = custom_fields or []
        self.extra = extra
        inputs = {
            "values": values,
            "ref_logprobs": ref_logprobs,
            "versions": versions,
            "baseline_reward": baseline_reward,
            "env_state_hash": env_state_hash,
            "num_turns": num_turns,
        }
        for name, value in inputs.items():
            if value is not None:
                if getattr(self, name) is not None:
                    raise InvalidRequestError(
                        f"{name} is given twice: as an argument, and in extra or info", subject=name
                    )
                setattr(self, name, value)

    def fix_suffix(self) -> Experience:
        """Derive the suffix of `eid` from the content, and return the experience itself.

        Content is all but the identity. What is made again with the same content, and the same batch,
        task, run and step, has the same uid then: pushed again it is a duplicate. Call it last: what is
        changed afterwards is other content under the same uid.

        Raises:
            TrxpError: It holds what TRXP can't.
        """
        from experience_buffer._codec import content, payload

        (item,) = payload.read(self.serialize())
        if isinstance(item, TrxpError):
            raise item
        suffix = content.digest(item).hex()[:_SUFFIX_DIGITS]
        self.eid = replace(self.eid, suffix=suffix)
        return self

    def serialize(self) -> bytes:
        """Write this experience as a TRXP payload.

        Raises:
            TrxpError: It holds what TRXP can't, or what no reader may load.
        """
        return self.serialize_many([self])

    @classmethod
    def deserialize(cls, data: bytes | bytearray | memoryview) -> Experience:
        """Read a payload of one experience.

        Args:
            data: The payload.

        Raises:
            TrxpError: The payload is damaged.
            ValueError: It doesn't hold exactly one experience.
        """
        experiences = cls.deserialize_many(data)
        if len(experiences) != 1:
            raise ValueError(
                f"the payload holds {len(experiences)} experiences, not 1; use deserialize_many"
            )
        return experiences[0]

    @staticmethod
    def serialize_many(experiences: Sequence[Experience]) -> bytes:
        """Write experiences as one TRXP payload; see `trxp.encode`.

        Args:
            experiences: Any number.
        """
        # Here, since the codec takes longer to load than a first experience takes otherwise.
        from experience_buffer import _payloads

        return _payloads.encode(experiences, Experience)

    @classmethod
    def deserialize_many(cls, data: bytes | bytearray | memoryview) -> list[Experience]:
        """Read a payload of any number of experiences; see `trxp.decode`.

        Args:
            data: The payload.
        """
        from experience_buffer import _payloads

        return _payloads.decode(data, Experience, limits=DEFAULT_LIMITS)

    def __repr__(self) -> str:
        said = [f"eid={_show.short(self.eid.uid)}"]
        state = {name: self.__dict__[name] for name in ("tokens", "prompt_length")}
        for name, value in (state | self.__dict__).items():
            is_derived = name == "action_mask" and self.experience_type == "single_turn"
            if name in ("eid", "experience_type") or is_derived or value is None:
                continue
            if isinstance(value, Tensors):
                value = value.kept()
            is_many = isinstance(value, list)
            if not is_many and (not isinstance(value, (dict, str)) or value):
                said.append(f"{name}={_show.short(value)}")
            elif is_many and value:
                said.append(f"{name}=<{_show.counted(len(value), 'entry', 'entries')}>")
        return _show.line(f"Experience({', '.join(said)})")

    def to_dict(self) -> dict[str, Any]:
        """Describe the experience without its tensors; texts and messages only where given."""
        described: dict[str, Any] = {
            "eid": self.eid.to_dict(),
            "type": self.experience_type,
            "prompt_length": self.prompt_length,
            "response_length": num_rows(kept(self, "tokens")) - self.prompt_length,
            "info": self.info,
            "metrics": self.metrics,
        }
        for name in _DESCRIBED:
            value = getattr(self, name)
            if value is not None:
                described[name] = float(value) if name == "reward" else value
        return described


_DESCRIBED = (
    "prompt_text",
    "response_text",
    "messages",
    "tools",
    "chosen_messages",
    "rejected_messages",
    "reward",
    "truncate_status",
)


def _single_turn_mask(experience: Experience, truncate_status: str | None) -> TensorView:
    prompt_length, logprobs = experience.prompt_length, kept(experience, "logprobs")
    if prompt_length <= 0:
        raise InvalidRequestError(
            f"prompt_length is {prompt_length}; a single turn's is 1 or more",
            subject="prompt_length",
        )
    if truncate_status == "prompt_truncated":
        if logprobs is None:
            raise InvalidRequestError(
                "a truncated prompt needs logprobs or an action_mask", subject="action_mask"
            )
        return _mask(bytes(num_rows(logprobs)))
    num_tokens = num_rows(kept(experience, "tokens"))
    if num_tokens <= prompt_length:
        raise InvalidRequestError(
            f"{num_tokens} tokens, but a prompt of {prompt_length}: there is no response; give "
            "an action_mask, or truncate_status='prompt_truncated'",
            subject="prompt_length",
        )
    return _mask(bytes([1]) * (num_tokens - prompt_length))


def _mask(values: bytes) -> TensorView:
    return TensorView("BOOL", (len(values),), memoryview(bytearray(values)))
