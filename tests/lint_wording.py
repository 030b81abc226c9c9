"""Check the wording of docstrings, comments and Markdown; part of `make lint`.

That of a public function of the package has a sentence that begins with Collective or One-sided if the function's own
body makes a call that communicates (`COMMUNICATING`). Exempt are properties and overrides.
"""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKED = ("odc_mpi/**/*.py", "*.md", "docs/**/*.md", "jobs/**/*.md", "benchmarks/**/*.md")
_COLLECTIVES = (
    "Allgather Allgatherv Allreduce Alltoall Barrier Bcast Gather Reduce_scatter_block Scatter Iallgather Iallreduce "
    "Ibarrier Ibcast Ireduce_scatter allgather allreduce barrier bcast gather scatter Create Dup Free Split Split_type"
)
#: The word to use; the calls; their receivers, by last name without underscores, "" if there is none.
COMMUNICATING = (
    ("Collective", "collective wait_collective run_on_all gather_objects broadcast", "world node group self"),
    ("Collective", "require_same require_shared_memory cores_per_rank split", "world"),
    ("Collective", "gradients_complete norm parameters_published", "group"),
    ("Collective", "complete_gradients publish_parameters", "transport"),
    ("Collective", "World Window DeviceWindow SharedWindow", ""),
    ("Collective", _COLLECTIVES, "comm node_comm"),
    ("Collective", "Allocate Allocate_shared Create", "Win"),
    ("One-sided", "put get accumulate flush", "window inbox store memory elements slots flags returns"),
    ("One-sided", "fetch_and_add atomic_read atomic_store atomic_read_all atomic_store_all", "window board"),
    ("One-sided", "Put Get Rget Accumulate Get_accumulate Fetch_and_op Compare_and_swap Flush Flush_all", "win"),
    ("One-sided", "fetch start_fetch push draw", "parameters inner gradients tickets"),
    ("One-sided", "claim publish snapshot has_changed mark_done", "queue work_queue"),
)
_WORD_OF = {
    (call, on): word for word, calls, names in COMMUNICATING for call in calls.split() for on in names.split(" ")
}
#: Idioms and British spellings; a space is any white space. Names before a parenthesis do not match.
IDIOMS = (
    r"told|tells|anew|reckon\w*|whoever|in vain|g[ai]v(?:es?|en|ing) back|hand(?:s|ed)? over|as a rule|for ever"
    r"|learnt|(?:burn|spel)t|(?:whil|among)st|(?:behavi|(?:dis)?col|fav|hon|neighb|lab|rum)our\w*|cent(?:re|res|red)"
    r"|\w*(?:author|categor|final|general|initial|linear|local|material|minim|normal|optim|organ|parallel|quant|random"
    r"|real|recogn|serial|standard|summar|synchron|token|util|vector|visual)is(?:e[drs]?|ing|able|ations?)"
)
_IDIOM = re.compile(rf"(?<![\w.])(?:{IDIOMS})(?![\w(])".replace(" ", r"\s+"), re.IGNORECASE)
#: How docstrings, their entries and their sentences may not begin: what is not Collective or One-sided is local.
_OPENER = re.compile(
    r"\A\s*(?:Whether|What|Which|How|Where|Return (?:what|which|why|when|how|whether it))\b"
    r"|(?:^\s*|[.:;?!)]\s+)Local(?=[.,;:]|\s*$|\s+(?:and|as|but|by|for|from|in|on|or|to|with)\b)"
    r"|^[ \t]*(?:\*{0,2}\w+(?: \([^)\n]*\))?)?: (?:Of\b|(?:They|Them|It|It is not|Those|This|That|The same)\.$)",
    re.MULTILINE,
)
_CODE = re.compile(r"^( *)(```+|~~~+).*?^\1\2|\]\([^)\n]*\)|(`+)(?:(?!\n\s*\n|\3).)+\3", re.MULTILINE | re.DOTALL)


def faults(source, path="odc_mpi/module.py"):
    """Yield line and message of each fault of a file, whose path is relative to the root of the project."""
    passages, functions = [(1, source, [_IDIOM])], []
    if path.endswith(".py"):
        tree = ast.parse(source)
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        passages = [(t.start[0], t.string.lstrip("#"), [_IDIOM]) for t in tokens if t.type == tokenize.COMMENT]
        documented = (n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.FunctionDef | ast.ClassDef))
        texts = ((node.body[0].lineno, ast.get_docstring(node, clean=False)) for node in documented if node.body)
        passages += [(line, text, [_IDIOM, _OPENER]) for line, text in texts if text]
        scopes = [tree, *(n for n in tree.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_"))]
        functions = [f for scope in scopes for f in scope.body if isinstance(f, ast.FunctionDef) and f.name[0] != "_"]
    for line, text, patterns in passages:
        prose = _CODE.sub(lambda match: re.sub(r"\S", "_", match[0]), text)
        for match in (match for pattern in patterns for match in pattern.finditer(prose)):
            yield line + prose.count("\n", 0, match.start()), f"{' '.join(text[slice(*match.span())].split())!r}"
    exempt = re.compile(r"property$|\boverride$|\.setter$")
    for node in (f for f in functions if not any(exempt.search(ast.unparse(name)) for name in f.decorator_list)):
        text, words = ast.get_docstring(node) or "", _words_of_calls(node)
        expected = "Collective" if "Collective" in words else "Collective|One-sided"
        missing = words and not re.search(rf"(?:^\s*|[.:;?!)]\s+)(?:{expected})\b", text, re.MULTILINE)
        if missing and text and not re.match(r"See `[\w.]+`", text):  # ruff demands the docstring
            yield node.lineno, f"{node.name}: expected a sentence that begins with {expected.replace('|', ' or ')}"


def _words_of_calls(function):
    """Return Collective, One-sided or both for the calls of a function's own body, without functions within it."""
    words, nodes = set(), [*function.body]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Call):
            receiver = getattr(node.func, "value", None)
            on = getattr(receiver, "attr", getattr(receiver, "id", "?")) if receiver else ""
            words.add(_WORD_OF.get((getattr(node.func, "attr", getattr(node.func, "id", "?")), on.lstrip("_"))))
        if not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            nodes.extend(ast.iter_child_nodes(node))
    return words - {None}


if __name__ == "__main__":
    paths = sorted({path.relative_to(ROOT) for pattern in CHECKED for path in ROOT.glob(pattern)})
    named = ((path.as_posix(), (ROOT / path).read_text(encoding="utf-8")) for path in paths)
    found = [f"{name}:{line}: {fault}" for name, text in named for line, fault in sorted(faults(text, name))]
    sys.exit("\n".join([*found, f"{len(found)} faults"]) if found else 0)
