# SPDX-License-Identifier: Apache-2.0
"""Why bytes are not UTF-8 text, although they may be valid UTF-8 by chance.

UTF-16 and UTF-32 write ASCII as itself and NULs, which are valid in UTF-8. No text has
NULs.
"""

import codecs
import re
import string

HEAD = 4096  # Bytes that an encoding is recognized by.
# By their names for iconv. UTF-32 is first: as UTF-16 it has NULs.
ENCODINGS = ("UTF-32LE", "UTF-32BE", "UTF-16LE", "UTF-16BE")
# Characters that texts of all languages have, and other bytes that are read as UTF-16
# have not: ASCII, and the space, commas and period of Chinese and Japanese.
FREQUENT = {*string.printable, *"\u3000\u3001\u3002\uff0c"}
NULS = "NUL characters"


def encoding_of(data: bytes) -> str:
    """The UTF-16 or UTF-32 that bytes seem to be, with or without a mark; else ""."""
    head = data[:HEAD]
    least = 0.03
    if is_text_with_nuls(decoded(head, "UTF-8")):
        least = 0.5
    for name in ENCODINGS:
        text = decoded(head, name)
        frequent = sum(character in FREQUENT for character in text)
        marked = text.startswith("\ufeff")
        if "\0" not in text and (marked or frequent > least * len(text)):
            return name
    return ""


def decoded(head: bytes, encoding: str) -> str:
    """The text that begins with these bytes; "" if it has another encoding."""
    try:
        # Incremental: the last character may be cut.
        return codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return ""


def is_text_with_nuls(text: str) -> bool:
    """Whether a text has no control characters besides line ends and NULs.

    UTF-16 that is read as UTF-8 has: one of the bytes of a letter that is not ASCII.
    """
    return bool(text) and re.sub("[\r\n\0]", "", text).isprintable()


def reason(data: bytes, otherwise: str) -> str:
    """Why bytes are not UTF-8, and what to do; ``otherwise`` if that is unknown."""
    if name := encoding_of(data):
        return f"it looks like {name}: `iconv -f {name} -t UTF-8` converts it"
    if b"\0" in data:
        return "no text has NULs: it is damaged, or of another encoding"
    return otherwise
