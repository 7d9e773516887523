"""Files that commands write: the old content or the new one, whatever happens in between."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from fusedreduce.cli.arguments import writable
from fusedreduce.trace.files import replace_file, replace_text


def test_a_file_is_replaced_in_one_piece(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    replace_text(path, "old")

    def fails(temporary: Path) -> None:
        temporary.write_text("half")
        raise MemoryError("planted")

    with pytest.raises(MemoryError, match="planted"):
        replace_file(path, fails)
    assert path.read_text() == "old\n" and list(tmp_path.iterdir()) == [path], "nothing is left beside it"
    replace_text(path, "new")
    assert path.read_text() == "new\n" and list(tmp_path.iterdir()) == [path]


def test_a_folder_is_made_and_one_that_cannot_be_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    assert writable(parser, tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        writable(parser, tmp_path / "file")
    assert "is not a folder that can be written to" in capsys.readouterr().err
