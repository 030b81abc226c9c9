"""Draw records and chat templates, encode them, and check the loss against what the record says.

    python tests/fuzz/records.py --seed 0 --draws 10000

Every text of a record is a different number, so a text is found in decoded tokens without knowing the template.
"""

import argparse
import ast
import json
import random
import sys
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "data" / "encoding"), str(TESTS.parent)]

END, START, BETWEEN = "<|im_end|>", "<|im_start|>", "<|sep|>"
ROLES = ("system", "user", "assistant", "tool")
MARKERS = tuple(f"<|{role}|>" for role in ROLES)
REASONING = ("reasoning_content", "reasoning", "thinking")
FLAGS = ("weight", "train", "training", "loss", "loss_scale", "loss_mask")


class Template(NamedTuple):
    """A chat template, the token that ends an answer, and whether it writes reasoning, tools and calls."""

    text: str
    end: str | None
    reasoning: bool
    tools: bool
    calls: bool


@dataclass
class Drawn:
    """A record, with what an encoder has to make of it."""

    record: dict
    trained: list = field(default_factory=list)  # texts with loss once
    untrained: list = field(default_factory=list)  # texts without loss, up to the last answer with loss
    optional: set = field(default_factory=set)  # texts that a template may leave out, if the report counts it
    arguments: list = field(default_factory=list)  # of calls of trained answers
    answers: list = field(default_factory=list)  # the last text of each trained answer
    unseen: list = field(default_factory=list)  # texts without loss that may be missing
    invalid: bool = False  # it must be refused
    extra: str = ""  # a field that must be counted


def draw_template(rng):
    """Return a random template: ChatML, markers of roles as in GLM, or a token between turns."""
    style = rng.choice(("chatml", "chatml", "chatml", "roles", "between", "unmarked"))
    reasoning, calls, tools = rng.random() < 0.7, rng.random() < 0.8, rng.random() < 0.7
    marks = style == "chatml" and rng.random() < 0.3
    open_turn = {"roles": "{{ '<|' + m.role + '|>' }}", "between": "{{ m.role }}: ", "unmarked": "[{{ m.role }}] "}
    begin = open_turn.get(style, START + "{{ m.role }}\n")
    dump = rng.choice(("c.arguments | tojson", "c.arguments", "c.arguments | string"))
    thought = "{% if m.NAME %}<think>{{ m.NAME }}</think>{% endif %}".replace("NAME", rng.choice(REASONING))
    call = (
        "{% for each in m.tool_calls or [] %}{% set c = each.function %}<call>"
        '{"name": "{{ c.name }}", "arguments": {{ DUMP }}}</call>{% endfor %}'
    ).replace("DUMP", dump)
    body = (thought if reasoning else "") + "{{ m.content or '' }}" + (call if calls else "")
    end = {"chatml": END, "unmarked": "[/turn]"}.get(style, "")
    after = rng.choice(("\n", "", "\n\n", " text after\n")) if style == "chatml" else "\n" * (style == "unmarked")
    inner, outer = (body + end, after) if rng.random() < 0.5 else (body + end + after, "")
    answer = "{% generation %}" + body + end + "{% endgeneration %}" + after if marks else inner + outer
    turn = begin + "{% if m.role == 'assistant' %}" + answer + "{% else %}{{ m.content or '' }}" + end + after
    turn += "{% endif %}"
    if style == "between":
        turn += "{% if not loop.last %}" + BETWEEN + "{% endif %}"
    head = "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}" if tools else ""
    prompt = begin.replace("{{ '<|' + m.role + '|>' }}", "<|assistant|>").replace("{{ m.role }}", "assistant")
    always = style in ("chatml", "roles") and not marks and rng.random() < 0.1
    prompt = prompt if always else "{% if add_generation_prompt %}" + prompt + "{% endif %}"
    text = head + "{% for m in messages %}" + turn + "{% endfor %}" + prompt
    ends = {"chatml": END, "between": BETWEEN, "roles": "<|user|>"}
    return Template(text, ends.get(style), reasoning, tools, calls)


