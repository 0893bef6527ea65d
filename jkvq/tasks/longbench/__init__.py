"""LongBench: questions about long documents, in English, Chinese and code."""
