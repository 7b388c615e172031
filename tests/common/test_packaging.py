from __future__ import annotations

import ast
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def imported_packages(source: Path) -> dict[str, Path]:
    """Top-level names imported anywhere in these files, lazily too, each with one file that does."""
    names: dict[str, Path] = {}
    for file in source.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules = [node.module]
            else:
                continue
            for module in modules:
                # The namespace is shared: which part of it was meant is in the second name.
                parts = module.split(".")[: 2 if module.startswith("offramp.") else 1]
                names[".".join(parts)] = file
    return {name: file for name, file in names.items() if name not in sys.stdlib_module_names}


@pytest.mark.parametrize("package", ["common", "train", "serve"])
def test_what_a_distribution_imports_it_declares(package: str) -> None:
    declared = {canonicalize_name(Requirement(line).name) for line in requires(f"offramp-{package}") or []}
    declared.add(canonicalize_name(f"offramp-{package}"))
    providers = packages_distributions()
    undeclared: list[str] = []
    for name, file in imported_packages(ROOT / "packages" / package / "src").items():
        if name.startswith("offramp."):
            distributions = {name.replace(".", "-")}
        else:
            distributions = {canonicalize_name(provider) for provider in providers.get(name, [name])}
        if not distributions & declared:
            undeclared.append(f"{file.relative_to(ROOT)} imports {name} ({', '.join(distributions)})")
    assert not undeclared


def test_every_declared_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {canonicalize_name(Requirement(line).name) for line in lines if line and not line.startswith("#")}
    for package in ("common", "train", "serve"):
        for line in requires(f"offramp-{package}") or []:
            name = canonicalize_name(Requirement(line).name)
            assert name.startswith("offramp-") or name in pinned, name


def test_pins_name_no_build_and_no_host() -> None:
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        requirement = Requirement(line)
        assert requirement.url is None, line
        assert [specifier.operator for specifier in requirement.specifier] == ["=="], line
        assert "+" not in str(requirement.specifier), line


def test_the_distributions_have_one_version() -> None:
    offramp = {
        Requirement(line).specifier
        for package in ("train", "serve")
        for line in requires(f"offramp-{package}") or []
        if Requirement(line).name == "offramp-common"
    }
    assert {str(specifier) for specifier in offramp} == {"==0.1.0"}
