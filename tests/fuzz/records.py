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
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "data" / "encode"), str(HERE.parents[1])]

END, START, BETWEEN = "<|im_end|>", "<|im_start|>", "<|sep|>"
ROLES = ("system", "user", "assistant", "tool")
MARKERS = tuple(f"<|{role}|>" for role in ROLES)
REASONING = ("reasoning_content", "reasoning", "thinking")
FLAGS = ("weight", "train", "training", "loss", "loss_scale", "loss_mask")


@dataclass
class Template:
    """A chat template, with what it writes.

    Attributes:
        end: Token that ends an answer; None if there is none.
        reasoning, tools, calls: True if the template writes them.
    """

    text: str
    end: str | None
    reasoning: bool
    tools: bool
    calls: bool


@dataclass
class Drawn:
    """A record, with what an encoder has to make of it.

    Attributes:
        trained, untrained: Texts with loss once, and texts without loss, up to the last answer with loss.
        unseen: Texts without loss that may be missing.
        optional: Texts that a template may leave out, if the report counts it.
        arguments: Arguments of calls of trained answers.
        answers: The last text of each trained answer.
        invalid: True if the record must be refused.
        extra: A field that must be counted, or "".
    """

    record: dict
    trained: list = field(default_factory=list)
    untrained: list = field(default_factory=list)
    optional: set = field(default_factory=set)
    arguments: list = field(default_factory=list)
    answers: list = field(default_factory=list)
    unseen: list = field(default_factory=list)
    invalid: bool = False
    extra: str = ""


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
        function = {"name": f"call_{self.number}", "arguments": arguments}
        if form == "text":
            function["arguments"] = json.dumps(arguments, ensure_ascii=self.chance(0.5))
        elif form == "bad":
            bad = self.chance(0.2)
            function["arguments"] = self.rng.choice(("[1]", "{", 3, [1], "1")) if bad else arguments
            drawn.invalid |= bad
        elif form == "missing":
            del function["arguments"]
        elif form != "object":
            function["arguments"] = {"empty": "", "null": None}[form]
        has_arguments = isinstance(function.get("arguments"), dict | str) and function.get("arguments") != ""
        texts = [function["name"], *([arguments["a"]] if has_arguments else [])]
        (drawn.trained if is_trained else drawn.untrained).extend(texts)
        drawn.optional.update(texts)
        if is_trained:
            drawn.arguments.append(arguments if has_arguments else {})
        return function

    def answer(self, drawn, *, is_context=False):
        message, rng = {"role": "assistant"}, self.rng
        flag = rng.choice(FLAGS) if self.chance(0.3) else None
        value = rng.choice((0, 1, False, True, None, 0.0, 1.0))
        if flag and self.chance(0.04):
            value, drawn.invalid = rng.choice((0.5, "no", 2, [])), True
        if flag:
            message[flag] = value
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
            text = self.text()
            message["content"] = self.content(text)
            texts.append(text)
        if kind == "text" and self.chance(0.2):
            message |= {"tool_calls": [], "refusal": None}
        if kind in ("call", "both"):
            function = self.call(drawn, is_trained=is_trained)
            wrapped = [{"type": "function", "id": "1", "function": function}]
            message |= {"function_call": function} if self.chance(0.3) else {"tool_calls": wrapped}
            message.setdefault("content", rng.choice(("", None)))
        if is_trained and texts:
            content = message.get("content")
            last = content if isinstance(content, str) and content else None
            drawn.answers += [last] if last and kind in ("text", "null") else []
        return message

    def plain(self, drawn, role):
        text = self.text()
        drawn.untrained.append(text)
        return {"role": role, "content": self.content(text)}

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
            last = max((rendered.rfind(text) for text in drawn.trained), default=len(rendered))
            after = [text for text in drawn.untrained if rendered.rfind(text) > last]
            drawn.untrained = [text for text in drawn.untrained if text not in after]
            drawn.unseen += after
        else:
            user, answer = self.text(), self.text()
            drawn.untrained.append(user)
            drawn.trained.append(answer)
            drawn.record |= rng.choice(
                ({"prompt": user, "completion": answer}, {"instruction": user, "output": answer})
            )
            if self.chance(0.3) or "instruction" in drawn.record:
                drawn.answers.append(answer)
            if self.chance(0.4):
                turn = [self.text(), self.text()]
                drawn.record["history"] = [turn]
                drawn.untrained.append(turn[0])
                drawn.trained.append(turn[1])
        has_system = any(each["role"] == "system" for each in drawn.record.get("messages", ()))
        if self.chance(0.2) and not has_system:
            drawn.record["system"] = self.text()
            drawn.untrained.append(drawn.record["system"])
        if self.chance(0.2):
            name = f"tool_{self.text().split()[1]}"
            drawn.record["tools"] = [{"type": "function", "function": {"name": name, "parameters": {}}}]
            drawn.untrained.append(name)
            drawn.optional.add(name)
        if drawn.record.keys() == {"prompt", "completion"}:
            drawn.answers.clear()  # texts, which end with the eos token
        if self.chance(0.2):
            drawn.extra = "topic_of_it"
            drawn.record[drawn.extra] = "x"
        drawn.record |= {"id": 3} if self.chance(0.3) else {}
        return drawn


