from __future__ import annotations

import os
from pathlib import Path

from offramp.serve.torchserve.snapshots import Registered, Snapshots

WRITTEN = r"""#Saving snapshot
#Mon Nov 30 18:19:44 UTC 2026
inference_address=http\://127.0.0.1\:39055
model_snapshot={\n  "name"\: "s.cfg",\n  "modelCount"\: 2,\n  "models"\: {\n    "tiny"\: {\n      "1.0"\: {\n        \
"defaultVersion"\: false,\n        "marName"\: "tiny",\n        "minWorkers"\: 1\n      },\n      "2"\: {\n        \
"defaultVersion"\: true,\n        "marName"\: "tiny-2-b4c2",\n        "minWorkers"\: 1\n      }\n    }\n  }\n}
model_store=store
""".replace("\\\n", "")


def test_what_was_registered_is_known_and_the_default_version_comes_first(tmp_path: Path) -> None:
    (tmp_path / "20261130181944335-snapshot.cfg").write_text(WRITTEN)
    assert Snapshots(tmp_path).newest() == [
        Registered("tiny", "2", "tiny-2-b4c2", True),
        Registered("tiny", "1.0", "tiny", False),
    ]
    assert Snapshots(tmp_path / "missing").newest() == []


def test_one_that_was_cut_counts_for_nothing_and_older_ones_go(tmp_path: Path) -> None:
    (tmp_path / "20261130181910615-startup.cfg").write_text(WRITTEN.replace("tiny-2-b4c2", "old"))
    (tmp_path / "20261130181937233-snapshot.cfg").write_text(WRITTEN)
    for length in (0, len(WRITTEN) // 2):
        (tmp_path / "20261130181944335-snapshot.cfg").write_text(WRITTEN[:length])
        assert Snapshots(tmp_path).newest()[0].folder == "tiny-2-b4c2"
        assert os.listdir(tmp_path) == ["20261130181937233-snapshot.cfg"]
