"""Makes the small random models of ``models.py``; run as a script in a process of its own.

usage: build_models.py KIND FOLDER_WITH_TOKENIZER NEW_FOLDER
"""

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

IM_START, IM_END = 1, 2
"""The embedded model's own tokens around a message."""
TEXT = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
}
TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] -%}
{%- if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}IMAGE\
{% elif part['type'] == 'audio' %}AUDIO{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def tokenizer_with(source: str, tokens: list[str], image: str = "", audio: str = "") -> Any:
    """The tokenizer of a folder with further special tokens, and a chat template with these placeholders."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", image).replace("AUDIO", audio)
    return tokenizer


def vocabulary(tokenizer: Any) -> int:
    """The tokens, and as many more as make their number a multiple of 64."""
    return -(-len(tokenizer) // 64) * 64


def text(source: str, out: str) -> None:
    """A two-layer Llama."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), head_dim=64, tie_word_embeddings=True, **TEXT)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def image(source: str, out: str) -> None:
    """A two-layer Idefics3, one of the families whose images need no torchvision: 4 tokens for an image."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    side, patch, merge = 56, 14, 2
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    marks = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *tiles]
    tokenizer = tokenizer_with(source, marks, image="<image>")
    torch.manual_seed(1)
    config = transformers.Idefics3Config(
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=merge,
        tie_word_embeddings=False,
        pad_token_id=IM_END,
        vision_config={"model_type": "idefics3_vision", "hidden_size": 64, "intermediate_size": 128,
                       "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": side, "patch_size": patch},
        text_config={"model_type": "llama", "vocab_size": vocabulary(tokenizer), "head_dim": 64, **ends(), **TEXT},
    )  # fmt: skip
    model = transformers.Idefics3ForConditionalGeneration(config)
    make_media_matter(model.model.connector)
    model.to(torch.bfloat16).save_pretrained(out)
    size = {"longest_edge": side}
    pixels = Idefics3ImageProcessorPil(do_image_splitting=False, size=size, max_image_size=size)
    transformers.Idefics3Processor(
        image_processor=pixels,
        tokenizer=tokenizer,
        image_seq_len=(side // patch // merge) ** 2,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(out)
    tokenizer.save_pretrained(out)


def audio(source: str, out: str) -> None:
    """A two-layer Qwen2-Audio with Whisper's kind of encoder, at 16 kHz: 25 tokens for a second."""
    mark = "<|AUDIO|>"
    tokenizer = tokenizer_with(
        source, [mark, "<|audio_bos|>", "<|audio_eos|>"], audio=f"<|audio_bos|>{mark}<|audio_eos|>"
    )
    torch.manual_seed(2)
    config = transformers.Qwen2AudioConfig(
        audio_token_index=tokenizer.convert_tokens_to_ids(mark),
        audio_config={"model_type": "qwen2_audio_encoder", "num_mel_bins": 80, "d_model": 64, "encoder_layers": 2,
                      "encoder_attention_heads": 2, "encoder_ffn_dim": 128, "max_source_positions": 1500},
        text_config={"model_type": "qwen2", "vocab_size": vocabulary(tokenizer), **ends(), **TEXT},
    )  # fmt: skip
    model = transformers.Qwen2AudioForConditionalGeneration(config)
    make_media_matter(model.model.multi_modal_projector)
    model.to(torch.bfloat16).save_pretrained(out)
    # vLLM reads the names of the first checkpoints, which transformers has given up since.
    rename(Path(out, "model.safetensors"), "language_model.model.model.", "language_model.model.")
    transformers.Qwen2AudioProcessor(
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=80),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(out)
    tokenizer.save_pretrained(out)


def ends() -> dict[str, Any]:
    return {"bos_token_id": IM_START, "eos_token_id": IM_END, "pad_token_id": IM_END, "tie_word_embeddings": False}


def make_media_matter(projector: torch.nn.Module) -> None:
    """With weights as random as all others, no image or audio would change a greedy text."""
    with torch.no_grad():
        for parameter in projector.parameters():
            parameter.mul_(50)


def rename(file: Path, old: str, new: str) -> None:
    """Give the tensors of a file new names."""
    tensors = {name.replace(old, new): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


if __name__ == "__main__":
    kind, *folders = sys.argv[1:]
    {"text": text, "image": image, "audio": audio}[kind](*folders)
