"""The tests themselves, where hypothesis is not installed: those that need it are skipped, and no other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# Python finds everything but hypothesis; and not pytest's plugins, of which hypothesis has one.
WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "hypothesis" else super().find_spec(name, path, target)

sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def test_gpu_tests_are_collected_and_what_needs_hypothesis_is_skipped() -> None:
    on_gpu = sorted(HERE.glob("gpu/test_gpu*.py"))
    others = ("buckets/test_finite.py", "buckets/test_streams.py", "kernels/test_kernels.py")
    command = [sys.executable, "-c", WITHOUT, "-p", "no:cacheprovider", "--collect-only", "-q"]
    done = subprocess.run(
        [*command, *map(str, on_gpu), *(str(HERE / name) for name in others)],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    found = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert found == {f"tests/gpu/{file.name}" for file in on_gpu} | {f"tests/{name}" for name in others[:2]}, text
    assert text.count("hypothesis is not installed") == 1, text
