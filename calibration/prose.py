"""The default text: the English prose of Python's own documentation, which is on every machine."""

import pydoc_data.topics


def default_text() -> str:
    """The paragraphs of `pydoc_data.topics` that are sentences, not code, tables or grammar."""
    topics = pydoc_data.topics.topics
    paragraphs = (part for name in sorted(topics) for part in topics[name].split("\n\n"))
    return "\n\n".join(part.strip("\n") for part in paragraphs if _is_prose(part))


def _is_prose(paragraph: str) -> bool:
    text = paragraph.strip()
    return text.endswith(".") and text[:1].isupper() and "::=" not in text
