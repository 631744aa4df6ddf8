"""Small transformers models of many architectures, from configs with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.torchvision_import import import_torchvision

_SMALL = dict(
    num_hidden_layers=2, hidden_size=64, num_attention_heads=4, intermediate_size=96, vocab_size=120,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_GQA = dict(_SMALL, num_key_value_heads=2)
_VISION = dict(
    num_hidden_layers=2, hidden_size=64, num_attention_heads=4, intermediate_size=96, image_size=32, patch_size=8
)
_ENCDEC = dict(
    d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=96, decoder_ffn_dim=96, vocab_size=120, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
    eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=None,
)  # fmt: skip
_T5 = dict(
    d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, vocab_size=120, pad_token_id=0, decoder_start_token_id=0
)


def _text(labels: str = "lm", **more: Any) -> Callable[[nn.Module], tuple[tuple, dict]]:
    def inputs(_: nn.Module) -> tuple[tuple, dict]:
        ids = torch.randint(3, 100, (2, 12))
        mask = torch.ones_like(ids)
        mask[1, 9:] = 0
        found: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, **more}
        if labels == "lm":
            found["labels"] = ids
        elif labels == "class":
            found["labels"] = torch.tensor([0, 1])
        return (), found

    return inputs


def _image(size: int = 32, **more: Any) -> Callable[[nn.Module], tuple[tuple, dict]]:
    return lambda _: ((), {"pixel_values": torch.randn(2, 3, size, size), **more})


def _audio(length: int = 2000) -> Callable[[nn.Module], tuple[tuple, dict]]:
    return lambda _: ((), {"input_values": torch.randn(2, length)})


#: (model class, config options, inputs)
_MODELS: list[tuple[str, dict[str, Any], Callable]] = [
    ("GPT2LMHeadModel", dict(n_layer=2, n_embd=64, n_head=4, vocab_size=120, n_positions=64, bos_token_id=1, eos_token_id=2), _text()),
    ("LlamaForCausalLM", _GQA, _text()),
    ("LlamaForSequenceClassification", _GQA, _text("class")),
    ("MistralForCausalLM", dict(_GQA, sliding_window=8), _text()),
    ("MixtralForCausalLM", dict(_GQA, num_local_experts=4), _text()),
    ("Qwen2ForCausalLM", _GQA, _text()),
    ("Qwen3ForCausalLM", dict(_GQA, head_dim=16), _text()),
    ("GemmaForCausalLM", dict(_GQA, head_dim=16), _text()),
    ("Gemma2ForCausalLM", dict(_GQA, head_dim=16), _text()),
    ("PhiForCausalLM", _SMALL, _text()),
    ("Phi3ForCausalLM", dict(_GQA), _text()),
    ("FalconForCausalLM", _SMALL, _text()),
    ("GPTNeoXForCausalLM", _SMALL, _text()),
    ("GPTNeoForCausalLM", dict(num_layers=2, hidden_size=64, num_heads=4, vocab_size=120, max_position_embeddings=64, attention_types=[[["global", "local"], 1]], bos_token_id=1, eos_token_id=2), _text()),
    ("GPTJForCausalLM", dict(n_layer=2, n_embd=64, n_head=4, vocab_size=120, n_positions=64, rotary_dim=8, bos_token_id=1, eos_token_id=2), _text()),
    ("OPTForCausalLM", dict(num_hidden_layers=2, hidden_size=64, ffn_dim=96, num_attention_heads=4, vocab_size=120, max_position_embeddings=64, word_embed_proj_dim=64), _text()),
    ("BloomForCausalLM", dict(n_layer=2, hidden_size=64, n_head=4, vocab_size=120), _text()),
    ("StableLmForCausalLM", _GQA, _text()),
    ("CohereForCausalLM", _GQA, _text()),
    ("OlmoForCausalLM", _GQA, _text()),
    ("Olmo2ForCausalLM", _GQA, _text()),
    ("GraniteForCausalLM", _GQA, _text()),
    ("Starcoder2ForCausalLM", _GQA, _text()),
    ("MptForCausalLM", dict(d_model=64, n_heads=4, n_layers=2, vocab_size=120, max_seq_len=64), _text()),
    ("CodeGenForCausalLM", dict(n_layer=2, n_embd=64, n_head=4, vocab_size=120, n_positions=64, rotary_dim=8, bos_token_id=1, eos_token_id=2), _text()),
    ("MambaForCausalLM", dict(num_hidden_layers=2, hidden_size=64, vocab_size=120, state_size=8), _text()),
    ("BertForMaskedLM", _SMALL, _text()),
    ("BertForSequenceClassification", _SMALL, _text("class", output_attentions=True)),
    ("BertModel", _SMALL, _text("", return_dict=False)),
    ("RobertaForSequenceClassification", _SMALL, _text("class")),
    ("DistilBertForSequenceClassification", dict(n_layers=2, dim=64, n_heads=4, hidden_dim=96, vocab_size=120, max_position_embeddings=64), _text("class")),
    ("AlbertForMaskedLM", dict(_SMALL, embedding_size=32), _text()),
    ("ElectraForSequenceClassification", dict(_SMALL, embedding_size=32), _text("class")),
    ("DebertaV2ForSequenceClassification", dict(_SMALL, relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"]), _text("class")),
    ("DebertaForSequenceClassification", dict(_SMALL, relative_attention=True, pos_att_type=["p2c", "c2p"]), _text("class")),
    ("XLMRobertaForTokenClassification", _SMALL, _text("")),
    ("ModernBertForMaskedLM", dict(_SMALL, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2), _text()),
    ("MPNetForMaskedLM", _SMALL, _text()),
    ("RoFormerForMaskedLM", dict(_SMALL, embedding_size=64), _text()),
    ("FNetForMaskedLM", _SMALL, lambda _: ((), {"input_ids": torch.randint(3, 100, (2, 12))})),
    ("NystromformerForMaskedLM", dict(_SMALL, segment_means_seq_len=12, num_landmarks=12), lambda _: ((), {"input_ids": torch.randint(3, 100, (2, 12)), "labels": torch.randint(3, 100, (2, 12))})),
    ("LongformerForMaskedLM", dict(_SMALL, attention_window=4), _text()),
    ("BigBirdForMaskedLM", dict(_SMALL, attention_type="original_full"), _text()),
    ("XLNetLMHeadModel", dict(d_model=64, n_layer=2, n_head=4, d_inner=96, vocab_size=120), _text()),
    ("T5ForConditionalGeneration", _T5, _text()),
    ("MT5ForConditionalGeneration", _T5, _text()),
    ("T5EncoderModel", _T5, _text("")),
    ("BartForConditionalGeneration", _ENCDEC, _text()),
    ("MBartForConditionalGeneration", _ENCDEC, _text()),
    ("PegasusForConditionalGeneration", _ENCDEC, _text()),
    ("MarianMTModel", _ENCDEC, _text()),
    ("BlenderbotForConditionalGeneration", _ENCDEC, _text()),
    ("M2M100ForConditionalGeneration", _ENCDEC, _text()),
    ("ViTForImageClassification", _VISION, _image()),
    ("ViTModel", dict(_VISION, output_hidden_states=True), _image()),
    ("DeiTForImageClassification", _VISION, _image()),
    ("BeitForImageClassification", _VISION, _image()),
    ("Dinov2ForImageClassification", _VISION, _image()),
    ("SwinForImageClassification", dict(image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4), _image()),
    ("ConvNextForImageClassification", dict(depths=[1, 1, 2, 1], hidden_sizes=[16, 24, 32, 48]), _image(64)),
    ("ResNetForImageClassification", dict(embedding_size=16, hidden_sizes=[16, 24, 32, 48], depths=[1, 1, 1, 1]), _image(64)),
    ("RegNetForImageClassification", dict(embedding_size=16, hidden_sizes=[16, 24, 32, 48], depths=[1, 1, 1, 1], groups_width=8), _image(64)),
    ("MobileNetV2ForImageClassification", {}, _image(64)),
    ("SegformerForSemanticSegmentation", dict(hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=32), _image(64)),
    ("PoolFormerForImageClassification", dict(hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1]), _image(64)),
    ("LevitForImageClassification", dict(image_size=64, hidden_sizes=[16, 24, 32], num_attention_heads=[2, 2, 2], depths=[1, 1, 1], key_dim=[8, 8, 8]), _image(64)),
    ("DPTForDepthEstimation", dict(_VISION, num_hidden_layers=4, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16, is_hybrid=False), _image()),
    ("ViTMAEForPreTraining", dict(_VISION, decoder_hidden_size=32, decoder_num_hidden_layers=1, decoder_num_attention_heads=4, decoder_intermediate_size=48), _image()),
    ("Wav2Vec2ForCTC", dict(_SMALL, conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4), _audio()),
    ("HubertForCTC", dict(_SMALL, conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4), _audio()),
    ("WhisperForConditionalGeneration", dict(_ENCDEC, num_mel_bins=20, max_source_positions=32, max_target_positions=32), lambda _: ((), {"input_features": torch.randn(2, 20, 64), "labels": torch.randint(3, 100, (2, 8))})),
    ("ASTForAudioClassification", dict(_VISION, num_mel_bins=16, max_length=64), lambda _: ((), {"input_values": torch.randn(2, 64, 16)})),
    ("CLIPModel", dict(text_config=dict(_SMALL, eos_token_id=2), vision_config=dict(_VISION), projection_dim=32), lambda _: ((), {"input_ids": torch.randint(3, 100, (2, 12)), "pixel_values": torch.randn(2, 3, 32, 32), "return_loss": True})),
    ("BioGptForCausalLM", _SMALL, _text()),
    ("OpenAIGPTLMHeadModel", dict(n_layer=2, n_embd=64, n_head=4, vocab_size=120, n_positions=64), _text()),
    ("CTRLLMHeadModel", dict(n_layer=2, n_embd=64, n_head=4, dff=96, vocab_size=120, n_positions=64), _text()),
    ("XGLMForCausalLM", dict(d_model=64, num_layers=2, attention_heads=4, ffn_dim=96, vocab_size=120, max_position_embeddings=64), _text()),
    ("GPTBigCodeForCausalLM", dict(n_layer=2, n_embd=64, n_head=4, vocab_size=120, n_positions=64), _text()),
    ("PersimmonForCausalLM", _SMALL, _text()),
    ("Gemma3ForCausalLM", dict(_GQA, head_dim=16), _text()),
    ("GlmForCausalLM", dict(_GQA, head_dim=16), _text()),
    ("HeliumForCausalLM", dict(_GQA, head_dim=16), _text()),
    ("NemotronForCausalLM", _GQA, _text()),
    ("OlmoeForCausalLM", dict(_GQA, num_experts=4, num_experts_per_tok=2), _text()),
    ("Qwen3MoeForCausalLM", dict(_GQA, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48), _text()),
    ("SmolLM3ForCausalLM", _GQA, _text()),
    ("Ernie4_5ForCausalLM", _GQA, _text()),
    ("ErnieForMaskedLM", _SMALL, _text()),
    ("CamembertForMaskedLM", _SMALL, _text()),
    ("ConvBertForMaskedLM", dict(_SMALL, embedding_size=64, conv_kernel_size=3), _text()),
    ("SqueezeBertForMaskedLM", dict(_SMALL, embedding_size=64), _text()),
    ("MobileBertForMaskedLM", dict(_SMALL, embedding_size=32, intra_bottleneck_size=64, true_hidden_size=64), _text()),
    ("RemBertForMaskedLM", dict(_SMALL, input_embedding_size=32, output_embedding_size=32), _text()),
    ("MegatronBertForMaskedLM", _SMALL, _text()),
    ("LayoutLMForTokenClassification", _SMALL, _text("")),
    ("FunnelForMaskedLM", dict(block_sizes=[1, 1], num_decoder_layers=1, d_model=64, n_head=4, d_head=16, d_inner=96, vocab_size=120), _text()),
    ("UMT5ForConditionalGeneration", _T5, _text()),
    ("LongT5ForConditionalGeneration", _T5, _text()),
    ("SwitchTransformersForConditionalGeneration", dict(_T5, num_experts=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1), _text()),
    ("PLBartForConditionalGeneration", _ENCDEC, _text()),
    ("Swinv2ForImageClassification", dict(image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4), _image()),
    ("MobileViTForImageClassification", dict(image_size=64, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 8, 16, 16, 16, 32], num_attention_heads=2), _image(64)),
    ("ConvNextV2ForImageClassification", dict(depths=[1, 1, 2, 1], hidden_sizes=[16, 24, 32, 48]), _image(64)),
    ("BitForImageClassification", dict(embedding_size=32, hidden_sizes=[128, 128, 256, 256], depths=[1, 1, 1, 1]), _image(64)),
    ("FocalNetForImageClassification", dict(image_size=32, embed_dim=16, depths=[1, 1], hidden_sizes=[16, 32], focal_levels=[2, 2], focal_windows=[3, 3]), _image()),
    ("PvtV2ForImageClassification", dict(image_size=64, hidden_sizes=[8, 16, 32, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 2]), _image(64)),
    ("ViTMSNForImageClassification", _VISION, _image()),
    ("Data2VecVisionForImageClassification", _VISION, _image()),
    ("GLPNForDepthEstimation", dict(hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16), _image(64)),
    ("YolosForObjectDetection", dict(_VISION, image_size=[32, 32], num_detection_tokens=8), _image()),
    ("HieraForImageClassification", dict(image_size=[64, 64], embed_dim=16, num_heads=[1, 2], depths=[1, 1], query_stride=[2, 2], num_query_pool=1, masked_unit_size=[4, 4]), _image(64)),
    ("EfficientNetForImageClassification", dict(image_size=64, num_block_repeats=[1] * 7), _image(64)),
    ("WavLMModel", dict(_SMALL, conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, mask_time_prob=0.0, layerdrop=0.0), _audio()),
    ("SEWModel", dict(_SMALL, conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, mask_time_prob=0.0, layerdrop=0.0), _audio()),
    ("VideoMAEForVideoClassification", dict(_VISION, num_frames=4), lambda _: ((), {"pixel_values": torch.randn(2, 4, 3, 32, 32)})),
    ("TimesformerForVideoClassification", dict(_VISION, num_frames=4), lambda _: ((), {"pixel_values": torch.randn(2, 4, 3, 32, 32)})),
    ("VivitForVideoClassification", dict(_VISION, num_frames=4, tubelet_size=[2, 8, 8]), lambda _: ((), {"pixel_values": torch.randn(2, 4, 3, 32, 32)})),
    ("Siglip2Model", dict(text_config=dict(_SMALL), vision_config=dict(_VISION)), lambda _: ((), {"input_ids": torch.randint(3, 100, (2, 12)), "pixel_values": torch.randn(2, 16, 192), "pixel_attention_mask": torch.ones(2, 16, dtype=torch.int64), "spatial_shapes": torch.tensor([[4, 4], [4, 4]])})),
    ("BlipForImageTextRetrieval", dict(text_config=dict(_SMALL, encoder_hidden_size=64), vision_config=dict(_VISION), image_text_hidden_size=32), lambda _: ((), {"input_ids": torch.randint(3, 100, (2, 12)), "pixel_values": torch.randn(2, 3, 32, 32)})),
    ("SiglipModel", dict(text_config=dict(_SMALL), vision_config=dict(_VISION)), lambda _: ((), {"input_ids": torch.randint(3, 100, (2, 12)), "pixel_values": torch.randn(2, 3, 32, 32)})),
    ("DebertaV2ForMaskedLM", dict(_SMALL, relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"]), _text()),
    ("DebertaForTokenClassification", dict(_SMALL, relative_attention=True, pos_att_type=["p2c", "c2p"]), _text("")),
    ("Cohere2ForCausalLM", _GQA, _text()),
    ("Qwen2MoeForCausalLM", dict(_GQA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, shared_expert_intermediate_size=48), _text()),
    ("GraniteMoeForCausalLM", dict(_GQA, num_local_experts=4), _text()),
    ("Olmo3ForCausalLM", _GQA, _text()),
    ("Glm4ForCausalLM", dict(_GQA, head_dim=16), _text()),
    ("ArceeForCausalLM", _GQA, _text()),
    ("SeedOssForCausalLM", dict(_GQA, head_dim=16), _text()),
    ("DiffLlamaForCausalLM", _GQA, _text()),
    ("Exaone4ForCausalLM", _GQA, _text()),
    ("DeepseekV3ForCausalLM", dict(_SMALL, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=48, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, first_k_dense_replace=1), _text()),
    ("GptOssForCausalLM", dict(_GQA, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8), _text()),
    ("PhimoeForCausalLM", dict(_GQA, num_local_experts=4), _text()),
    ("Mamba2ForCausalLM", dict(num_hidden_layers=2, hidden_size=64, vocab_size=120, state_size=8, num_heads=8, head_dim=16, n_groups=1, chunk_size=8), _text()),
    ("FalconMambaForCausalLM", dict(num_hidden_layers=2, hidden_size=64, vocab_size=120, state_size=8), _text()),
    ("RwkvForCausalLM", dict(num_hidden_layers=2, hidden_size=64, vocab_size=120, context_length=64), _text()),
    ("FlaubertWithLMHeadModel", dict(emb_dim=64, n_layers=2, n_heads=4, vocab_size=120, max_position_embeddings=64), _text()),
    ("XLMWithLMHeadModel", dict(emb_dim=64, n_layers=2, n_heads=4, vocab_size=120, max_position_embeddings=64), _text()),
    ("IBertForMaskedLM", _SMALL, _text()),
    ("LukeForMaskedLM", dict(_SMALL, entity_vocab_size=20, entity_emb_size=32), _text()),
    ("Data2VecTextForMaskedLM", _SMALL, _text()),
    ("RobertaPreLayerNormForMaskedLM", _SMALL, _text()),
    ("YosoForMaskedLM", dict(_SMALL, use_expectation=True), _text()),
    ("ProphetNetForConditionalGeneration", dict(vocab_size=120, hidden_size=64, encoder_ffn_dim=96, num_encoder_layers=2, num_encoder_attention_heads=4, decoder_ffn_dim=96, num_decoder_layers=2, num_decoder_attention_heads=4, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1), _text()),
    ("BigBirdPegasusForConditionalGeneration", dict(_ENCDEC, attention_type="original_full"), _text()),
    ("BlenderbotSmallForConditionalGeneration", _ENCDEC, _text()),
    ("MvpForConditionalGeneration", _ENCDEC, _text()),
    ("Speech2TextForConditionalGeneration", dict(_ENCDEC, encoder_layerdrop=0.0, decoder_layerdrop=0.0, input_feat_per_channel=20, max_source_positions=64, max_target_positions=32, conv_channels=32), lambda _: ((), {"input_features": torch.randn(2, 64, 20), "labels": torch.randint(3, 100, (2, 8))})),
    ("ViltModel", dict(_SMALL, image_size=32, patch_size=8), lambda _: ((), {"input_ids": torch.randint(3, 100, (2, 12)), "pixel_values": torch.randn(2, 3, 32, 32), "pixel_mask": torch.ones(2, 32, 32, dtype=torch.int64)})),
    ("VisualBertModel", dict(_SMALL, visual_embedding_dim=24), lambda _: ((), {"input_ids": torch.randint(3, 100, (2, 12)), "visual_embeds": torch.randn(2, 5, 24)})),
    ("LxmertModel", dict(_SMALL, visual_feat_dim=24, l_layers=1, x_layers=1, r_layers=1), lambda _: ((), {"input_ids": torch.randint(3, 100, (2, 12)), "visual_feats": torch.randn(2, 5, 24), "visual_pos": torch.rand(2, 5, 4)})),
    ("ChineseCLIPModel", dict(text_config=dict(_SMALL), vision_config=dict(_VISION), projection_dim=32), lambda _: ((), {"input_ids": torch.randint(3, 100, (2, 12)), "pixel_values": torch.randn(2, 3, 32, 32), "return_loss": True})),
    ("CLIPSegForImageSegmentation", dict(text_config=dict(_SMALL, eos_token_id=2), vision_config=dict(_VISION, num_hidden_layers=3), projection_dim=32, extract_layers=[1, 2], reduce_dim=16, decoder_num_attention_heads=4, decoder_intermediate_size=32), lambda _: ((), {"input_ids": torch.randint(3, 100, (2, 12)), "pixel_values": torch.randn(2, 3, 32, 32)})),
    ("GitForCausalLM", dict(_SMALL, vision_config=dict(_VISION)), lambda _: ((), {"input_ids": torch.randint(3, 100, (2, 12)), "pixel_values": torch.randn(2, 3, 32, 32)})),
    ("OwlViTModel", dict(text_config=dict(_SMALL, eos_token_id=2), vision_config=dict(_VISION), projection_dim=32), lambda _: ((), {"input_ids": torch.randint(3, 100, (2, 12)), "pixel_values": torch.randn(2, 3, 32, 32), "return_loss": True})),
    ("MobileViTV2ForImageClassification", dict(image_size=64), _image(64)),
    ("SwiftFormerForImageClassification", dict(image_size=64, depths=[1, 1, 1, 1], embed_dims=[16, 24, 32, 48]), _image(64)),
    ("Dinov2WithRegistersForImageClassification", _VISION, _image()),
    ("IJepaForImageClassification", _VISION, _image()),
    ("VitDetModel", _VISION, _image()),
    ("MobileNetV1ForImageClassification", {}, _image(64)),
    ("PvtForImageClassification", dict(image_size=64, hidden_sizes=[8, 16, 32, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 2]), _image(64)),
    ("UniSpeechModel", dict(_SMALL, conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, mask_time_prob=0.0, layerdrop=0.0), _audio()),
    ("Wav2Vec2ForSequenceClassification", dict(_SMALL, conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, mask_time_prob=0.0, layerdrop=0.0), _audio()),
    ("AltCLIPModel", dict(text_config=dict(_SMALL, project_dim=64), vision_config=dict(_VISION), projection_dim=32), lambda _: ((), {"input_ids": torch.randint(3, 100, (2, 12)), "pixel_values": torch.randn(2, 3, 32, 32), "return_loss": True})),
    ("MT5EncoderModel", _T5, _text("")),
    ("TapasModel", _SMALL, _text("")),
    ("DPRQuestionEncoder", _SMALL, _text("")),
    ("SplinterModel", _SMALL, _text("")),
    ("MarkupLMModel", _SMALL, _text("")),
    ("BitNetForCausalLM", _GQA, _text()),
    ("Llama4ForCausalLM", dict(_GQA, head_dim=16, num_local_experts=2, intermediate_size_mlp=96), _text()),
    ("JetMoeForCausalLM", dict(_GQA, num_local_experts=4, kv_channels=16), _text()),
    ("BambaForCausalLM", dict(_GQA, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=16, mamba_d_state=8, mamba_chunk_size=8), _text()),
    ("UperNetForSemanticSegmentation", dict(backbone_config=None), _image(64)),
    ("ApertusForCausalLM", _GQA, _text()),
    ("DogeForCausalLM", _GQA, _text()),
    ("Ernie4_5_MoeForCausalLM", dict(_GQA, moe_num_experts=4, moe_k=2, moe_intermediate_size=48), _text()),
    ("HunYuanDenseV1ForCausalLM", dict(_GQA, head_dim=16), _text()),
    ("Lfm2ForCausalLM", dict(_GQA, layer_types=["conv", "full_attention"]), _text()),
    ("MinistralForCausalLM", dict(_GQA, head_dim=16), _text()),
    ("NanoChatForCausalLM", _GQA, _text()),
    ("RecurrentGemmaForCausalLM", dict(_GQA, lru_width=64), _text()),
    ("VaultGemmaForCausalLM", dict(_GQA, head_dim=16), _text()),
    ("FlexOlmoForCausalLM", dict(_GQA, num_experts=4, num_experts_per_tok=2), _text()),
    ("CwmForCausalLM", dict(_GQA, head_dim=16), _text()),
    ("EuroBertForMaskedLM", _GQA, _text()),
    ("EsmForMaskedLM", dict(_SMALL, mask_token_id=4), _text()),
    ("MraForMaskedLM", _SMALL, _text()),
    ("RoCBertForMaskedLM", _SMALL, _text()),
    ("XmodForMaskedLM", dict(_SMALL, default_language="en_XX"), _text()),
    ("XLMRobertaXLForMaskedLM", _SMALL, _text()),
    ("LEDForConditionalGeneration", dict(_ENCDEC, max_encoder_position_embeddings=64, max_decoder_position_embeddings=64, attention_window=4), _text()),
    ("NllbMoeForConditionalGeneration", dict(_ENCDEC, num_experts=4), _text()),
    ("PegasusXForConditionalGeneration", dict(_ENCDEC, block_size=4, num_global_tokens=4), _text()),
    ("CvtForImageClassification", dict(image_size=32, embed_dim=[16, 32, 64], num_heads=[1, 2, 4], depth=[1, 1, 1]), _image()),
    ("DINOv3ViTModel", _VISION, _image()),
    ("DINOv3ConvNextModel", dict(hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1]), _image(64)),
]  # fmt: skip


#: Options of which each language model below takes those that its config has.
_COMMON = dict(
    _GQA, head_dim=16, n_layer=2, n_embd=64, n_head=4, n_layers=2, d_model=64, n_heads=4, moe_intermediate_size=32,
    num_experts=4, n_routed_experts=4, num_local_experts=4, num_experts_per_tok=2, q_lora_rank=16, kv_lora_rank=16,
    qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, n_group=1, topk_group=1, first_k_dense_replace=1,
    shared_expert_intermediate_size=32, mamba_n_heads=4, mamba_d_state=8, mamba_d_head=32, linear_num_value_heads=2,
    linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
)  # fmt: skip
#: All of transformers' causal language models, beside those above, that run with these.
_CAUSAL = """
AfmoeForCausalLM
Apertus1p5TextForCausalLM
AriaTextForCausalLM
BeamForCausalLM
BertGenerationDecoder
Cohere2MoeForCausalLM
CpmAntForCausalLM
DeepseekV4ForCausalLM
DoryForCausalLM
Emu3ForCausalLM
ExaoneMoeForCausalLM
FlintForCausalLM
GPTNeoXJapaneseForCausalLM
Gemma4UnifiedForCausalLM
Glm4MoeForCausalLM
GraniteMoeSWAForCausalLM
GraniteMoeSharedForCausalLM
GraniteSWAForCausalLM
HYV3ForCausalLM
HYV4ForCausalLM
HrmTextForCausalLM
HunYuanMoEV1ForCausalLM
HyperCLOVAXForCausalLM
Inkling2ForCausalLM
Inkling2LoopForCausalLM
InklingForCausalLM
Jais2ForCausalLM
Kolibri1ForCausalLM
LagunaForCausalLM
LaraMiniForCausalLM
MarianForCausalLM
MellumForCausalLM
MiMoV2FlashForCausalLM
MiniMaxForCausalLM
MiniMaxM2ForCausalLM
MiniMaxM3VLForCausalLM
Ministral3ForCausalLM
MllamaForCausalLM
ModernBertDecoderForCausalLM
MoshiForCausalLM
NemotronHForCausalLM
OlmoHybridForCausalLM
SolarOpenForCausalLM
TrOCRForCausalLM
""".split()


def transformers_models() -> Iterator[tuple[str, tuple]]:
    """Name, maker, inputs of each."""
    import_torchvision()  # transformers imports it where it is installed
    import transformers

    transformers.logging.set_verbosity_error()
    for name, options, inputs in [*_MODELS, *((name, None, _text()) for name in _CAUSAL)]:

        def make(name: str = name, options: dict[str, Any] | None = options) -> nn.Module:
            cls = getattr(transformers, name)
            if options is None:
                options = {k: v for k, v in _COMMON.items() if k in cls.config_class().to_dict()}
            return cls(cls.config_class(**options))

        yield name, (make, inputs)