def make_tokenizer():
    from tiny_tokenizers import tiny_tokenizer

    tokenizer = tiny_tokenizer("byte-level")
    special = [START, END, BETWEEN, *MARKERS]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
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
        return _check_refusal(template, drawn, counts.bad_lines[0]), False
    if drawn.invalid:
        return (["accepted, and must be invalid"] if sequences else []), bool(sequences)
    if not sequences:
        return (["dropped without a count"] if not counts.num_untrained_dropped else []), False
    return list(_findings(tokenizer, template, drawn, sequences, counts)), True


def _check_refusal(template, drawn, reason):
    """A record may be refused if the template leaves out what an answer consists of."""
    is_whole = template.reasoning and template.calls and "string" not in template.text
    simple = not drawn.arguments and not (set(drawn.trained) & drawn.optional)
    return [f"refused: {reason}"] if not drawn.invalid and (is_whole or simple) else []


def _findings(tokenizer, template, drawn, sequences, counts):
    runs, wholes = [], []
    for each in sequences:
        tokens, mask = each.tokens.tolist(), each.loss_mask.tolist()
        begins = [i for i in range(len(mask)) if mask[i] and (i == 0 or not mask[i - 1])]
        ends = [next((j for j in range(i, len(mask)) if not mask[j]), len(mask)) for i in begins]
        runs += [tokenizer.decode(tokens[i:j]) for i, j in zip(begins, ends, strict=True)]
        wholes.append(tokenizer.decode(tokens))
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
    "Who",
    "me",
    " ",
    "  ",
    "\n",
    ".",
    ":",
    "is",
    "der",
    "日",
    "ж",
    "🙂",
    "12",
    "345",
    "<|turn|>",
    "\t",
    "//",
    "▁",
    "ß",
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
    found = []
    if tokens[: len(before)] != before or encoded.loss_mask.tolist() != [i >= len(before) for i in range(len(tokens))]:
        found.append("the prompt has other tokens than for generation")
    if joined[: len(before)] == before and tokens != joined and not is_byte_level:
        found.append(f"{tokens} instead of {joined}")
    return [f"{each}: {prompt!r}, {completion!r}" for each in found]


def run_texts(seed, draws, log=print):
    """Check random texts with all tiny tokenizers, and return the number of findings."""
    from tiny_tokenizers import KINDS, tiny_tokenizer

    num_found = 0
    for kind in KINDS:
        tokenizer = tiny_tokenizer(kind)
        for number in range(draws // len(KINDS)):
            rng = random.Random(f"{seed}/{kind}/{number}")
            for found in check_texts(tokenizer, rng, is_byte_level=kind == "byte-level"):
                num_found += 1
                log(f"{kind}, draw {seed}/{number}: {found}")
    return num_found


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


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the random records")
    parser.add_argument("--draws", type=int, default=10_000, help="number of records")
    arguments = parser.parse_args()
    num_found, num_accepted = run(arguments.seed, arguments.draws)
    num_texts_found = run_texts(arguments.seed, arguments.draws)
    print(f"{arguments.draws} records, {num_accepted} accepted, {num_found} findings; {num_texts_found} with texts")
    return 1 if num_found or num_texts_found else 0


if __name__ == "__main__":
    sys.exit(main())
