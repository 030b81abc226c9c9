"""Readers of data files. They yield blocks of records in the order of the file, in bounded memory."""
