"""Idioms of prose that readers stumble over, as regular expressions, with the words to write instead.

In idioms a space matches any white space, and case matters only within `(?-i:...)`. A match begins and ends at a word
boundary. Names with a dot before or a parenthesis after them do not match, as in `file.tell()`.
"""

#: No ordinary use in technical English.
FORBIDDEN = {
    r"told": "reported, printed, gathered; as a noun: the message, the values",
    r"tells": "reports, prints, contains, publishes",
    r"(?:to|can|cannot|could) be had": "is available",
    r"anew": "again, from scratch",
    r"reckon(?:s|ed|ing)?": "compute, estimate",
    r"whoever": "the rank that ..., any idle rank, the caller",
    r"(?:go|goes|went|going) with": "requires, is only valid with",
    r"in vain": "until the deadline expires",
    r"in passing": "the call that does it",
    r"at home": "locally, on this rank",
    r"(?:let|lets|letting) go of": "releases, drops its reference to",
    r"(?:give|gives|given|gave|giving) back": "releases, returns to the pool",
    r"(?:hand|hands|handed|handing) (?:over|back)": "acquires, releases, records an event for",
    r"dealt out": "assigned, distributed",
    r"(?:at most|for|after|of) so (?:many|much|long)(?! (?:as|that)\b)": "the number: at most `seconds`",
    r"so (?:many|much)(?= (?:of|at|for|in|on|by|from|to)\b| ?[.,;:)])": "the number: N, `count`",
    r"such a one": "the noun",
    r"without a word": "silently",
    r"in words(?! of\b)": "as text; for fragments: inserted after ...",
    r"in the mean": "on average",
    r"what (?:became|becomes|came|comes) of": "the outcome of",
    r"to the last bit": "bitwise identical, bit for bit",
    r"one behind the other": "contiguously, sequentially, concatenated",
    r"of one's own": "your own",
    r"(?:own|others'|another's) affair": "local decision",
    r"of ours": "of this package",
    r"each own": "of each rank",
    r"if need be": "the condition: if it is not unsharded",
    r"as a rule": "usually",
    r"(?:take|takes|took|taking) note": "records",
    r"(?-i:(?:come|comes|came|coming) to [ABN])": "reaches the end of the gradients, of the step",
    r"beside the computation": "overlapped with computation",
    r"for ever": "forever, without end",
    r"(?:put|puts|putting) together": "builds, creates",
    r"(?:mend|mends|mended)": "fix",
    r"whole or not at all": "atomically",
    r"(?:another|others) than": "different from, differs from",
    r"out of turn": "in the wrong phase",
    r"in good order": "cleanly",
    r"(?-i:Not) (?:before here|earlier)": "Imported late: ...",
    r"making one is (?:local|collective)": "Construction is collective. (nothing if it is local)",
}
#: Letters of the three synchronization points, which docs/ordering.md defines. N may be a number: "after N steps".
POINTS = {
    r"(?-i:(?:[Aa]fter|[Bb]efore|[Aa]t|[Uu]ntil|[Bb]etween|[Pp]oints?) (?:[AB]|N(?! [a-z]+s\b)))": (
        "gradients complete, gradient norm, parameters published"
    ),
}
POINTS_DEFINED_IN = "docs/ordering.md"
_ISE = (
    "author|categor|character|custom|emphas|factor|final|general|initial|linear|local|material|maxim|memor|minim|normal|"
    "optim|organ|parallel|penal|prior|quant|random|real|recogn|serial|special|stabil|standard|summar|synchron|token|util|"
    "vector|visual"
)
#: British, with the American spelling.
SPELLINGS = {
    r"learnt": "trained; of tokens: loss tokens",
    r"(?:burn|spel)t": "burned, spelled",
    r"(?:behavi|(?:dis)?col|fav|hon|neighb|lab|rum)our\w*": "-or",
    rf"\w*(?:{_ISE})is(?:e|es|ed|er|ers|ing|able|ation|ations)": "-ize, -ization",
    r"(?:an|par)alys(?:e|ed|er|es|ing)": "-yze",
    r"cent(?:re|res|red)": "center",
    r"(?:cancel|channel|label|model|signal|total|travel)l(?:ed|ing)": "a single l: labeled",
    r"(?:whil|among)st": "while, among",
    r"(?:grey|catalogue|dialogue|programme|artefact|judgement|fulfil|defence|licence)s?": "the American spelling",
}
_ENTRY = r"^[ \t]*(?:\*{0,2}\w+(?: \([^)\n]*\))?)?: "
#: How entries and sentences of docstrings and `#:` comments may not begin, and what to write instead.
ENTRIES = {
    r"(?:^\s*|[.:;?!)]\s+)Local(?=[.,;:]|\s*$|\s+(?:and|as|but|by|for|from|in|on|or|to|with)\b)": (
        "nothing: what is not Collective or One-sided is local"
    ),
    _ENTRY + r"Of\b": "begin with the noun",
    _ENTRY + r"(?:They|Them|It|It is not|Those|This|That|The same)\.$": "an entry that says nothing: omit it",
}
#: How docstrings may not begin, either.
OPENERS = ENTRIES | {
    r"\A\s*(?:Whether|What|Which|How|Where)\b": "begin with a verb or a noun",
    r"\A\s*Return (?:what|which|why|when|how|whether it)\b": "say the noun",
}
