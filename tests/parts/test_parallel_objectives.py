"""Objectives of decoders that write all tokens at once: a batch may be split, as the trainer does on a CPU."""

import pytest
import torch

from regard.data.batches import IGNORE, BucketedBatches
from regard.evaluate import InMemoryDataset
from regard.files import recipe
from regard.parts.objectives.parallel import Parallel, SpecialTokens
from regard.schema import find
from tests.models import shallow

NAMES = [name for name in recipe.names() if "length" in recipe.load(name)["model"]]
VOCAB, SPECIAL = 23, SpecialTokens(0, 1, 2)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(5)
    rows = []
    for source, target in ((5, 4), (9, 7), (2, 2), (7, 9), (4, 3), (8, 5)):
        draw = [torch.randint(3, VOCAB, (n,), generator=generator).numpy() for n in (source, target)]
        rows.append((draw[0], torch.cat((torch.from_numpy(draw[1]), torch.tensor([SPECIAL.end]))).numpy()))

    def fertilities(source, target):
        counts = torch.zeros(len(source), dtype=torch.long)
        counts[: min(len(source), len(target))] = 1
        counts[0] += len(target) - int(counts.sum())
        return counts.numpy()

    made = BucketedBatches(InMemoryDataset(rows), 1000, 1, SPECIAL.start, SPECIAL.pad, fertilities=fertilities)
    return made.make(torch.arange(len(rows)).numpy())


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_may_be_split(name, batch, monkeypatch):
    """In training mode, with the same random numbers for every row however the batch is split."""
    import regard.parts.objectives.edits as edits
    import regard.parts.objectives.glancing as glancing
    import regard.parts.objectives.masked_target as masked

    def scores(like, generator=None):
        at = torch.arange(like.shape[1])
        return (((like * (like != IGNORE)).sum(1, keepdim=True) * 7 + at * 5) % 11) / 11 + at / 1000  # no two are equal

    def rates(*shape, device=None, generator=None):
        found = scores(now[0])[:, :1]
        return found if len(shape) == 2 else found[:, 0]

    for module in (edits, glancing, masked):
        monkeypatch.setattr(module, "random_scores", scores)
    real_rand = torch.rand
    monkeypatch.setattr(torch, "rand", lambda *s, **k: rates(*s) if "generator" in k else real_rand(*s, **k))
    torch.manual_seed(3)
    model = shallow(name, VOCAB, ["model.dropout=0.0"]).double().train()
    table = recipe.load(name)["objective"]
    objective = find(Parallel, table["part"])(SPECIAL)
    now = [batch.targets]

    def gradients(parts):
        model.zero_grad()
        total = 0.0
        for part in parts:
            now[0] = part.targets
            loss = objective(model, part).loss / batch.count
            loss.backward()
            total += float(loss.detach())
        return total, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    whole, wanted = gradients([batch])
    for size in (40, 20):
        parts = batch.split(size)
        assert len(parts) > 1
        split, found = gradients(parts)
        assert split == pytest.approx(whole, rel=1e-9)
        for key, grad in wanted.items():
            torch.testing.assert_close(found[key], grad, rtol=1e-7, atol=1e-10, msg=key)
