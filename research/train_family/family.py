"""The bundled family: its members, their shapes and peak learning rates."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from research.train_family.corpus import VOCAB_SIZE

TARGET = "tiny-8m"
MIDDLE = "tiny-3m"
SMALL = "tiny-1m"
SPECIALISTS = {"tiny-1m-code": "code", "tiny-1m-math": "math"}
MIX = {"code": 0.42, "prose": 0.38, "math": 0.20}

# name -> hidden size, layers, MLP size, query heads, key/value heads; all heads are 32 wide.
SHAPES = {
    TARGET: (256, 9, 736, 8, 2),
    MIDDLE: (160, 7, 448, 5, 1),
    SMALL: (96, 3, 256, 3, 1),
}
LEARNING_RATE = {TARGET: 2.5e-3, MIDDLE: 3e-3, SMALL: 4e-3}


def build(name: str, eos_token_id: int) -> LlamaForCausalLM:
    hidden, layers, mlp, heads, kv_heads = SHAPES[name]
    torch.manual_seed(len(name) + layers)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=hidden,
            num_hidden_layers=layers,
            intermediate_size=mlp,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=32,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=eos_token_id,
            eos_token_id=eos_token_id,
            pad_token_id=eos_token_id,
        )
    )
