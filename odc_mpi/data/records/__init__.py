"""The schema of records: formats, fields of records and messages, and their conversion to examples."""
