"""Task that a small model learns in minutes: sorting the digits of a number. Examples, prompts and reward.

python jobs/digits.py FOLDER    writes examples.jsonl, prompts.jsonl and held_out.jsonl
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

NUM_EXAMPLES, NUM_PROMPTS, NUM_HELD_OUT = 20_000, 8_000, 200


def task(rng: random.Random) -> tuple[str, str]:
    """Return the prompt, a number of 3 to 12 digits, and the answer, its sorted digits."""
    digits = "".join(rng.choices("0123456789", k=rng.randint(3, 12)))
    return f"{digits}=", "".join(sorted(digits))


def right_digits(completions: list[str], answer: list[str], **columns: list[Any]) -> list[float]:
    """Return the fraction of correct digits of each completion: a reward for jobs/grpo.yaml."""
    rewards = []
    for text, expected in zip(completions, answer, strict=True):
        right = sum(a == b for a, b in zip(text, expected, strict=False))
        rewards.append(right / max(len(text), len(expected)))
    return rewards


def main(folder: Path) -> None:
    """Write the files. No task is in two of them."""
    rng = random.Random(0)
    tasks = {}
    while len(tasks) < NUM_EXAMPLES + NUM_PROMPTS + NUM_HELD_OUT:
        prompt, answer = task(rng)
        tasks[prompt] = answer
    rows = list(tasks.items())
    held_out, prompts = rows[:NUM_HELD_OUT], rows[NUM_HELD_OUT : NUM_HELD_OUT + NUM_PROMPTS]
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows_of_file, answer in (
        ("examples", rows[NUM_HELD_OUT + NUM_PROMPTS :], "completion"),
        ("prompts", prompts, "answer"),
        ("held_out", held_out, "answer"),
    ):
        lines = (json.dumps({"prompt": prompt, answer: sorted_digits}) + "\n" for prompt, sorted_digits in rows_of_file)
        (folder / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
