"""Planted faults in how model files are read: which spelling counts, defaults of families, and what a file adds."""

from __future__ import annotations

from mutant import Mutant

FILES = "tests/found/test_model_files.py::"
BLOCKS = "tests/quant/test_gguf_blocks.py::"
FAMILY = "tests/parity/test_family_parity.py::test_family[gemma4]"
GGUF = "tests/found/test_gguf_files.py::"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "second-rope-spelling-ignored",
        "rope_scaling beside rope_parameters is not read",
        "src/quire/families/rope.py",
        '    if kind_of(old) == "default":\n        return new\n',
        "    if old is not None:\n        return new\n",
        (f"{FILES}test_of_two_rope_spellings_the_one_that_says_more_counts",),
    ),
    Mutant(
        "own-head-of-a-tied-model-dropped",
        "a stored output matrix that differs from the embedding is not used",
        "src/quire/models/checkpoint.py",
        "table is None or head.equals(table)",
        "table is None or head.shape == table.shape",
        (f"{FILES}test_a_stored_head_of_a_tied_model_is_used_where_it_differs",),
    ),
    Mutant(
        "one-epsilon-for-all-families",
        "a file without rms_norm_eps has Llama's default whatever its family is",
        "src/quire/families/shape.py",
        'f.number("rms_norm_eps", eps)',
        'f.number("rms_norm_eps", 1e-6)',
        (f"{FILES}test_families_have_their_own_defaults",),
    ),
    Mutant(
        "do-sample-not-read",
        "do_sample = false samples at the file's temperature",
        "src/quire/models/generation_config.py",
        'if values.get("do_sample") is False:',
        'if values.get("do_sample") == "no":',
        (f"{FILES}test_generation_config_never_stops_a_load",),
    ),
    Mutant(
        "bos-lost-to-the-other-flag",
        "add_eos_token alone takes the BOS of tokenizer.json away",
        "src/quire/text/load.py",
        "(has[0] if config.add_bos is None else config.add_bos)",
        "config.add_bos is True",
        (f"{FILES}test_a_flag_that_is_not_there_changes_nothing",),
    ),
    Mutant(
        "old-name-of-the-rope-factor",
        "rope.scale_linear of a GGUF file is not read",
        "src/quire/families/gguf.py",
        'f.number("rope.scale_linear", 0.0, positive=False)',
        "0.0",
        (f"{GGUF}test_a_factor_without_a_type_is_linear",),
    ),
    Mutant(
        "ends-by-id-alone",
        "the end of a turn is not found by its text in a GGUF file",
        "src/quire/text/gguf_vocab.py",
        "if text in _ENDS}",
        "if not text}",
        (f"{GGUF}test_the_end_of_a_turn_is_found_by_its_text",),
    ),
    Mutant(
        "router-of-qwen2-normalizes",
        "a GGUF file of Qwen2-MoE is routed with weights that sum to 1",
        "src/quire/families/gguf.py",
        '"norm_topk_prob": arch == "qwen3moe"',
        '"norm_topk_prob": arch != "gpt-oss"',
        ("tests/parity/test_gguf.py::test_architecture[qwen2_moe]",),
    ),
    Mutant(
        "halves-of-kv-b-one-after-the-other",
        "the keys' rows of all heads stand before the values' in MLA's kv_b of a GGUF file",
        "src/quire/models/stored_weights.py",
        "torch.cat((of_keys.transpose(1, 2), of_values), dim=1).flatten(0, 1)",
        "torch.cat((of_keys.transpose(1, 2).flatten(0, 1), of_values.flatten(0, 1)))",
        ("tests/parity/test_gguf.py::test_architecture[deepseek_v3]",),
    ),
    Mutant(
        "a-part-read-twice",
        "the first part of a split GGUF file is read in the place of each other part",
        "src/quire/models/gguf_file.py",
        "[(part, *_read_one(part)) for part in paths]",
        "[(part, *_read_one(paths[0])) for part in paths]",
        ("tests/models/test_gguf_split.py::test_any_part_gives_the_whole_model",),
    ),
    Mutant(
        "parts-out-of-order",
        "a part of a split GGUF file that stands in another's place is read",
        "src/quire/models/gguf_file.py",
        'own.get("split.no", 0) != index',
        'own.get("split.no", 0) > len(parts)',
        ("tests/models/test_gguf_split.py::test_a_part_in_the_place_of_another_is_found",),
    ),
    Mutant(
        "rows-of-a-grid-swapped",
        "two vectors of the grid of IQ2_XXS stand in each other's place",
        "src/quire/quant/iq_grids.toml",
        "00000200050008000a00110014002000220028002a",
        "02000000050008000a00110014002000220028002a",
        (f"{BLOCKS}test_decoded_blocks_equal_the_oracle[iq2_xxs]",),
    ),
    Mutant(
        "low-bit-of-a-scale-lost",
        "the lowest bit of IQ3_XXS's scales is not read",
        "src/quire/quant/ggml_codebooks.py",
        "(words >> 28 & 15).flatten(1) + 0.5) * 0.5",
        "(words >> 28 & 14).flatten(1) + 0.5) * 0.5",
        (f"{BLOCKS}test_a_block_decodes_as_llama_cpp_decodes_it[iq3_xxs]",),
    ),
    Mutant(
        "infinite-scales-are-packed",
        "a block whose scale is not a finite number is loaded",
        "src/quire/models/gguf_weights.py",
        "if not finite.all():",
        "if not finite.any():",
        (f"{BLOCKS}test_a_scale_that_is_not_finite_names_tensor_and_file",),
    ),
    Mutant(
        "adapter-of-other-modules",
        "tensors of modules that an adapter's configuration leaves out are applied",
        "src/quire/lora/adapter.py",
        "if not config.adapts(module_of(each))]",
        "if not module_of(each) and not config.adapts(each)]",
        (
            "tests/found/test_adapter_files.py::test_tensors_that_the_configuration_leaves_out_are_not_applied",
        ),
    ),
    Mutant(
        "embedding-of-the-layer-before",
        "a layer of Gemma 4 adds the token's embedding of another layer",
        "src/quire/models/per_layer.py",
        "embedding = self._ends.of_layer(self._index)",
        "embedding = self._ends.of_layer(self._index - 1)",
        (FAMILY,),
    ),
    Mutant(
        "values-not-normed",
        "Gemma 4's values are stored without their norm",
        "src/quire/layers/shared_attention.py",
        "normed = self._rms_norm(heads, self._ones, self._eps).flatten(1)",
        "normed = heads.flatten(1)",
        (FAMILY,),
    ),
    Mutant(
        "first-layers-cache-read",
        "a layer that reads another's K and V reads those of the first",
        "src/quire/modelspec.py",
        "return index if attn is None or attn.kv_layer is None else attn.kv_layer",
        "return index if attn is None or attn.kv_layer is None else 0",
        (FAMILY,),
    ),
)
