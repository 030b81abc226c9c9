"""README and docs: links, the shell's and the command line's grammar, and the pages' total length."""

import re
import runpy
import shlex
import subprocess

import pytest
from doc_blocks import PAGES, ROOT, blocks, commands
from step_metrics import STEP

import odc_mpi
from odc_mpi.cli import main as cli
from odc_mpi.training import settings
from odc_mpi.training.parsing.aliases import ALIASES

#: Words before `odc-mpi` in a command line: a launcher, or a loop of the shell.
LAUNCHER = re.compile(r"(?:^|[;&|]\s*|\bdo\s+)(?:(?:mpiexec|srun)\s[^|;&]*?)?\bodc-mpi\s+([^|;&>]*)")
SHELL = ("sh", "console")
GENERATED = "reference/"


def shell_blocks():
    return [
        pytest.param(block, id=f"{page.name}:{block.line}")
        for page in PAGES
        for block in blocks(page)
        if block.kind in SHELL
    ]


@pytest.mark.parametrize("block", shell_blocks())
def test_commands_are_accepted_by_their_parsers(block):
    checked = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    for command in commands(block):
        for words in LAUNCHER.findall(re.sub(r"\s#\s.*", "", command)):
            check_arguments(shlex.split(re.sub(r"\$\w+", "1", words)))


def check_arguments(words):
    """Parse the arguments of `odc-mpi`, and the settings among them."""
    if words[-1:] == ["--help"]:
        words = words[:-1]
    if words in ([], ["train"], ["prepare"], ["checkpoint"]):
        return
    arguments = cli.parse(words)
    if arguments.command in ("train", "job"):
        file = ROOT / arguments.config if arguments.config else None
        required = ["--model.path", "MODEL_DIR", "--data.path", "DATA.h5"]
        if file and file.exists():
            settings.load(file, arguments.overrides)
        else:
            settings.load(None, [*required, *arguments.overrides])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"^( *)```.*?^\1```$|`[^`\n]+`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if path.startswith(GENERATED):
            continue  # written by `make docs`, which checks these links
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name}: {target}"


def anchors(page):
    """Return the names of a page's headings as GitHub and the site derive them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_the_reference_is_complete(tmp_path):
    runpy.run_path(str(ROOT / "docs" / "stage.py"))["stage"](tmp_path)
    pages = {page.stem: page.read_text() for page in (tmp_path / "docs" / "reference").glob("*.md")}
    assert [key for key in settings.defaults() if f"`{key}`" not in pages["settings"]] == []
    assert [name for name in ALIASES if f"`{name}`" not in pages["settings"]] == []
    assert [key for key in (*STEP, "eval_loss_best", "eval_NAME") if f"`{key}`" not in pages["metrics"]] == []
    assert [name for name in cli.COMMANDS if f"## odc-mpi {name}\n" not in pages["commands"]] == []
    assert [name for name in odc_mpi.__all__ if name != "__version__" and f".{name}\n" not in pages["python"]] == []
    assert "](../" not in "".join(page.read_text() for page in (tmp_path / "docs").glob("*.md"))


def test_every_page_and_variable_is_listed():
    nav, environment = ((ROOT / "docs" / name).read_text() for name in ("mkdocs.yml", "environment.md"))
    assert [page.name for page in PAGES[1:] if nav.count(f": {page.relative_to(ROOT / 'docs')}\n") != 1] == []
    package = "".join(path.read_text() for path in (ROOT / "odc_mpi").rglob("*.py"))
    assert [name for name in sorted(set(re.findall(r"ODC_MPI_[A-Z_]+", package))) if name not in environment] == []


def test_the_picture_of_imports_is_up_to_date():
    """If not: python docs/draw_imports.py > docs/imports.svg."""
    drawing = runpy.run_path(str(ROOT / "docs" / "draw_imports.py"))
    assert drawing["draw"](drawing["read_imports"]()) == (ROOT / "docs" / "imports.svg").read_text()


def test_pages_are_short():
    """README is read in two minutes; the manual stays below 2,000 lines, without the pages that are generated."""
    lengths = {page: len(page.read_text(encoding="utf-8").splitlines()) for page in PAGES}
    assert lengths.pop(ROOT / "README.md") <= 150
    assert sum(lengths[page] for page in lengths if GENERATED not in page.as_posix()) <= 2050
