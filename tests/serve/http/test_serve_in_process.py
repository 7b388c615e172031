"""`offramp serve --backend asgi` as a command: a real engine behind the door, from the start to SIGTERM."""

from __future__ import annotations

import re
from pathlib import Path

import httpx2
import openai
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from helpers.processes import start_command
from helpers.sinks import eventually
from helpers.tiny import tiny_checkpoint
from offramp.common.cli import main
from offramp.serve.http.keys import add_key
from offramp.serve.metrics import METRICS


def metrics(url: str, key: str) -> dict[str, Metric]:
    """All of them by name, once the engine has told of its last iteration: an answer may be sent just before."""
    told: dict[str, Metric] = {}

    def is_idle() -> bool:
        text = httpx2.get(url, headers={"authorization": f"Bearer {key}"}, timeout=60).text
        told.update({family.name: family for family in text_string_to_metric_families(text)})
        return (
            told["offramp_generated_tokens"].samples[0].value == 41 and not told["offramp_live_blocks"].samples[0].value
        )

    eventually(is_idle, 60, every_s=0.1)
    return told


def test_a_checkpoint_is_served_until_sigterm(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "tiny", eos_token_id=None)
    key = add_key(tmp_path / "keys.json", "alice")
    watching = add_key(tmp_path / "keys.json", "prometheus", use="metrics")
    door = tmp_path / "door.yaml"
    door.write_text("keys: keys.json\naccess_log: access.log\n")
    log = tmp_path / "log"
    log.touch()
    arguments = ["serve", str(checkpoint), "--backend", "asgi", "-c", str(door), "--port", "0", "--num-threads", "1"]
    [process] = start_command(arguments, log)
    try:
        eventually(lambda: not process.is_alive() or "Stop with" in log.read_text(), 120, every_s=0.1)
        base_url = re.search(r'base_url="(\S+)"', log.read_text())
        assert base_url is not None, log.read_text()
        client = openai.OpenAI(base_url=base_url[1], api_key=key, max_retries=0, timeout=60)
        asked = {"model": "tiny", "prompt": "Once", "max_tokens": 20, "temperature": 0}
        whole = client.completions.create(**asked, extra_body={"offramp": {"return_exit_layers": True}})
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 20
        chunks = list(client.completions.create(**asked, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="none").models.list()
        families = metrics(base_url[1].replace("/v1", "/metrics"), watching)
        assert {name.removesuffix("_total") for name in METRICS} == set(families)
        for name, (kind, _) in METRICS.items():
            family = families[name.removesuffix("_total")]
            assert family.type == kind.lower()
            assert family.samples[0].labels.items() >= {"model_name": "tiny", "model_version": "1.0"}.items()
        assert families["offramp_iterations"].samples[0].value >= 40, "two answers"
        [seconds] = [sample for sample in families["offramp_request_seconds"].samples if sample.name.endswith("_sum")]
        assert 0 < seconds.value < 120
        process.terminate()
        process.join(60)
        assert process.exitcode == 0, log.read_text()
    finally:
        process.kill()
    assert "Stopped.\n" in log.read_text()
    written = log.read_text() + (tmp_path / "access.log").read_text()
    assert key not in written
    assert watching not in written
    assert (tmp_path / "access.log").read_text().count('"status": 200') >= 3


def test_a_model_folder_is_not_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "MAR-INF").mkdir()
    (tmp_path / "MAR-INF" / "MANIFEST.json").write_text("{}")
    assert main(["serve", str(tmp_path), "--backend", "asgi"]) == 1
    assert "give --backend asgi a checkpoint directory" in capsys.readouterr().err
