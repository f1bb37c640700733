"""Coverage-guided fuzzing of what reads strangers' bytes: `run` fuzzes, `test_corpus` keeps what was found mended."""

NAMES = (
    "request", "form", "gguf", "safetensors", "tokenizer", "tokenizer_config", "sentencepiece", "tiktoken", "config",
    "adapter",
)  # fmt: skip
