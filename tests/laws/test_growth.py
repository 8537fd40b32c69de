"""What is said to grow with the length alone does so, in learning too: all numbers that a forward and a backward write.
A slice taken in a loop passes every other test, but its gradient is as long as the whole."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard import build
from regard.core import losses
from regard.files import recipe

SHORT = 2048
LINEAR = (
    "atrous", "bigbird", "deltanet", "flash", "gla", "infini", "involution", "linear-transformer", "linformer", "local",
    "longformer", "longnet", "performer", "performer-encoder", "reformer", "retnet", "rmt", "rwkv4", "rwkv6", "s4",
    "s4d", "transformer-xl",
)  # fmt: skip


class Written(TorchDispatchMode):
    """Counts the elements that operations write. Views write none; some write only a part of what they return."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket not in (torch.ops.aten.index_add_, torch.ops.aten.index_put_):
            self.count += sum(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor))
        return out


def written(name: str, length: int) -> int:
    table = recipe.load(name, "tiny", ["model.dropout=0.0"])
    table["vocab"] = 20
    layers = table["model"]["layer"]
    table["model"]["depth"] = len(layers) if isinstance(layers, list) else 1
    lengthen(table["model"])
    torch.manual_seed(0)
    model = build(table)
    model(model.embed.random_input(1, length))  # what a pattern of that length lets see is found once
    with Written() as all_of_them, losses(model) as more:
        (model(model.embed.random_input(1, length)).square().mean() + more()).backward()
    return all_of_them.count


def lengthen(table) -> None:
    """Parts with a maximum length are built for the longer one."""
    for key, value in table.items() if isinstance(table, dict) else enumerate(table):
        if key == "length" and isinstance(value, int):
            table[key] = max(value, 2 * SHORT)
        elif isinstance(value, dict | list):
            lengthen(value)


@pytest.mark.parametrize("name", LINEAR)
def test_twice_as_long_is_twice_the_work(name):
    assert written(name, 2 * SHORT) < 2.3 * written(name, SHORT)


def test_full_attention_is_more():
    """Quadratic attention is counted as quadratic."""
    assert written("alibi", 2 * SHORT) > 3 * written("alibi", SHORT)
