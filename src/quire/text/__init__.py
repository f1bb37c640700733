"""Text in and out: tokenizers from every common file form, chat templates, detokenization, stop strings.

Torch-free, and free of the clock: `strftime_now` of a template gets its clock injected.
"""
