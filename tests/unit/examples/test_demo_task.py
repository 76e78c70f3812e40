"""The parts of the demo that need no server: task, policy, learner, ranks, weights, audit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from examples.demo import task, weights
from examples.demo.journal import Journal, audit
from examples.demo.learner import Learner, collate
from examples.demo.model import Policy, accuracy, generate, pad_prompts
from examples.demo.ranks import Ranks
from examples.demo.settings import DemoSettings
from examples.demo.worker import Roller, groups_of
from experience_buffer import Experience
from experience_buffer.packed import PackedBatch, PackedRow, pack


@pytest.mark.parametrize(
    ("response", "expected"),
    [((5, 1, 3), 1.0), ((5, 1, 4), 2 / 3), ((3, 1, 5), 1 / 3), ((0, 0, 0), 0.0)],
)
def test_reward_is_the_share_of_digits_in_their_place(
    response: task.Problem, expected: float
) -> None:
    assert task.reward((3, 1, 5), response) == pytest.approx(expected)


def test_a_response_of_another_length_is_no_response() -> None:
    with pytest.raises(ValueError, match="shorter"):
        task.reward((3, 1, 5), (5, 1))


def test_training_never_poses_a_held_out_problem() -> None:
    posed = task.training_problems(20_011, generator=random.Random(7))
    held_out = task.held_out_problems(997, seed=7)
    assert not set(posed) & set(held_out)
    assert not any(map(task.is_held_out, posed))
    assert {len(problem) for problem in posed} == set(range(1, task.MAX_LENGTH + 1))
    assert {len(problem) for problem in held_out} == {task.MAX_LENGTH}
    assert len(set(held_out)) == 997


def test_about_a_tenth_of_the_longest_problems_is_held_out() -> None:
    problems = [tuple(map(int, f"{number:06d}")) for number in range(0, 1_000_000, 101)]
    share = sum(map(task.is_held_out, problems)) / len(problems)
    assert share == pytest.approx(0.1, abs=0.02)


def test_the_same_seed_draws_the_same_problems() -> None:
    assert task.held_out_problems(31, seed=3) == task.held_out_problems(31, seed=3)
    assert task.held_out_problems(31, seed=3) != task.held_out_problems(31, seed=4)


def make_round(folder: Path, policy: Policy) -> list[Experience]:
    settings = DemoSettings(address="", folder=folder, groups_per_update=22)
    groups = groups_of(settings, 1, 13)
    return Roller(settings, 1).roll(policy, version=5, groups=groups)


def packed(experiences: Sequence[Experience]) -> PackedBatch:
    rows = [PackedRow(uid=e.eid.uid, payload=e.serialize(), tensors={}) for e in experiences]
    return PackedBatch.parse(b"".join(pack(rows)))


def keep(sums: Tensor) -> None:
    """There are no other ranks to add."""


def test_a_round_holds_whole_groups_of_one_problem_each(tmp_path: Path) -> None:
    experiences = make_round(tmp_path, Policy())
    groups: dict[str, list[Experience]] = {}
    for experience in experiences:
        groups.setdefault(experience.eid.tid, []).append(experience)
    assert list(groups) == [f"13/1-{number}" for number in range(11)]
    assert [len(members) for members in groups.values()] == [8] * 11
    assert len({experience.eid.uid for experience in experiences}) == 88
    assert all(len({e.prompt_text for e in members}) == 1 for members in groups.values())
    assert {experience.info["model_version"] for experience in experiences} == {5}


def test_what_was_sampled_with_a_cache_has_the_logprobs_that_the_learner_computes(
    tmp_path: Path,
) -> None:
    torch.manual_seed(11)
    policy = Policy()
    experiences = make_round(tmp_path, policy)
    for experience in experiences:
        assert experience.logprobs is not None
        experience.advantages = torch.ones_like(experience.logprobs)
    batch = collate(packed(experiences))
    logits, _ = policy(batch.tokens_BS[:, :-1])
    logprobs = torch.log_softmax(logits[:, task.PROMPT_LENGTH - 1 :], -1)
    chosen = batch.tokens_BS[:, task.PROMPT_LENGTH :].clamp(max=9).unsqueeze(-1)
    computed = logprobs.gather(2, chosen)[..., 0] * batch.mask_BR
    torch.testing.assert_close(computed, batch.behaviour_logprobs_BR, atol=1e-5, rtol=1e-5)


def make_lesson(folder: Path, policy: Policy) -> list[Experience]:
    """Answers of which those that end with a 7 are good."""
    experiences = make_round(folder, policy)
    for experience in experiences:
        assert experience.logprobs is not None
        sign = 1.0 if int(experience.tokens[-1]) == 7 else -0.1
        experience.advantages = torch.full_like(experience.logprobs, sign)
    return experiences


def test_an_update_makes_likelier_what_had_a_positive_advantage(tmp_path: Path) -> None:
    learner = Learner(num_updates=17, seed=2)
    experiences = make_lesson(tmp_path, learner.policy)
    prompts = pad_prompts([(1, 2, 3, 4, 5, 6)])
    before = learner.policy(prompts)[0][0, -1].softmax(-1)[7]
    for _ in range(3):
        learner.update(collate(packed(experiences)), add_up=keep)
    assert learner.policy(prompts)[0][0, -1].softmax(-1)[7] > before


def test_ranks_with_parts_of_a_batch_take_the_step_of_one_with_all_of_it(tmp_path: Path) -> None:
    whole = Learner(num_updates=17, seed=2)
    experiences = make_lesson(tmp_path, whole.policy)
    parts = [collate(packed(part)) for part in (experiences[:24], experiences[24:])]
    sums: list[Tensor] = []
    for part in parts:
        Learner(num_updates=17, seed=2).update(part, add_up=lambda own: sums.append(own.clone()))
    whole.update(collate(packed(experiences)), add_up=keep)

    def add_up(own: Tensor) -> None:
        own.copy_(sums[0] + sums[1])

    for part in parts:
        learner = Learner(num_updates=17, seed=2)
        learner.update(part, add_up=add_up)
        pairs = zip(learner.policy.parameters(), whole.policy.parameters(), strict=True)
        for shared, alone in pairs:
            # Of the weights, Adam's first step would hide a factor.
            torch.testing.assert_close(shared.grad, alone.grad, atol=1e-6, rtol=1e-4)


def test_a_learner_goes_on_from_its_checkpoint_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    assert weights.load_checkpoint(path) is None
    learner = Learner(num_updates=17, seed=2)
    batch = collate(packed(make_lesson(tmp_path, learner.policy)))
    learner.update(batch, add_up=keep)
    weights.save_checkpoint({"learner": learner.state_dict(), "client": {"step": 1}}, path=path)
    checkpoint = weights.load_checkpoint(path)
    assert checkpoint is not None
    assert checkpoint["client"] == {"step": 1}
    resumed = Learner(num_updates=17, seed=3)
    resumed.load_state_dict(checkpoint["learner"])
    for one in (learner, resumed):
        one.update(batch, add_up=keep)
    for name, parameter in learner.policy.state_dict().items():
        assert torch.equal(resumed.policy.state_dict()[name], parameter)


def test_a_single_rank_meets_nobody_but_itself(tmp_path: Path) -> None:
    with Ranks(0, 1, rendezvous=tmp_path / "ranks #1") as ranks:
        numbers = torch.tensor([1.5, -2.0])
        ranks.add_up(numbers)
        assert numbers.tolist() == [1.5, -2.0]
        assert ranks.gather("it") == ["it"]
        assert ranks.is_first
        ranks.meet()


def test_an_untrained_policy_solves_nothing() -> None:
    torch.manual_seed(0)
    assert accuracy(Policy(), task.held_out_problems(101, seed=0)) == 0.0


def test_the_likeliest_answer_needs_no_randomness() -> None:
    policy, prompts = Policy(), pad_prompts([(1, 2), (3, 4, 5)])
    first, _ = generate(policy, prompts, generator=None)
    assert torch.equal(first, generate(policy, prompts, generator=None)[0])


def test_a_follower_takes_over_each_published_policy(tmp_path: Path) -> None:
    path, policy = tmp_path / "weights.pt", Policy()
    follower = weights.Follower(path)
    assert follower.refresh() == -1
    for version in (3, 4):
        weights.publish(policy, version=version, path=path)
        assert follower.refresh() == version
    assert torch.equal(follower.policy.positions.weight, policy.positions.weight)


def test_the_audit_finds_what_is_missing_unknown_or_repeated(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("acked-0", "acked-1", "trained-0", "trained-1")]
    contents = (["a", "b"], ["c", "d"], ["1 a", "3 x"], ["2 a"])
    for path, lines in zip(paths, contents, strict=True):
        with Journal(path) as journal:
            journal.append(lines)
    found = audit(paths[:2], trained=paths[2:], in_buffer=["b", "a"])
    assert (found.num_acked, found.num_trained, found.num_in_buffer) == (4, 2, 1)
    assert found.missing == ("c", "d")
    assert found.unknown == ("x",)
    assert found.repeated == ("a",)
    assert not found.is_clean


def test_the_audit_follows_the_timeline_that_survives(tmp_path: Path) -> None:
    acked, trained = tmp_path / "acked", tmp_path / "trained"
    lives = (
        ["0 resumed", "1 a", "2 b", "3 c"],
        ["1 resumed", "2 c", "3 b", "4 d"],
        ["3 resumed", "4 d"],
    )
    for lines in lives:
        with Journal(trained) as journal:
            journal.append(lines)
    with Journal(acked) as journal:
        journal.append("abcde")
    found = audit([acked], trained=[trained], in_buffer=["e"])
    assert found.is_clean
    assert (found.num_trained, found.num_undone, found.num_in_buffer) == (4, 3, 1)
    with Journal(trained) as journal:
        journal.append(["3 resumed", "4 c"])
    assert audit([acked], trained=[trained], in_buffer=["e"]).missing == ("d",)
    assert audit([acked], trained=[trained], in_buffer=["e"]).repeated == ("c",)
