"""The names that we use, from where they are defined.

In transformers itself pyright reads the imports of all its models before it knows one name, which
takes longer than all of jkvq. Other names are `Any` until they are added here.
"""

from typing import Any

from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM as AutoModelForCausalLM
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.models.llama.configuration_llama import LlamaConfig as LlamaConfig
from transformers.tokenization_utils_tokenizers import (
    PreTrainedTokenizerFast as PreTrainedTokenizerFast,
)

def __getattr__(name: str) -> Any: ...
