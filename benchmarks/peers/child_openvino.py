"""OpenVINO for `benchmarks.fidelity`; runs where openvino and openvino-genai are installed. See `child`.

python child_openvino.py FOLDER CONTEXT         a model that optimum-cli made
python child_openvino.py FILE.gguf CONTEXT      what OpenVINO GenAI makes of the file, in a temporary folder
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import openvino
import openvino.opset13 as opset
import openvino_genai
from child import answer_lines

THREADS = {"INFERENCE_NUM_THREADS": 1}


def model_folder(path: Path) -> Path:
    """Return the folder of a converted model."""
    if path.is_dir():
        return path
    made = Path(mkdtemp(prefix="openvino-"))
    (made / path.name).symlink_to(path)  # GenAI writes the model beside the file
    openvino_genai.LLMPipeline(str(made / path.name), "CPU", enable_save_ov_model=True)
    return made


def keep_last_row(model: Any) -> Any:
    """Cut the input of the output matrix to its last row, as GenAI's pipelines do."""
    node = model.outputs[0].node.input_value(0).get_node()
    while node.get_type_name() != "MatMul":
        node = node.input_value(0).get_node()
    last = opset.gather(node.input_value(0), opset.constant([-1], np.int64), opset.constant(1, np.int64))
    node.input(0).replace_source_output(last.output(0))
    model.validate_nodes_and_infer_types()
    return model


class OpenVino:
    """A stateful model, compiled twice with the plugin's defaults for one thread: for all logits, and for the last."""

    def __init__(self, folder: Path) -> None:
        file, core = folder / "openvino_model.xml", openvino.Core()
        every, last = core.read_model(str(file)), keep_last_row(core.read_model(str(file)))
        self._compiled = {
            True: core.compile_model(every, "CPU", THREADS),
            False: core.compile_model(last, "CPU", THREADS),
        }
        self._names = {name for port in every.inputs for name in port.get_names()}
        self.num_bytes = file.with_suffix(".bin").stat().st_size
        self.reset()

    def reset(self) -> None:
        """Forget the sequence."""
        self._requests = {key: compiled.create_infer_request() for key, compiled in self._compiled.items()}
        self._num_tokens = 0

    def feed(self, ids: list[int], *, all_logits: bool) -> Any:
        """Append tokens; return their logits, which the model makes of every token."""
        past, count = self._num_tokens, len(ids)
        self._num_tokens = past + count
        inputs = {
            "input_ids": np.array([ids], np.int64),
            "attention_mask": np.ones((1, past + count), np.int64),
            "position_ids": np.arange(past, past + count, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        request = self._requests[all_logits]
        request.infer({name: value for name, value in inputs.items() if name in self._names})
        return request.get_output_tensor(0).data[0]


if __name__ == "__main__":
    answer_lines(OpenVino(model_folder(Path(sys.argv[1]).expanduser())))
