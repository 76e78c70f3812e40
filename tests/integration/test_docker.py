"""The image: its Dockerfile's steps work in a clean environment, and what they install runs.

Also the compose file, as far as it can be checked without a container engine.
"""

from __future__ import annotations

import resource
import shutil
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.integration import dockerfile
from tests.ports import unused_ports

ROOT = Path(__file__).parent.parent.parent
DOCKER = ROOT / "docker"
WHEELHOUSE = ROOT / ".venv" / "wheelhouse"

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dockerfile.Stage]:
    """The image, built from the wheels that `make test` has downloaded; gone afterwards."""
    assert WHEELHOUSE.is_dir(), "no wheels to build from; run: python3 scripts/install.py dev"
    folder = tmp_path_factory.mktemp("image")
    try:
        yield dockerfile.build(
            DOCKER / "Dockerfile",
            context=ROOT,
            folder=folder,
            pip_options={
                "PIP_NO_INDEX": "1",
                "PIP_FIND_LINKS": WHEELHOUSE.as_uri(),
                # Half a minute for modules of which these tests load few.
                "PIP_NO_COMPILE": "1",
            },
            TORCH_INDEX_URL="",
        )
    finally:
        # A gigabyte that pytest would keep for three more runs.
        shutil.rmtree(folder)


def test_it_starts_reports_health_and_stops(image: dockerfile.Stage) -> None:
    port, metrics_port = unused_ports(2)
    # The health check asks the port that the image serves; here that one may be taken.
    healthcheck = [*image.healthcheck, str(metrics_port)]
    assert _run(image, healthcheck) != 0, "healthy before it was started"
    arguments = ["--port", str(port), "--metrics-port", str(metrics_port)]
    server = image.start([*image.entrypoint, *arguments])
    try:
        deadline = time.monotonic() + 60
        while _run(image, healthcheck) != 0:
            assert server.poll() is None, f"ended: {server.communicate()[0]}"
            assert time.monotonic() < deadline, "not healthy within 60 s"
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics") as answer:
            assert b"experience_buffer_items" in answer.read()
        assert _cpu_seconds(image, healthcheck) < 0.05, "it is asked every few seconds, for ever"
        server.send_signal(image.stop_signal)
        output = server.communicate(timeout=30)[0]
    finally:
        server.kill()
        server.communicate()
    assert server.returncode == 0, output
    assert any((image.root / "data").iterdir()), "nothing was stored in the volume"


def test_it_holds_no_library_of_cuda(image: dockerfile.Stage) -> None:
    installed = {path.name for path in image.root.glob("usr/local/lib/python*/site-packages/*")}
    assert "experience_buffer_server" in installed
    assert installed.isdisjoint({"torch", "nvidia", "triton"})


def test_what_servers_compile_is_compiled_in_the_image(image: dockerfile.Stage) -> None:
    kept = {path.name for path in image.root.glob("var/cache/experience-buffer/**/*.nbi")}
    assert any(name.startswith("cpu_kernels.spread-") for name in kept)
    assert any(name.startswith("scan.") for name in kept)


def test_it_refuses_an_open_port_unless_told(image: dockerfile.Stage) -> None:
    entrypoint = [word for word in image.entrypoint if word != "--insecure"]
    server = image.start([*entrypoint, "--port", "0", "--metrics-port", "0"])
    output = server.communicate(timeout=60)[0]
    assert server.returncode != 0
    assert "--insecure" in output


def test_it_runs_as_its_own_user_and_writes_to_its_volume(image: dockerfile.Stage) -> None:
    created = [command for command in image.commands if f"{image.user} " in f"{command} "]
    assert image.user not in ("root", "0")
    assert any("useradd" in command for command in created)
    assert any(f"chown {image.user}:{image.user} /data" in command for command in created)
    assert image.volumes == ["/data"]
    assert image.working_folder == image.root / "data"


def test_the_generated_code_is_made_in_the_image() -> None:
    context_patterns = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "client/experience_buffer/v1" in context_patterns


def test_compose_names_what_exists_and_publishes_on_loopback(image: dockerfile.Stage) -> None:
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
    for name, service in compose["services"].items():
        for published in service["ports"]:
            assert published.startswith("127.0.0.1:"), f"{name} publishes {published} to everyone"
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            exists = (DOCKER / source).exists() if "/" in source else source in compose["volumes"]
            assert exists, f"{name}: there is no {source}"
    server = compose["services"]["server"]
    assert (DOCKER / server["build"]["context"] / server["build"]["dockerfile"]).exists()
    assert [int(p.split(":")[-1]) for p in server["ports"]] == image.ports
    assert server["volumes"] == [f"data:{image.volumes[0]}"]


def test_compose_starts_each_service_when_what_it_reads_from_is_healthy(
    image: dockerfile.Stage,
) -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))["services"]
    assert image.healthcheck
    waits = {name: service["depends_on"] for name, service in services.items() if name != "server"}
    assert {name: list(wait) for name, wait in waits.items()} == {
        "prometheus": ["server"], "grafana": ["prometheus"],
    }  # fmt: skip
    for wait in waits.values():
        for name, how in wait.items():
            assert how == {"condition": "service_healthy"}
            assert name == "server" or services[name]["healthcheck"]["test"][0] == "CMD"


def _run(image: dockerfile.Stage, command: list[str]) -> int:
    process = image.start(command)
    process.communicate(timeout=30)
    return process.returncode


def _cpu_seconds(image: dockerfile.Stage, command: list[str]) -> float:
    """Of a command that succeeds, and of whatever it starts."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = spent()
    assert _run(image, command) == 0
    return spent() - before
