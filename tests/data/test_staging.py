from pathlib import Path

import pytest

from odc_mpi.data.staging import Staging, staging
from odc_mpi.errors import UserError


def fill(parts: Staging, content: str) -> None:
    parts.dataset.write_text(content)
    parts.tokenizer.mkdir()
    (parts.tokenizer / "t").write_text(content)


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def publish(folder: Path, content: str) -> dict[str, str]:
    with staging(folder / "out", folder / "tokenizer") as parts:
        fill(parts, content)
    return contents(folder)


def test_publishes_and_replaces(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "on the way"
    assert publish(folder, "1") == {"out": "1", "tokenizer/t": "1", "tokenizer/odc_mpi_tokenizer": "out\n"}
    assert publish(folder, "2") == {"out": "2", "tokenizer/t": "2", "tokenizer/odc_mpi_tokenizer": "out\n"}


def test_folders_that_were_made_go_again(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(KeyError), staging(tmp_path / "there" / "made" / "too" / "out", None) as parts:
        parts.dataset.write_text("1")
        raise KeyError
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]


def test_data_sets_share_a_tokenizer_only_if_it_is_the_same(tmp_path: Path) -> None:
    def publish_as(name: str, content: str) -> None:
        with staging(tmp_path / name, tmp_path / "tokenizer") as parts:
            fill(parts, content)

    publish_as("a.h5", "1")
    publish_as("a.hdf5", "1")
    before = contents(tmp_path)
    assert before["tokenizer/odc_mpi_tokenizer"] == "a.h5\na.hdf5\n"
    for name in ("a.h5", "a.hdf5", "b.h5"):
        with pytest.raises(UserError, match=r"that of a\.(h5|hdf5) is, which has other tokens: change OUT"):
            publish_as(name, "2")
        assert contents(tmp_path) == before
    (tmp_path / "a.h5").unlink()
    publish_as("a.hdf5", "2")  # nobody else has it any more
    assert contents(tmp_path)["tokenizer/odc_mpi_tokenizer"] == "a.hdf5\n"


def test_an_exception_publishes_nothing(tmp_path: Path) -> None:
    before = publish(tmp_path, "1")
    with pytest.raises(KeyError), staging(tmp_path / "out", tmp_path / "tokenizer") as parts:
        fill(parts, "2")
        raise KeyError
    assert contents(tmp_path) == before


@pytest.mark.parametrize("when", ["first", "later"])
def test_a_failure_while_publishing_is_undone(tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = publish(tmp_path, "1") if when == "later" else {}

    def fail(*_: object) -> None:
        raise OSError("disk on fire")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="on fire"):
        publish(tmp_path, "2")
    assert contents(tmp_path) == before
    assert (tmp_path / "tokenizer").exists() == (when == "later")


def test_permissions_are_the_usual_ones(tmp_path: Path) -> None:
    publish(tmp_path, "1")
    (tmp_path / "usual").touch()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_foreign_directories_stay(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    with pytest.raises(UserError, match="not odc-mpi's"):
        publish(tmp_path, "1")
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer"]
