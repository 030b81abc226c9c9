"""Readers of data files, which yield blocks of records in the order of the file, in bounded memory.

Modules::

    blocks       blocks of records, which worker processes parse
    records      records, checks of their fields, and errors that name file and line
    text_files   JSON lines, JSON arrays, CSV and TSV
    parquet      Parquet
    hf_datasets  data sets of the library `datasets`, from a directory or the Hugging Face Hub
    compressed   decompression of gzip and Zstandard
    stdlib       functions of Python's standard library
"""
