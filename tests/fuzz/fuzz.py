"""Give the commands damaged files and bad input, and judge the results.

    python tests/fuzz/fuzz.py --seed 0 --jobs 2                 all inputs: make fuzz SEED=0
    python tests/fuzz/fuzz.py --part 20                         a random twentieth of each family
    python tests/fuzz/fuzz.py --match "c: .*mask" --verbose     those whose name matches, with their output

The last line counts inputs, tracebacks, hangs, wrong exit codes, losses of files and silently wrong results.
"""

import argparse
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import textwrap
import time
from collections import Counter
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "launch"), str(HERE.parent / "fakes"), str(HERE.parents[1])]

import inputs  # noqa: E402
import material  # noqa: E402
import runner  # noqa: E402
from case import Case  # noqa: E402
from judge import SEVERITIES, judge, result, snapshot  # noqa: E402

#: The inputs, and results from undamaged files by command; processes of the pool inherit both.
CASES, EXPECTED = [], {}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the random inputs")
    parser.add_argument("--jobs", type=int, default=2, help="concurrent inputs")
    parser.add_argument("--part", type=int, default=1, metavar="N", help="only one in N inputs")
    parser.add_argument("--match", default="", metavar="REGEX", help="only inputs whose 'family: name' matches")
    parser.add_argument("--verbose", action="store_true", help="print every input with its exit code and output")
    arguments = parser.parse_args()
    runner.import_modules()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that copies are removed
    CASES.extend(select(arguments.seed, arguments.part, arguments.match))
    began, rows, context = time.monotonic(), {}, multiprocessing.get_context("fork")
    work = Path(tempfile.mkdtemp(prefix="odc_mpi-fuzz-"))  # commands run the exit handlers of a TemporaryDirectory
    try:
        _make_undamaged(work / "material", context)
        with context.Pool(arguments.jobs) as pool:
            for number, found, finished in pool.imap_unordered(partial(_run, work), range(len(CASES))):
                case, rows[number] = CASES[number], found
                if found or arguments.verbose:
                    print(f"{case.family}: {case.name}: exit code {finished.code}; {'; '.join(found)}", flush=True)
                if arguments.verbose:
                    print(textwrap.indent(finished.out + finished.err, "    "), flush=True)
    finally:
        shutil.rmtree(work)
    return _print(rows, time.monotonic() - began)


def _make_undamaged(directory, context):
    directory.mkdir()
    child = context.Process(target=material.write_sources, args=(directory,))
    child.start()
    child.join()
    assert child.exitcode == 0
    for argv in material.COMMANDS:
        finished = runner.run(Case("material", "", argv), directory)
        assert finished.code == 0, (argv, finished)


def select(seed, part, match):
    """Yield all inputs of a seed, or a random part of each family."""
    for family in inputs.FAMILIES:
        draw = random.Random(seed)
        everything = list(family(draw))
        chosen = everything if part == 1 else draw.sample(everything, len(everything) // part)
        yield from (case for case in chosen if re.search(match, f"{case.family}: {case.name}"))


def _run(work, number):
    """Run an input; return its number, the findings, and its end."""
    case, directory = CASES[number], work / str(os.getpid())
    if case.same and case.argv not in EXPECTED:
        reference = Case("reference", "", case.argv, ranks=case.ranks, codes=(0,), limit_s=120)
        *_, EXPECTED[case.argv] = _judged(reference, work / "material", directory)
    found, finished, _ = _judged(case, work / "material", directory)
    return number, found, finished


def _judged(case, undamaged, directory):
    """Run an input; return findings, its end, and its result."""
    with runner.copied(case, undamaged, directory):
        before = snapshot(directory)
        finished = runner.run(case, directory)
        got = result(case, directory, finished) if finished.code == 0 else None
        return judge(case, finished, before, snapshot(directory), EXPECTED.get(case.argv), got), finished, got


def _print(rows, seconds):
    counts = Counter(text[0] for found in rows.values() for text in found)
    named = ", ".join(f"{counts[letter]} {SEVERITIES[letter]}" for letter in SEVERITIES)
    print(f"{len(rows)} inputs in {seconds:.0f} s, {counts['M']} messages of more than one line, {named}")
    return 1 if any(counts[letter] for letter in SEVERITIES) else 0


if __name__ == "__main__":
    sys.exit(main())