class Draw:
    """Random parts of records with texts that occur once."""

    def __init__(self, rng):
        self.rng, self.number = rng, rng.randrange(1000, 2000)

    def text(self):
        self.number += self.rng.randrange(1, 9)
        return f"text {self.number}{self.rng.choice(('', '', '.', ' ж', ' 🙂', '!'))}"

    def chance(self, probability):
        return self.rng.random() < probability

    def content(self, text):
        parts = [{"type": "text", "text": ""}, {"type": "text", "text": text}]
        return parts if self.chance(0.2) else text

    def call(self, drawn, *, is_trained):
        arguments = {"a": self.text(), "b": self.rng.choice((1, None, True, [1], {"c": "d"}))}
        form = self.rng.choice(("object", "object", "text", "empty", "missing", "null", "bad", "bad"))
        as_text = json.dumps(arguments, ensure_ascii=self.chance(0.5))
        given = {"text": as_text, "empty": "", "null": None}.get(form, arguments)
        if form == "bad" and self.chance(0.2):
            given, drawn.invalid = self.rng.choice(("[1]", "{", 3, [1], "1")), True
        function = {"name": f"call_{self.number}", "arguments": given}
        if form == "missing":
            del function["arguments"]
        has_arguments = form in ("object", "text", "bad")
        texts = [function["name"], *([arguments["a"]] if has_arguments else [])]
        (drawn.trained if is_trained else drawn.untrained).extend(texts)
        drawn.optional.update(texts)
        drawn.arguments += [arguments if has_arguments else {}] if is_trained else []
        return function

    def answer(self, drawn, *, is_context=False):
        message, rng = {"role": "assistant"}, self.rng
        flag, value = rng.choice(FLAGS) if self.chance(0.3) else None, rng.choice((0, 1, False, True, None, 0.0, 1.0))
        if flag and self.chance(0.04):
            value, drawn.invalid = rng.choice((0.5, "no", 2, [])), True
        message |= {flag: value} if flag else {}
        is_trained = not is_context and not (flag and value is not None and not value)
        texts = drawn.trained if is_trained else drawn.untrained
        kind = rng.choice(("text", "text", "text", "call", "both", "refusal", "null"))
        if self.chance(0.25):
            thought = self.text()
            message[rng.choice(REASONING)] = thought
            texts += [thought] if is_trained else []  # templates leave out that of earlier turns
            drawn.unseen += [] if is_trained else [thought]
            drawn.optional.add(thought)
        if kind == "refusal":
            message |= {"refusal": self.text(), "content": rng.choice(("", None))}
            texts.append(message["refusal"])
        elif kind == "null" and self.chance(0.3):
            message["content"] = None
        elif kind in ("text", "both", "null"):
            texts.append(self.text())
            message["content"] = self.content(texts[-1])
        if kind == "text" and self.chance(0.2):
            message |= {"tool_calls": [], "refusal": None}
        if kind in ("call", "both"):
            function = self.call(drawn, is_trained=is_trained)
            wrapped = [{"type": "function", "id": "1", "function": function}]
            message |= {"function_call": function} if self.chance(0.3) else {"tool_calls": wrapped}
            message.setdefault("content", rng.choice(("", None)))
        content = message.get("content")
        if is_trained and content and isinstance(content, str) and kind in ("text", "null"):
            drawn.answers.append(content)
        return message

    def plain(self, drawn, role):
        drawn.untrained.append(self.text())
        return {"role": role, "content": self.content(drawn.untrained[-1])}

    def record(self):
        """Return a record in one of the formats."""
        drawn, rng = Drawn({}), self.rng
        if self.chance(0.6):
            messages = [self.plain(drawn, "system")] if self.chance(0.3) else []
            for _ in range(rng.randrange(1, 4)):
                messages += [self.plain(drawn, "user"), self.answer(drawn)]
                if messages[-1].get("tool_calls") and self.chance(0.7):
                    messages += [self.plain(drawn, "tool"), self.answer(drawn)]
            drawn.record["messages"] = messages
            # What follows the last answer with loss has no effect on training.
            rendered = json.dumps(messages, ensure_ascii=False)
            # Without other letters, which JSON text within the JSON may escape.
            texts = (*drawn.trained, *drawn.untrained)
            place = {text: rendered.rfind(text.encode("ascii", "ignore").decode().rstrip()) for text in texts}
            last = max((place[text] for text in drawn.trained), default=len(rendered))
            after = [text for text in drawn.untrained if place[text] > last]
            drawn.untrained = [text for text in drawn.untrained if text not in after]
            drawn.unseen += after
        else:
            names = rng.choice((("prompt", "completion"), ("instruction", "output")))
            turns = [[self.text(), self.text()] for _ in range(1 + self.chance(0.4))]
            drawn.untrained, drawn.trained = map(list, zip(*turns, strict=True))
            drawn.record = dict(zip(names, turns[0], strict=True))
            drawn.record |= {"history": turns[1:]} if turns[1:] else {}
            drawn.answers += [turns[0][1]] if self.chance(0.3) or "instruction" in drawn.record else []
        has_system = any(each["role"] == "system" for each in drawn.record.get("messages", ()))
        if self.chance(0.2) and not has_system:
            drawn.record["system"] = self.text()
            drawn.untrained.append(drawn.record["system"])
        if self.chance(0.2):
            drawn.untrained.append(f"tool_{self.text().split()[1]}")
            function = {"name": drawn.untrained[-1], "parameters": {}}
            drawn.record["tools"] = [{"type": "function", "function": function}]
            drawn.optional.add(function["name"])
        if drawn.record.keys() == {"prompt", "completion"}:
            drawn.answers.clear()  # texts, which end with the eos token
        if self.chance(0.2):
            drawn.extra = "topic_of_it"
            drawn.record |= {drawn.extra: "x"}
        drawn.record |= {"id": 3} if self.chance(0.3) else {}
        return drawn


