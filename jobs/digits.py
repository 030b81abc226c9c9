"""A task that a small model learns in minutes: to sort the digits of a number. Its examples, prompts and reward.

python jobs/digits.py FOLDER    writes examples.jsonl, prompts.jsonl and held_out.jsonl
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

NUM_EXAMPLES, NUM_PROMPTS, NUM_HELD_OUT = 20_000, 8_000, 200


def task(draws: random.Random) -> tuple[str, str]:
    """Return a number of 3 to 12 digits as text, and its digits in order."""
    digits = "".join(draws.choices("0123456789", k=draws.randint(3, 12)))
    return f"{digits}=", "".join(sorted(digits))


def right_digits(completions: list[str], answer: list[str], **columns: list[Any]) -> list[float]:
    """Return of each completion the share of places with the right digit: a reward, for jobs/grpo.yaml."""
    rewards = []
    for text, wanted in zip(completions, answer, strict=True):
        right = sum(a == b for a, b in zip(text, wanted, strict=False))
        rewards.append(right / max(len(text), len(wanted)))
    return rewards


def main(folder: Path) -> None:
    """Write the files; no task of one is in another."""
    draws = random.Random(0)
    tasks = {}
    while len(tasks) < NUM_EXAMPLES + NUM_PROMPTS + NUM_HELD_OUT:
        prompt, answer = task(draws)
        tasks[prompt] = answer
    rows = list(tasks.items())
    held_out, prompts = rows[:NUM_HELD_OUT], rows[NUM_HELD_OUT : NUM_HELD_OUT + NUM_PROMPTS]
    folder.mkdir(parents=True, exist_ok=True)
    for name, own, answer in (
        ("examples", rows[NUM_HELD_OUT + NUM_PROMPTS :], "completion"),
        ("prompts", prompts, "answer"),
        ("held_out", held_out, "answer"),
    ):
        lines = (json.dumps({"prompt": prompt, answer: sorted_digits}) + "\n" for prompt, sorted_digits in own)
        (folder / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
