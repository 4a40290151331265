"""LoRA, by peft: small matrices beside the linear layers are trained, and the weights themselves stay."""

import torch
from torch import nn

from ..errors import InvalidConfigError
from ..optional import needs
from ..randomness import seed_global

EMBEDDING = "class_embedding.weight"
"""In U-ViT and in diffusers' UNets alike."""


def add_adapters_(model: nn.Module, rank: int, seed: int) -> None:
    """Adapters of this rank on the linear layers of the network (attention, MLP); all else is frozen.

    They begin as zero. Class embeddings are trained as they are: new classes have nothing else to learn in.
    """
    peft = needs("peft", "lora", "LoRA (--lora)")
    names = [
        name
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear and "skip_scaling" not in name and "time_emb" not in name
    ]
    if not names:
        raise InvalidConfigError(f"--lora {rank}: {type(model).__name__} has no linear layers to adapt")
    settings = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=names)
    with torch.random.fork_rng():
        seed_global(seed, "adapters")
        peft.inject_adapter_in_model(settings, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or name == EMBEDDING)


@torch.no_grad()
def merge_adapters_(model: nn.Module) -> None:
    """Add the adapters to the weights and remove them: the network is one without adapters again."""
    for name, layer in list(model.named_modules()):
        if hasattr(layer, "get_base_layer") and hasattr(layer, "merge"):
            layer.merge()  # pyright: ignore[reportCallIssue]
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, layer.get_base_layer())  # pyright: ignore[reportCallIssue]
    for attribute in ("peft_config", "_hf_peft_config_loaded"):
        vars(model).pop(attribute, None)
