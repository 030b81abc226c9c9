"""Readers for data files, which yield blocks of records in the order of the file, in bounded memory."""
