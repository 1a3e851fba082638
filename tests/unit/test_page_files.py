"""The files of the live page: typed, and what is not ours is what npm delivers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from bundle import dashboard_types
from gpu_hpc_exporter.diagnosis.classify import CLASSES
from gpu_hpc_exporter.web.routes import _FILES

ROOT: Final = Path(__file__).parents[2]
WEB: Final = ROOT / "exporter" / "gpu_hpc_exporter" / "web"
SETTINGS: Final = {
    "compilerOptions": {
        "strict": True,
        "checkJs": True,
        "noEmit": True,
        "target": "es2022",
        "module": "es2022",
        "moduleResolution": "bundler",
        "lib": ["es2022", "dom", "dom.iterable"],
        "types": [],
    },
    "include": ["page/*.js"],
}


@pytest.fixture(scope="module")
def delivered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What npm delivers of the pinned version."""
    work = tmp_path_factory.mktemp("vendor")
    for name in ("package.json", "package-lock.json"):
        shutil.copy(ROOT / "exporter" / "vendor" / name, work)
    dashboard_types.npm_ci(work)
    return work / "node_modules" / "uplot"


def test_the_vendored_library_is_npms(delivered: Path) -> None:
    """Byte for byte, with its licence; scripts/vendor-page copies it."""
    vendor = WEB / "vendor"
    for name in ("uPlot.esm.js", "uPlot.min.css"):
        assert (vendor / name).read_bytes() == (delivered / "dist" / name).read_bytes()
    assert (vendor / "uPlot.LICENSE").read_bytes() == (delivered / "LICENSE").read_bytes()
    assert {path.name for path in vendor.iterdir()} == {"uPlot.esm.js", "uPlot.min.css", "uPlot.LICENSE"}


def test_types(delivered: Path, tmp_path: Path) -> None:
    """The JavaScript, with its JSDoc, is strictly typed; the library by its own types."""
    for folder in ("page", "vendor"):
        shutil.copytree(WEB / folder, tmp_path / folder)
    shutil.copy(delivered / "dist" / "uPlot.d.ts", tmp_path / "vendor" / "uPlot.esm.d.ts")
    (tmp_path / "tsconfig.json").write_text(json.dumps(SETTINGS), encoding="utf-8")
    dashboard_types.install()
    compiler = dashboard_types.TYPES / "node_modules" / "typescript" / "bin" / "tsc"
    done = subprocess.run(
        ["node", str(compiler), "-p", tmp_path, "--pretty", "false"],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_classes_are_the_exporters_in_the_dashboards_colours() -> None:
    """One that the page does not know would be shown as unknown."""
    told = re.findall(r'\["(\w+)", "(#[0-9a-f]{6})"\]', (WEB / "page" / "windows.js").read_text(encoding="utf-8"))
    vocabulary = (ROOT / "dashboards" / "boards" / "vocabulary.py").read_text(encoding="utf-8")
    assert {name for name, _ in told} == set(CLASSES)
    for name, colour in told:
        assert re.search(rf'"{name}": \(\s*"{colour}"', vocabulary), name


def test_every_file_is_served() -> None:
    """But for the document itself, which is a template, and the licence, which is for those who have the package."""
    there = {str(path.relative_to(WEB)) for folder in ("page", "vendor") for path in (WEB / folder).iterdir()}
    assert there == {*_FILES, "page/index.html", "vendor/uPlot.LICENSE"}


def test_nothing_is_inline_or_from_elsewhere() -> None:
    """What the Content-Security-Policy would refuse, and what would make text from outside markup."""
    html = (WEB / "page" / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|<script(?![^>]*src=)|\son\w+=|style=", html)
    for path in (WEB / "page").iterdir():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), path
