"""After a run went back, each dead prompt has one letter, and no other prompt has any."""

from __future__ import annotations

from spot_async.run_directory.dead_letters import FILE_NAME, DeadLetter, settle_letters
from spot_async.run_directory.layout import RunDirectory
from spot_async.run_directory.reading import RunFiles


def letter(ordinal, **more):
    return DeadLetter(ordinal=ordinal, problem_id=f"p{ordinal}", reason="400: too long", **more)


def test_a_letter_too_few_too_many_or_torn_is_mended(tmp_path):
    (tmp_path / "run.json").write_text('{"format": 1}')
    asked_again, dead = letter(3, stage="score"), letter(5, stage="score", attempts=4)
    RunDirectory(tmp_path).append(FILE_NAME, [asked_again, dead, dead])
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes() + b'{"ordinal": 7, "prob')
    for _ in range(2):
        settle_letters(tmp_path, [letter(5), letter(7)])
        assert RunFiles(tmp_path).dead_letters() == [dead, letter(7)]


def test_a_run_without_deaths_has_no_file(tmp_path):
    RunDirectory(tmp_path).append(FILE_NAME, [letter(3)])
    settle_letters(tmp_path, [])
    assert not (tmp_path / FILE_NAME).exists()
    settle_letters(tmp_path, [])
    assert not (tmp_path / FILE_NAME).exists()
