"""PyTorch twins of the models in src/model: the same names, shapes and arithmetic.

They start from saved weights; their own initialisation is not that of the Rust models.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F


def build(plan):
    """The twin of a plan's model."""
    kind = plan["name"]
    if kind == "mlp":
        width = plan["hidden"]
        return nn.Sequential(
            nn.Linear(plan["input"], width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, plan["classes"]),
        )
    if kind == "convnet":
        return Convnet(plan["channels"], plan["classes"], plan["batch_norm"])
    if kind == "resnet18":
        return ResNet18(plan["channels"], plan["classes"])
    if kind == "gpt":
        return GPT(plan["width"], plan["heads"], plan["layers"], plan["context"], plan["vocabulary"])
    raise ValueError(f"there is no twin of model `{kind}`")


def loss(output, target):
    """Mean cross-entropy; one row of logits a prediction."""
    return F.cross_entropy(output.reshape(-1, output.shape[-1]), target.reshape(-1))


class Convnet(nn.Module):
    def __init__(self, channels, classes, batch_norm):
        super().__init__()
        self.batch_norm = batch_norm
        for number, (before, after, stride) in enumerate([(channels, 32, 1), (32, 64, 2), (64, 128, 2)], 1):
            setattr(self, f"conv{number}", nn.Conv2d(before, after, 3, stride=stride, padding=1))
            if batch_norm:
                setattr(self, f"bn{number}", nn.BatchNorm2d(after))
        self.fc = nn.Linear(128, classes)

    def forward(self, x):
        for number in (1, 2, 3):
            x = getattr(self, f"conv{number}")(x)
            if self.batch_norm:
                x = getattr(self, f"bn{number}")(x)
            x = F.relu(x)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class BasicBlock(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample = None
        if stride != 1 or before != after:
            self.downsample = nn.Sequential(
                nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet18(nn.Module):
    """torchvision's names, with a 3x3 stride-1 stem and no max-pool."""

    def __init__(self, channels, classes):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        before = 64
        for number, (after, stride) in enumerate([(64, 1), (128, 2), (256, 2), (512, 2)], 1):
            layer = nn.Sequential(BasicBlock(before, after, stride), BasicBlock(after, after, 1))
            setattr(self, f"layer{number}", layer)
            before = after
        self.fc = nn.Linear(512, classes)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = layer(x)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        heads = [
            part.reshape(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in self.c_attn(x).chunk(3, dim=2)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).reshape(batch, tokens, width))


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2's names; the head is the token embedding."""

    def __init__(self, width, heads, layers, context, vocabulary):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        # Only so that a twin without weights is no worse a start than GPT-2.
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                residual = math.sqrt(2 * layers) if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 / residual)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))
