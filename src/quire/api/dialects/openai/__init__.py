"""OpenAI's chat and text completions and embeddings, with the fields that vLLM and SGLang add."""
