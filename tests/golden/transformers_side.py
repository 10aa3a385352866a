"""What Hugging Face transformers makes of a model, computed in a process of its own.

Run as a file, never imported: `kernels` is the name of a top-level package here and of a Hugging Face package that
transformers imports when it is installed, so the two must not share a `sys.path`. `ask.py` starts this with one that
leaves the checkout out. Needs torch and transformers; imports nothing of this repository.

    python -P transformers_side.py REQUEST.json FOLDER

REQUEST is {"models": [...], "rope": {...}}, either may be absent. A model is {"name", "folder", "config" (arguments of
LlamaConfig, to be written to the folder's config.json in transformers' form; null: it has one), "logits": [token ids,
...], "greedy": [[token ids, new tokens], ...], "save": a folder for transformers to save the model to in shards of
"shard_size"}. "rope" is {"positions": [...], "configs": {name: arguments}}.
FOLDER receives `<name>.npz` for each model (logits_0 [T, V], greedy_0 [new], margin_0 [new]: the best logit minus the
second best), `rope.npz` (<name>/inv_freq, cos, sin) and `made_with.json`.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers


def main(request_file: str, folder: str) -> None:
    request, out = json.loads(Path(request_file).read_text()), Path(folder)
    transformers.utils.logging.disable_progress_bar()
    # On cores that other processes use too, threads that wait for each other made this fifteen times slower.
    torch.set_num_threads(1)
    for model in request.get("models", ()):
        np.savez(out / f"{model['name']}.npz", **run_model(model))
    if "rope" in request:
        np.savez(out / "rope.npz", **rope_tables(request["rope"]))
    made_with = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    (out / "made_with.json").write_text(json.dumps(made_with))


@torch.no_grad()
def run_model(request: dict[str, Any]) -> dict[str, np.ndarray]:
    if request.get("config") is not None:
        config = transformers.LlamaConfig(architectures=["LlamaForCausalLM"], **request["config"])
        config.save_pretrained(request["folder"])
    model, report = transformers.LlamaForCausalLM.from_pretrained(
        request["folder"], dtype=torch.float32, output_loading_info=True
    )
    if any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise SystemExit(f"transformers did not find the checkpoint it expects in {request['folder']}: {report}")
    model.eval()
    if "save" in request:
        model.save_pretrained(request["save"], max_shard_size=request["shard_size"])
    found = {}
    for index, tokens in enumerate(request.get("logits", ())):
        found[f"logits_{index}"] = model(torch.tensor([tokens])).logits[0].float().numpy()
    for index, (tokens, new) in enumerate(request.get("greedy", ())):
        # No end-of-text token: every run goes on to the last token asked for.
        model.generation_config = transformers.GenerationConfig(
            do_sample=False,
            max_new_tokens=new,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        ids = torch.tensor([tokens])
        made = model.generate(ids, attention_mask=torch.ones_like(ids))
        best = torch.stack(made.logits)[:, 0].topk(2).values
        found[f"greedy_{index}"] = made.sequences[0, len(tokens) :].numpy()
        found[f"margin_{index}"] = (best[:, 0] - best[:, 1]).float().numpy()
    return found


@torch.no_grad()
def rope_tables(request: dict[str, Any]) -> dict[str, np.ndarray]:
    found = {}
    positions = torch.tensor([request["positions"]])
    for name, arguments in request["configs"].items():
        rope = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(transformers.LlamaConfig(**arguments))
        cos, sin = rope(torch.zeros(1, dtype=torch.float32), positions)
        half = cos.shape[-1] // 2  # the second half repeats the first
        found[f"{name}/inv_freq"] = rope.inv_freq.numpy()
        found[f"{name}/cos"], found[f"{name}/sin"] = cos[0, :, :half].numpy(), sin[0, :, :half].numpy()
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
