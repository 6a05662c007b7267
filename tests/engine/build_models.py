"""Makes the small random models of ``models.py``; run as a script in a process of its own.

usage: build_models.py KIND FOLDER_WITH_TOKENIZER NEW_FOLDER
"""

import importlib
import json
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


def omni(source: str, out: str) -> None:
    """A two-layer MiniCPM-o, which takes images (4 tokens and 2 marks each) and audio (25 tokens a second) at once.

    It is the one family in vLLM that takes both and needs neither torchvision nor timm. What its checkpoints bring as
    code, this one brings too (``tiny_omni.py``), so it is served with ``trust_remote_code``.
    """
    from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    torch.manual_seed(3)
    tokenizer = omni_tokenizer(source)
    Path(out, "tiny_omni.py").write_text(Path(__file__).with_name("tiny_omni.py").read_text())
    sys.path.insert(0, out)
    tiny_omni = importlib.import_module("tiny_omni")  # from there, so that its names are those in the configuration

    config = tiny_omni.TinyOmniConfig(
        vocab_size=vocabulary(tokenizer),
        vision_config={"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
                       "image_size": 56, "patch_size": 14},
        audio_config={"num_mel_bins": 80, "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 2,
                      "encoder_ffn_dim": 256, "max_source_positions": 1500, "vocab_size": 8, "pad_token_id": 0},
        architectures=["MiniCPMO"],
        dtype="bfloat16",
        head_dim=64,
        **ends(),
        **TEXT,
    )  # fmt: skip
    parts = {
        "llm": transformers.Qwen3ForCausalLM(config).state_dict(),
        "vpm": Idefics2VisionTransformer(config.vision_config).state_dict(),
        "apm": WhisperEncoder(config.audio_config).state_dict(),
        "resampler": resampler(config.query_num, config.hidden_size, config.vision_config.hidden_size),
        "audio_projection_layer": projector(config.audio_config.d_model, config.hidden_size),
    }
    tensors = {f"{part}.{name}": tensor for part, weights in parts.items() for name, tensor in weights.items()}
    save_file({name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()},
              Path(out, "model.safetensors"), metadata={"format": "pt"})  # fmt: skip
    config.auto_map = {"AutoConfig": "tiny_omni.TinyOmniConfig"}
    config.save_pretrained(out)
    tokenizer.save_pretrained(out)
    processors = {
        **transformers.WhisperFeatureExtractor(feature_size=80).to_dict(),
        **tiny_omni.TinyOmniImageProcessor().to_dict(),
    }
    processors["auto_map"] = {
        "AutoImageProcessor": "tiny_omni.TinyOmniImageProcessor",
        "AutoProcessor": "tiny_omni.MiniCPMOProcessor",
    }
    Path(out, "preprocessor_config.json").write_text(json.dumps(processors))


def omni_tokenizer(source: str) -> Any:
    """The marks that MiniCPM-o's tokenizer knows, and a token for each placeholder."""
    image, audio = "(<image>./</image>)", "(<audio>./</audio>)"
    names = {"im": "image", "slice": "slice", "audio": "audio", "spk": "|spk|"}
    marks = {f"{name}_{end}": f"<{'/' if end == 'end' else ''}{mark}>"
             for name, mark in names.items() for end in ("start", "end")}  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(source, extra_special_tokens={**marks, "unk_mark": "<unk>"})
    tokenizer.add_special_tokens({"additional_special_tokens": [image, audio]})
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", image).replace("AUDIO", audio)
    return tokenizer


def resampler(queries: int, width: int, vision_width: int) -> dict[str, torch.Tensor]:
    """What makes an image's tokens of its patches; strong, as in ``make_media_matter``."""
    norms = {f"ln_{name}.{kind}": value for name in ("q", "kv", "post")
             for kind, value in (("weight", torch.ones(width)), ("bias", torch.zeros(width)))}  # fmt: skip
    attention = torch.nn.MultiheadAttention(width, 1).state_dict()
    return {
        "query": torch.randn(queries, width),
        "kv_proj.weight": torch.randn(width, vision_width),
        "proj": torch.randn(width, width),
        **norms,
        **{f"attn.{name}": weight for name, weight in attention.items()},
    }


def projector(inputs: int, outputs: int) -> dict[str, torch.Tensor]:
    return {
        "linear1.weight": torch.randn(outputs, inputs),
        "linear1.bias": torch.zeros(outputs),
        "linear2.weight": torch.randn(outputs, outputs) / 4,
        "linear2.bias": torch.zeros(outputs),
    }


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
    {"text": text, "image": image, "audio": audio, "omni": omni}[kind](*folders)
