"""Tokenizing examples and pairs of answers, with loss masks, in blocks of records."""
