"""Writes a Llama with random weights, its tokeniser and two LoRA adapters.

Run by the interpreter of the installation, which has torch and transformers:
`_real_model.py HOME TEXTS SIZE [TOKENISER]`.
TEXTS is a file to train a tokeniser with (4,096 tokens); TOKENISER a folder with `tokenizer.json` and
`tokenizer_config.json` to use instead: with the 151,680 tokens of Qwen3 the small model has 101 M parameters.
SIZE `28m` is for a CPU. `8b` is Llama 3.1 8B with a small vocabulary, for a GPU: its weights are made by the server.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HIDDEN, LAYERS, HEADS, KV_HEADS, WIDTH, RANK = 512, 8, 8, 4, 64, 8
_LARGE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokeniser(texts: Path, folder: Path) -> int:
    """Returns the size of the vocabulary."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train([str(texts)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)
    return len(fast)


def copy_tokeniser(source: Path, folder: Path) -> int:
    """Returns the size of the vocabulary, in whole 64s."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    read = json.loads((source / "tokenizer.json").read_text())
    last = max(*read["model"]["vocab"].values(), *(token["id"] for token in read["added_tokens"]))
    return int(-(-(last + 1) // 64) * 64)


def write_model(folder: Path, vocabulary: int, size: str) -> None:
    small = {
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN * 11 // 4,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": WIDTH,
    }
    config = LlamaConfig(
        vocab_size=vocabulary,
        **(small if size == "28m" else _LARGE),
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    if size == "28m":
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
    else:
        config.save_pretrained(folder)


def write_adapter(folder: Path, seed: int) -> None:
    """In the layout of PEFT: low-rank changes of the attention's queries and values."""
    folder.mkdir(exist_ok=True)
    chance = torch.Generator().manual_seed(seed)
    sizes = {"q_proj": HEADS * WIDTH, "v_proj": KV_HEADS * WIDTH}
    tensors = {}
    for layer in range(LAYERS):
        for name, size in sizes.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("lora_A", (RANK, HIDDEN)), ("lora_B", (size, RANK))):
                tensors[f"{place}.{part}.weight"] = (torch.randn(shape, generator=chance) * 0.01).to(torch.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": list(sizes), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def main(home: Path, texts: Path, size: str, tokeniser: str = "") -> None:
    folder = home / ("model" if size == "28m" else f"model-{size}")
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = copy_tokeniser(Path(tokeniser), folder) if tokeniser else train_tokeniser(texts, folder)
    write_model(folder, vocabulary, size)
    for seed, name in enumerate(("adapter-a", "adapter-b"), 1) if size == "28m" else ():
        write_adapter(home / name, seed)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
