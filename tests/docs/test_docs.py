"""The commands that the documentation promises are run, so that none goes stale.

A fenced `bash` block whose first line is `# test` is run. The blocks of a page share one fresh directory and one shell,
in the order of the page. `offramp` is forked from a process that has imported everything, except on one page, which has
the script that is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```bash\n# test\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = {
    str(page.relative_to(ROOT)): blocks
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if page.is_file() and (blocks := BLOCK.findall(page.read_text(encoding="utf-8")))
}
INSTALLED_SCRIPT = "docs/importing.md"
TIME_LIMIT = 600.0  # seconds for a page; only a hang comes near it


def test_some_page_is_tested() -> None:
    assert INSTALLED_SCRIPT in PAGES


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_work(
    page: str, tmp_path: Path, empty_store: Path, request: pytest.FixtureRequest
) -> None:
    # The scripts of this very environment come first, as they do for a reader who has activated it.
    folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
    if page != INSTALLED_SCRIPT:
        folders.insert(0, str(request.getfixturevalue("quick_offramp").parent))
        shutil.copy(empty_store, tmp_path / "mlflow.db")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(PAGES[page])],
        cwd=tmp_path,
        env={**os.environ, "PATH": os.pathsep.join(folders)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )
    assert done.returncode == 0, f"{page} failed:\n{done.stdout}\n{done.stderr}"
