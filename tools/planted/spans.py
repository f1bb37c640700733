"""Planted faults in spans: what their contents add to hashes, and which rows of an encoder a token has."""

from __future__ import annotations

from mutant import Mutant

CONTENT, ROWS = "src/quire/cache/span_content.py", "src/quire/runner/span_rows.py"
AXES = "src/quire/runner/axes.py"
HASHES = ("tests/cache/test_span_content.py",)
SEEING = "tests/images/test_seeing.py::"
GEMMA = "tests/images/test_gemma3.py::"
SAME_BITS = (SEEING + "test_answers_have_the_same_bits_however_computed",)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "span-missing-in-its-first-block",
        "the block in which an image begins has the hash of any image",
        CONTENT,
        "range(span.start // block_size, ",
        "range(span.start // block_size + 1, ",
        HASHES,
    ),
    Mutant(
        "span-missing-in-its-last-block",
        "the block in which an image ends has the hash of any image",
        CONTENT,
        "(span.end - 1) // block_size + 1)",
        "(span.end - 1) // block_size)",
        HASHES,
    ),
    Mutant(
        "content-of-a-span-not-hashed",
        "an image of the same size is taken for another",
        CONTENT,
        "part = span.content + ",
        "part = b'' + ",
        HASHES,
    ),
    Mutant(
        "rows-of-a-cut-span-from-its-start",
        "a chunk that begins inside of an image gets the rows of its beginning",
        ROWS,
        "self._rows_of(span)[first - span.start : stop - span.start]",
        "self._rows_of(span)[: stop - first]",
        SAME_BITS,
    ),
    Mutant(
        "rows-of-an-image-kept-by-its-size",
        "the encoder's output for another image of the same size is used",
        ROWS,
        "name = span.content, span.grid",
        "name = b'', span.grid",
        (SEEING + "test_image_of_same_size_is_not_taken_for_another",),
    ),
    Mutant(
        "placeholders-keep-their-embeddings",
        "the model sees the placeholder in place of the image",
        ROWS,
        "embeddings[at + first : at + stop] = rows",
        "_ = rows",
        (SEEING + "test_answer_equals_that_of_transformers",),
    ),
    Mutant(
        "text-after-an-image-at-its-own-position",
        "a text after an image is turned by its place in the sequence, where the model goes on after the image's axes",
        AXES,
        "    return sum(max(span.grid) // edge - span.length for span in spans)",
        "    return 0",
        ("tests/runner/test_axes.py",),
    ),
    Mutant(
        "rows-and-columns-of-an-image-swapped",
        "the tokens of an image that is not square have each other's angles",
        AXES,
        "np.stack((inside * 0, inside // columns, inside % columns))",
        "np.stack((inside * 0, inside % columns, inside // columns))",
        ("tests/runner/test_axes.py",),
    ),
    Mutant(
        "tokens-of-an-image-see-the-past-alone",
        "in the decoder of Gemma 3 a token of an image does not see those after it",
        "src/quire/kernels/attention/__init__.py",
        "end = np.where(row_position < 0, 0, seq_lens)",
        "end = row_position + 1",
        (GEMMA + "test_answer_equals_that_of_transformers",),
    ),
    Mutant(
        "window-of-an-image-reaches-back-from-its-end",
        "a token of an image sees as far back as a window reaches from the last of them, and no farther",
        "src/quire/kernels/attention/__init__.py",
        """    if tiling.both_ways:
        end = np.where(row_position < 0, 0, seq_lens)
""",
        """    if tiling.both_ways:
        end = np.where(row_position < 0, 0, seq_lens)
        first = first if tiling.window is None else np.maximum(end - tiling.window, 0)
""",
        (GEMMA + "test_answer_equals_that_of_transformers",),
    ),
    Mutant(
        "span-cut-by-a-chunk",
        "part of an image whose tokens see each other both ways is computed without the rest",
        "src/quire/scheduler/policies/whole_spans.py",
        "if span.whole and span.start < end < span.end:",
        "if span.whole and span.start + 1 < end < span.end:",
        ("tests/scheduler/test_whole_spans.py",),
    ),
    Mutant(
        "span-waits-for-its-share-for-ever",
        "an image longer than what long prompts may have of a step is never computed",
        "src/quire/scheduler/policies/whole_spans.py",
        "if span.end - start <= num_left else before",
        "if span.end - start <= num_tokens else before",
        ("tests/scheduler/test_whole_spans.py",),
    ),
    Mutant(
        "span-that-enters-preempts-what-is-planned",
        "an image that enters takes the blocks of a sequence that has its place in the step already",
        "src/quire/scheduler/policies/whole_spans.py",
        "return self._state.cache.reachable_end(seq.table) >= self.least_end(seq)",
        "return True",
        ("tests/scheduler/test_whole_spans.py",),
    ),
    Mutant(
        "span-too-large-for-the-memory-tried-for-ever",
        "a step with an image that is too large for the memory is planned again and again",
        "src/quire/scheduler/policies/whole_spans.py",
        "return span is not None and span.end == start + plan.num_scheduled_tokens",
        "return False",
        ("tests/scheduler/test_whole_spans.py",),
    ),
    Mutant(
        "images-shared-between-salts",
        "who times first tokens learns whether another tenant sent an image",
        "src/quire/engine/prompts.py",
        "salted(spans, terms.cache_salt) if spans else spans",
        "spans",
        ("tests/images/test_placing.py",),
    ),
    Mutant(
        "decoded-files-shared-between-salts",
        "who times first tokens learns that another tenant sent the same file lately",
        "src/quire/engine/images.py",
        "digest_size=32, key=key)",
        "digest_size=32)",
        ("tests/images/test_kept_files.py",),
    ),
    Mutant(
        "pixels-in-request-logs",
        "a file of requests holds the images that clients sent",
        "src/quire/engine/request_log.py",
        "without_pixels(request.spans) if request.spans else ()",
        "request.spans",
        ("tests/bench/test_compare.py::test_log_names_images_without_their_pixels",),
    ),
    Mutant(
        "pixels-in-recordings-without-ids",
        "a recording that is to hold nothing that clients sent holds their images",
        "src/quire/executor/recorder.py",
        "        spans=(),\n",
        "",
        ("tests/engine/test_recording.py",),
    ),
)