def make_tokenizer():
    from tiny_tokenizers import tiny_tokenizer

    tokenizer = tiny_tokenizer("byte-level")
    tokenizer.add_special_tokens({"additional_special_tokens": [START, END, BETWEEN, *MARKERS]})
    return tokenizer


def check(tokenizer, template, drawn):
    """Encode a record alone, and return the findings as texts, and True if the record was accepted."""
    from odc_mpi.data.encoding.blocks import SequenceFilter, encode_block
    from odc_mpi.data.records.block import Block

    tokenizer.chat_template = template.text
    try:
        block = Block("f", "line", [(1, json.loads(json.dumps(drawn.record)))])
        encoded = encode_block(tokenizer, SequenceFilter(), block, {})
    except Exception as error:
        return [f"raises {type(error).__name__}: {error}"], False
    sequences, counts = encoded.sequences[0], encoded.counts
    if counts.num_bad_lines:
        # It may be refused if the template leaves out what an answer consists of.
        is_whole = template.reasoning and template.calls and "string" not in template.text
        simple = not drawn.arguments and not (set(drawn.trained) & drawn.optional)
        must_pass = not drawn.invalid and (is_whole or simple)
        return [f"refused: {counts.bad_lines[0]}"] * must_pass, False
    if drawn.invalid:
        return (["accepted, and must be invalid"] if sequences else []), bool(sequences)
    if not sequences:
        return (["dropped without a count"] if not counts.num_untrained_dropped else []), False
    return list(_findings(tokenizer, template, drawn, sequences, counts)), True


def _findings(tokenizer, template, drawn, sequences, counts):
    runs, wholes = [], []
    for each in sequences:
        wholes.append(tokenizer.decode(each.tokens))
        for is_trained, run in groupby(zip(each.tokens.tolist(), each.loss_mask, strict=True), lambda pair: pair[1]):
            runs += [tokenizer.decode([token for token, _ in run])] if is_trained else []
    trained, whole = "\0".join(runs), "\0".join(wholes)
    reported = [note for note in counts.notes if note.startswith("ignored: ")]
    ignored = bool([note for note in reported if not drawn.extra or drawn.extra not in note])
    yield from (f"loss on {text!r}" for text in (*drawn.untrained, *drawn.unseen) if text in trained)
    for text in drawn.untrained:
        if text not in whole and not (text in drawn.optional and ignored):
            yield f"{text!r} is missing and not counted"
    for text in drawn.trained:
        count = trained.count(text)
        if count != 1 and not (count == 0 and text in drawn.optional and ignored):
            yield f"{text!r} has loss {count} times"
    if template.calls:
        objects = list(_objects(trained))
        yield from (f"arguments {each} are not an object" for each in drawn.arguments if each not in objects)
    if template.end:
        for text in drawn.answers:
            run = next((run for run in runs if text in run), "").strip()
            after = run.rpartition(text)[2].strip()
            if not (after.startswith(MARKERS if template.end in MARKERS else template.end)):
                yield f"the end after {text!r} has no loss: {after!r}"
            elif after not in (template.end, *MARKERS) and text == drawn.answers[-1]:
                yield f"loss after the end of {text!r}: {after!r}"
    if drawn.extra and not any(drawn.extra in note for note in reported):
        yield "an unknown field is not counted"


