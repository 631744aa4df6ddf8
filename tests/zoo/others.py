"""diffusers, x-transformers and torch-geometric, small and with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.torchvision_import import import_torchvision
from tests.zoo.check import Example, Inputs


def _given(*args: Callable[[], torch.Tensor], **kwargs: Callable[[], Any]) -> Callable[[nn.Module], Inputs]:
    return lambda _: (tuple(a() for a in args), {k: v() for k, v in kwargs.items()})


def _normal(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(*shape)


def _whole(high: int, *shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randint(0, high, shape)


def diffusers_models() -> Iterator[tuple[str, Example]]:
    """UNets, transformers and autoencoders of diffusers."""
    import_torchvision()
    import diffusers

    time = _whole(1000, 2)
    unet = dict(sample_size=16, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8)
    down = dict(down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"))
    cross = dict(down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
                 cross_attention_dim=24, attention_head_dim=8)  # fmt: skip
    vae = dict(down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
               block_out_channels=(16, 32), norm_num_groups=8, latent_channels=4)  # fmt: skip
    heads = dict(num_attention_heads=2, attention_head_dim=8, num_layers=2)
    models: list[tuple[str, dict[str, Any], Callable]] = [
        ("UNet2DModel", dict(unet, **down), _given(_normal(2, 3, 16, 16), time)),
        ("UNet2DConditionModel", dict(unet, **cross), _given(_normal(2, 4, 16, 16), time, _normal(2, 5, 24))),
        ("UNet1DModel", dict(sample_size=32, in_channels=14, out_channels=14, down_block_types=("DownBlock1D", "DownBlock1D"), up_block_types=("UpBlock1D", "UpBlock1D"), block_out_channels=(32, 64), use_timestep_embedding=True, time_embedding_type="positional", act_fn="mish", layers_per_block=1), _given(_normal(2, 14, 32), time)),
        ("AutoencoderKL", vae, _given(_normal(2, 3, 32, 32))),
        ("VQModel", dict(vae, num_vq_embeddings=16), _given(_normal(2, 3, 32, 32))),
        ("DiTTransformer2DModel", dict(heads, sample_size=8, patch_size=2, in_channels=4, num_embeds_ada_norm=10, norm_num_groups=4), _given(_normal(2, 4, 8, 8), timestep=time, class_labels=_whole(10, 2))),
        ("PixArtTransformer2DModel", dict(heads, sample_size=8, patch_size=2, in_channels=4, cross_attention_dim=16, caption_channels=12, norm_num_groups=4, use_additional_conditions=False), _given(_normal(2, 4, 8, 8), _normal(2, 5, 12), time, added_cond_kwargs=lambda: {"resolution": None, "aspect_ratio": None})),
        ("SD3Transformer2DModel", dict(sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2, caption_projection_dim=16, joint_attention_dim=12, pooled_projection_dim=10, out_channels=4), _given(_normal(2, 4, 8, 8), _normal(2, 5, 12), _normal(2, 10), time)),
        ("PriorTransformer", dict(heads, embedding_dim=16, num_embeddings=7, additional_embeddings=4), _given(_normal(2, 16), time, _normal(2, 16), _normal(2, 7, 16))),
        ("ControlNetModel", dict(block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), cross_attention_dim=24, attention_head_dim=8, conditioning_embedding_out_channels=(16, 32)), _given(_normal(2, 4, 16, 16), time, _normal(2, 5, 24), _normal(2, 3, 32, 32))),
    ]  # fmt: skip
    for name, options, inputs in models:

        def make(name: str = name, options: dict[str, Any] = options) -> nn.Module:
            return getattr(diffusers, name)(**options)

        yield name, (make, inputs)


def x_transformers_models() -> Iterator[tuple[str, Example]]:
    """Spellings of attention and feed-forward layers that x-transformers offers."""
    import x_transformers

    base = dict(dim=32, depth=2, heads=2, attn_dim_head=16)
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "flash": dict(attn_flash=True),
        "rotary": dict(rotary_pos_emb=True),
        "alibi": dict(alibi_pos_bias=True),
        "rel_pos": dict(rel_pos_bias=True),
        "swiglu": dict(ff_swish=True, ff_glu=True),
        "rmsnorm": dict(use_rmsnorm=True),
        "qk_norm": dict(attn_qk_norm=True),
        "gated": dict(attn_gate_values=True),
        "talking_heads": dict(attn_pre_talking_heads=True),
        "grouped": dict(attn_kv_heads=1),
        "macaron": dict(macaron=True),
        "memory": dict(attn_num_mem_kv=4),
        "sandwich": dict(sandwich_norm=True),
        "dropout": dict(attn_dropout=0.1, ff_dropout=0.1),
    }
    for name, more in options.items():

        def make(more: dict[str, Any] = more) -> nn.Module:
            layers = x_transformers.Decoder(**{**base, **more})
            return x_transformers.TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=layers)

        yield name, (make, _given(_whole(50, 2, 16)))

    def vit() -> nn.Module:
        layers = x_transformers.Encoder(**base)
        return x_transformers.ViTransformerWrapper(image_size=32, patch_size=8, num_classes=5, attn_layers=layers)

    yield "vit", (vit, _given(_normal(2, 3, 32, 32)))


class _Graph(nn.Module):
    """Two convolutions over a graph and a readout."""

    def __init__(self, first: nn.Module, second: nn.Module):
        super().__init__()
        self.first, self.second, self.out = first, second, nn.LazyLinear(4)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        x = self.first(x, edge_index).relu()
        return self.out(self.second(x, edge_index))


def geometric_models() -> Iterator[tuple[str, Example]]:
    """Message-passing convolutions of torch-geometric over one graph of 12 nodes and 40 edges."""
    from torch_geometric import nn as gnn

    def mlp(wide: int) -> nn.Module:
        return nn.Sequential(nn.Linear(wide, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16))

    makers: dict[str, Callable[[int], nn.Module]] = {
        "GCNConv": lambda wide: gnn.GCNConv(wide, 16),
        "SAGEConv": lambda wide: gnn.SAGEConv(wide, 16),
        "GATConv": lambda wide: gnn.GATConv(wide, 8, heads=2),
        "GATv2Conv": lambda wide: gnn.GATv2Conv(wide, 8, heads=2, dropout=0.2),
        "GINConv": lambda wide: gnn.GINConv(mlp(wide)),
        "GraphConv": lambda wide: gnn.GraphConv(wide, 16),
        "TransformerConv": lambda wide: gnn.TransformerConv(wide, 8, heads=2),
        "TAGConv": lambda wide: gnn.TAGConv(wide, 16),
        "ChebConv": lambda wide: gnn.ChebConv(wide, 16, K=2),
        "ARMAConv": lambda wide: gnn.ARMAConv(wide, 16),
        "SGConv": lambda wide: gnn.SGConv(wide, 16),
        "EdgeConv": lambda wide: gnn.EdgeConv(mlp(2 * wide)),
        "LEConv": lambda wide: gnn.LEConv(wide, 16),
        "ResGatedGraphConv": lambda wide: gnn.ResGatedGraphConv(wide, 16),
    }
    for name, layer in makers.items():

        def make(layer: Callable[[int], nn.Module] = layer) -> nn.Module:
            model = _Graph(layer(8), layer(16))
            model(torch.randn(12, 8), torch.randint(0, 12, (2, 40)))  # the lazy layer takes its size
            return model

        yield name, (make, _given(_normal(12, 8), _whole(12, 2, 40)))
