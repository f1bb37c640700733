"""Text Embeddings Inference's forms, and what other servers of encoders have."""
