"""The directory that a run leaves behind: config.yaml, metrics.jsonl, summary.json. Local; for rank 0."""

from pathlib import Path

from odc_mpi.errors import UserError

#: What a run writes and a later run in the same directory must not mix with its own.
RECORDS = ("config.yaml", "metrics.jsonl", "summary.json")


def open_run_directory(path: Path, config_text: str) -> None:
    """Make a run directory ready: what an earlier run left goes to `earlier-N`, the configuration is written. Local.

    Args:
        path: Made if it does not exist.
        config_text: The content of config.yaml.

    Raises:
        UserError: The directory cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        left = [path / name for name in RECORDS if (path / name).exists()]
        if left:
            number = next(n for n in range(1, 1 << 30) if not (path / f"earlier-{n}").exists())
            (path / f"earlier-{number}").mkdir()
            for record in left:
                record.rename(path / f"earlier-{number}" / record.name)
        (path / RECORDS[0]).write_text(config_text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"run.dir: expected a directory to write in, got {path}: {error.strerror}") from error
