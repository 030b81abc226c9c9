"""GSM8K (grade school mathematics) as prompts with answers, and a reward for correct numbers; for gsm8k.yaml.

Usage: python jobs/models/gsm8k.py FILE OUT. FILE has JSON lines with question and answer, which ends with #### NUMBER.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

_INSTRUCTION = "Think step by step. End with a line of the form #### NUMBER."
_ANSWER = re.compile(r"####\s*(-?[\d.,]+)")


def find_number(text: str) -> str | None:
    """Return the number after the last ####, without separators of thousands, or None."""
    numbers = _ANSWER.findall(text)
    return numbers[-1].replace(",", "").rstrip(".") if numbers else None


def correct_number(completions: list[Any], answer: list[str], **columns: list[Any]) -> list[float]:
    """Return 1 for each completion with the right number, 0.1 for a wrong one in the right form, otherwise 0."""
    rewards = []
    for completion, expected in zip(completions, answer, strict=True):
        number = find_number(completion if isinstance(completion, str) else completion[-1]["content"])
        rewards.append(0.0 if number is None else 1.0 if number == expected else 0.1)
    return rewards


def main(source: Path, out: Path) -> None:
    """Convert a file of the data set."""
    with out.open("w") as file:
        for line in source.read_text().removesuffix("\n").split("\n"):  # text may contain other separators
            record = json.loads(line)
            messages = [{"role": "user", "content": f"{record['question']}\n\n{_INSTRUCTION}"}]
            file.write(json.dumps({"messages": messages, "answer": find_number(record["answer"])}) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
