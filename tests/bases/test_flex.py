"""The flex kernel against the reference: its tables, one real compilation, and what it cannot do."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from regard.bases import AttentionMask, flex, reference
from regard.core import Pattern, Position, Score, Tap, UserError, part
from regard.parts.patterns.segment import Segment


class Case:
    """Random q, k, v for six heads, and what they may see."""

    def __init__(self, pattern: Pattern | str, length: int, pad: tuple = (), kv_heads: int = 6, position: str = "none"):
        torch.manual_seed(length)
        at = torch.arange(length)[None]
        marked = torch.where(at < torch.tensor(pad)[:, None], at, -1) if pad else at
        self.see = AttentionMask(part(Pattern, pattern), at, marked, from_start=True, holes=bool(pad))
        self.q = torch.randn(2, 6, length, 16)
        self.k, self.v = (torch.randn(2, kv_heads, length, 16) for _ in range(2))
        self.position = part(Position, position, width=96, heads=6, dim=16)

    def check(self) -> None:
        with torch.no_grad():
            have = flex.attend(self.q, self.k, self.v, self.see, self.position, self.q, 0.0)
            want = reference.attend(self.q, self.k, self.v, self.see, Score(), self.position, self.q, 0.0, Tap())
        assert torch.allclose(have, want, rtol=1e-4, atol=1e-5), f"{(have - want).abs().max():.1e}"


CASES = (
    Case("causal & window(37)", 130),
    Case("everything", 257, pad=(257, 100)),
    Case("causal & heads(window(5), stride(3))", 140, position="alibi"),
    Case("causal & ~window(4)", 129, kv_heads=2, position="t5"),
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:flex_attention called without")
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.see.pattern))
def test_tables(case, monkeypatch):
    """Without the compiler, which takes its time: the same tables, looked up one by one."""
    monkeypatch.setattr(flex, "compiled", lambda device: flex_attention)
    torch.compiler.reset()
    case.check()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled():
    torch.compiler.reset()
    Case("causal & heads(window(9), stride(3))", 150, pad=(150, 70), kv_heads=2, position="alibi").check()


IDS = torch.randint(0, 9, (3, 300), generator=torch.Generator().manual_seed(0)).sort(1).values


@pytest.mark.parametrize("by_row", ["causal", "heads(window(4), stride(3), everything) & segment", "~segment"])
def test_lists(by_row):
    """The mask of every pair, and which blocks are visited or full, are those of the pattern in every row and head."""
    names = {"causal": "causal", "~segment": ~Segment(IDS)}
    pattern = names.get(by_row) or part(Pattern, "heads(window(4), stride(3), everything)") & Segment(IDS)
    see = Case(pattern, 300, pad=(300, 150, 1)).see
    mask, want = flex.block_mask_of(see, 6), see.full_mask(6).expand(3, -1, 300, 300)
    heads = want.shape[1]
    at = torch.arange(300)
    rows, of_head = torch.arange(3)[:, None, None, None], torch.arange(heads)[:, None, None]
    assert torch.equal(mask.mask_mod(rows, of_head, at[:, None], at), want)
    blocks = nn.functional.pad(want, (0, 84, 0, 84)).unflatten(3, (3, 128)).unflatten(2, (3, 128)).transpose(3, 4)
    full = blocks.flatten(4).all(-1)
    some = blocks.flatten(4).any(-1) & ~full
    for chosen, count, which in (
        (some, mask.kv_num_blocks, mask.kv_indices),
        (full, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        listed = torch.zeros_like(chosen).scatter(-1, which.long(), torch.arange(3) < count[..., None])
        assert torch.equal(listed, chosen)


class Odd(Position):
    """Its bias goes neither by distance nor, unless it says so, by the query."""

    def bias(self, query_at: Tensor, key_at: Tensor, q: Tensor) -> Tensor:
        return torch.cos(query_at * key_at + q[..., :1])


def test_says_what_it_cannot_do():
    case = Case("causal", 130)

    def run(q: Tensor, position: Position, drop: float = 0.0) -> None:
        flex.attend(q, q, q, case.see, position, q, drop)

    with pytest.raises(UserError, match="has no gradients on CPU"):
        run(case.q.clone().requires_grad_(), case.position)
    with pytest.raises(UserError, match="cannot drop"):
        run(case.q, case.position, 0.1)
    with pytest.raises(UserError, match="float64"):
        run(case.q.double(), case.position)
    odd = Odd()
    with pytest.raises(UserError, match="which does not go by distance alone"):
        run(case.q, odd)
    odd.needs_query = True
    with pytest.raises(UserError, match="which asks the query"):
        run(case.q, odd)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_without_a_compiler(monkeypatch):
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", ("there-is-no-such-compiler",))
    torch.compiler.reset()
    with pytest.raises(UserError, match="cannot be compiled here: use kernel 'blocks'"):
        Case("causal & window(3)", 133).check()
