"""Damage to a file, as of a bad sector."""


def flip(path, position):
    """Change one bit of a file; once more, and it is as it was."""
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)
