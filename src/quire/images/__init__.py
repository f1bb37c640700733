"""Images on the side of the API: bytes that a client sent → pixels → what a model's encoder reads. No torch.

A file may be built to harm the program that reads it, so a server decodes images in a helper process
(`quire.engine.helper`) under limits of time and memory.
"""
