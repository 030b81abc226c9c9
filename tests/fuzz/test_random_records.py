"""Random records and chat templates, and the judgment of them."""

import random

from records import Draw, Drawn, Template, check, draw_template, make_tokenizer, run, run_texts

PLAIN = Template("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}", None, False, False, False)


def test_random_records_and_texts_have_no_findings():
    lines = []
    num_found, num_accepted = run(0, 200, lines.append)
    num_found += run_texts(0, 200, lines.append)
    assert not num_found and num_accepted > 100, "\n".join(lines)


def test_faults_are_found():
    tokenizer, rng = make_tokenizer(), random.Random(0)
    record = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}
    expected = (
        (Drawn(record, trained=["two"], untrained=["one"]), []),
        (Drawn(record, untrained=["two"]), ["loss on 'two'"]),
        (Drawn(record, trained=["one"]), ["'one' has loss 0 times"]),
        (Drawn(record, untrained=["three"]), ["'three' is missing and not counted"]),
        (Drawn(record, invalid=True), ["accepted, and must be invalid"]),
        (Drawn(record, extra="topic"), ["an unknown field is not counted"]),
    )
    for drawn, found in expected:
        assert check(tokenizer, PLAIN, drawn) == (found, True)
    assert draw_template(rng).text != draw_template(rng).text and Draw(rng).record().record
