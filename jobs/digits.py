"""Task that a small model learns in minutes: sorting the digits of a number. Examples, prompts, reward and preferences.

python jobs/digits.py FOLDER    writes examples.jsonl, prompts.jsonl, held_out.jsonl, pairs.jsonl, held_out_pairs.jsonl
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


def mistake(rng: random.Random, answer: str) -> str:
    """Return a wrong answer: two neighbors exchanged, another digit, or one digit too few or too many."""
    digits = list(answer)
    position, kind = rng.randrange(len(digits)), rng.randrange(4)
    if kind == 0:
        digits[position - 1], digits[position] = digits[position], digits[position - 1]
    elif kind == 1:
        digits[position] = rng.choice("0123456789")
    elif kind == 2:
        del digits[position]
    else:
        digits.insert(position, rng.choice("0123456789"))
    wrong = "".join(digits)
    return wrong if wrong != answer else answer + answer[-1]


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
    for name, rows_of_file in (("pairs", prompts), ("held_out_pairs", held_out)):
        pairs = ({"prompt": prompt, "chosen": right, "rejected": mistake(rng, right)} for prompt, right in rows_of_file)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
