"""What a command writes at its end."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from scripts._files import UsageError, hand_out


class Gone(io.StringIO):
    """A reader that has left, as ``head`` does."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_reader_that_left_costs_no_file(tmp_path: Path) -> None:
    found, image = tmp_path / "found.json", tmp_path / "found.png"
    with pytest.raises(BrokenPipeError):
        hand_out("a table", {"a": 1}, str(found), image=(str(image), lambda: b"picture"), out=Gone())
    assert json.loads(found.read_text()) == {"a": 1}
    assert image.read_bytes() == b"picture"


def test_a_file_that_cannot_be_written_costs_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError):
        hand_out("a table", {}, str(tmp_path / "missing" / "found.json"))
    assert capsys.readouterr().out == "a table\n"


def test_json_on_standard_output_is_alone_there(capsys: pytest.CaptureFixture[str]) -> None:
    hand_out("a table", {"a": 1}, "-")
    out, err = capsys.readouterr()
    assert (json.loads(out), err) == ({"a": 1}, "a table\n")