def _objects(text):
    """Yield all objects in a text, in JSON or as Python writes them."""
    for i in (i for i, letter in enumerate(text) if letter == "{"):
        try:
            yield json.JSONDecoder().raw_decode(text, i)[0]
            continue
        except ValueError:
            pass
        for j in (j for j, letter in enumerate(text) if letter == "}" and j > i):
            try:
                yield ast.literal_eval(text[i : j + 1])
                break
            except (ValueError, SyntaxError):
                pass


PIECES = (
    *("Who", "me", "is", "der", "日", "ж", "🙂", "12", "345", "<|turn|>", "//", "▁", "ß", ".", ":"),
    *(" ", "  ", "\n", "\t"),
)


def check_texts(tokenizer, rng, *, is_byte_level):
    """Encode a random prompt and completion, and return findings about tokens at their boundary.

    If the tokens of the prompt begin those of the joined text, TRL's tokens of the completion are the rest.
    """
    from odc_mpi.data.encoding.encode import encode
    from odc_mpi.data.examples import PromptCompletion

    prompt, completion = ("".join(rng.choices(PIECES, k=rng.randrange(low, 6))) for low in (0, 1))
    [[encoded]] = encode(tokenizer, [PromptCompletion("", prompt, completion)])
    tokens, before = encoded.tokens.tolist(), tokenizer(prompt)["input_ids"]
    joined = [*tokenizer(prompt + completion)["input_ids"], tokenizer.eos_token_id]
    mask = [i >= len(before) for i in range(len(tokens))]
    if tokens[: len(before)] != before or encoded.loss_mask.tolist() != mask:
        return [f"the prompt has other tokens than for generation: {prompt!r}, {completion!r}"]
    differs = joined[: len(before)] == before and tokens != joined and not is_byte_level
    return [f"{tokens} instead of {joined}: {prompt!r}, {completion!r}"] * differs


def run_texts(seed, draws, log=print):
    """Check random texts with all tiny tokenizers, and return the number of findings."""
    from tiny_tokenizers import KINDS, tiny_tokenizer

    lines = []
    for kind in KINDS:
        tokenizer = tiny_tokenizer(kind)
        for number in range(draws // len(KINDS)):
            found = check_texts(tokenizer, random.Random(f"{seed}/{kind}/{number}"), is_byte_level=kind == "byte-level")
            lines += [f"{kind}, draw {seed}/{number}: {each}" for each in found]
    for line in lines:
        log(line)
    return len(lines)


def run(seed, draws, log=print):
    """Check a number of random records; print each finding, and return the numbers of findings and accepted records."""
    tokenizer, num_found, num_accepted = make_tokenizer(), 0, 0
    for number in range(draws):
        rng = random.Random(f"{seed}/{number}")
        template, drawn = draw_template(rng), Draw(rng).record()
        found, accepted = check(tokenizer, template, drawn)
        num_accepted += accepted
        if found:
            num_found += 1
            log(f"draw {seed}/{number}: {'; '.join(found)}\n  {json.dumps(drawn.record)}\n  {template.text!r}")
    return num_found, num_accepted


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the random records")
    parser.add_argument("--draws", type=int, default=10_000, help="number of records")
    arguments = parser.parse_args()
    num_found, num_accepted = run(arguments.seed, arguments.draws)
    num_texts_found = run_texts(arguments.seed, arguments.draws)
    print(f"{arguments.draws} records, {num_accepted} accepted, {num_found} findings; {num_texts_found} with texts")
    sys.exit(1 if num_found or num_texts_found else 0)
