"""Program that compares mathematical answers with math-verify, for `rollout.math_reward`.

Each line of the input is a JSON list: the answer, the text of a completion, and the limit in seconds of processor
time. A line with 1, 0 or, if the answer is not mathematical, null is written for each. When the limit expires, the
process ends at once: by a signal without a handler, because the computation may be a single call into C.
"""

import json
import logging
import resource
import signal
import sys

#: Bytes of memory that the process may use.
_MAX_BYTES = 4 << 30


def main() -> None:
    """Write "ready", then compare the answers in each line."""
    from math_verify import parse, verify  # type: ignore[import-untyped]

    logging.disable(logging.WARNING)  # math-verify's own limits are off
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    verify(parse("$1$", parsing_timeout=None), parse(r"\boxed{1}", parsing_timeout=None), timeout_seconds=None)
    print("ready", flush=True)  # the first call takes a second
    for line in sys.stdin:
        answer, text, limit_s = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        # Without its delimiters, LaTeX would be read as plain text.
        expected = parse(f"${answer}$", parsing_timeout=None) or parse(answer, parsing_timeout=None)
        found = parse(text, parsing_timeout=None) if expected else []
        result = float(verify(expected, found, timeout_seconds=None)) if expected else None
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
