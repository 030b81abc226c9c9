"""Special cases of single model families, one file each. A new one is a file here, and its call where it applies.

A quirk is recognized by a model's configuration, modules or outputs where possible, and otherwise by its family's name.
"""
