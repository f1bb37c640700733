"""GGUF as a target of `quire quantize`: types of blocks, the file, its metadata and vocabulary."""
