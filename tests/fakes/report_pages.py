"""Checks of HTML pages of reports."""

import re
from xml.etree import ElementTree

#: A name to be careful with.
NASTY = "<script>alert('&')</script>"


def shows(text, *words):
    """Check that a page, a picture or a printed table has all of the words."""
    assert [each for each in words if each not in text] == []


def extract_plots(page):
    """Extract the plots of a page: each a well-formed document, without duplicate names."""
    found = re.findall(r"<svg.*?</svg>", page, re.S)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([^)]+)\)", page)) | set(re.findall(r'href="#([^"]+)"', page)) <= set(ids)
    for svg in found:
        ElementTree.fromstring(svg)
    return found


def needs_nothing_else(page):
    for address in re.findall(r'(?:src|href|action|data)\s*=\s*"([^"]*)"', page) + re.findall(r"url\(([^)]*)\)", page):
        assert address.startswith("#"), address
    rest = re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert "http" not in rest and "<script" not in page and "@import" not in page
