"""What comparisons with trainers of TRL have in common: tiny models, and losses with their gradients."""

import numpy as np
import pytest
import torch
from packed_models import packed_model, plain_model

from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.dataset.writer import DatasetWriter
from odc_mpi.data.tokenizer import train_tokenizer

#: Warnings of the libraries of TRL.
WARNINGS = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning")]
SIZES = {"attention_dropout": 0.0, "max_position_embeddings": 80}


def make_trainer(kind, folder, records, **arguments):
    """Return the trainer `kind` of TRL for a tiny policy, and a reference model that differs, so that no term is 0."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    texts = [text for record in records for text in record.values() if isinstance(text, str)]
    tokenizer = train_tokenizer(iter(texts * 20), 300)
    models = [plain_model(vocab_size=len(tokenizer), **SIZES).double() for _ in "ab"]
    torch.manual_seed(5)
    for parameter in models[1].parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    settings = {"per_device_train_batch_size": len(records), "use_cpu": True, "report_to": "none", "bf16": False}
    arguments = getattr(trl, f"{kind}Config")(str(folder), **settings, **arguments)
    data = datasets.Dataset.from_list(records)
    return getattr(trl, f"{kind}Trainer")(*models, arguments, train_dataset=data, processing_class=tokenizer)


def write_rows(path, rows):
    """Write rows of prompt, answers and columns; return the data set."""
    with DatasetWriter(path, vocab_size=1000, tokenizer="t", source="s") as writer:
        for prompt, answers, columns in rows:
            tokens = np.array([*prompt, *answers])
            writer.append(tokens, np.arange(len(tokens)) >= len(prompt), columns)
    return Dataset(path)


def our_model(trainer):
    return packed_model(vocab_size=trainer.model.config.vocab_size, **SIZES).eval().double()


def loss_of(trainer):
    """Return the loss of a trainer for a batch of all its data, with gradients of its model."""
    trainer._metrics["train"].clear()
    trainer.model.train().zero_grad()
    rows = [trainer.train_dataset[i] for i in range(len(trainer.train_dataset))]
    wanted = trainer.compute_loss(trainer.model, trainer.data_collator(rows))
    wanted.backward()
    return wanted.item()


def assert_like_trl(loss, model, wanted, trainer, rtol=1e-6, atol=0.0):
    """Compare the loss and the gradients of our model with those of a trainer."""
    assert loss.item() == pytest.approx(wanted, rel=1e-6)
    for (name, mine), other in zip(model.named_parameters(), trainer.model.parameters(), strict=True):
        bound = atol + rtol * float(other.grad.abs().max())
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=bound, msg=lambda m, n=name: f"{n}: {m}")


def assert_metrics(found, trainer, atol=1e-6):
    for name, value in found.items():
        assert value == pytest.approx(trainer._metrics["train"][name][0], rel=1e-5, abs=atol), name
