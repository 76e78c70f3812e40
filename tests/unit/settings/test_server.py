"""Settings from TOML and the environment; every error names its key."""

from __future__ import annotations

from pathlib import Path

import pytest

from experience_buffer_server.settings.server import ConfigurationError, load_settings

TOML = """
[server]
port = 6007
max_push_items = 11
[store]
path = "elsewhere"
[buffers.math]
group_size = 8
consumers = ["actor", {name = "critic", unit = "group"}]
[buffers.math.advantage]
estimator = "gae"
gamma = 0.5
"""


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "server.toml"
    path.write_text(TOML, encoding="utf-8")
    return path


def test_the_file_is_read(toml: Path) -> None:
    settings = load_settings(toml)
    assert settings.server.port == 6007
    assert settings.store.path == Path("elsewhere")
    math = settings.buffers["math"]
    assert [(c.name, c.unit) for c in math.consumers] == [("actor", "item"), ("critic", "group")]
    assert math.advantage.parameters == {"gamma": 0.5}


def test_the_command_line_wins_over_the_environment_over_the_file(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPERIENCE_BUFFER_SERVER__PORT", "6011")
    monkeypatch.setenv("EXPERIENCE_BUFFER_SERVER__MAX_WAITING_SAMPLES", "13")
    monkeypatch.setenv("EXPERIENCE_BUFFER_BUFFERS__MATH__GROUP_SIZE", "17")
    settings = load_settings(toml, server={"port": None, "max_waiting_samples": 19})
    assert settings.server.port == 6011
    assert settings.server.max_push_items == 11
    assert settings.server.max_waiting_samples == 19
    assert settings.buffers["math"].group_size == 17
    assert settings.buffers["math"].advantage.estimator == "gae"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server]\nprt = 1", r"server.prt: unknown key; did you mean port\?$"),
        ("[server]\nxyz = 1", "server.xyz: unknown key$"),
        ("[sever]\nport = 1", r"sever: unknown key; did you mean server\?"),
        ("[buffers.m]\ngroupsize = 2", r"buffers.m.groupsize: .* mean group_size\?"),
        ("[buffers.m.pacing]\nbatchsize = 2", r"pacing.batchsize: .* mean batch_size\?"),
        (
            "[[buffers.m.consumers]]\nname = 'a'\nlimiter = { minsize = 2 }",
            r"consumers.0.limiter.minsize: unknown key; did you mean min_size\?",
        ),
        ("[server]\nport = 70000", "server.port: .*65535.*got 70000"),
        ("[server]\nport = 'x'", "server.port: .*got 'x'"),
        ("[server]\nkeepalive_seconds = 1e9", "server.keepalive_seconds: .*86400"),
        ("[server]\nkeepalive_timeout_seconds = 1e9", "keepalive_timeout_seconds: .*86400"),
        ("[server]\nmax_calls = 2147483648", "server.max_calls: .*2147483648"),
        ("[compute]\nthreads = 0", "compute.threads: .*got 0"),
        ("[store]\nsync_interval_seconds = inf", "store.sync_interval_seconds: .*finite"),
        ("[buffers.math]\nmax_bytes = 0", "buffers.math.max_bytes: .*got 0"),
        ("[buffers.'a b']", "buffers.a b.*: give 1 to 64 letters"),
        ("[buffers.m]\nconsumers = ['t r']", r"consumers.0.name: give 1 to 64 .*got 't r'"),
        ("[buffers.m.advantage]\nestimator = 'grop'", "'grop'; did you mean 'grpo'[?] There are"),
        ("[buffers.m.advantage]\nestimator = 'GRPO'", "'GRPO'; did you mean 'grpo'"),
        ("[buffers.m]\nconsumers = []", "buffers.m: consumers: at least one"),
        ("[buffers.m]\nconsumers = ['a', 'a']", "buffers.m: consumers: names must differ"),
        ("[buffers.m]\non_group_deadline = 'drop'", "buffers.m: on_group_deadline"),
        ("[buffers.m.advantage]\nestimator = 'x'", "buffers.m.advantage: unknown estimator 'x'"),
        ("[buffers.m.advantage]\nestimator = 'gae'\ngama = 1", "buffers.m.advantage: .*'gama'"),
        ("[buffers.m.advantage]\nestimator = 'gae'\ngamma = 7", "buffers.m.advantage: .*gamma"),
        ("[buffers.m.advantage]\ngamma = 1", r"buffers.m.advantage: parameters \['gamma'\]"),
        ("server = [", "configuration file .*server.toml: Invalid value"),
    ],
)
def test_an_error_names_its_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "server.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=message):
        load_settings(path)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("EXPERIENCE_BUFFER_SEVER__PORT", "1", "EXPERIENCE_BUFFER_SEVER__PORT: unknown"),
        ("EXPERIENCE_BUFFER_SERVER__PRT", "1", "server.prt: unknown key"),
        ("EXPERIENCE_BUFFER_SERVER__PORT", "x", "server.port: .*got 'x'"),
        ("EXPERIENCE_BUFFER_SERVER", "no json", 'environment: .*"server"'),
    ],
)
def test_a_wrong_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError, match=message):
        load_settings()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.toml: .*No such file"):
        load_settings(tmp_path / "none.toml")
