from __future__ import annotations

import contextlib
import stat
from pathlib import Path

import pytest

from offramp.common.cli import main
from offramp.common.errors import OfframpError
from offramp.serve.http.key_limits import KeyLimits
from offramp.serve.http.keys import ApiKey, KeyRing, KeysFile, add_key, remove_key
from offramp.serve.protocol.errors import ApiError


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ask(limits: KeyLimits, key: ApiKey) -> ApiError | None:
    try:
        with limits.admitted(key):
            return None
    except ApiError as error:
        return error


def key(**limits: int) -> ApiKey:
    return ApiKey(name="a", sha256="0" * 64, **limits)  # pyright: ignore[reportArgumentType]


def test_a_minute_is_given_back_bit_by_bit() -> None:
    clock = Clock()
    limits = KeyLimits(9, clock)
    asked = key(requests_per_minute=6)
    assert [ask(limits, asked) for _ in range(6)] == [None] * 6
    refused = ask(limits, asked)
    assert refused is not None
    assert (refused.status, refused.headers) == (429, {"Retry-After": "10"})
    clock.now += 9.5
    refused = ask(limits, asked)
    assert refused is not None
    assert refused.headers == {"Retry-After": "1"}
    clock.now += 0.5
    assert ask(limits, asked) is None
    clock.now += 3600
    assert [ask(limits, asked) for _ in range(7)].count(None) == 6, "what is not used is not saved up"


def test_a_seat_is_given_back_whatever_happens() -> None:
    limits = KeyLimits(2)
    asked = key(max_concurrent=1)
    with limits.admitted(asked):
        assert ask(limits, asked) is not None
        with limits.admitted(None), pytest.raises(ApiError), limits.admitted(None):
            pass
    with contextlib.suppress(ValueError), limits.admitted(asked):
        raise ValueError
    assert ask(limits, asked) is None


def test_a_file_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "new" / "keys.json"
    secret = add_key(file, "alice", requests_per_minute=5)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert secret not in file.read_text()
    clock = Clock()
    keys = KeysFile(file, clock)
    found = keys.find(secret)
    assert found is not None
    assert (found.name, found.requests_per_minute, found.max_concurrent) == ("alice", 5, None)
    assert keys.find(secret[:-1]) is None
    assert keys.find(found.sha256) is None, "a hash is no key"
    with pytest.raises(OfframpError, match="has a key named 'alice' already"):
        add_key(file, "alice")
    other = add_key(file, "bob")
    assert keys.find(other) is None, "it looks once a second"
    clock.now += 1
    assert keys.find(other) is not None
    remove_key(file, "bob")
    file.write_text("{}x")
    clock.now += 1
    assert keys.find(other) is not None, "what cannot be read changes nothing"
    with pytest.raises(OfframpError, match=f"{file} is no file of keys"):
        remove_key(file, "alice")


@pytest.mark.parametrize("name", ["", "-a", "a b", "a\n", "x" * 65, "ä"])
def test_a_name_is_one_word(tmp_path: Path, name: str) -> None:
    with pytest.raises(OfframpError, match="'name' "):
        add_key(tmp_path / "keys.json", name)
    assert not (tmp_path / "keys.json").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from offramp.serve.cli.keys import main as keys_main

    file = str(tmp_path / "keys.json")
    assert keys_main(["add", file, "alice", "--max-concurrent", "4"]) == 0
    secret = capsys.readouterr().out.strip()
    assert KeysFile(Path(file)).find(secret) is not None
    assert keys_main(["list", file]) == 0
    said = capsys.readouterr().out
    assert "alice" in said
    assert "4 at the same time" in said
    assert keys_main(["add", file, "prometheus", "--use", "metrics"]) == 0
    watching = capsys.readouterr().out.strip()
    assert keys_main(["list", file]) == 0
    said = capsys.readouterr().out
    assert "/metrics alone" in said
    hashes = [key.sha256 for key in KeyRing.read(Path(file)).keys]
    assert not [word for word in (secret, watching, *hashes) if word in said]
    assert keys_main(["remove", file, "prometheus"]) == 0
    assert keys_main(["remove", file, "alice"]) == 0
    with pytest.raises(OfframpError, match="has no key named 'alice'; it has: none"):
        keys_main(["remove", file, "alice"])
    assert main(["serve", str(tmp_path), "--settings", file]) == 1
    assert "--backend asgi" in capsys.readouterr().err
