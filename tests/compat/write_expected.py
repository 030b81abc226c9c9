"""Write expected.json anew, from the kept data set and a trace: python write_expected.py TRACE.json."""

import json
import sys
from pathlib import Path

import odc_mpi

HERE = Path(__file__).parent


def main(trace):
    with odc_mpi.Dataset(HERE / "data" / "examples.h5") as dataset:
        facts = {
            "lengths": dataset.lengths.tolist(),
            "num_trained_tokens": dataset.num_trained_tokens.tolist(),
            "vocab_size": dataset.vocab_size,
            "max_token_id": dataset.max_token_id,
            "vocabulary": dataset.vocabulary,
            "digest": dataset.digest(),
        }
    content = json.loads(Path(trace).read_text())
    assert content["ranks"] == 1
    steps = {name: content["runs"][name] for name in ("start", "resumed")}
    rows = {name: ",\n  ".join(map(json.dumps, values)) for name, values in steps.items()}
    text = f'{{"dataset": {json.dumps(facts)},\n "made_with": {json.dumps(content["about"])}'
    text += "".join(f',\n "{name}": [\n  {values}]' for name, values in rows.items()) + "}\n"
    json.loads(text)
    (HERE / "expected.json").write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
