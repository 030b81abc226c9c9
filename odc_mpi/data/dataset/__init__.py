"""Data sets: tokenized sequences in an HDF5 file, verified when they are read.

| dataset              | type   | shape        | contents                                                              |
|----------------------|--------|--------------|-----------------------------------------------------------------------|
| `tokens`             | uint32 | [num_tokens] | all sequences, concatenated                                           |
| `loss_mask`          | uint8  | [num_tokens] | 1 if the token contributes to the loss, otherwise 0                   |
| `offsets`            | int64  | [n + 1]      | index in `tokens` of each sequence's first token, then `num_tokens`   |
| `num_trained_tokens` | int32  | [n]          | loss tokens of each sequence, not counting its first token            |
| `checksums`          | uint32 | [n]          | CRC-32 of the tokens of each sequence, followed by its loss mask      |
| `report`             | uint8  | [num_bytes]  | counts of `prepare` as JSON                                           |
| `tokenizer/PATH`     | uint8  | [num_bytes]  | each file of the tokenizer, by its path in the tokenizer's directory  |

There are n sequences. In a data set of pairs, each sequence consists of a prompt, the chosen answer and the rejected
answer. For pairs and labels, there is another dataset, int32 [n], for each name in `format.COLUMNS`. The first token of
a sequence is never predicted, so it does not contribute to the loss.

Attributes of the file: `format`, `version`, `vocab_size`, `max_token_id`, `vocabulary` (`vocabulary_digest`), `content`
(digest of `offsets`, `num_trained_tokens`, `checksums` and the datasets of pairs), `tokenizer` and `source` (names, for
display), `num_untrained_dropped` and `num_bad_lines` (see `FilterCounts`), `request` (digest of the sources, options,
tokenizer and versions that `prepare` used) and `sources` (digest of the `DataSource.origin` of all sources). Attributes
are written last, so a file without attributes is unfinished.

Every chunk has an HDF5 Fletcher-32 checksum, and all metadata have checksums (`libver="v110"`; text attributes have a
fixed length of at most 4 KiB, because HDF5 stores others without checksums). These checksums detect changes to stored
data, while `checksums` and `content` also detect data that was exchanged, moved or never written.
"""
