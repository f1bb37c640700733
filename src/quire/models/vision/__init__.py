"""Encoders of images, one file per kind of `VisionSpec`."""
