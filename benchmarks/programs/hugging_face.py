"""Models of transformers, with the losses of its Flax examples."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.programs.program import Built, Program, images, labels, tokens, train_step

__all__ = ["PROGRAMS"]

_PACKAGES = ("transformers", "flax", "optax")
_Sizes = Mapping[str, int]
_VOCABULARY = 8192
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_NO_DROPOUT_IN_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _next_token(model: Any) -> Any:
    import optax
    from flax.training.common_utils import onehot

    def loss(parameters: Any, ids: jax.Array, mask: jax.Array, key: jax.Array | None = None) -> jax.Array:
        logits = model(ids, attention_mask=mask, params=parameters, dropout_rng=key, train=True).logits
        shifted, following = logits[..., :-1, :], ids[..., 1:]
        return optax.softmax_cross_entropy(shifted, onehot(following, shifted.shape[-1])).mean()

    return loss


def _gpt2(batch: int, length: int, dtype: Any = jnp.float32, sizes: _Sizes | None = None, **rates: float) -> Built:
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    sizes = sizes or {"n_layer": 2, "n_head": 8, "n_embd": 512, "vocab_size": _VOCABULARY}
    config = GPT2Config(n_positions=length, **sizes, **rates)
    model = FlaxGPT2LMHeadModel(config, input_shape=(1, 8), dtype=dtype)
    ids = tokens(batch, length, config.vocab_size)
    key = () if rates else (jax.random.PRNGKey(7),)  # by default all rates are 0.1, that of attention's weights too
    return train_step(_next_token(model)), (model.params, ids, jnp.ones_like(ids), *key)


def _bert(batch: int, length: int, sizes: _Sizes | None = None) -> Any:
    from transformers import BertConfig

    sizes = sizes or {
        "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512, "intermediate_size": 2048,
        "vocab_size": _VOCABULARY,
    }  # fmt: skip
    return BertConfig(max_position_embeddings=length, **sizes, **_NO_DROPOUT_IN_BERT)


def _bert_forward(batch: int, length: int, dtype: Any) -> Built:
    from transformers import FlaxBertModel

    model = FlaxBertModel(_bert(batch, length), input_shape=(1, 8), dtype=dtype)
    ids = tokens(batch, length, _VOCABULARY)
    mask = (jnp.arange(length) < length - jnp.arange(batch)[:, None] * length // 8).astype(jnp.int32)

    def forward(parameters: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
        return model(ids, attention_mask=mask, params=parameters).last_hidden_state

    return forward, (model.params, ids, mask)


def _bert_train(batch: int, length: int, dtype: Any = jnp.float32, sizes: _Sizes | None = None) -> Built:
    import optax
    from flax.training.common_utils import onehot
    from transformers import FlaxBertForMaskedLM

    model = FlaxBertForMaskedLM(_bert(batch, length, sizes), input_shape=(1, 8), dtype=dtype)
    ids = tokens(batch, length, model.config.vocab_size)
    wanted = jnp.where(jax.random.uniform(jax.random.key(4), ids.shape) < 0.15, ids, -100)

    def loss(parameters: Any, ids: jax.Array, mask: jax.Array, wanted: jax.Array) -> jax.Array:
        logits = model(ids, attention_mask=mask, params=parameters, train=True).logits
        counted = jnp.where(wanted >= 0, 1.0, 0.0)
        each = optax.softmax_cross_entropy(logits, onehot(wanted, logits.shape[-1])) * counted
        return each.sum() / counted.sum()

    return train_step(loss), (model.params, ids, jnp.ones_like(ids), wanted)


def _llama(batch: int, length: int, dtype: Any, sizes: _Sizes | None = None) -> Built:
    from transformers import FlaxLlamaForCausalLM, LlamaConfig

    sizes = sizes or {
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 512,
        "intermediate_size": 1024, "vocab_size": _VOCABULARY,
    }  # fmt: skip
    config = LlamaConfig(max_position_embeddings=length, attention_dropout=0.0, **sizes)
    model = FlaxLlamaForCausalLM(config, input_shape=(1, 8), dtype=dtype)
    ids = tokens(batch, length, config.vocab_size)
    return train_step(_next_token(model)), (model.params, ids, jnp.ones_like(ids))


def _clip(batch: int) -> Built:
    from transformers import CLIPConfig, FlaxCLIPModel

    text = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CLIPConfig(
        text_config=text | {"vocab_size": _VOCABULARY, "max_position_embeddings": 64, "eos_token_id": _VOCABULARY - 1},
        vision_config=text | {"image_size": 128, "patch_size": 16},
        projection_dim=256,
    )
    model = FlaxCLIPModel(config)

    def cross_entropy(logits: jax.Array) -> jax.Array:
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(logits, axis=-1)))

    def loss(parameters: Any, ids: jax.Array, pixels: jax.Array) -> jax.Array:
        logits = model(ids, pixels, params=parameters, train=True).logits_per_image
        return (cross_entropy(logits) + cross_entropy(logits.T)) / 2

    return train_step(loss), (model.params, tokens(batch, 64, _VOCABULARY), images(batch, 3, 128, 128))


def _bart(batch: int, length: int) -> Built:
    import optax
    from flax.training.common_utils import onehot
    from transformers import BartConfig, FlaxBartForConditionalGeneration

    config = BartConfig(
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=8, decoder_attention_heads=8, d_model=512,
        encoder_ffn_dim=2048, decoder_ffn_dim=2048, max_position_embeddings=length, vocab_size=_VOCABULARY,
        dropout=0.0,
    )  # fmt: skip
    model = FlaxBartForConditionalGeneration(config, input_shape=(1, 8))
    ids, wanted = tokens(batch, length, _VOCABULARY), tokens(batch, length // 2, _VOCABULARY)

    def loss(parameters: Any, ids: jax.Array, mask: jax.Array, wanted: jax.Array) -> jax.Array:
        given = jnp.pad(wanted[:, :-1], ((0, 0), (1, 0)))
        logits = model(ids, mask, decoder_input_ids=given, params=parameters, train=True).logits
        return optax.softmax_cross_entropy(logits, onehot(wanted, logits.shape[-1])).mean()

    return train_step(loss), (model.params, ids, jnp.ones_like(ids), wanted)


def _vit(batch: int) -> Built:
    import optax
    from flax.training.common_utils import onehot
    from transformers import FlaxViTForImageClassification, ViTConfig

    config = ViTConfig(
        num_hidden_layers=2, num_attention_heads=6, hidden_size=384, intermediate_size=1536, num_labels=100,
        **_NO_DROPOUT_IN_BERT,
    )  # fmt: skip
    model = FlaxViTForImageClassification(config)

    def loss(parameters: Any, pixels: jax.Array, wanted: jax.Array) -> jax.Array:
        logits = model(pixel_values=pixels, params=parameters, train=True).logits
        return optax.softmax_cross_entropy(logits, onehot(wanted, logits.shape[-1])).mean()

    return train_step(loss), (model.params, images(batch, 3, 224, 224), labels(batch, 100))


def _regnet(batch: int, size: int) -> Built:
    import optax
    from flax.training.common_utils import onehot
    from transformers import FlaxRegNetForImageClassification, RegNetConfig

    sizes = {"embedding_size": 32, "hidden_sizes": [64, 128, 256, 384], "depths": [1, 2, 2, 1], "groups_width": 16}
    model = FlaxRegNetForImageClassification(RegNetConfig(num_labels=100, **sizes))

    def loss(parameters: Any, pixels: jax.Array, wanted: jax.Array) -> jax.Array:
        logits = model(pixels, params=parameters, train=True)[0].logits
        return optax.softmax_cross_entropy(logits, onehot(wanted, logits.shape[-1])).mean()

    return train_step(loss), (dict(model.params), images(batch, 3, size, size), labels(batch, 100))


def _whisper(batch: int, frames: int) -> Built:
    from transformers import FlaxWhisperModel, WhisperConfig

    config = WhisperConfig(
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=6, decoder_attention_heads=6, d_model=384,
        encoder_ffn_dim=1536, decoder_ffn_dim=1536, vocab_size=_VOCABULARY, max_source_positions=frames // 2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip
    model = FlaxWhisperModel(config, input_shape=(1, 80, frames))

    def forward(parameters: Any, features: jax.Array) -> jax.Array:
        return model.encode(input_features=features, params=parameters).last_hidden_state

    return forward, (model.params, images(batch, 80, frames))


def _program(name: str, build: Any, *arguments: Any, **rates: float) -> Program:
    return Program(name, _PACKAGES, functools.partial(build, *arguments, **rates))


def _of_gpu(name: str, build: Any, batch: int, length: int, sizes: _Sizes, small: _Sizes, **rates: float) -> Program:
    build = functools.partial(build, dtype=jnp.bfloat16, **rates)
    whole, dry = (
        functools.partial(build, *of, sizes=given) for of, given in (((batch, length), sizes), ((2, 32), small))
    )
    return Program(name, _PACKAGES, whole, "gpu", dry)


PROGRAMS = (
    _program("transformers GPT-2 train B1 T1024 f32", _gpt2, 1, 1024, **_NO_DROPOUT),
    _program("transformers GPT-2 train B4 T512 f32", _gpt2, 4, 512, **_NO_DROPOUT),
    _program("transformers GPT-2 train with dropout B4 T512 f32", _gpt2, 4, 512),
    _program("transformers BERT forward B4 T512 f32", _bert_forward, 4, 512, jnp.float32),
    _program("transformers BERT forward B1 T512 bf16", _bert_forward, 1, 512, jnp.bfloat16),
    _program("transformers BERT train B4 T256 f32", _bert_train, 4, 256),
    _program("transformers Llama train B1 T1024 bf16", _llama, 1, 1024, jnp.bfloat16),
    _program("transformers Llama train B4 T512 f32", _llama, 4, 512, jnp.float32),
    _program("transformers CLIP train B32 T64 f32", _clip, 32),
    _program("transformers BART train B4 T512 f32", _bart, 4, 512),
    _program("transformers ViT train B4 T197 f32", _vit, 4),
    _program("transformers RegNet train B4 96x96 f32", _regnet, 4, 96),
    _program("transformers Whisper encoder forward B1 T1500 f32", _whisper, 1, 3000),
    _of_gpu(
        "transformers GPT-2 train B8 T1024 bf16", _gpt2, 8, 1024,
        {"n_layer": 4, "n_head": 12, "n_embd": 768, "vocab_size": 50257},
        {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 97}, **_NO_DROPOUT,
    ),
    _of_gpu(
        "transformers Llama train B2 T2048 bf16", _llama, 2, 2048,
        {"num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 4, "hidden_size": 2048,
         "intermediate_size": 5632, "vocab_size": 32000},
        {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64,
         "intermediate_size": 64, "vocab_size": 97},
    ),
    _of_gpu(
        "transformers BERT train B32 T512 bf16", _bert_train, 32, 512,
        {"num_hidden_layers": 4, "num_attention_heads": 12, "hidden_size": 768, "intermediate_size": 3072,
         "vocab_size": 30522},
        {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64,
         "vocab_size": 97},
    ),
)  # fmt: skip
