"""Grants: what an access file may say, who has which token, and what the command line writes."""

from __future__ import annotations

import hmac
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experience_buffer_server.access import access_file
from experience_buffer_server.access.grants import Grants, digest_of, parse
from experience_buffer_server.commands.cli import application
from experience_buffer_server.settings.access import GrantSettings
from experience_buffer_server.settings.server import ConfigurationError

NOON = 1_800_000_000.0
DIGEST = digest_of("one").hex()
ENTRY = f'[[grants]]\nname = "worker"\ntoken_sha256 = "{DIGEST}"\nroles = ["push"]\n'


def entry(token: str = "one", **values: object) -> GrantSettings:
    given = {"name": "worker", "token_sha256": digest_of(token).hex(), "roles": ["push"]}
    if "certificate_name" in values:
        del given["token_sha256"]
    return GrantSettings.model_validate(given | values)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[[grants", "Expected"),
        ("[server]\n", "server: unknown key"),
        (ENTRY + "role = 1\n", "grants.0.role: unknown key"),
        (ENTRY.replace('"push"', ""), "at least 1 item"),
        (ENTRY.replace("push", "admin"), "'push', 'sample', 'look', 'operate' or 'metrics'"),
        (ENTRY.replace(DIGEST, DIGEST.upper()), "SHA-256 digest"),
        (ENTRY.replace(DIGEST, "secret"), "SHA-256 digest"),
        (ENTRY + 'certificate_name = "x"\n', "either token_sha256 or certificate_name"),
        ('[[grants]]\nname = "a"\nroles = ["push"]\n', "either token_sha256 or certificate_name"),
        (ENTRY.replace("worker", "a b"), "give 1 to 64 letters"),
        (ENTRY + "buffers = []\n", "buffers is empty"),
        (ENTRY + 'buffers = ["*-math"]\n', "give a buffer's name, the beginning"),
        (ENTRY + "expires = 2026-12-31T00:00:00\n", "timezone"),
        (ENTRY + ENTRY.replace("worker", "other"), "has the credential of 'worker'"),
    ],
)
def test_a_file_with_an_error_is_refused_with_the_key(text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        parse(text)


@pytest.mark.parametrize("more", ["", "token = 'ebt_secret'\n"])
def test_the_message_of_a_wrong_entry_shows_no_secret(more: str) -> None:
    """A token pasted where its digest belongs mustn't travel to the log."""
    with pytest.raises(ConfigurationError) as caught:
        parse(ENTRY.replace(DIGEST, "ebt_secret") + more)
    assert "ebt_secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("buffers", "covered", "not_covered"),
    [
        (["*"], ["math", "", "*"], []),
        (["math"], ["math"], ["math2", "mat", "", "*"]),
        (["math-*", "eval"], ["math-", "math-1", "eval"], ["math", "eval-1", "*", ""]),
    ],
)
def test_buffers_are_named_or_begin_alike(
    buffers: list[str], covered: list[str], not_covered: list[str]
) -> None:
    identity = Grants([entry(buffers=buffers)]).by_token(digest_of("one"), now=NOON)
    assert identity is not None
    assert all(map(identity.covers, covered))
    assert not any(map(identity.covers, not_covered))


def test_one_credential_can_have_several_roles_on_several_buffers() -> None:
    grants = Grants(
        [
            entry(buffers=["math"]),
            entry(roles=["sample"], buffers=["eval"]),
            entry("two", roles=["operate"], buffers=["eval"]),
        ]
    )
    one, two = (grants.by_token(digest_of(token), now=NOON) for token in ("one", "two"))
    assert one is not None
    assert two is not None
    push, sample = {"push"}, {"sample"}
    assert one.name == two.name == "worker"
    assert (one.allows(push, "math"), one.allows(sample, "math")) == (True, False)
    assert (one.allows(push, "eval"), one.allows(sample, "eval")) == (False, True)
    assert two.allows(push, "eval")
    assert two.allows({"metrics"}, "eval")
    assert not two.allows(push, "math")


def test_a_grant_ends_at_its_time() -> None:
    soon = "2027-01-15T08:00:00Z"  # The same instant as NOON.
    grants = Grants([entry(expires=soon), entry(roles=["sample"], buffers=["eval"])])
    before = grants.by_token(digest_of("one"), now=NOON - 0.1)
    after = grants.by_token(digest_of("one"), now=NOON)
    assert before is not None
    assert after is not None
    assert before.expires_time == NOON
    assert sorted(before.roles) == ["push", "sample"]
    assert sorted(after.roles) == ["sample"]
    over = Grants([entry(expires=soon)]).by_token(digest_of("one"), now=NOON)
    assert over is not None
    assert not over.grants


