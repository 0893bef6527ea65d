"""What LongBench does not count when it compares words."""
# ruff: noqa: RUF001 (Chinese punctuation is meant)

import re
import string

# As the authors have it, without 《 and with 》.
_CHINESE = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』"
    "【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_ASCII = str.maketrans("", "", string.punctuation)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation + _CHINESE)


def normalized_english(text: str) -> str:
    """In small letters, without ASCII punctuation and articles, with single spaces."""
    plain = text.lower().translate(_NO_ASCII)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def normalized_chinese(text: str) -> str:
    """In small letters, without punctuation and spaces."""
    return "".join(text.lower().translate(_NO_PUNCTUATION).split())
