"""The byte alphabet of GPT-2: one printable character for each of the 256 bytes.

Byte-level vocabularies spell their tokens in it. Bytes that print as themselves in Latin-1 keep their
character; the others take, in byte order, the characters from U+0100 on (so a space is U+0120).
"""

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


def byte_characters() -> dict[int, str]:
    """Byte -> the character that spells it."""
    characters = {byte: chr(byte) for byte in _PRINTABLE}
    others = (byte for byte in range(256) if byte not in characters)
    return characters | {byte: chr(0x100 + index) for index, byte in enumerate(others)}


def character_bytes() -> dict[str, int]:
    """Character -> the byte it spells."""
    return {character: byte for byte, character in byte_characters().items()}