def test_a_found_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append(right)
        return hmac.compare_digest(left, right)

    tokens = [f"token {number}" for number in range(7)]
    grants = Grants([entry(token, name=f"w{n}") for n, token in enumerate(tokens)])
    monkeypatch.setattr(
        "experience_buffer_server.access.grants.hmac", type("H", (), {"compare_digest": compare})
    )
    for token, name in [(tokens[0], "w0"), (tokens[3], "w3"), (tokens[6], "w6"), ("no", None)]:
        compared.clear()
        found = grants.by_token(digest_of(token), now=NOON)
        assert (found and found.name) == name
        assert compared == ([digest_of(token)] if name else [])


def test_a_certificate_has_the_grants_of_all_its_names() -> None:
    grants = Grants(
        [
            entry(certificate_name="worker-1", buffers=["math"]),
            entry(certificate_name="worker.example", name="other", roles=["sample"]),
        ]
    )
    found = grants.by_certificate(["worker.example", "worker-1"], now=NOON)
    assert found is not None
    assert found.name == "other"
    assert found.allows({"push"}, "math")
    assert found.allows({"sample"}, "math")
    assert grants.by_certificate(["worker"], now=NOON) is None
    assert grants.by_token(digest_of("worker-1"), now=NOON) is None


def run(*arguments: object, status: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(application(), ["token", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result.stdout, result.stderr


def test_the_command_line_makes_lists_and_revokes_tokens(tmp_path: Path) -> None:
    path = tmp_path / "access.toml"
    asked: list[list[object]] = [
        ["worker", "--role", "push", "--buffer", "math", "--buffer", "eval-*"],
        ["trainer", "--role", "sample", "--role", "metrics"],
        ["worker", "--role", "push", "--days", 30],
    ]
    tokens = [run("new", "--file", path, "--name", *words)[0].strip() for words in asked]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(set(tokens)) == 3
    assert all(len(token) >= 43 for token in tokens)
    assert not any(token in path.read_text("utf-8") for token in tokens)
    grants, warning = access_file.load(path)
    assert not warning
    first, second, third = (grants.by_token(digest_of(token), now=0.0) for token in tokens)
    assert first is not None
    assert second is not None
    assert third is not None
    assert (first.name, second.name, third.name) == ("worker", "trainer", "worker")
    assert first.covers("eval-1")
    assert not first.covers("other")
    assert third.expires_time < 2**40
    listed, _ = run("list", "--file", path)
    assert listed.count("worker") == 2
    assert digest_of(tokens[0]).hex()[:12] in listed
    assert len(listed.splitlines()) == 1 + 3, "a line each, below a heading"
    run("revoke", "--file", path, "--name", "worker", "--id", digest_of(tokens[0]).hex()[:12])
    assert [one.name for one in access_file.entries(path)] == ["trainer", "worker"]
    run("revoke", "--file", path, "--name", "worker")
    assert [one.name for one in access_file.entries(path)] == ["trainer"]
    assert "no such entry" in run("revoke", "--file", path, "--name", "worker", status=2)[1]
    assert "say which" in run("revoke", "--file", path, status=2)[1]
    assert "there is no file" in run("list", "--file", tmp_path / "none", status=2)[1]
    assert "role" in run("new", "--name", "a", "--role", "admin", status=2)[1]
    never = run("new", "--name", "a", "--role", "push", "--days", "1e9", status=2)[1]
    assert "--days" in never


def test_what_an_operator_wrote_stays_as_it_is(tmp_path: Path) -> None:
    path, link = tmp_path / "access.toml", tmp_path / "link.toml"
    top, below = "# Ours.\n\n", "\n# The trainer of the night.\n"
    other = ENTRY.replace("worker", "trainer").replace(DIGEST, digest_of("two").hex())
    path.write_text(top + ENTRY + below + other, encoding="utf-8")
    path.chmod(0o640)
    link.symlink_to(path)
    removed = access_file.remove(link, lambda one: one.name == "worker")
    assert [one.name for one in removed] == ["worker"]
    assert path.read_text("utf-8") == top + below.lstrip("\n") + other
    access_file.add(link, entry("three"))
    assert path.read_text("utf-8").startswith(top + below.lstrip("\n") + other)
    assert [one.name for one in access_file.entries(path)] == ["trainer", "worker"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert link.is_symlink()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["access.toml", "link.toml"]
    path.write_text("grants = []\nbroken", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"access\.toml: "):
        access_file.add(path, entry("four"))
    assert path.read_text("utf-8") == "grants = []\nbroken"


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "access.toml"
    path.write_text(ENTRY, encoding="utf-8")
    path.chmod(0o644)
    assert "can be read by every user" in access_file.load(path)[1]
    path.chmod(0o602)
    with pytest.raises(ConfigurationError, match="every user of this machine may write"):
        access_file.load(path)
    with pytest.raises(ConfigurationError, match="can't read"):
        access_file.load(tmp_path / "none")


@pytest.mark.parametrize("text", ["x = " + "9" * 5000, "x = 2030-02-31", "[" * 5000])
def test_no_text_ends_the_server(text: str) -> None:
    """What the parser raises for it isn't always an error of its own."""
    with pytest.raises(ConfigurationError):
        parse(text)
